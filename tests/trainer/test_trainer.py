"""One training step: invariances, metrics by hand, edge cases (one rank, tiny models)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rl import messages
from megatron_rl.trainer.batch import (
    batch_of_examples,
    completion_positions,
    micro_batches_of,
    same_version,
)
from megatron_rl.trainer.model import Policy
from megatron_rl.trainer.step import Trainer, learning_rate
from tests.trainer.cases import batch, gradients, run_config, world_of_one, write_model

EMPTY = np.zeros(0, dtype="<f4").tobytes()


@pytest.fixture(scope="module", params=["tiny_scout", "tiny_dense"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "hf", request.param)


@pytest.fixture(scope="module")
def world(directory: Path) -> Iterator[None]:
    with world_of_one(run_config(directory)):
        yield


def trained(directory: Path, message: messages.Batch, **overrides: Any) -> tuple[Any, Any, Any]:
    """(StepDone, gradients, policy) of one step from the start weights."""
    config = run_config(directory, **overrides)
    policy = Policy(config, directory)
    seen: dict[str, Any] = {}
    apply = policy.apply

    def observed(rate: float) -> float:
        seen["gradients"] = gradients(policy)
        return apply(rate)

    policy.apply = observed  # type: ignore[method-assign]
    return Trainer(config, policy).train_step(message, message.step), seen["gradients"], policy


@pytest.mark.parametrize("micro_batch_tokens", [1, 40, 10**6])
def test_micro_batches_do_not_change_gradient_or_metrics(
    world: None, directory: Path, micro_batch_tokens: int
) -> None:
    done, found, _ = trained(directory, batch(), schedule__micro_batch_tokens=micro_batch_tokens)
    want, reference, _ = trained(directory, batch(), schedule__micro_batch_tokens=64)
    for name, value in want.metrics.items():
        assert done.metrics[name] == pytest.approx(value, abs=1e-5, rel=1e-5), name
    for name, gradient in reference.items():
        torch.testing.assert_close(
            found[name], gradient, atol=1e-5 * float(gradient.abs().max()) + 1e-9, rtol=1e-4
        )


def test_loss_gradient_and_metrics_equal_plain_autograd(world: None, directory: Path) -> None:
    from transformers import AutoModelForCausalLM

    message = batch(step=4)
    done, found, _ = trained(directory, message)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    bounds, prompts, token_ids = (
        messages.ints(x) for x in (message.bounds, message.prompt_lengths, message.token_ids)
    )
    advantages, generator, weights = (
        torch.tensor(messages.floats(x))
        for x in (message.advantages, message.generator_logprobs, message.loss_weights)
    )
    versions = messages.ints(message.versions)
    logps, entropies, where = [], [], []
    for i in range(len(prompts)):  # sequence by sequence, with nothing padded
        ids = torch.tensor(token_ids[bounds[i] : bounds[i + 1]].astype(np.int64))
        all_logps = torch.log_softmax(model(ids[None]).logits[0], -1)
        rows = torch.arange(int(prompts[i]), len(ids))
        logps.append(all_logps[rows - 1, ids[rows]])
        entropies.append(-(all_logps.exp() * all_logps).sum(-1)[rows - 1])
        where.append(torch.from_numpy(completion_positions(message, i)))
    logp, entropy, source = torch.cat(logps), torch.cat(entropies), torch.cat(where)
    gen, w = generator[source], weights[source]
    ratio = torch.exp(logp.detach() - gen)
    loss = -(w * ratio.clamp(max=5.0) * advantages[source] * logp).sum()
    loss.backward()

    name = "model.norm.weight"
    torch.testing.assert_close(found[name], model.model.norm.weight.grad, atol=1e-6, rtol=1e-4)
    own = ratio[w > 0]
    sequences = np.repeat(np.arange(len(prompts)), np.diff(bounds))
    same = torch.from_numpy(same_version(sequences, versions, 4, len(prompts)))[source]
    error = (logp.detach() - gen).abs()[same]
    want = {
        "loss": loss.item(),
        "tokens_trained": len(own),
        "ratio_mean": float(own.mean()),
        "ratio_max": float(own.max()),
        "ratio_min": float(own.min()),
        "ratio_std": float(own.std(correction=0)),
        "clipped_fraction": float((own > 5.0).float().mean()),
        "ratio_outside_0.9_1.1": float(((own < 0.9) | (own > 1.1)).float().mean()),
        "mismatch_kl": float((own - 1 - own.log()).mean()),
        "entropy": entropy[w > 0].mean().item(),
        "same_version_logprob_error_max": float(error.max()),
        "same_version_logprob_error_mean": float(error.mean()),
        "same_version_logprob_tokens": int(same.sum()),
        "learning_rate": 1e-3,
    }
    for key, value in want.items():
        assert done.metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    assert done.metrics["grad_norm"] > 0
    assert set(done.metrics) == {*want, "grad_norm"}
    for i, found_probe in zip(message.probe, done.probe_logprobs, strict=True):
        np.testing.assert_allclose(found_probe, logps[i].detach(), atol=1e-5)


def test_a_dump_has_the_trained_tokens_of_chosen_steps(
    world: None, directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokens").mkdir()
    for name in ("4-1.npy", "5-1.npy"):  # of more ranks, before a resume
        (tmp_path / "tokens" / name).touch()
    options = {"output_dir": tmp_path, "metrics__token_dump_steps": [4]}
    message = batch(step=4)
    done, *_ = trained(directory, message, **options)
    trained(directory, batch(step=3), **options)
    assert {p.name for p in tmp_path.glob("tokens/*")} == {"4-0.npy", "5-1.npy"}
    tokens = np.load(tmp_path / "tokens" / "4-0.npy")
    trainer, generator = tokens["trainer_logprob"], tokens["generator_logprob"]
    np.testing.assert_allclose(tokens["ratio"], np.exp(trainer - generator), rtol=1e-6)
    for name in ("min", "max", "mean", "std"):
        value = float(getattr(tokens["ratio"].astype(float), name)())
        assert value == pytest.approx(done.metrics[f"ratio_{name}"], rel=1e-6), name
    # Every trained token of the batch, once, with its own values.
    bounds, prompts = messages.ints(message.bounds), messages.ints(message.prompt_lengths)
    sequence = tokens["prompt_id"]
    assert (tokens["completion"] == sequence % 4).all() and (tokens["step"] == 4).all()
    source = bounds[sequence] + prompts[sequence] + tokens["position"]
    assert sorted(source) == np.flatnonzero(messages.floats(message.loss_weights) > 0).tolist()
    for name, values in {
        "token": messages.ints(message.token_ids),
        "advantage": messages.floats(message.advantages),
        "generator_logprob": messages.floats(message.generator_logprobs),
        "staleness": 4 - messages.ints(message.versions),
    }.items():
        assert (tokens[name] == values[source]).all(), name
    assert set(tokens["staleness"]) == {0, 1}
    assert tokens.dtype.itemsize == 40


def test_a_batch_without_a_trained_token_still_steps(world: None, directory: Path) -> None:
    n = len(messages.floats(batch().loss_weights))
    nothing = np.zeros(n, dtype="<f4").tobytes()
    done, found, _ = trained(directory, batch(loss_weights=nothing))
    assert all((g == 0).all() for g in found.values())
    assert done.metrics["tokens_trained"] == 0
    assert done.metrics["ratio_mean"] == done.metrics["ratio_min"] == 0.0
    assert done.metrics["grad_norm"] == 0.0
    assert done.metrics["same_version_logprob_tokens"] > 0

    empty = batch(
        bounds=np.zeros(1, dtype="<i4").tobytes(),
        probe=[],
        **dict.fromkeys(
            ("prompt_lengths", "token_ids", "advantages", "generator_logprobs", "loss_weights"),
            EMPTY,
        ),
        versions=EMPTY,
    )
    done, found, _ = trained(directory, empty)
    assert all((g == 0).all() for g in found.values())
    assert np.isfinite(list(done.metrics.values())).all()


def test_padding_never_leaks_into_a_shorter_sequence(world: None, directory: Path) -> None:
    # The same short sequence beside a short and beside a long one.
    policy = Policy(run_config(directory, schedule__micro_batch_tokens=10**6), directory)
    short = ([5, 6, 7], [0, 2, 8])  # pad and eos inside are tokens like others
    seen = []
    for other in (([3], [4]), ([3] * 9, [4] * 30)):
        (micro,) = micro_batches_of(batch_of_examples([short, other]), policy)
        policy.forward_backward([micro], None)
        assert micro.logprobs_T is not None
        seen.append(micro.logprobs_T[micro.source_T < 6])
    torch.testing.assert_close(seen[0], seen[1], atol=1e-6, rtol=1e-6)


def test_temperature_divides_the_logits(world: None, directory: Path) -> None:
    policy = Policy(run_config(directory, generation__temperature=0.5), directory)
    (micro,) = micro_batches_of(batch_of_examples([([5, 6, 7], [8, 9])]), policy)

    def logprobs(**kwargs: Any) -> torch.Tensor:
        policy.forward_backward([micro], None, **kwargs)
        assert micro.logprobs_T is not None
        return micro.logprobs_T

    module = policy.modules[0](micro.tokens_BS, torch.arange(5)[None], None)[0]
    for temperature, found in ((0.5, logprobs()), (1.0, logprobs(temperature=1.0))):
        want = torch.log_softmax(module / temperature, -1)[[2, 3], [8, 9]]
        torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("logits", ["fp32", "bf16"])
def test_bf16_parameters_train_near_fp32(world: None, directory: Path, logits: str) -> None:
    options = {"precision__params": "bf16", "precision__logits": logits}
    done, found, policy = trained(directory, batch(), **options)
    want, reference, _ = trained(directory, batch())
    assert done.metrics["loss"] == pytest.approx(want.metrics["loss"], rel=0.1, abs=5e-3)
    name = "model.layers.1.self_attn.o_proj.weight"
    scale = float(reference[name].abs().max())
    assert float((found[name].float() - reference[name]).abs().max()) < 0.1 * scale
    assert policy.parameters["output_layer.weight"].dtype == torch.bfloat16


def test_bad_batches_are_refused(world: None, directory: Path) -> None:
    config = run_config(directory)
    trainer = Trainer(config, Policy(config, directory))
    with pytest.raises(ValueError, match="0 advantages for"):
        trainer.train_step(batch(advantages=EMPTY), 0)
    ids = messages.ints(batch().token_ids).copy()
    ids[3] = 32
    with pytest.raises(ValueError, match="vocabulary is 0 to 31"):
        trainer.train_step(batch(token_ids=ids.tobytes()), 0)
    generator = messages.floats(batch().generator_logprobs).copy()
    generator[-1] = np.nan
    with pytest.raises(FloatingPointError, match="not finite"):
        trainer.train_step(batch(generator_logprobs=generator.tobytes()), 0)


def test_learning_rate_warms_up_linearly_to_a_constant(directory: Path) -> None:
    config = run_config(directory, optimizer__warmup_steps=4)
    rates = [learning_rate(config, step) / 1e-3 for step in (0, 1, 3, 4, 100)]
    assert rates == pytest.approx([0.25, 0.5, 1.0, 1.0, 1.0])


def test_layouts_that_cannot_divide_the_model_are_refused(world: None, directory: Path) -> None:
    for options, what in (
        ({"parallel__tensor": 4, "roles__trainer_ranks": 4}, "parallel.tensor is 4"),
        ({"parallel__pipeline": 4, "roles__trainer_ranks": 4}, "parallel.pipeline is 4"),
        (
            {
                "parallel__pipeline": 2,
                "parallel__virtual_pipeline": 2,
                "roles__trainer_ranks": 2,
            },
            "parallel.virtual_pipeline is 2: 3 layers",
        ),
    ):
        with pytest.raises(ValueError, match=what):
            Policy(run_config(directory, **options), directory)
