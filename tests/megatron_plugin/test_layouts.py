"""RL in Megatron's own `pretrain`: every layout gives what a computation by hand gives.

By hand is transformers' model, the CISPO loss written out, torch's AdamW, and Megatron's padded
vocabulary (--make-vocab-size-divisible-by 128 of 31 words: with two tensor-parallel ranks the
second one holds padding only).
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_rl import messages
from megatron_rl.models import architecture
from megatron_rl.models.packing import RowLayout
from megatron_rl.models.safetensors_directory import read_config
from megatron_rl.trainer.batch import divide
from tests.megatron_plugin.pretrain_worker import STEPS
from tests.trainer.cases import ODD_VOCABULARY, batch, write_model
from tests.workers import PRELOADED, run_ranks

RATE, EPS = 1e-3, 1e-3
CAP = 1.2
Z, AUXILIARY, TOPK = 1e-2, 1e-1, 2
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("tiny_dense", {"num_hidden_layers": 4}),
    "moe": ("tiny_qwen3_moe", {"num_hidden_layers": 4, "mlp_only_layers": [0]}),
}
TRAINING = f"""
  --num-layers 4 --hidden-size 64 --num-attention-heads 2 --kv-channels 32 --ffn-hidden-size 192
  --max-position-embeddings 256 --position-embedding-type rope --rotary-base 1000
  --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
  --tokenizer-type NullTokenizer --vocab-size {ODD_VOCABULARY} --seq-length 64
  --micro-batch-size 1 --lr {RATE} --min-lr 0 --lr-decay-style constant --weight-decay 0
  --adam-beta2 0.999 --adam-eps {EPS} --clip-grad 1.0 --log-interval 1 --train-iters {STEPS}
  --eval-interval 2 --num-workers 0
""".split()
EXPERTS = [
    *("--num-experts", "4", "--moe-ffn-hidden-size", "96", "--moe-router-topk", "2"),
    *("--moe-router-dtype", "fp32", "--moe-token-dispatcher-type", "alltoall"),
    *("--qk-layernorm", "--moe-layer-freq", "[0,1,1,1]"),
]
OWN_LOSSES = ["--moe-z-loss-coeff", str(Z), "--moe-aux-loss-coeff", str(AUXILIARY)]
OWN_LOSSES += ["--moe-router-load-balancing-type", "aux_loss"]
BALANCED = ["--moe-router-load-balancing-type", "none"]
TP = ["--tensor-model-parallel-size", "2"]
TPSP = [*TP, "--sequence-parallel"]
PP = ["--pipeline-model-parallel-size", "2"]
VPP = [*PP, "--num-layers-per-virtual-pipeline-stage", "1"]
EP = ["--expert-model-parallel-size", "2"]
CP = ["--context-parallel-size", "2", "--spec", "tests.megatron_plugin.specs", "context_parallel"]
FULL = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
FULL += ["--recompute-num-layers", "1"]
DP = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "pp2": (2, PP),
    "pp2_vpp2": (2, VPP),
    "tp2_sp": (2, TPSP),
    "tp2_pp2": (4, [*TPSP, *PP]),
    "ep2": (2, EP),
    "tp2_sp_ep2_full": (2, [*TPSP, *EP, "--expert-tensor-parallel-size", "1", *FULL]),
    "cp2": (2, CP),
    "dp2": (2, DP),
}


@dataclass(frozen=True)
class Run:
    """What a run left behind."""

    losses: list[float]
    norms: list[float]
    announced: list[int]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    changes = {"vocab_size": ODD_VOCABULARY, "rms_norm_eps": 1e-5}
    return {
        name: write_model(folder / name, tiny, scale=0.5, **more, **changes)
        for name, (tiny, more) in MODELS.items()
    }


def free_port() -> int:
    """Return a free port below those that the kernel gives to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def run(
    folder: Path,
    model: Path,
    ranks: int,
    arguments: list[str],
    bound: float | None = 1e6,
    **case: Any,
) -> Run:
    """Run the script over these ranks; a step has four micro-batches."""
    folder.mkdir()
    replicas = 2 if "dp2" in folder.name or folder.name.partition("-")[2] == "ep2" else 1
    case |= {"ranks": ranks, "port": free_port(), "model": str(model)}
    case["arguments"] = [*TRAINING, "--global-batch-size", str(4 * replicas), *arguments]
    (folder / "case.json").write_text(json.dumps(case))
    (folder / "rl.yaml").write_text(
        f"output_dir: {folder}/rl\nmodel: {model}\ntask: {{kind: arithmetic}}\n"
        "schedule: {micro_batch_tokens: 64, prompts_per_step: 4, completions_per_prompt: 2}\n"
        "roles: {generator_ranks: 1}\n"
        f"algorithm: {{loss: {{kind: cispo, max_ratio: {CAP}}}}}\n"
        f"metrics: {{max_logprob_error: {json.dumps(bound)}}}\n"
    )
    run_ranks(
        "tests.megatron_plugin.pretrain_worker", ranks, folder, 240,
        (*PRELOADED, "megatron.training.training", "tests.megatron_plugin.quick_parser"),
    )  # fmt: skip
    out = json.loads((folder / "out.json").read_text())
    made = folder / "gradients.pt"
    return Run(
        [row["loss"] for row in out["rows"]],
        out["norms"],
        out["announced"],
        load_file(folder / "weights/model.safetensors"),
        torch.load(made) if made.exists() else {},
    )


