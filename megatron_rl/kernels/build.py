"""Compiles `csrc` into one shared library under torch's stable ABI.

g++ makes the CPU twin; where nvcc is found, the CUDA code goes into the same file with the CUDA
runtime linked statically, so that the file loads with and without a GPU. It needs libtorch symbols
of torch 2.10 and later only, and no Python. `python -m megatron_rl.kernels.build` builds it.

    name: megatron_rl_kernels-<hash of csrc>-<cpu|cuda>.so   (.ptxas beside it: nvcc's report)
    place: beside this file (made by setup.py, or by `... --install`), else the user's cache
           directory (built on first use)
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).with_name("csrc")
INSTALLED = Path(__file__).parent
"""Where an installation puts the library."""
TORCH_TARGET = "0x020a000000000000"
"""Oldest libtorch that the file loads in (2.10)."""
CUDA_ARCHITECTURES = ("80", "90a", "100")
"""Real architectures; the last one's PTX serves newer devices."""
_WARNINGS = ("-Wall", "-Wextra", "-Werror")
_COMMON = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden")
_X86 = (
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16"),
    *("-mamx-tile", "-mamx-bf16"),
    # g++ 12 takes its own _mm512_undefined_* for uninitialised variables.
    *("-Wno-maybe-uninitialized", "-Wno-uninitialized"),
)


class BuildError(RuntimeError):
    """The library can't be built here; the message names the missing tool or the failed command."""


def source_hash() -> str:
    """16 hexadecimal digits over the names and bytes of `csrc`."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def library_name(cuda: bool) -> str:
    """File name of the library of these sources."""
    return f"megatron_rl_kernels-{source_hash()}-{'cuda' if cuda else 'cpu'}.so"


def cache_directory() -> Path:
    """Where a library built on first use is kept (`MEGATRON_RL_CACHE` overrides it)."""
    if "MEGATRON_RL_CACHE" in os.environ:
        return Path(os.environ["MEGATRON_RL_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megatron_rl"


def find_nvcc() -> str | None:
    """Path of nvcc: `$CUDA_HOME/bin`, then PATH."""
    home = os.environ.get("CUDA_HOME")
    if home and (found := shutil.which("nvcc", path=str(Path(home) / "bin"))):
        return found
    return shutil.which("nvcc")


def _compiler() -> str:
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name)
    if found is None:
        raise BuildError(f"no C++ compiler: {name} is not on PATH (set CXX, or install g++)")
    return found


def _torch_directory() -> Path:
    # Not imported: headers and libraries are all that a build needs.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed: its headers are needed")
    root = Path(spec.origin).parent
    if not (root / "include/torch/csrc/stable/library.h").is_file():
        raise BuildError("this torch has no stable-ABI headers: 2.10 or later is needed")
    return root


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stderr}")
    return done.stdout + done.stderr


def _architectures(nvcc: str) -> list[str]:
    known = set(re.findall(r"compute_(\w+)", _run([nvcc, "--list-gpu-arch"])))
    return [a for a in CUDA_ARCHITECTURES if a.rstrip("a") in known]


def _cuda_flags(architectures: Sequence[str]) -> list[str]:
    flags = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    newest = architectures[-1].rstrip("a")
    return [*flags, f"-gencode=arch=compute_{newest},code=compute_{newest}"]


def _compile_cuda(nvcc: str, architectures: Sequence[str], out: Path) -> str:
    """Compiles the CUDA source without warnings; returns ptxas's report."""
    host = ",".join(("-fPIC", "-fvisibility=hidden", *_WARNINGS))
    return _run(
        [
            *(nvcc, "-std=c++17", "-O3", "-cudart=static", "-Werror=all-warnings", "--threads=0"),
            *("-Xptxas=-v", f"-Xcompiler={host}", *_cuda_flags(architectures)),
            *("-c", str(SOURCES / "rows_cuda.cu"), "-o", str(out)),
        ]
    )


