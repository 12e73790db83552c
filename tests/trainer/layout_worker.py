"""One of two gloo processes that take the tiny models through every parallel layout.

Started by `test_layouts.py`; rank 0 writes what it saw.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl import messages
from tests.trainer.cases import (
    ODD_VOCABULARY,
    absolute_terms,
    batch,
    distances,
    gradients,
    run_config,
    save_checkpoint,
    with_random_routes,
)

STEPS = 2
EXAMPLES = [([1, 5, 6], [7, 2]), ([1, 9], [3, 4, 5, 2]), ([1, 8, 8, 8], [2])]
EXPERTS = {"parallel__expert": 2}
SHARDED = {"parallel__distributed_optimizer": True}
PLAIN = {"parallel__distributed_optimizer": False}
OVERLAP = {"parallel__overlap_grad_reduce": True, "parallel__overlap_param_gather": True}
TP = {"parallel__tensor": 2}
SP = {**TP, "parallel__sequence_parallel": True}
PP = {"parallel__pipeline": 2}
CP = {"parallel__context": 2}
PADDED = {"schedule__packing": False}
# Short micro-batches: 8 of them, of as many shapes, go round the stages.
VPP = {**PP, "parallel__virtual_pipeline": 2, "schedule__micro_batch_tokens": 16}

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense TP2": ("tiny_dense", TP),
    "dense TP2 SP": ("tiny_dense", SP),
    "dense PP2": ("tiny_dense", PP),
    "dense DP2": ("tiny_dense", PLAIN),
    "dense DP2 distributed optimizer": ("tiny_dense", SHARDED),
    "dense DP2 overlapped": ("tiny_dense", OVERLAP),
    "scout CP2 EP2 overlapped": ("tiny_scout", {**CP, **EXPERTS, **OVERLAP}),
    "tied dense PP2 VPP2 overlapped": ("deep_dense", {**VPP, **OVERLAP}),
    "scout EP2": ("tiny_scout", {**EXPERTS, **PLAIN}),
    "scout EP2 distributed optimizer": ("tiny_scout", {**EXPERTS, **SHARDED}),
    "scout TP2 SP": ("tiny_scout", {**SP, **PLAIN}),
    "scout TP2 SP ETP2": ("tiny_scout", {**SP, "parallel__expert_tensor": 2}),
    "scout TP2 SP EP2": ("tiny_scout", {**SP, **EXPERTS}),
    "scout PP2": ("tiny_scout", PP),
    "scout DP2 distributed optimizer": ("tiny_scout", SHARDED),
    "dense DP2 padded": ("tiny_dense", {**PLAIN, **PADDED}),
    "dense CP2": ("tiny_dense", {**CP, **PLAIN}),
    "scout CP2 EP2 distributed optimizer": ("tiny_scout", {**CP, **EXPERTS, **SHARDED}),
    "chunked scout DP2": ("chunked_scout", PLAIN),
    "chunked scout CP2": ("chunked_scout", CP),
    "chunked scout CP2 padded": ("chunked_scout", {**CP, **PADDED}),
    "qwen3 TP2": ("tiny_qwen3", TP),
    "qwen3 moe TP2 SP EP2": ("tiny_qwen3_moe", {**SP, **EXPERTS}),
    "tied dense PP2 VPP2": ("deep_dense", VPP),
    "scout PP2 VPP2": ("deep_scout", VPP),
    "replayed scout TP2 SP EP2 recomputed": (
        "replayed_scout",
        {**SP, **EXPERTS, "parallel__recompute": "full"},
    ),
    "replayed scout PP2 VPP2 recomputed": (
        "replayed_scout",
        {**VPP, "parallel__recompute": "full"},
    ),
    "replayed scout CP2 padded": ("replayed_scout", {**CP, **PADDED}),
}
DUMP = {"metrics__token_dump_steps": [0]}
DEEP_SCOUT = {
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 1, 1, 0],
    "moe_layers": [0, 1, 3],
    "layer_types": None,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny_dense": ("tiny_dense", {"vocab_size": ODD_VOCABULARY}),
    "tiny_scout": ("tiny_scout", {}),
    "tiny_qwen3": ("tiny_qwen3", {}),
    "tiny_qwen3_moe": ("tiny_qwen3_moe", {}),
    # Sequences have up to 20 tokens: chunks and temperature steps begin within them.
    "chunked_scout": (
        "tiny_scout",
        {"attention_chunk_size": 5, "floor_scale": 3, "attn_scale": 0.3},
    ),
    # Two layers for each of two stages: a virtual pipeline of two chunks.
    "deep_dense": ("tiny_dense", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "deep_scout": ("tiny_scout", DEEP_SCOUT),
    "replayed_scout": ("tiny_scout", DEEP_SCOUT),
}
"""Name -> (tiny model that it starts from, changes in its config.json)."""
LOOPED = "scout EP2 distributed optimizer"
CHECKPOINTED = (
    *("dense TP2", "dense DP2 overlapped", "scout EP2 distributed optimizer"),
    *("scout PP2", "scout PP2 VPP2"),
    "scout CP2 EP2 distributed optimizer",
)


def routing(model: str) -> dict[str, str]:
    return {"algorithm__routing_replay": "replay"} if model.startswith("replayed") else {}


def observe(config: Any, directory: Path, check_resume: bool) -> dict[str, Any]:
    """Trains a few steps; what is compared between layouts, complete on rank 0."""
    from megatron_rl.data.examples import Position
    from megatron_rl.trainer import checkpoint
    from megatron_rl.trainer.export import export
    from megatron_rl.trainer.model import Policy
    from megatron_rl.trainer.sft import ExampleFeed, run_supervised
    from megatron_rl.trainer.step import Trainer, next_batch

    policy = Policy(config, directory)
    if check_resume:  # an optimizer that never stepped
        path = save_checkpoint(config, policy, 0)
        assert checkpoint.load(config, policy, path) == 0
    trainer = Trainer(config, policy)
    seen: dict[str, Any] = {"exports": [dict(export(policy))], "metrics": [], "gradients": None}
    run, finalize = policy._forward_backward, policy.config.finalize_model_grads_func
    # Every rank gets all gradients, where the distributed optimizer leaves it a shard of them.
    policy._forward_backward = lambda **kw: run(**kw, force_all_reduce=True)
    assert finalize is not None
    apply = policy.apply

    def observed(learning_rate: float) -> float:
        if seen["gradients"] is None:  # those of later steps differ as Adam's steps do
            seen["gradients"] = gradients(policy)
        return apply(learning_rate)

    policy.apply = observed  # type: ignore[method-assign]
    source = Batches(policy) if dist.get_rank() == 0 else None
    for step in range(STEPS):
        part, _ = next_batch(source, step, lambda: False, policy)
        done = trainer.train_step(part, step)
        seen["metrics"].append(done.metrics)
        seen.setdefault("probe", []).append(done.probe_logprobs)
        results = [messages.floats(data) for data in (done.ratios, done.entropies)]
        seen.setdefault("results", results)  # of the first step, on rank 0
        # Buckets of a few kilobytes: fused experts must stay together all the same.
        seen["exports"].append(dict(export(policy, 2**12 if step == 1 else 2**28)))
    seen["tokens"] = dumped_tokens(config.output_dir)
    seen["supervised"] = []
    short = config.model_copy(update={"sft": config.sft.model_copy(update={"steps": 2})})
    steps = iter([(EXAMPLES, Position())] * 3)
    feed = ExampleFeed(short, steps, Position()) if dist.get_rank() == 0 else None
    run_supervised(short, policy, feed, lambda row: seen["supervised"].append(row["loss"]))
    if check_resume:
        seen["resumed"] = _resumes_exactly(config, directory, policy)
    return seen


def dumped_tokens(output_dir: Path) -> Any:
    """Return the tokens that all ranks wrote in step 0, in the order of the batch."""
    tokens = np.concatenate([np.load(path) for path in output_dir.glob("tokens/0-*.npy")])
    return np.sort(tokens, order=["prompt_id", "position"])


class Batches:
    """Rank 0's source."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy

    def next_batch(self, step: int) -> messages.Batch:
        return _batch(self.policy, step)


