"""The loss over the LM head: the fused ways equal the plain one in every layout, to 1e-6 in fp32.

The two processes are gloo's on one machine: NCCL and bf16 weights are not exercised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_rl.algorithm.losses.gspo import Gspo
from megatron_rl.algorithm.settings import Algorithm
from megatron_rl.models import architecture, tiny
from megatron_rl.models.packing import RowLayout
from megatron_rl.trainer.batch import MicroBatch, batch_of_examples, divide, micro_batches_of
from megatron_rl.trainer.loss import Objective
from megatron_rl.trainer.model import Policy
from megatron_rl.trainer.sft import CROSS_ENTROPY
from tests.trainer.cases import ODD_VOCABULARY, run_config, world_of_one, write_model
from tests.trainer.loss_worker import CASES
from tests.workers import run_ranks

TOLERANCE = 1e-6
"""Of gradients, per absolute terms of their sums over sequences; of weights after a step."""
LOGPROB_TOLERANCE = 2e-6
"""Of log-probs and metrics: log-probs up to 8 are rounded to 2^-21 (.5e-6), ratios likewise."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Differences of the two heads in all layouts."""
    folder = tmp_path_factory.mktemp("heads")
    write_model(folder / "dense", "tiny_dense", vocab_size=ODD_VOCABULARY)
    write_model(folder / "tied", "tiny_dense", vocab_size=ODD_VOCABULARY, tie_word_embeddings=True)
    write_model(folder / "scout", "tiny_scout")
    run_ranks("tests.trainer.loss_worker", 2, folder, 550)
    return torch.load(folder / "found.pt")


@pytest.mark.timeout(600)
def test_a_step_of_the_fused_head_equals_that_of_the_plain_one(found: Any) -> None:
    for layout, way in CASES:
        seen = found[layout][way]
        assert seen["way"] == way, layout
        logprobs = {**seen["metrics"], "probe": seen["probe"]}
        assert {k: v for k, v in logprobs.items() if v > LOGPROB_TOLERANCE} == {}, (layout, way)
        others = {**seen["gradients"], "weights": seen["weights"]}
        assert {k: v for k, v in others.items() if v > TOLERANCE} == {}, (layout, way)
        assert seen["least gradient"] > 1e-5, (layout, way)


def one_micro_batch() -> MicroBatch:
    """Of one sequence with a completion of two tokens."""
    batch = batch_of_examples([([5, 6, 7], [8, 9])])
    (micro,) = divide(batch, architecture(tiny.CONFIGS["tiny_dense"]), RowLayout())
    return micro


@pytest.mark.parametrize(
    ("algorithm", "way"),
    [
        ({}, "row kernel"),
        ({"kl_coefficient": 0.1}, "one pass"),
        ({"loss": "dispo"}, "one pass"),
        ({"loss": "reinforce", "correction": "token_truncation"}, "one pass"),
        ({"loss": "reinforce", "correction": "sequence_mask"}, "two passes"),
        ({"loss": "gspo"}, "two passes"),
        ({"entropy_coefficient": 0.1}, "plain"),
    ],
)
def test_the_way_follows_from_the_algorithm(algorithm: dict[str, Any], way: str) -> None:
    objective = Objective(Algorithm.model_validate(algorithm))
    assert objective.method("fused") == way
    assert objective.method("plain") == "plain"


def test_a_loss_that_wrongly_says_per_token_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gspo, "per_token", True)
    objective = Objective(Algorithm.model_validate({"loss": "gspo"}))
    assert objective.method("fused") == "one pass"
    with pytest.raises(RuntimeError, match="per_token = False"):
        objective.terms(one_micro_batch(), torch.zeros(2), slice(0, 2))


def test_tokens_are_independent_where_the_algorithm_says_so() -> None:
    independent = {"cispo", "dispo", "dppo", "mini_rl", "ppo_clip", "reinforce"}
    for kind in (*independent, "gspo"):
        assert Algorithm.model_validate({"loss": kind}).per_token == (kind in independent)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policy]:
    directory = write_model(tmp_path_factory.mktemp("model") / "hf", "tiny_dense")
    with world_of_one(run_config(directory)):
        yield Policy(run_config(directory), directory)


def test_a_forward_pass_alone_leaves_gradients_and_graph_alone(world: Policy) -> None:
    head: Any = world.parameters["output_layer.weight"]
    (micro,) = micro_batches_of(batch_of_examples([([5, 6, 7], [8, 9])]), world)
    world.forward_backward([micro], CROSS_ENTROPY)
    before = head.main_grad.clone()
    assert before.abs().max() > 0
    world.forward_backward([micro], None)
    assert micro.logprobs_T is not None
    assert micro.entropy_T is not None
    assert not micro.logprobs_T.requires_grad
    assert not micro.entropy_T.requires_grad
    assert torch.equal(head.main_grad, before)


def test_gradients_of_several_micro_batches_add_up(world: Policy) -> None:
    head: Any = world.parameters["output_layer.weight"]
    parts = []
    examples = [([5, 6, 7], [8, 9]), ([4], [3, 3, 3])]
    micro_batches = [micro_batches_of(batch_of_examples([one]), world)[0] for one in examples]
    for micro in micro_batches:
        world.forward_backward([micro], CROSS_ENTROPY)
        parts.append(head.main_grad.clone())
    world.forward_backward(micro_batches, CROSS_ENTROPY)
    torch.testing.assert_close(head.main_grad, parts[0] + parts[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("chunk_mib", [0.001, 1.0])
def test_the_chunks_memory_does_not_change_the_gradient(world: Policy, chunk_mib: float) -> None:
    head: Any = world.parameters["output_layer.weight"]
    micro_batches = micro_batches_of(batch_of_examples([([5, 6, 7], list(range(2, 30)))]), world)
    world.forward_backward(micro_batches, CROSS_ENTROPY)
    want = head.main_grad.clone()
    before, world.run = world.run, run_config(world.directory, kernels__chunk_mib=chunk_mib)
    world.forward_backward(micro_batches, CROSS_ENTROPY)
    world.run = before
    torch.testing.assert_close(head.main_grad, want, atol=1e-6, rtol=1e-6)
