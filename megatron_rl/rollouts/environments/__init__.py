"""Environments: what answers the policy's turns and rewards them, in processes of their own."""

from megatron_rl.rollouts.environments.protocol import Environment, Opening, Step

__all__ = ["Environment", "Opening", "Step"]
