"""Compile `csrc` into one shared library under torch's stable ABI.

g++ compiles the CPU code; where nvcc is found, the CUDA code goes into the same file with the CUDA
runtime linked statically, so that the file loads with and without a GPU. It needs symbols of
libtorch 2.10 and later only, and no Python. It lies next to this file (setup.py and `python -m
megatron_rl.kernels.build --install`), else in the user's cache directory (built on first use).
"""

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
INSTALLED = Path(__file__).parent  # folder of an installed library
TORCH_TARGET = "0x020a000000000000"  # oldest libtorch that the library loads in (2.10)
CUDA_ARCHITECTURES = ("80", "90a", "100")
"""Real architectures; the PTX of the last one serves newer devices."""
_WARNINGS = ("-Wall", "-Wextra", "-Werror")
_COMMON = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden")
# g++ 12 takes its own _mm512_undefined_* for uninitialized variables.
_QUIET = ("-Wno-maybe-uninitialized", "-Wno-uninitialized")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16")
_X86 = (*_AVX512, "-mamx-tile", "-mamx-bf16", *_QUIET)


class BuildError(RuntimeError):
    """The library can't be built; the message names the missing tool or the failed command."""


def library_name(cuda: bool) -> str:
    """Return the file name of the library, with a hash over the names and bytes of `csrc`."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"megatron_rl_kernels-{digest.hexdigest()[:16]}-{'cuda' if cuda else 'cpu'}.so"


def cache_directory() -> Path:
    """Return the folder of libraries built on first use (`MEGATRON_RL_CACHE` overrides it)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MEGATRON_RL_CACHE") or Path(base, "megatron_rl"))


def find_nvcc() -> str | None:
    """Return the path of nvcc, from `$CUDA_HOME/bin` or PATH."""
    home = os.environ.get("CUDA_HOME")
    return (home and shutil.which("nvcc", path=str(Path(home) / "bin"))) or shutil.which("nvcc")


def _compiler() -> str:
    name = os.environ.get("CXX", "g++")
    if (path := shutil.which(name)) is None:
        raise BuildError(f"no C++ compiler: {name} is not on PATH (set CXX, or install g++)")
    return path


def _torch_directory() -> Path:
    # Not imported: a build needs the headers and libraries only.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed: its headers are needed")
    root = Path(spec.origin).parent
    if not (root / "include/torch/csrc/stable/library.h").is_file():
        raise BuildError("this torch has no stable-ABI headers: 2.10 or later is needed")
    return root


