"""The `algorithm` section: all choices of a recipe other than sizes, and their conflicts."""

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveInt, field_validator, model_validator

from megatron_rl.algorithm.corrections import CorrectionChoice, NoCorrection
from megatron_rl.algorithm.losses import LossChoice
from megatron_rl.algorithm.losses.cispo import Cispo
from megatron_rl.section import Fraction, Section, with_kind

DEFAULT_KINDS = {"loss": "cispo", "correction": "none"}
"""Kind of a choice that is given by its parameters only."""


class Algorithm(Section):
    """Loss, corrections, advantages, filters and curriculum (ScaleRL's by default)."""

    loss: LossChoice = Cispo()
    """Policy loss and its parameters; the name of a loss (`loss: gspo`) selects its defaults."""
    old_policy: Literal["generator", "trainer"] = "generator"
    """Old policy in the ratio of ppo_clip, gspo and mini_rl: the log-probs of the generator
    (ScaleRL), or log-probs that the trainer computes with the weights at the start of the phase
    (`schedule.updates_per_phase`; with one update these are the current weights, ratio 1)."""
    correction: CorrectionChoice = NoCorrection()
    """Importance correction from the generator to the old policy (for reinforce: to the current
    policy)."""
    routing_replay: Literal["none", "compare", "replay"] = "none"
    """For mixtures of experts: generators return the experts of each token, and the trainer counts
    the differences to its own routers (`compare`), or uses the generator's experts with the
    weights of its own routers (`replay`, R3 of arXiv 2510.11370)."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of KL(policy || reference) in the objective; the reference is the start checkpoint."""
    kl_reset_steps: PositiveInt | None = None
    """Make the current policy the reference every this many optimizer steps (ProRL); default:
    never."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy in the objective; a positive weight increases the entropy."""
    aggregation: Literal["prompt", "sample", "token", "constant"] = "prompt"
    """Average token losses per prompt, per completion (`sample`) or over all tokens of the batch;
    `constant` divides the sum of each completion by a constant length."""
    constant_length_tokens: PositiveInt | None = None
    """Length for `aggregation: constant`; default: that of the longest possible completion."""
    credit: Literal["rollout", "turn"] = "rollout"
    """The reward of a rollout counts for all of its turns, or (`turn`) each turn has an advantage
    of its own, of the rewards from it on (an environment's), over the group's turns of the same
    number."""
    advantage_baseline: Literal["mean", "leave_one_out"] = "mean"
    """Baseline of a reward: the mean of its group, or the mean of the others in the group."""
    advantage_normalization: Literal["batch", "prompt", "none"] = "batch"
    """Divide the centered rewards by the standard deviation of the batch, of the prompt, or not."""
    advantage_std_over: Literal["trained", "all"] = "trained"
    """Prompts in the standard deviation of the batch: those that are trained, or all of the step,
    including filtered ones."""
    zero_variance_filter: bool = True
    """Drop prompts whose completions all have the same reward."""
    refill: bool = False
    """Draw more prompts to replace dropped ones, until the step has its number of prompts (DAPO's
    dynamic sampling)."""
    refill_max_ratio: float = Field(default=10.0, gt=1.0)
    """Limit of prompts drawn for one step, as a multiple of `schedule.prompts_per_step`."""
    truncated: Literal["drop", "mask", "train"] = "drop"
    """Completions that reached the token budget: leave them out of loss and baseline, leave them
    out of the loss only (overlong filtering), or train them with their verified reward."""
    length_penalty: Literal["none", "right", "all"] = "none"
    """Add clip((length_max - tokens) / length_cache - 1, -1, 0) to the reward of correct
    completions (`right`, ScaleRL's alternative to interruption) or of all (DAPO's soft overlong
    punishment)."""
    length_max_tokens: PositiveInt | None = None
    """Length at which the penalty reaches -1; default: that of the longest possible completion."""
    length_cache_tokens: PositiveInt | None = None
    """Length over which the penalty grows from 0 to -1; default: a seventh of
    `length_max_tokens`, as ScaleRL's 2k of 14k."""
    no_positive_resampling: bool = True
    """Do not draw a prompt in later epochs after its pass rate reached the threshold."""
    no_positive_resampling_threshold: Fraction = 0.9
    """Pass rate at or above which a prompt is not drawn again."""
    no_positive_resampling_statistic: Literal["last", "mean"] = "last"
    """Pass rate to compare: that of the last visit, or the mean over all visits."""

    @field_validator("loss", "correction", mode="before")
    @classmethod
    def _by_name(cls, value: Any, info: Any) -> Any:
        return with_kind(value, DEFAULT_KINDS[info.field_name])

    @property
    def has_other_terms(self) -> bool:
        """True if the objective has terms that do not depend on advantages."""
        return bool(self.kl_coefficient or self.entropy_coefficient)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for conflict in self._conflicts():
            raise ValueError(conflict)
        return self

    def _conflicts(self) -> Iterator[str]:
        reference, loss = self.loss.ratio_reference, f"algorithm.loss.kind = {self.loss.kind!r}"
        corrects = self.correction.kind != "none"
        start = f"algorithm.correction.kind is {self.correction.kind!r}:"
        if self.old_policy == "trainer" and reference != "old":
            yield (
                f"algorithm.old_policy is 'trainer': {loss} has no ratio to an old policy of the"
                " trainer; use 'generator'"
            )
        if corrects and reference == "generator":
            yield f"{start} {loss} weighs with pi / pi_gen already; use 'none'"
        if corrects and reference == "old" and self.old_policy == "generator":
            yield (
                f"{start} with algorithm.old_policy = 'generator' the ratio starts at the"
                " generator and needs no correction; use old_policy 'trainer', or correction 'none'"
            )
        if corrects and self.loss.kind == "mini_rl":
            yield f"{start} {loss} has its own importance weight (max_weight_ratio); use 'none'"
        if self.kl_reset_steps is not None and not self.kl_coefficient:
            yield (
                f"algorithm.kl_reset_steps is {self.kl_reset_steps}: algorithm.kl_coefficient is 0,"
                " so there is no reference to reset; set it above 0 or leave kl_reset_steps out"
            )
        if self.constant_length_tokens is not None and self.aggregation != "constant":
            yield (
                f"algorithm.constant_length_tokens is {self.constant_length_tokens}:"
                f" algorithm.aggregation = {self.aggregation!r} does not use it; use 'constant' or"
                " leave it out"
            )
        if self.advantage_std_over == "all" and self.advantage_normalization != "batch":
            yield (
                "algorithm.advantage_std_over is 'all': algorithm.advantage_normalization ="
                f" {self.advantage_normalization!r} has no standard deviation over the batch; use"
                " 'batch' or leave it out"
            )
        if self.refill and not self.zero_variance_filter:
            yield (
                "algorithm.refill is true: algorithm.zero_variance_filter is false, so there is"
                " nothing to refill; set it true or refill false"
            )
        lengths = (self.length_max_tokens, self.length_cache_tokens)
        if self.length_penalty == "none" and lengths != (None, None):
            yield (
                f"algorithm.length_max_tokens is {lengths[0]} and algorithm.length_cache_tokens is"
                f" {lengths[1]}: algorithm.length_penalty = 'none' uses neither; use 'right' or"
                " 'all', or leave them out"
            )
        if (lengths[1] or 0) > (lengths[0] or float("inf")):
            yield (
                f"algorithm.length_cache_tokens is {lengths[1]}: it must not exceed"
                f" algorithm.length_max_tokens = {lengths[0]}"
            )

    @property
    def per_token(self) -> bool:
        """True if a token's term depends on its own log-probs only."""
        return self.loss.per_token and self.correction.per_token

    def resolved(self, completion_tokens: int) -> Self:
        """Return a copy with the default lengths, for the longest possible completion."""
        lengths: dict[str, int] = {}
        if self.aggregation == "constant" and self.constant_length_tokens is None:
            lengths["constant_length_tokens"] = completion_tokens
        if self.length_penalty != "none":
            longest = self.length_max_tokens or completion_tokens
            lengths["length_max_tokens"] = longest
            lengths["length_cache_tokens"] = self.length_cache_tokens or max(longest // 7, 1)
        return self.model_copy(update=lengths)

    def summary(self) -> str:
        """Return the loss with its parameters, and the other keys that differ from the defaults."""
        changed = self.model_dump(exclude={"loss", "correction"}, exclude_defaults=True)
        if self.correction.kind != "none":
            changed["correction"] = self.correction.kind
        shown = [self.loss.summary(), *(f"{key} {value}" for key, value in changed.items())]
        return "; ".join([*shown, "all else as by default"])
