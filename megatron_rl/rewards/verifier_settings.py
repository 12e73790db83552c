"""Settings of verifiers and sandbox: the configuration's section `verifier`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.rewards.base import Verdict
from megatron_rl.section import Section


class RewardValues(Section):
    """Reward of each verdict; null leaves the completion out of the batch, like a truncated one."""

    correct: float | None = 1.0
    """Reward of a right answer."""
    wrong: float | None = -1.0
    """Reward of a wrong answer."""
    no_answer: float | None = None
    """Reward without an answer: no box, thinking not ended, no code block."""
    unparsable: float | None = None
    """Reward of an answer that cannot be read."""
    timed_out: float | None = None
    """Reward of an answer whose comparison went over a limit (a slow program is wrong)."""

    def of(self, verdict: Verdict) -> float | None:
        """Reward of a verdict, its own if it has one; None if it is no reward."""
        if verdict.reward is not None:
            return verdict.reward
        value: float | None = getattr(self, verdict.verdict.value)
        return value


class MathSettings(Section):
    """The maths verifier."""

    boxed: bool = True
    """Only a `\\boxed{...}` is an answer; else a completion without a box is one as a whole."""
    ended_thinking: bool = True
    """A completion without the end-of-thinking marker has no answer."""
    stock_cpu_seconds: PositiveFloat = 0.5
    """CPU time of math-verify, which reads sums, integrals and limits; over it: `timed_out`."""


class SandboxSettings(Section):
    """Where and under which limits a model's programs run; limits are of one test or say so."""

    isolation: Literal["strong", "weak", "remote"] = "strong"
    """`strong`: own namespaces (bubblewrap), refused where the host has none. `weak`: rlimits and
    seccomp only, the program can read the host's files. `remote`: a sandbox service."""
    cpu_seconds: PositiveFloat = 6.0
    """CPU time of one test."""
    wall_seconds: PositiveFloat = 10.0
    """Time of one test, waiting included."""
    total_seconds: PositiveFloat = 60.0
    """Time of all tests of one program; what is left then has failed."""
    memory_mib: PositiveInt = 1024
    """Memory of all processes of the program together (strong), or of one (weak)."""
    processes: PositiveInt = 16
    """Processes and threads at once (strong); weak isolation lets a program start no process."""
    file_mib: PositiveInt = 16
    """Largest file, and size of the scratch file system (strong)."""
    output_kib: PositiveInt = 4096
    """Longest standard output of one test; a longer one fails the test."""
    max_tests: NonNegativeInt = 0
    """Tests that are run of each problem, the longest inputs first; 0 runs all of them."""
    read_only_paths: tuple[str, ...] = ()
    """More folders of the host that programs may read (strong)."""
    remote_url: str | None = None
    """Address of the sandbox service (`megatron-rl rewards serve`)."""
    remote_retries: NonNegativeInt = 5
    """Tries after the first one, with growing pauses; then the run stops with `VerifierDown`."""


class VerifierSettings(Section):
    """The verifier pool: worker processes, queue, limits of one verdict."""

    workers: PositiveInt = 2
    """Worker processes."""
    queue_size: PositiveInt = 1024
    """Completions waiting for a worker; when it is full, `verify` waits (back-pressure)."""
    cpu_seconds: PositiveFloat = 2.0
    """CPU time of one verdict; then the worker is killed and the verdict is `timed_out`."""
    wall_seconds: PositiveFloat = 30.0
    """Time of one verdict of which the machine may give others a part; sandboxed code has its own
    `sandbox.total_seconds` beside it."""
    memory_mib: PositiveInt = 1024
    """Memory that a worker may allocate above what it starts with."""
    verdicts_per_worker: PositiveInt = 20_000
    """Verdicts after which a worker is replaced (leaks)."""
    growth_mib: PositiveInt = 512
    """Growth of a worker's resident memory after which it is replaced."""
    start_seconds: PositiveFloat = 120.0
    """Wait for a worker to start."""
    max_deaths: PositiveInt = 12
    """Deaths of workers in a row, with no verdict between, after which the verifier is down."""
    custom: str | None = None
    """Import path `package.module:function` of a reward function, for task kind `custom`."""
    values: RewardValues = RewardValues()
    math: MathSettings = MathSettings()
    sandbox: SandboxSettings = SandboxSettings()

    think_end: Annotated[str, Field(min_length=1)] = "</think>"
    """Marker that closes thinking; only what follows it is an answer."""