def _batch(policy: Any, step: int) -> messages.Batch:
    message = batch(step, seed=step)
    return message if policy.routing is None else with_random_routes(message, policy.architecture)


def gradient_terms(config: Any, directory: Path) -> dict[str, Tensor]:
    """Return the absolute terms of the first step's gradient in one process, by sequence."""
    from megatron_rl.trainer.model import Policy
    from megatron_rl.trainer.step import Trainer

    schedule = config.schedule.model_copy(update={"micro_batch_tokens": 1})
    single = config.model_copy(update={"schedule": schedule})
    policy = Policy(single, directory)
    policy.apply = lambda learning_rate: 0.0  # type: ignore[method-assign]
    with absolute_terms(policy) as terms:
        Trainer(single, policy).train_step(_batch(policy, 0), 0)
    return terms


def _resumes_exactly(config: Any, directory: Path, policy: Any) -> dict[str, Any]:
    from megatron_rl.trainer import checkpoint
    from megatron_rl.trainer.export import export
    from megatron_rl.trainer.model import Policy
    from megatron_rl.trainer.step import Trainer

    path = save_checkpoint(config, policy, STEPS)
    other = Policy(config, directory)
    step = checkpoint.load(config, other, path)
    both = []
    for one in (policy, other):
        done = Trainer(config, one).train_step(batch(step, seed=step), step)
        both.append((done.metrics, dict(export(one))))
    (metrics, weights), (metrics_2, weights_2) = both
    return {
        "step": step,
        "metrics": metrics == metrics_2,
        "weights": all(torch.equal(weights[n], weights_2[n]) for n in weights),
    }


