"""Connection of trainer rank 0 to the orchestrator."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, override

import msgspec
import torch.distributed as dist

from megatron_rl import messages as m
from megatron_rl.config import RunConfig, Timeouts
from megatron_rl.messages import TRAINER
from megatron_rl.orchestrator_connection import OrchestratorConnection
from megatron_rl.weights.store import node_name

if TYPE_CHECKING:
    from megatron_rl.trainer.publisher import Publisher
    from megatron_rl.trainer.shards import ModelShards

POLL_SECONDS = 0.1
CLOSE_SECONDS = 2.0


class OrchestratorGone(RuntimeError):
    """The orchestrator ended or did not answer in time."""


def connect(
    stack: ExitStack,
    config: RunConfig,
    policy: ModelShards,
    store: Any,
    orchestrator: Any,
    stop_requested: Callable[[], bool] = lambda: False,
) -> tuple[TrainerClient | None, Publisher]:
    """Connect this rank to the orchestrator; return the client, on rank 0, and the publisher.

    Rank 0 has the process of the orchestrator, and its address is in torchrun's `store`; other
    ranks have None. `stack` closes what is made.
    """
    from megatron_rl.trainer import publisher, start_comparison

    client = None
    if orchestrator is None:
        stack.callback(show_life(store, dist.get_rank()).close)
    else:
        client = TrainerClient(
            orchestrator.endpoint,
            config.timeouts,
            active_parameters=policy.architecture.active_parameters(),
            max_logprob_error=start_comparison.bound(config),
            alive=orchestrator.ended,
            stop_requested=stop_requested,
        )
        stack.callback(client.close)
    own = publisher.Publisher(config, policy, node_name(), client.announce if client else None)
    stack.callback(own.close)
    if client is not None:
        client.raise_if_failed = own.raise_if_failed
    own.serve_other_nodes(lambda: str(store.get("orchestrator").decode()))
    return client, own


def show_life(store: Any, rank: int) -> OrchestratorConnection:
    """Connect a rank after the first to the orchestrator, to which its silence tells its end."""
    peer = OrchestratorConnection(store.get("orchestrator").decode(), f"{TRAINER}-{rank}")
    peer.send(m.Hello(role="trainer-rank", rank=rank, version=0))
    return peer


class TrainerClient(OrchestratorConnection):
    """Requests batches and reports steps.

    Every wait is bounded by `timeouts`. `max_logprob_error` is the mean difference to the
    generators' log-probs that ends the run, in nats. `alive` returns None while the orchestrator
    runs, else why it ended; `stop_requested` True once the run was interrupted.
    """

    def __init__(
        self,
        endpoint: str,
        timeouts: Timeouts,
        *,
        active_parameters: int,
        max_logprob_error: float,
        alive: Callable[[], str | None],
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._timeouts, self._alive, self._stop_requested = timeouts, alive, stop_requested
        super().__init__(endpoint, TRAINER)
        self._is_silent = False
        self.raise_if_failed: Callable[[], None] = lambda: None
        """Called while it waits; raises what makes the wait futile."""
        self.send(
            m.Hello(
                role=TRAINER, rank=0, version=0, active_parameters=active_parameters,
                max_logprob_error=max_logprob_error,
            )
        )  # fmt: skip

    def next_batch(self, step: int) -> m.Batch:
        """Return the batch of this step, or a stopping batch if the run is interrupted.

        A batch that is skipped because nothing can be learned from it starts the wait again.
        OrchestratorGone: none within `timeouts.batch_seconds`, or a silent orchestrator, or none.
        """
        self.send(m.BatchRequest(step=step))
        batch = self._wait(m.Batch, "batch_seconds", step, interruptible=True)
        return batch or m.Batch(step=step, stop=True)

    def step_done(self, done: m.StepDone, wait_seconds: float) -> None:
        """Report a trained step, with the time that was waited for its batch."""
        self.send(msgspec.structs.replace(done, wait_seconds=wait_seconds))

    def save_state(self, step: int, directory: str) -> None:
        """Return when the orchestrator has written its state into a checkpoint folder.

        Raises:
            OrchestratorGone: not written within `timeouts.startup_seconds`.
        """
        self.send(m.SaveState(step=step, directory=directory))
        self._wait(m.StateSaved, "startup_seconds", step)

    def announce(self, manifest: m.Manifest, seconds: float) -> None:
        """Announce a complete version that took so long; any thread may call this."""
        self.send(m.Published(manifest=manifest, seconds=seconds))

    @override
    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        super().close(seconds)

    def _wait[Answer: m.Message](
        self, kind: type[Answer], timeout: str, step: int, *, interruptible: bool = False
    ) -> Answer | None:
        seconds: float = getattr(self._timeouts, timeout)
        deadline = time.monotonic() + seconds
        while True:
            if (message := self.receive(POLL_SECONDS)) is not None:
                # A batch requested before an interrupt may arrive first. It is not lost: the
                # orchestrator keeps its groups until the step is reported.
                if isinstance(message, kind) and message.step == step:  # type: ignore[attr-defined]
                    return message
                if isinstance(message, m.BatchSkipped):
                    deadline = time.monotonic() + seconds
                continue
            if interruptible and self._stop_requested():
                return None
            self.raise_if_failed()
            self._check_silence()
            if (reason := self._alive()) is not None:
                raise OrchestratorGone(f"the orchestrator ended: {reason}")
            if time.monotonic() > deadline:
                raise OrchestratorGone(
                    f"no {kind.__name__} for step {step} within timeouts.{timeout} = {seconds} s"
                )

    def _check_silence(self) -> None:
        limit, silent = self._timeouts.silence_seconds, time.monotonic() - self.heard_at
        text = f"the orchestrator is silent for {silent:.0f} s (timeouts.silence_seconds)"
        if silent <= limit:
            self._is_silent = False
        elif silent > self._timeouts.hang_seconds:
            raise OrchestratorGone(f"{text}: the trainer's ranks are to be started again")
        elif not self._is_silent:
            self._is_silent = True
            print(f"warning: {text}: its process is stopped", file=sys.stderr, flush=True)
