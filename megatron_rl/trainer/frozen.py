"""Log-probs under weights that are not trained: a reference policy, or the old policy of a phase.

One extra copy of this rank's parameters and one extra forward pass per batch; there is no second
module: the frozen weights take the place of the trained ones for the time of the pass.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.trainer.batch import MicroBatch
from megatron_rl.trainer.model import Policy


class FrozenWeights:
    """A copy of a policy's weights, in their number format, on their device.

    Args:
        policy: whose module computes; its weights are the same after each call.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._weights = {name: p.data.clone() for name, p in policy.parameters.items()}

    def take(self) -> None:
        """Freeze the weights that the policy has now."""
        for name, p in self._policy.parameters.items():
            self._weights[name].copy_(p.data)

    def take_huggingface(self, directory: str | Path) -> None:
        """Freeze the weights of a Hugging Face directory of the same architecture.

        Raises:
            ValueError: names or shapes that differ from the architecture's.
        """
        self._swap()
        try:
            self._policy.load_huggingface(directory)
        finally:
            self._swap()

    @torch.no_grad()
    def logprobs(self, batches: list[MicroBatch], tokens: int) -> Tensor:
        """Log-probs of the completion tokens, by flat position [tokens], on the CPU.

        Collective over the ranks of a model; filled on its last pipeline stage, 0 elsewhere.

        Args:
            batches: of this data-parallel rank.
            tokens: flat positions of the whole step.
        """
        self._swap()
        try:
            found = self._policy.forward_backward(batches, None)
        finally:
            self._swap()
        flat = torch.zeros(tokens)
        for batch, (logprobs_T, _) in zip(batches, found, strict=False):
            flat[batch.source_T] = logprobs_T.float().cpu()
        return flat

    def _swap(self) -> None:
        for name, p in self._policy.parameters.items():
            trained = p.data.clone()
            p.data.copy_(self._weights[name])
            self._weights[name].copy_(trained)
