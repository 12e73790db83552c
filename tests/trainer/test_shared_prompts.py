"""Completions of one prompt share its positions: fewer of them, and the same step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl import messages
from megatron_rl.models import architecture, tiny
from megatron_rl.models.packing import RowLayout, Rows, pieces
from megatron_rl.trainer.batch import (
    batch_of_examples,
    completion_positions,
    divide,
    micro_batches_of,
)
from megatron_rl.trainer.model import Policy
from megatron_rl.trainer.step import Trainer
from tests.trainer.cases import batch, distances, gradients, run_config, world_of_one, write_model

SHARED = RowLayout(max_tokens=10**6, shared_prompts=True)
ARCHITECTURE = architecture(tiny.CONFIGS["tiny_dense"])
tokens = st.integers(0, 2)
examples = st.lists(
    st.tuples(st.lists(tokens, min_size=1, max_size=3), st.lists(tokens, max_size=4)), max_size=9
)


def test_worked_example() -> None:
    batch = batch_of_examples([([5, 6, 8], [7, 9]), ([5, 6, 8], [2]), ([5], [3])])
    (micro,) = divide(batch, ARCHITECTURE, SHARED)
    assert micro.tokens_BS.tolist() == [[5, 6, 8, 7, 8, 5, 3]]
    assert (micro.bounds, micro.continues) == ((0, 2, 4, 5, 7), (-1, 0, 0, -1))
    assert micro.rows_T.tolist() == [2, 3, 4, 5]
    assert micro.targets_T.tolist() == [7, 9, 2, 3]
    rows = Rows.of_bounds(micro.bounds, 0, 1, micro.tokens_BS.device, micro.continues)
    assert rows.positions_s.tolist() == [0, 1, 2, 3, 2, 0, 1]


@given(examples)
def test_every_completion_token_is_predicted_from_its_own_sequence(
    examples: list[tuple[list[int], list[int]]],
) -> None:
    batch = batch_of_examples(examples)
    (micro,) = divide(batch, ARCHITECTURE, SHARED)
    want = [p for i in range(len(examples)) for p in completion_positions(batch, i)]
    assert sorted(micro.source_T.tolist()) == want
    # What the predicting position sees: its sequence up to there, in order.
    rows = Rows.of_bounds(micro.bounds, 0, 1, micro.tokens_BS.device, micro.continues)
    cut = pieces(micro.bounds, None, 0, 1, micro.continues)
    slots = np.arange(micro.bounds[-1]) if cut.slots is None else cut.slots
    seen: list[list[int]] = []
    k = 0
    for queries, keys in zip(cut.queries, cut.keys, strict=True):
        seen += [slots[k : k + keys - (queries - 1 - i)].tolist() for i in range(queries)]
        k += keys
    ids, bounds = micro.tokens_BS[0].tolist(), messages.ints(batch.bounds).tolist()
    flat = messages.ints(batch.token_ids).tolist()
    for row, source in zip(micro.rows_T.tolist(), micro.source_T.tolist(), strict=True):
        start = max(b for b in bounds if b <= source)
        assert [ids[i] for i in seen[row]] == flat[start:source]
        assert rows.positions_s[seen[row]].tolist() == list(range(source - start))


def grouped() -> messages.Batch:
    """Return a batch of three groups of four, the last one's prompt of one token."""
    rng, given = np.random.default_rng(5), []
    for length in (6, 3, 1):
        prompt = rng.integers(0, 31, length).tolist()
        given += [(prompt, rng.integers(0, 31, n).tolist()) for n in rng.integers(1, 9, 4)]
    return batch_of_examples(given, weight=0.02)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = write_model(tmp_path_factory.mktemp("model") / "hf", "tiny_dense")
    with world_of_one(run_config(path)):
        yield path


@pytest.mark.parametrize("loss", ["cispo", "gspo"])
def test_a_step_equals_that_of_whole_sequences(directory: Path, loss: str) -> None:
    seen: list[tuple[int, dict[str, Any], dict[str, Any]]] = []
    for shares in (True, False):
        config = run_config(directory, schedule__micro_batch_tokens=10**6, algorithm__loss=loss)
        policy = Policy(config, directory)
        assert policy.shares_prompts
        policy.shares_prompts = shares
        trainer = Trainer(config, policy)
        micro_batches, objective = trainer.prepare(grouped(), 0)
        policy.forward_backward(micro_batches, objective)
        (micro,) = micro_batches
        assert micro.logprobs_T is not None
        by_source = dict(zip(micro.source_T.tolist(), micro.logprobs_T.tolist(), strict=True))
        seen.append((micro.tokens_BS.numel(), by_source, gradients(policy)))
    (fewer, logprobs, found), (whole, want_logprobs, want) = seen
    # Without sharing 4 * (6 + 3 + 1) prompt tokens; with it 5 + 2 once, 4 * (1 + 1 + 1), and 8
    # completions without their last token.
    assert whole - fewer == 40 - (5 + 2 + 12) + 8
    assert logprobs == pytest.approx(want_logprobs, abs=2e-6)
    assert max(distances(found, want).values()) < 1e-5


@pytest.mark.parametrize(("completion", "shared"), [(14, True), (16, False)])
def test_a_row_is_shared_if_a_fifth_of_it_goes_away(completion: int, shared: bool) -> None:
    # Of 2 * (8 + c) positions, 7 and the last token of each completion go away: 9.
    batch = batch_of_examples([([3] * 8, [4] * completion)] * 2)
    (micro,) = divide(batch, ARCHITECTURE, SHARED)
    assert (micro.continues == (-1, 0, 0)) == shared
    assert micro.tokens_BS.numel() == 2 * (8 + completion) - (9 if shared else 0)


def test_other_prompts_leave_the_row_as_it_is(directory: Path) -> None:
    config = run_config(directory, schedule__micro_batch_tokens=10**6)
    policy = Policy(config, directory)
    (micro,) = micro_batches_of(batch(), policy)
    assert micro.continues == ()
    assert micro.tokens_BS.numel() == messages.ints(batch().bounds)[-1]


@pytest.mark.parametrize("options", [{"chunk": 4, "size": 1}, {"chunk": None, "size": 2}])
def test_chunks_and_context_parallelism_refuse_shared_prompts(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="without chunks on one rank"):
        pieces((0, 4, 8), rank=0, continues=(-1, 0), **options)