def sequence_logprobs(model: Any, message: messages.Batch) -> tuple[Tensor, Tensor]:
    """Return (log-probs of the completion tokens, their positions in the batch's arrays)."""
    bounds = messages.ints(message.bounds)
    ids = torch.from_numpy(messages.ints(message.token_ids).astype("int64"))
    prompts = messages.ints(message.prompt_lengths)
    logprobs, positions = [], []
    for i, (first, last) in enumerate(pairwise(bounds)):
        own = ids[first:last]
        log_softmax = model(own[None]).logits[0].log_softmax(-1)
        start = int(prompts[i])
        logprobs.append(log_softmax[start - 1 : -1].gather(1, own[start:, None])[:, 0])
        positions.append(torch.arange(first + start, last))
    return torch.cat(logprobs), torch.cat(positions)


def cispo(model: Any, message: messages.Batch) -> Tensor:
    """Return arXiv 2510.13786's loss of a batch."""
    logprobs_T, at = sequence_logprobs(model, message)
    generator, advantages, weights = (
        torch.from_numpy(messages.floats(getattr(message, name)).copy())[at]
        for name in ("generator_logprobs", "advantages", "loss_weights")
    )
    ratio = (logprobs_T.detach() - generator).exp().clamp(max=CAP)
    return -(weights * ratio * advantages * logprobs_T).sum()


def micro_batches(model: Path, message: messages.Batch, replicas: int) -> list[list[int]]:
    """Return the numbers of the sequences of each micro-batch."""
    layout = RowLayout(ranks=replicas, max_tokens=64, packed=False, count_multiple=4)
    bounds, out = messages.ints(message.bounds), []
    for rank in range(replicas):
        for micro in divide(message, architecture(read_config(model)), layout, rank):
            first = [int(row.max()) for row in micro.origin_BS if row.max() >= 0]
            out.append([int(i) for i in bounds.searchsorted(first, side="right") - 1])
    return out


def router_losses(network: Any, inputs: dict[str, list[Tensor]], groups: list[list[int]]) -> Tensor:
    """Return z and auxiliary losses: means over tokens, the latter of micro-batches (GShard)."""
    total, loss = sum(len(x) for x in next(iter(inputs.values()))), torch.zeros(())
    for name, hidden in inputs.items():
        weight = network.get_parameter(f"{name}.weight")
        logits = [x @ weight.T for x in hidden]
        loss = loss + Z * torch.cat(logits).logsumexp(-1).square().sum() / total
        for group in filter(None, groups):
            logits_TE = torch.cat([logits[i] for i in group])
            tokens, experts = logits_TE.shape
            routed = torch.zeros(experts).index_add_(
                0, logits_TE.topk(TOPK).indices.flatten(), torch.ones(tokens * TOPK)
            )
            shares = routed / (tokens * TOPK) * logits_TE.softmax(-1).mean(0)
            loss = loss + AUXILIARY * experts * shares.sum() * tokens / total
    return loss


def by_hand(model: Path, folder: Path, replicas: int = 0) -> Run:
    """Return what `STEPS` steps give without Megatron.

    Args:
        model: a Hugging Face directory.
        folder: for results.
        replicas: data-parallel size, with the routers' own losses; 0: without them.
    """
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    network.get_input_embeddings().padding_idx = None  # token 0 is a word like the others
    adam = torch.optim.Adam(network.parameters(), lr=RATE, betas=(0.9, 0.999), eps=EPS)
    inputs: dict[str, list[Tensor]] = defaultdict(list)
    for name, module in network.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_pre_hook(
                lambda _, given, name=name: inputs[name].append(given[0].flatten(0, -2))
            )
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        adam.zero_grad()
        inputs.clear()
        message = batch(step, seed=step)
        loss = whole = cispo(network, message)
        if replicas:
            groups = micro_batches(model, message, replicas)
            whole = loss + router_losses(network, inputs, groups)
        whole.backward()
        if step == 0:
            weights = [(p, p.data) for p in network.parameters()]
            for p, _ in weights:
                p.data = p.grad.clone() if p.grad is not None else torch.zeros_like(p)
            network.save_pretrained(folder / "gradients")
            gradients = load_file(folder / "gradients/model.safetensors")
            for p, data in weights:
                p.data = data
        norms.append(float(torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)))
        losses.append(float(loss.detach()))
        adam.step()
    network.save_pretrained(folder / "weights")
    weights = load_file(folder / "weights/model.safetensors")
    return Run(losses, norms, list(range(STEPS + 1)), weights, gradients)


