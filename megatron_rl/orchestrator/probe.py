"""Trainer's log-probs against the generator's, for the same tokens under the same weights."""

from __future__ import annotations

from megatron_rl import messages as m
from megatron_rl.orchestrator.generators import Engines
from megatron_rl.orchestrator.meter import Meter

PROBE_SEQUENCES = 4

Probed = list[tuple[list[int], m.Sample]]
"""(prompt ids, completion) of each probed sequence."""


class Probe:
    """Asks an engine that holds the weights of a step for log-probs of the step's tokens."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._probed: dict[int, Probed] = {}
        self._logprobs: dict[int, list[list[float]]] = {}

    def sent(self, step: int, probed: Probed) -> None:
        """These sequences of the step's batch are probed."""
        self._probed[step] = probed

    def trained(self, done: m.StepDone, engines: Engines) -> tuple[str, m.ScoreRequest] | None:
        """The engine to ask, and for what; None if nothing is probed or no engine fits."""
        probed = self._probed.pop(done.step)
        holders = [e.name for e in engines if e.version == done.step and not e.updating]
        if not (probed and holders):
            return None
        self._logprobs[done.step] = done.probe_logprobs
        request = m.ScoreRequest(
            step=done.step,
            prompts=[prompt for prompt, _ in probed],
            completions=[sample.token_ids for _, sample in probed],
        )
        return holders[0], request

    def scored(self, scores: m.Scores) -> None:
        """An engine's log-probs; those of other weights (an update came between) don't count."""
        trainer = self._logprobs.pop(scores.step)
        if scores.version == scores.step:
            self._meter.probe(trainer, scores.logprobs)
