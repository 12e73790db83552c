"""All checks, in the order in which a reader looks for the cause."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.commands.doctor import (
    device_probe,
    devices,
    exchange,
    generator_check,
    node_check,
    versions,
)
from megatron_rl.commands.doctor.result import Result, fail


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line chose."""

    generator_python: str | None = None
    """None: generators run in this interpreter."""
    weights_directory: Path = node_check.SHARED_MEMORY
    ports: list[int] = field(default_factory=lambda: [node_check.RENDEZVOUS_PORT])
    quick: bool = False
    """Leave out what starts processes: generators' environment, all-reduce, Transformer Engine."""


def run_checks(options: Options) -> Iterator[Result]:
    """The lines of the report, each as soon as it is known."""
    yield from _guarded("python", versions.check_python)
    cuda = False
    for result in _guarded("torch", devices.check_gpus):
        yield result
        if result.check == "torch":
            return  # nothing below works without torch
    cuda = devices.has_cuda()
    answer: dict[str, Any] | None = None
    if not options.quick:
        answer, line = generator_check.ask(options.generator_python or sys.executable)
        yield line
    theirs = answer["versions"] if answer is not None else None
    extra = "cuda" if cuda else "cpu"
    yield from _guarded("versions", lambda: versions.check_versions(extra, theirs))
    yield from _software(options, answer, cuda=cuda)
    yield from _guarded("machine", node_check.check_memory)
    yield from _guarded("open files", node_check.check_open_files)
    shared, ports = options.weights_directory, options.ports
    yield from _guarded("shared memory", lambda: node_check.check_shared_memory(shared, cuda=cuda))
    yield from _guarded("loopback", node_check.check_loopback)
    yield from _guarded("ports", lambda: [node_check.check_port(port) for port in ports])
    if not options.quick:
        yield from _guarded("all-reduce", lambda: exchange.check_all_reduce(cuda=cuda))
    yield from _guarded("weight transfer", lambda: exchange.check_weight_transfer(shared))


def _software(options: Options, answer: dict[str, Any] | None, *, cuda: bool) -> Iterator[Result]:
    if not options.quick:
        yield from _guarded(
            "Transformer Engine", lambda: devices.check_transformer_engine(cuda=cuda)
        )
    yield from _guarded("compiled kernels", lambda: devices.check_kernels(cuda=cuda))
    if answer is not None:
        found = answer
        yield from _guarded("vLLM", lambda: generator_check.check_features(found))
    fixes = device_probe._said(device_probe.upstream_fixes)
    ours = {"python": sys.executable, "upstream_fixes": fixes}
    yield from _guarded(
        "upstream fixes", lambda: generator_check.check_upstream_fixes(ours, answer)
    )
    yield from _guarded(
        "NCCL",
        lambda: generator_check.check_nccl(
            device_probe._said(device_probe.nccl) if cuda else {},
            answer["nccl"] if answer else None,
            cuda=cuda,
        ),
    )


def _guarded(name: str, check: Callable[[], Result | list[Result]]) -> list[Result]:
    # A check that breaks is a finding, and the others still count.
    try:
        found = check()
    except Exception as e:  # noqa: BLE001
        return [fail(name, f"{type(e).__name__}: {e}", "see the message; docs/install.md")]
    return [found] if isinstance(found, Result) else found
