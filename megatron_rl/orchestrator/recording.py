"""Rows of rollout files, from the dispatch of a completion to its batch or evaluation."""

import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from megatron_rl import messages as m
from megatron_rl.config import RunConfig
from megatron_rl.data import Prompt
from megatron_rl.metrics.metrics_file import Row
from megatron_rl.metrics.rollouts import MAX_PENDING, Decode, RolloutWriter
from megatron_rl.orchestrator.batching import BuiltBatch, dropped_because
from megatron_rl.orchestrator.groups import Group
from megatron_rl.rewards import Outcome, Verdict


class Recorder:
    """Notes times and engine of completions, and gives rows to a writer, with `decode`."""

    def __init__(
        self, config: RunConfig | None = None, decode: Decode | None = None, step: int | None = None
    ) -> None:
        self._config, self._writer = config or RunConfig(), None
        if decode is not None:
            folder, metrics = self._config.output_dir / "rollouts", self._config.metrics
            writer = RolloutWriter(folder, metrics.rollouts_gib * 2**30, decode, step)
            self._writer = writer if metrics.rollouts_every_steps else None
        self._decode, self._samples, self._sampled = decode, list[Row](), -1
        self._notes: dict[tuple[int, int, int], Row] = defaultdict(dict)
        self._rows: list[Row] = []  # of a step, with the batches skipped for it, until it is done

    def behind(self, files: int = MAX_PENDING) -> bool:
        """Return True while the disk is so many files behind; raise the error of a file."""
        return self._writer is not None and self._writer.check() >= files

    def sent(self, request: m.Generate) -> None:
        """Note the dispatch of completions."""
        for index in request.indices if self._writer else ():
            self._notes[request.evaluation, request.group, index] = {"sent": time.monotonic()}

    def arrived(self, engine: str, sample: m.Sample) -> None:
        """Note the arrival of a completion."""
        if self._writer is not None:
            notes, now = self._notes[_key(sample)], time.monotonic()
            notes |= {"engine": engine, "arrived": now, "unix_seconds": time.time()}
            notes["seconds_to_arrive"] = now - notes["sent"]

    def verified(self, sample: m.Sample) -> None:
        """Note the time of the verdict on a completion."""
        if "arrived" in (notes := self._notes.get(_key(sample), {})):
            notes["seconds_to_verify"] = time.monotonic() - notes["arrived"]

    def batch(
        self, step: int, groups: list[Group], built: BuiltBatch, prompts: Sequence[Prompt]
    ) -> None:
        """Keep the rows of the batch of a step, or of one that is skipped for it."""
        every, rows = self._config.metrics.samples_every_steps, list[Row]()
        due = self._decode and every and step % every == 0 and step != self._sampled
        for group in groups if self._writer or due else ():
            for sample in group.ordered:
                because = dropped_because(group, sample, built, self._config.algorithm)
                advantages, weight = built.trained.get((group.index, sample.index), ((), None))
                prompt, verdict = prompts[group.prompt_id], group.verdicts[sample.index]
                row = self._row(prompt, sample, verdict, step)
                row |= {"kind": "train", "set": "", "reward": group.reward(sample)}
                row |= {"advantage": next(iter(advantages), None), "loss_weight": weight}
                row["turn_advantages"] = m.float_bytes(advantages) if len(advantages) > 1 else None
                rows.append(row | {"trained": not because, "dropped_because": because})
            for index in range(group.size):
                self._notes.pop((-1, group.index, index), None)
        if self._decode and due:
            self._samples, self._sampled = right_and_wrong(rows), step
            for row in self._samples:
                row["completion"] = self._decode(m.ints(row["token_ids"]).tolist())
        self._rows += rows if self._writer else []

    def take_samples(self) -> list[Row]:
        """Return the completions to show of the last batch, once; mostly there are none."""
        rows, self._samples = self._samples, []
        return rows

    def trained(self, done: m.StepDone) -> None:
        """Write the file of a step, with the trainer's results for its tokens, if it has them."""
        start, ratios, entropies = 0, m.floats(done.ratios), m.floats(done.entropies)
        for row in (row for row in self._rows if row["trained"] and done.ratios):
            # The trainer has none for the tokens of prompts.
            origins = np.repeat(*np.array(row["origins"]).T)
            held = origins != m.ORIGINS.index("prompt")
            own = slice(start, start := start + int(held.sum()))
            ratio, entropy = (np.full(len(origins), np.nan, "<f4") for _ in range(2))
            ratio[held], entropy[held] = ratios[own], entropies[own]
            ratio[origins != m.ORIGINS.index("sampled")] = np.nan
            row |= {"ratios": m.float_bytes(ratio), "entropies": m.float_bytes(entropy)}
        assert start == len(ratios), f"step {done.step}: ratios of other tokens than its file's"
        self._flush()

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        if rows and self._config.metrics.records(rows[0]["step"]):
            self.write("step", rows[0]["step"], rows)

    def evaluated(
        self, rows: list[Row], name: str, prompt: Prompt, sample: m.Sample, verdict: Verdict
    ) -> None:
        """Add a completion to the rows of an evaluation."""
        if self._writer is not None:
            row = self._row(prompt, sample, verdict, sample.evaluation)
            row |= {"kind": "eval", "set": name, "trained": False, "dropped_because": ""}
            rows.append(row | {"reward": self._config.verifier.values.of(verdict)})
            self._notes.pop(_key(sample), None)

    def write(self, kind: str, step: int, rows: list[Row]) -> None:
        """Write a step or an evaluation."""
        if self._writer is not None:
            self._writer.write(kind, step, rows)

    def close(self) -> None:
        """Write what is left, and wait until all files are complete."""
        if self._writer is not None:
            self._flush()
            self._writer.close()

    def _row(self, prompt: Prompt, sample: m.Sample, verdict: Verdict, step: int) -> Row:
        return {
            "step": step, "task": prompt.task, "prompt_id": prompt.id, "prompt": prompt.text,
            "prompt_token_ids": m.int_bytes(prompt.token_ids), "group": sample.group,
            "index": sample.index, "token_ids": sample.token_ids, "logprobs": sample.logprobs,
            "versions": [(span.version, span.end - span.start) for span in sample.spans],
            "origins": [(m.ORIGINS.index(s.kind), s.end - s.start) for s in sample.segments],
            "finish_reason": sample.finish_reason, "verdict": verdict.outcome.value,
            "verdict_reason": verdict.reason,
            "lag_max": max((step - span.version for span in sample.spans), default=0),
            **self._notes.get(_key(sample), {}),
        }  # fmt: skip


def right_and_wrong(rows: Sequence[Row]) -> list[Row]:
    """Return a right and a wrong completion, of one prompt if there is one with both.

    If all are right, or all wrong, it is one; a verifier's time-out is neither.
    """
    firsts: tuple[dict[int, Row], dict[int, Row]] = ({}, {})  # by group: right, wrong
    for row in rows:
        if row["verdict"] != Outcome.TIMED_OUT:
            firsts[row["verdict"] != Outcome.CORRECT].setdefault(row["group"], row)
    both = next((group for group in firsts[0] if group in firsts[1]), -1)
    return [of.get(both, next(iter(of.values()))) for of in firsts if of]


def _key(sample: m.Sample) -> tuple[int, int, int]:
    return sample.evaluation, sample.group, sample.index
