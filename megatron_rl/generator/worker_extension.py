"""What a generator's engine calls in its workers beyond vLLM's own: one class, named in one place.

The parts have methods of different names, also from those of vLLM's worker.
"""

from __future__ import annotations

from megatron_rl.generator.expert_capture import CapturedRoutes
from megatron_rl.generator.held_weights import HeldWeights
from megatron_rl.generator.weight_transfer import StagedWeights


class WorkerExtension(HeldWeights, StagedWeights, CapturedRoutes):
    """`worker_extension_cls` of a generator."""
