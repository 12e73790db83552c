"""Shared material of the policy tests: worlds of one rank, model variants, batches."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl import messages
from megatron_rl.config import RunConfig
from megatron_rl.models import routed_experts, tiny
from tests.sums import sum_error

PROMPT, COMPLETION = (3, 9), (1, 14)
"""Ranges of lengths of the test batches, in tokens."""
ODD_VOCABULARY = 31
"""Of a model that tensor parallelism must pad, and of all batches."""


def run_config(model: str | Path, ranks: int = 1, **overrides: Any) -> RunConfig:
    """Return a small fp32 run; `overrides` are dotted keys with `__` for the dot."""
    options = {
        "roles__trainer_ranks": ranks,
        "precision__params": "fp32",
        "optimizer__learning_rate": 1e-3,
        "optimizer__warmup_steps": 0,
        "optimizer__eps": 1e-8,
        "schedule__micro_batch_tokens": 64,
        "timeouts__startup_seconds": 120,
        **overrides,
    }
    tree: dict[str, Any] = {"model": str(model)}
    for key, value in options.items():
        section, _, name = key.rpartition("__")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return RunConfig.model_validate(tree)


@contextlib.contextmanager
def world_of_one(config: RunConfig) -> Iterator[None]:
    """Make this process the whole Megatron world."""
    from megatron_rl.trainer.world import destroy_world, init_world

    init_world(config, 0, 1, dist.HashStore())
    try:
        yield
    finally:
        destroy_world()


def save_checkpoint(config: RunConfig, policy: Any, step: int, write_state: Any = None) -> Path:
    """Write one checkpoint, and return its complete directory."""
    from megatron_rl.trainer.checkpoint import Saver

    saver = Saver(config, policy)
    path = saver.save(step, write_state)
    saver.wait()
    saver.close()
    return path


def write_model(directory: Path, name: str, scale: float = 1.0, **changes: Any) -> Path:
    """Write a tiny model with weights that matter: norms off 1, `changes` in its config.json.

    Args:
        directory: written.
        name: which tiny model it starts from.
        scale: multiplies the initial matrices.
        changes: keys of config.json; sizes may differ from the tiny model's.
    """
    config = {**tiny.CONFIGS[name], **changes}
    rng = torch.Generator().manual_seed(11)
    tiny.create(name, directory)
    tensors = load_file(directory / "model.safetensors")
    if changes:
        tensors = _from_transformers(config)
    for key in sorted(tensors):
        tensor = tensors[key]
        if tensor.dim() == 1:
            tensors[key] = torch.rand(tensor.shape, generator=rng) + 0.5
        else:
            tensors[key] = torch.randn(tensor.shape, generator=rng) * 0.1 * scale
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


TINY_VISION = {
    "hidden_size": 32,
    "image_size": 28,
    "intermediate_size": 128,  # pixel shuffle makes four patches one
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 14,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "vision_output_dim": 32,
}


def write_multimodal(directory: Path, **changes: Any) -> Path:
    """`tiny_scout` with a vision tower beside it, as transformers saves the two.

    Args:
        directory: written.
        changes: keys of the text part's configuration.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {**tiny.CONFIGS["tiny_scout"], **changes}
    config = AutoConfig.for_model("llama4", text_config=text, vision_config=TINY_VISION)
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1) if p.dim() > 1 else torch.nn.init.uniform_(p, 0.5, 1.5)
    model.save_pretrained(directory)
    return directory


