"""The memory plan as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megatron_rl.commands.plan.generator_memory import GIB, Assumptions, GeneratorMemory
from megatron_rl.commands.plan.layout import Layout
from megatron_rl.commands.plan.memory import Memory, StageMemory
from megatron_rl.commands.plan.search import Search
from megatron_rl.commands.plan.transfer import Transfer

if TYPE_CHECKING:
    from megatron_rl.models.base import Architecture

SCHEMA = "megatron_rl.memory_plan/1"
PARTS = ("parameters", "gradients", "optimizer", "activations", "logits", "transfer")


def gib(size: float) -> str:
    """A size in GiB."""
    return f"{size / GIB:.2f}"


def print_model(name: str, architecture: Architecture) -> None:
    """Name and size of the model."""
    a = architecture
    active = a.active_parameters()
    some = "" if active == a.parameters() else f", {active:,} active"
    print(f"model: {name}, {a.parameters():,} parameters{some}")


def print_problems(title: str, found: list[str]) -> None:
    """Reasons, one a line."""
    print(title)
    for reason in found:
        print(f"  - {reason}")


def print_memory(layout: Layout, memory: Memory, assumed: Assumptions) -> None:
    """A column per pipeline stage that differs, and the generator's lines."""
    print(f"layout: {layout}")
    stages = _different(memory.stages)
    rows = [("trainer rank of stage", [str(stage.stage) for stage in stages])]
    rows.append(("parameters", [f"{stage.count.total:,}" for stage in stages]))
    rows += [
        (f"{part} GiB", [gib(getattr(stage, part)) for stage in stages])
        for part in (*PARTS, "total")
    ]
    for name, cells in rows:
        print(f"  {name:<24}" + "".join(f"{cell:>17}" for cell in cells))
    room = assumed.gpu_gib - assumed.reserve_gib
    print(f"  of {room:g} GiB ({assumed.gpu_gib:g} less a reserve of {assumed.reserve_gib:g})")
    print_generator(memory.generator)


def print_generator(generator: GeneratorMemory) -> None:
    """Weights and cache of a generator rank."""
    g = generator
    print(
        f"generator rank: {gib(g.weights)} GiB weights, {gib(g.workspace)} GiB workspace,"
        f" {gib(max(g.kv_cache, 0))} GiB KV cache = {g.kv_tokens:,} tokens ="
        f" {g.sequences:.1f} sequences of {g.sequence_tokens:,} tokens per engine"
    )


def print_transfer(transfer: Transfer) -> None:
    """Bytes and seconds of an update."""
    print(f"weight update: {transfer.num_bytes / 1e9:.1f} GB to every generator rank")
    for link, seconds in transfer.seconds.items():
        print(f"  {seconds:8.2f} s over {link}")


def print_search(search: Search) -> None:
    """Layouts that fit, or the nearest miss."""
    for i, one in enumerate(search.found):
        worst, g = one.memory.worst, one.memory.generator
        print(
            f"{'proposed' if i == 0 else 'or'}: {one.layout}\n"
            f"  {gib(worst.total)} GiB on the fullest trainer rank, {g.sequences:.0f} full"
            f" sequences per engine\n  {one.layout.options()}"
        )
    if not search.found and search.nearest is not None:
        print_problems(
            f"no layout fits: {search.tried} layouts divide the model; the nearest is"
            f" {search.nearest.layout}",
            list(search.nearest.memory.misfits),
        )
    elif not search.found:
        print("no layout fits: none divides the model")


def _different(stages: tuple[StageMemory, ...]) -> list[StageMemory]:
    """The first, the last, and the fullest stage."""
    worst = max(stages, key=lambda stage: stage.total)
    return sorted({stages[0], worst, stages[-1]}, key=lambda stage: stage.stage)


def as_json(
    layout: Layout,
    problems: list[str],
    memory: Memory | None,
    transfer: Transfer,
    search: Search | None,
    assumed: Assumptions,
) -> dict[str, Any]:
    """Schema `megatron_rl.memory_plan/1`; sizes in bytes."""

    def of(layout: Layout, memory: Memory) -> dict[str, Any]:
        stages = [{**asdict(stage), "total": stage.total} for stage in memory.stages]
        generator = memory.generator
        kept = {"kv_tokens": generator.kv_tokens, "sequences": generator.sequences}
        return {
            "layout": layout.values(),
            "stages": stages,
            "generator": {**asdict(generator), **kept},
            "misfits": list(memory.misfits),
        }

    found = () if search is None else search.found
    return {
        "schema": SCHEMA,
        "assumptions": asdict(assumed),
        "configured": {"layout": layout.values(), "problems": problems}
        | ({} if memory is None else of(layout, memory)),
        "transfer": asdict(transfer),
        "proposed": [of(one.layout, one.memory) for one in found],
    }
