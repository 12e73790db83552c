"""Policy losses, one file each: terms of single tokens, never means.

All normalization is in the loss weights, so a loss does not depend on the split of the tokens over
micro-batches and ranks. To add a loss, write one file with a `Loss` and add its name here.
"""

from typing import Annotated

from pydantic import Field

from megatron_rl.algorithm.losses.cispo import Cispo
from megatron_rl.algorithm.losses.dispo import Dispo
from megatron_rl.algorithm.losses.dppo import Dppo
from megatron_rl.algorithm.losses.gspo import Gspo
from megatron_rl.algorithm.losses.mini_rl import MiniRl
from megatron_rl.algorithm.losses.ppo import PpoClip
from megatron_rl.algorithm.losses.reinforce import Reinforce

LossChoice = Annotated[
    Cispo | Dispo | Dppo | Gspo | MiniRl | PpoClip | Reinforce, Field(discriminator="kind")
]
"""The value of `algorithm.loss`."""