def assert_equal(result: Run, expected: Run) -> None:
    assert result.announced == list(range(STEPS + 1))
    assert result.losses == pytest.approx(expected.losses, rel=1e-5, abs=1e-6)
    assert result.norms == pytest.approx(expected.norms, rel=1e-5)
    assert result.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        torch.testing.assert_close(result.weights[name], weight, rtol=0, atol=2e-5, msg=name)
    for name, gradient in (expected.gradients if result.gradients else {}).items():
        largest = float(gradient.abs().max())
        assert (result.gradients[name] - gradient).abs().max() <= 1e-5 * largest + 1e-8, name


@pytest.fixture(scope="module")
def hand(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("hand")
    return {name: by_hand(path, folder / name) for name, path in models.items()}


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_equals_the_computation_by_hand(
    models: dict[str, Path], hand: dict[str, Run], tmp_path: Path, model: str
) -> None:
    more = [*EXPERTS, *BALANCED] if model == "moe" else []
    assert len(set(hand[model].losses)) == STEPS
    result = run(tmp_path / f"{model}-one", models[model], 1, more, gradients=True)
    assert result.gradients
    assert_equal(result, hand[model])


CASES = [(m, layout) for m in MODELS for layout in LAYOUTS if m == "moe" or "ep2" not in layout]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_every_layout_equals_the_computation_by_hand(
    models: dict[str, Path], hand: dict[str, Run], tmp_path: Path, model: str, layout: str
) -> None:
    ranks, arguments = LAYOUTS[layout]
    more = [*EXPERTS, *BALANCED] if model == "moe" else []
    result = run(tmp_path / f"{model}-{layout}", models[model], ranks, [*arguments, *more])
    assert_equal(result, hand[model])


@pytest.mark.parametrize("layout", ["one", *(name for name in LAYOUTS if name != "pp2_vpp2")])
def test_router_losses_equal_the_computation_by_hand(
    models: dict[str, Path], hand: dict[str, Run], tmp_path: Path, layout: str
) -> None:
    ranks, arguments = LAYOUTS.get(layout, (1, []))
    expected = by_hand(models["moe"], tmp_path / "hand", 2 if layout in ("dp2", "ep2") else 1)
    gate = "model.layers.1.mlp.gate.weight"
    without = (hand["moe"].gradients[gate] - expected.gradients[gate]).abs().max()
    assert without > 0.01 * expected.gradients[gate].abs().max()
    arguments = [*arguments, *EXPERTS, *OWN_LOSSES]
    # A distributed optimizer leaves parts of the gradients on the ranks.
    whole = layout != "dp2"
    result = run(tmp_path / f"moe-{layout}", models["moe"], ranks, arguments, gradients=whole)
    assert bool(result.gradients) == whole
    assert_equal(result, expected)


def test_another_model_than_the_generators_is_stopped_before_the_first_update(
    models: dict[str, Path], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    message = batch()
    with torch.no_grad():
        network = AutoModelForCausalLM.from_pretrained(models["dense"], dtype=torch.float32)
        logprobs_T, at = sequence_logprobs(network, message)
    by_generator = torch.from_numpy(messages.floats(message.generator_logprobs).copy())
    by_generator[at] = logprobs_T
    case = {"fields": {"generator_logprobs": by_generator.numpy().tobytes().hex()}, "bound": None}
    once = ["--train-iters", "1"]
    assert run(tmp_path / "dense-same", models["dense"], 1, once, **case).announced == [0, 1]
    other = [*once, "--spec", "tests.megatron_plugin.specs", "half_scale"]
    with pytest.raises(AssertionError) as failure:
        run(tmp_path / "dense-other", models["dense"], 1, other, **case)
    last = str(failure.value).splitlines()[-1]
    mean = re.search(r"step 0: .* differ by ([\d.e-]+) nats", last)
    assert mean and float(mean[1]) > 0.001
    assert "core_attention is a tests.megatron_plugin.specs.HalfScale" in last
    assert "metrics.max_logprob_error" in last
