"""The `algorithm` section: all choices of a recipe that are no sizes, and what goes together."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from megatron_rl.algorithm.corrections import CorrectionChoice, NoCorrection
from megatron_rl.algorithm.losses import LossChoice
from megatron_rl.algorithm.losses.cispo import Cispo
from megatron_rl.section import Fraction, Section, with_kind

DEFAULT_KINDS = {"loss": "cispo", "correction": "none"}
"""What is meant where a choice is given by its parameters alone."""


class Algorithm(Section):
    """Loss, corrections, advantages, filters and curriculum (ScaleRL's by default)."""

    loss: LossChoice = Cispo()
    """Policy loss and its parameters; its name alone (`loss: gspo`) takes the defaults."""
    old_policy: Literal["generator", "trainer"] = "generator"
    """The old policy that the ratio of ppo_clip, gspo and mini_rl starts from: the generator's own
    log-probs (ScaleRL), or those that the trainer computes with the weights at the start of the
    phase (`schedule.updates_per_phase`; with one update that is the current policy, ratio 1)."""
    correction: CorrectionChoice = NoCorrection()
    """Importance correction from the generator to that old policy (or, for reinforce, to the
    current one)."""
    routing_replay: Literal["none", "compare", "replay"] = "none"
    """For mixtures of experts: generators return the experts that each token took, and the trainer
    counts where its own routers differ (`compare`), or takes the generator's experts with the
    weights of its own routers (`replay`, R3 of arXiv 2510.11370)."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of KL(policy || reference) in the objective; the reference is the start checkpoint."""
    kl_reset_steps: PositiveInt | None = None
    """Optimizer steps after which the current policy becomes the reference (ProRL); never by
    default."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy in the objective; positive rewards it."""
    aggregation: Literal["prompt", "sample", "token", "constant"] = "prompt"
    """What one loss is the mean over before the mean over the batch; `constant` divides a
    completion's sum by a constant length."""
    constant_length_tokens: PositiveInt | None = None
    """Length that `aggregation: constant` divides by; default: the longest completion."""
    advantage_baseline: Literal["mean", "leave_one_out"] = "mean"
    """What is subtracted from a reward: the group's mean, or the mean of the others in it."""
    advantage_normalization: Literal["batch", "prompt", "none"] = "batch"
    """Which standard deviation divides the centred rewards."""
    advantage_std_over: Literal["trained", "all"] = "trained"
    """Prompts of the batch's standard deviation: those that are trained, or all of the step,
    filtered ones included."""
    zero_variance_filter: bool = True
    """Drop prompts whose completions all have one reward."""
    refill: bool = False
    """Draw further prompts for the dropped ones, until the step has its number of prompts (DAPO's
    dynamic sampling)."""
    refill_max_ratio: float = Field(default=10.0, gt=1.0)
    """Prompts drawn for one step, at most, as a multiple of `schedule.prompts_per_step`."""
    truncated: Literal["drop", "mask", "train"] = "drop"
    """Completions cut at the token budget: left out of loss and baseline, left out of the loss
    alone (over-long filtering), or trained with their verified reward."""
    length_penalty: Literal["none", "right", "all"] = "none"
    """Add clip((length_max - tokens) / length_cache - 1, -1, 0) to the reward of right completions
    (ScaleRL's alternative to interruption), or of all (DAPO's soft over-long punishment)."""
    length_max_tokens: PositiveInt | None = None
    """Length at which the penalty reaches -1; default: the longest completion."""
    length_cache_tokens: PositiveInt | None = None
    """Length over which the penalty grows from 0; default: a fifth of `length_max_tokens`."""
    no_positive_resampling: bool = True
    """Never draw a prompt again, in later epochs, once its pass rate reached the threshold."""
    no_positive_resampling_threshold: Fraction = 0.9
    """Pass rate from which a prompt is not drawn again."""
    no_positive_resampling_statistic: Literal["last", "mean"] = "last"
    """Pass rate of the last visit, or running mean over all visits."""

    @field_validator("loss", "correction", mode="before")
    @classmethod
    def _by_name(cls, value: Any, info: Any) -> Any:
        return with_kind(value, DEFAULT_KINDS[info.field_name])

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        for bad, message in self._contradictions():
            if bad:
                raise ValueError(message)
        return self

    def _contradictions(self) -> list[tuple[bool, str]]:
        kind, against = self.loss.kind, self.loss.against
        corrects, trainer = self.correction.kind != "none", self.old_policy == "trainer"
        return [
            (
                trainer and against != "old",
                f"algorithm.old_policy is 'trainer': algorithm.loss.kind = {kind!r} has no ratio to"
                " an old policy of the trainer; use 'generator'",
            ),
            (
                corrects and against == "generator",
                f"algorithm.correction.kind is {self.correction.kind!r}: algorithm.loss.kind ="
                f" {kind!r} weighs with pi / pi_gen already; use 'none'",
            ),
            (
                corrects and against == "old" and not trainer,
                f"algorithm.correction.kind is {self.correction.kind!r}: with"
                " algorithm.old_policy = 'generator' the ratio starts at the generator and there is"
                " nothing to correct; use old_policy 'trainer', or correction 'none'",
            ),
            (
                corrects and kind == "mini_rl",
                f"algorithm.correction.kind is {self.correction.kind!r}: algorithm.loss.kind ="
                " 'mini_rl' has its own importance weight (max_weight_ratio); use 'none'",
            ),
            (
                self.kl_reset_steps is not None and not self.kl_coefficient,
                f"algorithm.kl_reset_steps is {self.kl_reset_steps}: algorithm.kl_coefficient is 0,"
                " so there is no reference to reset; set it above 0 or leave kl_reset_steps out",
            ),
            (
                self.constant_length_tokens is not None and self.aggregation != "constant",
                f"algorithm.constant_length_tokens is {self.constant_length_tokens}:"
                f" algorithm.aggregation = {self.aggregation!r} divides by no constant; use"
                " 'constant' or leave it out",
            ),
            (
                self.advantage_std_over == "all" and self.advantage_normalization != "batch",
                "algorithm.advantage_std_over is 'all': algorithm.advantage_normalization ="
                f" {self.advantage_normalization!r} takes no standard deviation over the batch; use"
                " 'batch' or leave it out",
            ),
            (
                self.refill and not self.zero_variance_filter,
                "algorithm.refill is true: algorithm.zero_variance_filter is false, so there is"
                " nothing to refill; set it true or refill false",
            ),
            (
                self.length_penalty == "none"
                and not (self.length_max_tokens is None and self.length_cache_tokens is None),
                f"algorithm.length_max_tokens is {self.length_max_tokens} and"
                f" algorithm.length_cache_tokens is {self.length_cache_tokens}:"
                " algorithm.length_penalty = 'none' uses neither; use 'right' or 'all', or leave"
                " them out",
            ),
            (
                (self.length_cache_tokens or 0) > (self.length_max_tokens or float("inf")),
                f"algorithm.length_cache_tokens is {self.length_cache_tokens}: it must not exceed"
                f" algorithm.length_max_tokens = {self.length_max_tokens}",
            ),
        ]

    @property
    def per_token(self) -> bool:
        """Whether a token's term follows from its own log-probs alone."""
        return self.loss.per_token and self.correction.per_token

    def resolved(self, completion_tokens: int) -> Algorithm:
        """With the lengths that follow from the longest completion filled in."""
        found: dict[str, int] = {}
        if self.aggregation == "constant" and self.constant_length_tokens is None:
            found["constant_length_tokens"] = completion_tokens
        if self.length_penalty != "none":
            longest = self.length_max_tokens or completion_tokens
            found["length_max_tokens"] = longest
            found["length_cache_tokens"] = self.length_cache_tokens or max(longest // 5, 1)
        return self.model_copy(update=found)

    def summary(self) -> str:
        """The algorithm in one line."""
        spread = {
            "batch": f"batch std over {self.advantage_std_over} prompts",
            "prompt": "prompt std",
            "none": "no std",
        }
        baseline = "leave-one-out" if self.advantage_baseline == "leave_one_out" else "group mean"
        old = f" against the {self.old_policy}'s old policy" if self.loss.against == "old" else ""
        parts = [
            f"{self.loss.summary()}{old}",
            "" if self.correction.kind == "none" else f"correction {self.correction.kind}",
            "routing replay" if self.routing_replay == "replay" else "",
            f"KL {self.kl_coefficient:g}" if self.kl_coefficient else "",
            f"entropy {self.entropy_coefficient:g}" if self.entropy_coefficient else "",
            f"{self.aggregation} mean" if self.aggregation != "constant" else "constant length",
            f"{baseline} baseline, {spread[self.advantage_normalization]}",
            "zero-variance filter" if self.zero_variance_filter else "",
            "refill" if self.refill else "",
            "" if self.truncated == "drop" else f"truncated: {self.truncated}",
            "" if self.length_penalty == "none" else f"length penalty: {self.length_penalty}",
            "No-Positive-Resampling" if self.no_positive_resampling else "",
        ]
        return "; ".join(part for part in parts if part)