def compare(
    seen: dict[str, Any], alone: dict[str, Any], terms: dict[str, Tensor]
) -> dict[str, Any]:
    """Largest differences of a layout from the single process."""

    def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
        assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
        return max(float((a[n] - b[n]).abs().max()) for n in b)

    pairs = zip(seen["metrics"], alone["metrics"], strict=True)
    probes = zip(seen["probe"], alone["probe"], strict=True)
    exports = list(zip(seen["exports"], alone["exports"], strict=True))
    return {
        "names": list(seen["exports"][0]) == list(alone["exports"][0]),
        "start_is_exact": apart(*exports[0]) == 0.0,
        "metrics": [{k: abs(a[k] - b[k]) for k in a.keys() | b.keys()} for a, b in pairs],
        "gradients": distances(seen["gradients"], alone["gradients"], terms),
        "weights": [apart(a, b) for a, b in exports],
        "tokens": tokens_apart(seen["tokens"], alone["tokens"]),
        "results": max(map(results_apart, seen["results"], alone["results"])),
        "moved": apart(seen["exports"][-1], seen["exports"][0]),
        "supervised": abs(seen["supervised"][-1] - alone["supervised"][-1]),
        "probe": [
            max(
                float((torch.tensor(x) - torch.tensor(y)).abs().max())
                for x, y in zip(a, b, strict=True)
            )
            for a, b in probes
        ],
        "resumed": seen.get("resumed"),
    }


def results_apart(values: Any, other: Any) -> float:
    """Return the largest relative difference; the results of tokens have 12 bits."""
    assert len(values) == len(other) > 0
    return float(np.abs(values / other - 1).max())


def tokens_apart(tokens: Any, other: Any) -> float:
    """Return the largest difference of the trainer's log-probs; all other values are equal."""
    assert len(tokens) == len(other)
    for name in set(tokens.dtype.names) - {"trainer_logprob", "ratio"}:
        assert (tokens[name] == other[name]).all(), name
    return float(np.abs(tokens["trainer_logprob"] - other["trainer_logprob"]).max())


class Orchestrator:
    """The edge: batches without end; the loop is stopped from the other rank."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def next_batch(self, step: int) -> messages.Batch:
        return batch(step, seed=step)

    def step_done(self, done: messages.StepDone, wait_seconds: float) -> None:
        self.heard.append(("done", done.step))

    def send(self, message: messages.Message) -> None:
        assert isinstance(message, messages.TrainerDone)
        self.heard.append(("end", message.step, message.interrupted))

    def save_state(self, step: int, directory: str) -> None:
        self.heard.append(("save", step))


class Versions:
    """A publisher that notes the versions among the client's events, on rank 0."""

    def __init__(self, client: Orchestrator | None) -> None:
        self.client = client

    def publish(self, version: int) -> None:
        if self.client is not None:
            self.client.heard.append(("published", version))

    def wait(self) -> None:
        pass


def loop_stopped_by_the_other_rank(config: Any, directory: Path, rank: int) -> list[Any]:
    """Return the events of rank 0's client when rank 1 is stopped before step 2."""
    from megatron_rl.train import train_loop
    from megatron_rl.trainer.model import Policy

    asked: list[int] = []
    # The generators' log-probs of these batches are random.
    metrics = config.metrics.model_copy(update={"max_logprob_error": 10.0})
    config = config.model_copy(update={"metrics": metrics})

    def stop_requested() -> bool:
        asked.append(1)
        return rank == 1 and len(asked) > 2

    client = Orchestrator() if rank == 0 else None
    train_loop(
        config,
        Policy(config, directory),
        client,
        publisher=Versions(client),
        start_step=0,
        stop_requested=stop_requested,
    )
    return client.heard if client else []


def main(rank: int, folder: Path) -> None:
    from megatron_rl.trainer import megatron_build, step
    from megatron_rl.trainer.world import destroy_world, init_world

    step.PIECE_BYTES = 1000
    torch.set_num_threads(1)
    # Several buckets even of a tiny model, the head's its own; they count where they overlap.
    megatron_build.DistributedDataParallelConfig = partial(
        megatron_build.DistributedDataParallelConfig, bucket_size=1000
    )
    alone: dict[str, Any] = {}
    terms: dict[str, Any] = {}
    if rank == 0:
        for name in MODELS:
            out = folder / "out" / name
            config = run_config(folder / name, output_dir=out, **DUMP, **routing(name))
            init_world(config, 0, 1, dist.HashStore())
            resumes = name in ("tiny_dense", "tiny_scout")
            alone[name] = observe(config, folder / name, check_resume=resumes)
            terms[name] = gradient_terms(config, folder / name)
            destroy_world()
    resumed = {n: seen["resumed"] for n, seen in alone.items() if "resumed" in seen}
    found: dict[str, Any] = {"one process": resumed}
    for i, (layout, (name, options)) in enumerate(LAYOUTS.items()):
        out = folder / "out" / str(i)
        config = run_config(folder / name, 2, output_dir=out, **options, **DUMP, **routing(name))
        init_world(config, rank, 2, dist.FileStore(str(folder / f"store{i}"), 2))
        seen = observe(config, folder / name, check_resume=layout in CHECKPOINTED)
        if layout == LOOPED:
            found["loop"] = loop_stopped_by_the_other_rank(config, folder / name, rank)
        destroy_world()
        if rank == 0:
            found[layout] = compare(seen, alone[name], terms[name])
    if rank == 0:
        torch.save(found, folder / "seen.pt")