def build(out: Path, *, cuda: bool) -> Path:
    """Builds the library into the file `out`, which appears whole or not at all.

    Args:
        out: file to make.
        cuda: put the CUDA kernels in; needs nvcc. Architectures that it doesn't know are left out.

    Raises:
        BuildError: no compiler, no torch headers, or a compiler error (with its text).
    """
    compiler, torch_root, nvcc = _compiler(), _torch_directory(), find_nvcc()
    if cuda and nvcc is None:
        raise BuildError("no CUDA compiler: nvcc is not on PATH nor in CUDA_HOME")
    x86 = platform.machine() in ("x86_64", "AMD64")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".kernels-", dir=out.parent) as name:
        work = Path(name)
        objects: list[Path] = []

        def compile_cpp(source: str, *flags: str) -> None:
            objects.append(work / f"{source}.o")
            defines = [f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]
            defines += ["-DMRL_X86_GEMM"] if x86 else []
            defines += ["-DMRL_CUDA"] if cuda else []
            include = ("-isystem", str(torch_root / "include"))
            _run(
                [
                    *(compiler, *_COMMON, *_WARNINGS, *flags, *defines, *include),
                    *("-c", str(SOURCES / source), "-o", str(objects[-1])),
                ]
            )

        compile_cpp("library.cpp")
        compile_cpp("rows_cpu.cpp")
        compile_cpp("cpu_features.cpp")
        if x86:
            compile_cpp("gemm_bf16.cpp", *_X86)
        linker = [compiler]
        if cuda:
            assert nvcc is not None
            compile_cpp("library_cuda.cpp")
            objects.append(work / "rows_cuda.o")
            report = _compile_cuda(nvcc, _architectures(nvcc), objects[-1])
            out.with_suffix(".ptxas").write_text(report)
            # nvcc knows where its static runtime lies.
            linker = [nvcc, "-cudart=static"]
        prefix = "-Xlinker=" if cuda else "-Wl,"
        finished = work / out.name
        _run(
            [
                # libtorch must be named as needed although no symbol seems to ask for it: torch is
                # loaded privately, and through it the CUDA half resolves the current stream.
                *(*linker, "-shared", *map(str, objects), "-o", str(finished)),
                *(f"-L{torch_root / 'lib'}", f"{prefix}--no-as-needed", "-ltorch", "-ltorch_cpu"),
                *(f"{prefix}--as-needed", f"{prefix}--exclude-libs,ALL"),
            ]
        )
        finished.replace(out)
    return out


def wants_cuda() -> bool:
    """Whether an installation gets the CUDA code: `MEGATRON_RL_BUILD_CUDA` (0, 1), else by nvcc.

    Raises:
        BuildError: another value.
    """
    chosen = os.environ.get("MEGATRON_RL_BUILD_CUDA", "")
    if chosen not in ("", "0", "1"):
        raise BuildError(
            f"MEGATRON_RL_BUILD_CUDA is {chosen!r}: 0 leaves the CUDA code out, 1 asks for it"
        )
    return chosen == "1" or (chosen == "" and find_nvcc() is not None)


def build_for_install(directory: Path) -> Path | None:
    """Builds the library into a package directory where the tools are there, else returns None.

    For setup.py: `directory` is `<build_lib>/megatron_rl/kernels`, or the source folder for an
    editable install. Libraries of other sources there are removed.

    Raises:
        BuildError: `MEGATRON_RL_BUILD_CUDA` asks for the CUDA code, and it can't be built.
    """
    cuda = wants_cuda()
    target = directory / library_name(cuda)
    if not target.is_file():
        try:
            build(target, cuda=cuda)
        except BuildError as error:
            if os.environ.get("MEGATRON_RL_BUILD_CUDA") == "1":
                raise
            print(f"megatron_rl: kernels not built now, but at first use: {error}")
            return None
    for other in directory.glob("megatron_rl_kernels-*"):
        if other.stem != target.stem:
            other.unlink()
    return target


def find_or_build(*, cuda: bool) -> Path:
    """The library of these sources: installed, cached, or built now under a file lock.

    Args:
        cuda: the CUDA code must be in it; without, a library with or without it will do.

    Raises:
        BuildError: it is not there and can't be built.
    """
    names = [library_name(True)] if cuda else [library_name(False), library_name(True)]
    directories = [INSTALLED, cache_directory()]
    for path in [d / n for d in directories for n in names]:
        if path.is_file():
            return path
    target = directories[1] / names[0]
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one rank builds, the others wait and find the file
        if not target.is_file():
            build(target, cuda=cuda)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="leave the CUDA code out")
    parser.add_argument("--out", type=Path, help="directory (default: the cache)")
    parser.add_argument("--install", action="store_true", help="beside the package, as setup.py")
    arguments = parser.parse_args()
    if arguments.install:
        print(build_for_install(INSTALLED) or "")
        return
    cuda = not arguments.cpu and find_nvcc() is not None
    directory = arguments.out or cache_directory()
    print(build(directory / library_name(cuda), cuda=cuda))


if __name__ == "__main__":
    main()
