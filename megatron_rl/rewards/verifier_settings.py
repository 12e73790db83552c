"""Settings of verifiers and sandbox: the configuration section `verifier`."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from megatron_rl.rewards.base import Verdict
from megatron_rl.section import Section


class RewardValues(Section):
    """Reward of each outcome; null leaves the completion out of the batch, like a truncated one.

    ScaleRL's by default: +1 for correct traces and -1 for all others (A.3 of arXiv 2510.13786).
    """

    correct: float | None = 1.0
    """Reward of a correct answer."""
    wrong: float | None = -1.0
    """Reward of a wrong answer."""
    no_answer: float | None = -1.0
    """Reward without an answer: no box, thinking not ended, no code block."""
    unparsable: float | None = -1.0
    """Reward of an answer that cannot be parsed."""
    timed_out: float | None = None
    """Reward of an answer that the verifier failed on: its comparison exceeded a limit or raised an
    unexpected exception (a slow program is wrong)."""

    def of(self, verdict: Verdict) -> float | None:
        """Return the reward of a verdict, or None to leave the completion out of the batch."""
        if verdict.reward is not None:
            return verdict.reward
        value: float | None = getattr(self, verdict.outcome.value)
        return value


class MathSettings(Section):
    """Settings of the math verifier."""

    boxed: bool = True
    """Accept only a `\\boxed{...}`; if false, a completion without a box is itself the answer."""
    ended_thinking: bool = True
    """Require the end-of-thinking marker: a completion without it has no answer."""
    stock_cpu_seconds: PositiveFloat = 0.5
    """CPU time of math-verify, which handles sums, integrals and limits; beyond it: `timed_out`."""


class SandboxSettings(Section):
    """Isolation and limits of a model's programs; limits apply to one test unless stated."""

    isolation: Literal["strong", "weak"] = "strong"
    """`strong`: separate namespaces (bubblewrap), an error if the host has none. `weak`: rlimits
    and seccomp only, refused as root: the program can read the files of the run's user."""
    cpu_seconds: PositiveFloat = 6.0
    """CPU time of one test."""
    wall_seconds: PositiveFloat = 10.0
    """Wall-clock time of one test."""
    total_seconds: PositiveFloat = 60.0
    """Wall-clock time of all tests of one program; the tests that remain have failed."""
    memory_mib: PositiveInt = 1024
    """Memory of all processes of the program together (strong), or of one (weak)."""
    processes: PositiveInt = 16
    """Processes and threads at once (strong); weak isolation lets a program start no process."""
    file_mib: PositiveInt = 16
    """Largest file, and size of the scratch file system (strong)."""
    output_kib: PositiveInt = 4096
    """Longest standard output of one test, or four times the longest expected one if that is more;
    a longer one fails the test."""
    max_tests: NonNegativeInt = 0
    """Tests to run per problem, the longest inputs first; 0 runs all of them."""
    read_only_paths: tuple[str, ...] = ()
    """Additional folders of the host that programs may read (strong)."""
    modules: tuple[str, ...] = (
        *("numpy", "scipy", "sympy", "mpmath", "networkx", "sortedcontainers"),
        *("pandas", "dateutil", "six"),
    )
    """Third-party modules that programs may import, as far as they are installed for the run
    (strong), with those that they need; a program that imports another one fails by its name."""


class VerifierSettings(Section):
    """Settings of the verifier pool: worker processes, queue, limits of one verdict."""

    workers: PositiveInt = 2
    """Worker processes."""
    queue_size: PositiveInt = 1024
    """Completions that may wait for a worker; beyond it `verify` waits (back-pressure)."""
    cpu_seconds: PositiveFloat = 2.0
    """CPU time of one verdict; beyond it the worker is killed and the outcome is `timed_out`."""
    wall_seconds: PositiveFloat = 30.0
    """Wall-clock time of one verdict; code gets `sandbox.total_seconds` in addition."""
    memory_mib: PositiveInt = 1024
    """Memory that a worker may allocate in addition to what it starts with."""
    verdicts_per_worker: PositiveInt = 20_000
    """Verdicts after which a worker is replaced (against leaks)."""
    growth_mib: PositiveInt = 512
    """Growth of a worker's resident memory after which it is replaced."""
    start_seconds: PositiveFloat = 120.0
    """Time that a worker may take to start."""
    max_deaths: PositiveInt = 12
    """Deaths of workers in a row, without a verdict between, after which the verifier is down."""
    custom: str | None = None
    """Import path `package.module:function` of a reward function, for task kind `custom`."""
    values: RewardValues = RewardValues()
    math: MathSettings = MathSettings()
    sandbox: SandboxSettings = SandboxSettings()

    think_end: Annotated[str, Field(min_length=1)] = "</think>"
    """Marker that ends thinking; the answer is searched only after it."""
