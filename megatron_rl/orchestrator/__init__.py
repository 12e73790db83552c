"""The orchestrator: dispatch, staleness, verification, batches, evaluation, metrics, state.

One asyncio process on the node of trainer rank 0. It talks ZeroMQ to the trainer and the generators
and imports neither torch nor Megatron nor vLLM.
"""


class RunError(RuntimeError):
    """The run cannot continue; the message names the role and the remedy."""


class TrainerGone(RuntimeError):
    """The trainer's ranks are gone or must be restarted, with another orchestrator."""
