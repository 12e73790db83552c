"""Each rank receives what it uses of a batch, and nothing else; a step may exceed 4 GiB."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_rl import messages
from megatron_rl.models.packing import RowLayout
from megatron_rl.trainer.batch import TOKEN_ARRAYS, parts_of
from tests.trainer.cases import batch, with_random_routes
from tests.trainer.parts_worker import LAYOUTS, MODEL, PIECE_BYTES, RANKS, batches
from tests.workers import run_ranks

ROUTES = len(MODEL.moe_layers) * MODEL.experts_per_token
"""Bytes of a token."""
GROUPS = {
    "DP2 TP2": [(0, 1), (2, 3)],
    "DP2 PP2": [(0, 2), (1, 3)],
    "TP2 PP2": [(0, 1, 2, 3)],
    "TP2 CP2 SP": [(0, 1), (2, 3)],
}
"""Ranks of one model-parallel group; elsewhere each rank has rows of its own."""
BATCHES = batches()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each rank saw: layout -> batch -> values."""
    folder = tmp_path_factory.mktemp("parts")
    run_ranks("tests.trainer.parts_worker", RANKS, folder, seconds=200)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def groups(layout: str) -> list[tuple[int, ...]]:
    return GROUPS.get(layout, [(rank,) for rank in range(RANKS)])


def encoded_bytes(message: messages.Batch, tokens: int, routes: int) -> tuple[int, int]:
    """Bounds of the bytes of a part: 20 a token, its routes, the whole arrays of sequences."""
    empty = dict.fromkeys(TOKEN_ARRAYS, b"")
    rest = len(messages.encode(msgspec.structs.replace(message, **empty, routes=[])))
    least = 8 + rest + 20 * tokens + routes
    # MessagePack's sizes of fields.
    return least, least + 4 * (len(TOKEN_ARRAYS) + len(message.routes) + 1)


@pytest.mark.parametrize("name", [n for n, message in BATCHES.items() if not message.stop])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rank_0_gets_the_results_of_each_token_in_the_order_of_the_batch(
    seen: list[dict[str, Any]], layout: str, name: str
) -> None:
    assert [rank[layout][name]["returned"] for rank in seen] == [True] * RANKS


@pytest.mark.parametrize("name", [n for n, message in BATCHES.items() if not message.stop])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_receives_its_own_tokens_only(
    seen: list[dict[str, Any]], layout: str, name: str
) -> None:
    ranks, message = [rank[layout][name] for rank in seen], BATCHES[name]
    per_token = ROUTES if message.routes else 0
    sent = 0
    for group in groups(layout):
        for rank in group:
            own = ranks[rank]
            assert own["only its own"] and own["the same micro-batches"]
            assert own["versions"] and own["routed"]
            assert own["tokens"] == ranks[group[0]]["tokens"]
            assert own["routes"] == per_token * len(own["tokens"])
            least, most = encoded_bytes(message, len(own["tokens"]), own["routes"])
            assert own["received"] == 0 if rank == 0 else least <= own["received"] <= most
            assert own["sent"] == 0 or rank == 0
            assert own["largest"] <= PIECE_BYTES
        others = {rank: ranks[rank]["received"] for rank in group if rank != group[0]}
        assert len(set(others.values())) <= 1
        sent += ranks[group[0]]["received"]
    assert ranks[0]["sent"] == sent  # once to each group, whose ranks pass it on
    tokens = [token for group in groups(layout) for token in ranks[group[0]]["tokens"]]
    assert set(tokens) == set(range(len(message.token_ids) // 4))
    if "CP" not in layout:
        assert len(tokens) == len(set(tokens))
    else:  # a token that is predicted on another rank than its own is on both
        assert len(tokens) - len(set(tokens)) <= 8 * (len(message.bounds) // 4)


def test_ranks_without_a_token_and_the_end_are_told(seen: list[dict[str, Any]]) -> None:
    few = [rank["DP4"]["few"] for rank in seen]
    assert [bool(rank["tokens"]) for rank in few] == [True, True, False, False]
    for rank in seen:
        for layout in LAYOUTS:
            assert rank[layout]["stop"]["largest"] <= PIECE_BYTES


def test_a_part_has_the_routes_of_its_tokens() -> None:
    message = with_random_routes(batch(sequences=9), MODEL)
    whole = np.frombuffer(b"".join(message.routes), np.uint8).reshape(-1, ROUTES)
    for context in (1, 2):
        for part in parts_of(message, RowLayout(ranks=2, max_tokens=30, context=context)):
            # Log-probs of the whole batch are all different, but on prompts.
            logprobs = messages.floats(part.generator_logprobs)
            own = np.frombuffer(b"".join(part.routes), np.uint8).reshape(-1, ROUTES)
            assert len(own) == len(logprobs) < len(whole)
            places = {x: i for i, x in enumerate(messages.floats(message.generator_logprobs)) if x}
            sampled = np.flatnonzero(logprobs)
            assert len(sampled)
            assert (own[sampled] == whole[[places[x] for x in logprobs[sampled]]]).all()


def test_routes_that_do_not_fit_their_sequences_are_refused() -> None:
    message = with_random_routes(batch(), MODEL)
    first, second, *rest = message.routes
    for routes in ([first + second, *rest], [first + second[:1], second[1:], *rest]):
        with pytest.raises(ValueError, match="each token of each sequence needs the same number"):
            list(parts_of(msgspec.structs.replace(message, routes=routes), RowLayout()))


def test_arrays_that_do_not_fit_are_refused_where_the_batch_arrives() -> None:
    with pytest.raises(ValueError, match="versions for .* tokens: one per token"):
        list(parts_of(batch(versions=bytes(4)), RowLayout()))


def test_no_field_of_a_large_step_reaches_the_limit_of_messagepack() -> None:
    # MessagePack has 32 bits for the size of a field. (Untouched zeros take no memory.)
    with pytest.raises(msgspec.EncodeError, match=r"longer than 2\*\*32 - 1"):
        messages.encode(messages.Batch(step=0, routes=[bytes(2**32)]))
    # Routes grow with the step, and their largest field with a sequence.
    message = with_random_routes(batch(sequences=9), MODEL)
    sent = msgspec.msgpack.decode(messages.encode(message))["routes"]
    lengths = np.diff(messages.ints(message.bounds))
    assert [len(data) for data in sent] == (ROUTES * lengths).tolist()
    # 94 layers, 8 experts of more than 255 a token; 2,048 sequences of 32,768 tokens.
    per_token, longest, sequences, limit = 94 * 8 * 2, 2**15, 2**11, 2**32
    assert per_token * longest < limit < per_token * longest * sequences
    assert 4 * longest * sequences < limit  # each array of tokens
    assert longest * sequences < 2**31  # `bounds`
