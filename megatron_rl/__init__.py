"""Reinforcement learning of large language models at scale on Megatron-Core."""

__version__ = "0.1.0"
