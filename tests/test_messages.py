"""Every message survives the wire, and what is no message is refused."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl import messages as m
from tests.segments import segments

ALL = typing.get_args(m.AnyMessage)
FINITE = st.floats(allow_nan=False, width=64)
INTS = st.integers(-(2**31), 2**31 - 1)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: INTS,
    float: FINITE,
    str: st.text(max_size=20),
    bytes: st.binary(max_size=32),
    bool: st.booleans(),
    Any: st.none() | INTS,
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    if kind in SCALARS:
        return SCALARS[kind]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is list:
        return st.lists(values(args[0]), max_size=4)
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*(values(a) for a in args))
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=4)
    if args and type(None) in args:
        return st.one_of(*(values(a) for a in args if a is not type(None)), st.none())
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        fields = {f: values(hints[f]) for f in kind.__struct_fields__}
        return st.builds(kind, **fields)
    raise AssertionError(f"a new type of field, {kind}: say here how to make one")


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_message_survives_the_wire(kind: type[m.Message], data: st.DataObject) -> None:
    message = data.draw(values(kind))
    back = m.decode(m.encode(message))
    assert type(back) is kind
    assert back == message


def test_every_message_type_is_decoded() -> None:
    assert set(ALL) == set(m.Message.__subclasses__())


def test_messages_are_told_apart_by_their_tag() -> None:
    tags = [kind.__struct_config__.tag for kind in ALL]
    assert len(set(tags)) == len(tags)
    assert msgspec.msgpack.decode(m.encode(m.Stop()))["type"] == "Stop"


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50))
def test_int_arrays_keep_every_bit(values: list[int]) -> None:
    array = np.array(values, dtype="<i4")
    assert m.ints(array.tobytes()).tolist() == values


@given(st.lists(st.floats(width=32, allow_nan=True), max_size=50))
def test_float_arrays_keep_every_bit(values: list[float]) -> None:
    data = np.array(values, dtype="<f4").tobytes()
    assert m.floats(data).tobytes() == data


def test_a_completions_tokens_are_bytes_of_four_each() -> None:
    # float32 is what engines compute and the batch has: nothing is rounded on the way.
    values = np.array([-0.1, -1.5, -17.25], "<f4")
    sample = m.Sample(
        group=0,
        index=0,
        prompt_id=0,
        evaluation=-1,
        token_ids=m.int_bytes([1, 200_000, 3]),
        logprobs=m.float_bytes(values.tolist()),
        segments=segments(3),
        spans=[m.VersionSpan(0, 0, 3)],
        finish_reason="stop",
    )
    again = m.decode(m.encode(sample))
    assert again == sample and again.num_tokens == 3
    assert m.ints(again.token_ids).tolist() == [1, 200_000, 3]
    assert (m.floats(again.logprobs) == values).all()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "Unknown"}),
        msgspec.msgpack.encode({"type": "Published"}),
        msgspec.msgpack.encode({"type": "BatchRequest", "step": "one"}),
        m.encode(m.BatchRequest(step=1))[:-1],
    ],
    ids=["empty", "no MessagePack", "unknown type", "fields missing", "wrong type", "cut off"],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        m.decode(data)


def test_a_message_cannot_be_changed() -> None:
    message = m.BatchRequest(step=1)
    with pytest.raises(AttributeError):
        message.step = 2  # type: ignore[misc]