def _from_transformers(config: dict[str, Any]) -> dict[str, Tensor]:
    """Names and shapes of the checkpoint that transformers saves for this configuration."""
    import tempfile

    from transformers import AutoConfig, AutoModelForCausalLM

    values = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **values))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def batch(step: int = 0, sequences: int = 7, seed: int = 0, **changes: Any) -> messages.Batch:
    """Return a batch with every kind of token: forced, dropped, of older and of one version.

    Sequence 1 is dropped as a whole; sequence 2 has a forced token in its middle; sequences of
    even number were sampled by `step` throughout, the others changed version on the way.
    """
    rng = np.random.default_rng(seed)
    prompts = rng.integers(*PROMPT, sequences)
    completions = rng.integers(*COMPLETION, sequences)
    bounds = np.concatenate([[0], np.cumsum(prompts + completions)])
    n = int(bounds[-1])
    ids = rng.integers(0, ODD_VOCABULARY, n)
    advantages, weights = np.zeros(n), np.zeros(n)
    generator, versions = np.zeros(n), np.full(n, -1)
    for i in range(sequences):
        first, last = bounds[i] + prompts[i], bounds[i + 1]
        advantages[first:last] = rng.normal()
        weights[first:last] = 0.0 if i == 1 else rng.uniform(0.001, 0.02)
        generator[first:last] = rng.normal(-3.4, 0.3, last - first)
        versions[first:last] = step
        if i % 2:
            versions[first] = step - 1
        if i == 2:
            versions[(first + last) // 2] = -1
            weights[(first + last) // 2] = 0.0
    fields = {
        "bounds": bounds.astype("<i4").tobytes(),
        "prompt_ids": np.arange(sequences, dtype="<i4").tobytes(),
        "completion_indices": (np.arange(sequences, dtype="<i4") % 4).tobytes(),
        "prompt_lengths": prompts.astype("<i4").tobytes(),
        "token_ids": ids.astype("<i4").tobytes(),
        "advantages": advantages.astype("<f4").tobytes(),
        "generator_logprobs": generator.astype("<f4").tobytes(),
        "loss_weights": weights.astype("<f4").tobytes(),
        "versions": versions.astype("<i4").tobytes(),
        "probe": [0, sequences - 1],
    }
    return messages.Batch(step=step, **{**fields, **changes})


def with_random_routes(message: messages.Batch, architecture: Any) -> messages.Batch:
    """Return the batch with random experts, none for the last token of each sequence."""
    bounds = messages.ints(message.bounds)
    shape = (bounds[-1], len(architecture.moe_layers), architecture.experts)
    order = np.argsort(np.random.default_rng(message.step).random(shape), axis=2)
    chosen = order[:, :, : architecture.experts_per_token]
    chosen[bounds[1:] - 1] = routed_experts.UNKNOWN
    return with_routes(message, chosen, architecture)


def with_routes(message: messages.Batch, experts_NLK: Any, architecture: Any) -> messages.Batch:
    """Return the batch with these routed experts of its tokens."""
    parts = np.split(experts_NLK, messages.ints(message.bounds)[1:-1])
    routes = [routed_experts.encode(part, architecture.experts) for part in parts]
    return msgspec.structs.replace(message, routes=routes)


@contextlib.contextmanager
def absolute_terms(policy: Any) -> Iterator[dict[str, Tensor]]:
    """Run micro-batches one by one, and sum the absolute values of their gradients by name.

    The sums are the yardstick of the error of the whole gradient (`tests.sums`). They are complete
    on rank 0; each gradient is collective over the trainer ranks.
    """
    sums: dict[str, Tensor] = {}
    run = policy.forward_backward

    def one_by_one(micro_batches: list[Any], objective: Any, **options: Any) -> None:
        for micro in micro_batches:
            run([micro], objective, **options)
            if objective is not None:
                for name, gradient in gradients(policy).items():
                    sums[name] = gradient.abs() + sums.get(name, 0.0)

    policy.forward_backward = one_by_one
    try:
        yield sums
    finally:
        policy.forward_backward = run


def distances(
    a: dict[str, Tensor], b: dict[str, Tensor], terms: dict[str, Tensor] | None = None
) -> dict[str, float]:
    """Return |a - b| / |terms| of each tensor, in Euclidean norms; by default terms are b."""
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    return {n: sum_error(a[n], b[n], (terms or b)[n]) for n in b}


def gradients(policy: Any) -> dict[str, Tensor]:
    """Return gradients by Hugging Face names; on rank 0, collective over the trainer ranks.

    They travel as the weights do: the parameters hold them for a moment.
    """
    from megatron_rl.trainer.export import export

    saved = {name: p.data.clone() for name, p in policy.parameters.items()}
    for p in policy.parameters.values():
        p.data.copy_(p.main_grad)
    found = dict(export(policy))
    for name, p in policy.parameters.items():
        p.data.copy_(saved[name])
    return found