def _run(command: Sequence[str | Path]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        text = " ".join(map(str, command))
        raise BuildError(f"{text} failed with {done.returncode}:\n{done.stderr}")
    return done.stdout + done.stderr


def _compile_cuda(nvcc: str, out: Path) -> str:
    """Compile the CUDA source without warnings and return ptxas's report."""
    known = set(re.findall(r"compute_(\w+)", _run([nvcc, "--list-gpu-arch"])))
    architectures = [a for a in CUDA_ARCHITECTURES if a.rstrip("a") in known]
    newest = architectures[-1].rstrip("a")
    host = ",".join(("-fPIC", "-fvisibility=hidden", *_WARNINGS))
    command = [nvcc, "-std=c++17", "-O3", "-cudart=static", "-Werror=all-warnings", "--threads=0"]
    command += ["-Xptxas=-v", f"-Xcompiler={host}"]
    command += [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    command += [f"-gencode=arch=compute_{newest},code=compute_{newest}"]
    return _run([*command, "-c", SOURCES / "rows_cuda.cu", "-o", out])


def build(out: Path, *, cuda: bool) -> Path:
    """Build the library, with the CUDA kernels or without, and put it at `out` when it is done.

    Raises:
        BuildError: no compiler, no torch headers, or a compiler error (with its text).
    """
    compiler, torch_root, nvcc = _compiler(), _torch_directory(), find_nvcc()
    if cuda and nvcc is None:
        raise BuildError("no CUDA compiler: nvcc is not on PATH nor in CUDA_HOME")
    x86 = platform.machine() in ("x86_64", "AMD64")
    flags = [*_COMMON, *_WARNINGS, f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]
    flags += ["-DMRL_X86_GEMM"] if x86 else []
    flags += ["-DMRL_CUDA"] if cuda else []
    flags += ["-isystem", str(torch_root / "include")]
    sources = ["library.cpp", "rows_cpu.cpp", "cpu_features.cpp"]
    sources += ["gemm_bf16.cpp"] if x86 else []
    sources += ["library_cuda.cpp"] if cuda else []
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".kernels-", dir=out.parent) as name:
        work = Path(name)
        for source in sources:
            own = _X86 if source == "gemm_bf16.cpp" else ()
            _run([compiler, *flags, *own, "-c", SOURCES / source, "-o", work / f"{source}.o"])
        objects, linker, prefix = [work / f"{s}.o" for s in sources], [compiler], "-Wl,"
        if cuda:
            assert nvcc is not None
            objects.append(work / "rows_cuda.o")
            out.with_suffix(".ptxas").write_text(_compile_cuda(nvcc, objects[-1]))
            # nvcc knows the path of its static runtime.
            linker, prefix = [nvcc, "-cudart=static"], "-Xlinker="
        # libtorch is a needed library although no symbol refers to it: torch is loaded privately,
        # and the CUDA half resolves the current stream through libtorch.
        libraries = [f"{prefix}--no-as-needed", "-ltorch", "-ltorch_cpu", f"{prefix}--as-needed"]
        finished = work / out.name
        output: list[str | Path] = ["-o", finished, f"-L{torch_root / 'lib'}"]
        _run([*linker, "-shared", *objects, *output, *libraries, f"{prefix}--exclude-libs,ALL"])
        finished.replace(out)
    return out


def wants_cuda() -> bool:
    """Return True if an installation gets the CUDA code: `MEGATRON_RL_BUILD_CUDA`, else by nvcc.

    Raises:
        BuildError: the variable is neither 0 nor 1.
    """
    chosen = os.environ.get("MEGATRON_RL_BUILD_CUDA", "")
    if chosen not in ("", "0", "1"):
        raise BuildError(
            f"MEGATRON_RL_BUILD_CUDA is {chosen!r}: 0 leaves the CUDA code out, 1 requires it"
        )
    return chosen == "1" or (chosen == "" and find_nvcc() is not None)


def build_for_install(directory: Path) -> Path | None:
    """Build the library into a package directory and remove those of other sources there.

    A library of the same sources next to this file is copied. Returns None where the tools are
    missing, unless `MEGATRON_RL_BUILD_CUDA` requires the CUDA code.

    Raises:
        BuildError: `MEGATRON_RL_BUILD_CUDA` requires the CUDA code, and it can't be built.
    """
    cuda = wants_cuda()
    target = directory / library_name(cuda)
    if not target.is_file() and (INSTALLED / target.name).is_file():
        for built in INSTALLED.glob(f"{target.stem}.*"):
            shutil.copy2(built, directory)
    elif not target.is_file():
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
    """Return the library of these sources: installed, cached, or built now under a file lock.

    `cuda` requires the CUDA code; else a library with or without it serves.

    Raises:
        BuildError: there is none and it can't be built.
    """
    names = [library_name(True)] if cuda else [library_name(False), library_name(True)]
    for path in [d / n for d in (INSTALLED, cache_directory()) for n in names]:
        if path.is_file():
            return path
    target = cache_directory() / names[0]
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one rank builds; the others wait for the file
        if not target.is_file():
            build(target, cuda=cuda)
    return target


def main() -> None:
    """Build the library from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--install", action="store_true", help="into the package, not the cache")
    if parser.parse_args().install:
        print(build_for_install(INSTALLED) or "")
    else:
        print(build(cache_directory() / library_name(cuda := wants_cuda()), cuda=cuda))


if __name__ == "__main__":
    main()
