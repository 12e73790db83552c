"""Print ptxas's report on the CUDA kernels as a table: `python -m benchmarks.kernels_registers`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_rl.kernels import build


@dataclass(frozen=True, slots=True)
class Registers:
    """The report on one kernel for one architecture."""

    architecture: str
    kernel: str
    registers: int
    spill_bytes: int
    stack_bytes: int


def registers() -> list[Registers]:
    """Return the registers, spills and stack of every kernel on every architecture.

    Raises:
        BuildError: no nvcc, or the source does not compile without warnings.
    """
    path = build.find_or_build(cuda=True)
    if not path.with_suffix(".ptxas").is_file():
        build.build(path, cuda=True)
    text = path.with_suffix(".ptxas").read_text()
    pattern = re.compile(
        r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes stack frame, "
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        re.DOTALL,
    )
    reports = []
    for mangled, arch, stack, stores, loads, used in pattern.findall(text):
        kernel = re.search(r"\d+(\w+?_kernel)(?:ILb([01])E)?", mangled)
        assert kernel is not None, mangled
        name = re.sub(r"^.*?([a-z]+_kernel)$", r"\1", kernel[1])
        suffix = {"0": " fp32", "1": " bf16", None: ""}[kernel[2]]
        spills = int(stores) + int(loads)
        reports.append(Registers(arch, name + suffix, int(used), spills, int(stack)))
    return reports


def main() -> None:
    """Print the table."""
    print("| architecture | kernel | registers | spill bytes | stack bytes |")
    print("|---|---|--:|--:|--:|")
    for r in registers():
        row = (r.architecture, r.kernel, r.registers, r.spill_bytes, r.stack_bytes)
        print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
