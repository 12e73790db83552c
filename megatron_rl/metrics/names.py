"""The metrics of a run: every name that metrics.jsonl may hold, with its meaning and unit.

This table is written into the file's first line. A trainer that measures something new adds its
name here; the strict mode of `MetricsWriter` refuses names that are not in it.
"""

from __future__ import annotations

METRICS: dict[str, str] = {
    # every row
    "kind": "`step` (one optimizer step), `eval` (one evaluation) or `event`",
    "unix_seconds": "when the row was written [s since 1970]",
    "nonfinite": "names whose value was NaN or infinite; they stand as null",
    "step": "step rows: index of the update that was made, 0 first; eval rows: weight version"
    " (updates made before it); events: weight version [optimizer steps]",
    "event": "what happened (event rows)",
    # compute: cumulative since step 0, in every step and eval row
    "compute_tokens": "tokens generated for training, prompts not counted [tokens]",
    "compute_device_hours": "wall hours x ranks of trainer and generators, evaluations and"
    " checkpoints not counted [device hours]",
    "compute_flops": "2 x parameters per generated token + 6 x per trained token, active"
    " parameters [FLOP]",
    "wall_seconds": "since the RL stage began, over all resumptions [s]",
    # evaluation
    "pass_rate": "mean over held-out prompts of the share of correct completions [fraction]",
    "pass_rate_stderr": "standard error of pass_rate from sampling, for these prompts [fraction]",
    "pass_at_n": "share of held-out prompts with at least one correct completion [fraction]",
    "num_prompts": "held-out prompts [prompts]",
    "samples_per_prompt": "the n of mean@n [completions]",
    "eval_seconds": "from the first request to the last reward [s]",
    "eval_completion_tokens_mean": "length of held-out completions [tokens]",
    "eval_truncated_fraction": "held-out completions cut at the budget [fraction]",
    "tasks": "task -> the same names over its prompts alone (runs of several tasks)",
    # rewards and prompts of a step
    "tokens": "completion tokens of the batch, dropped prompts included [tokens]",
    "tokens_trained": "completion tokens with a loss weight above 0 [tokens]",
    "completions": "completions of the batch, dropped prompts included [completions]",
    "reward_mean": "mean verified reward over the batch's completions that have one [reward units]",
    "train_pass_rate": "share of correct completions in the batch, those not counted that the"
    " verifier came to no verdict on [fraction]",
    "completions_without_reward": "completions whose verdict is no reward; not trained"
    " [completions]",
    "prompts_trained": "prompts with a loss weight above 0 [prompts]",
    "prompts_dropped_zero_variance": "prompts whose completions all had one reward [prompts]",
    "prompts_refilled": "prompts drawn beyond the step's number, for dropped ones [prompts]",
    "length_penalty_mean": "mean length penalty over the trained completions [reward units]",
    "prompts_excluded": "prompts that No-Positive-Resampling leaves out of the epoch [prompts]",
    "prompt_ids": "prompts of the batch, in order [ids]",
    "epoch": "passes over the prompt set when the batch's last prompt was drawn [epochs]",
    "verdicts": "what the verifier said -> completions [completions]",
    "verifier_waiting": "completions that wait for a verdict at the end of the step [completions]",
    "verifier_deaths": "verifier workers that died and were replaced, since the start [workers]",
    "verifier_bugs": "verdicts `unparsable` for an exception that no verifier foresaw, since the"
    " start [completions]",
    "completions_truncated": "completions cut at the token budget [completions]",
    "completions_interrupted": "completions whose thinking was interrupted [completions]",
    "completion_tokens_mean": "length of the batch's completions [tokens]",
    "completion_tokens_max": "longest completion of the batch [tokens]",
    # staleness
    "lag_mean": "weight version trained minus version that made the token, over tokens"
    " [optimizer steps]",
    "lag_max": "the greatest of these lags [optimizer steps]",
    "lag_histogram": "lag in optimizer steps -> tokens [tokens]",
    "multi_version_fraction": "completions made by two or more weight versions [fraction]",
    "multi_version_fraction_long": "the same among completions over 16 tokens [fraction]",
    "completions_long": "completions over 16 tokens in the batch [completions]",
    # loss
    "loss": "sum(loss_weight x term) over the batch [nats]",
    "ratio_mean": "pi_train / pi_gen over trained tokens, before the cap [ratio]",
    "ratio_max": "greatest ratio, before the cap [ratio]",
    "ratio_std": "standard deviation of these ratios [ratio]",
    "clipped_fraction": "trained tokens whose ratio the loss cut at a bound, or that it masked for"
    " it [fraction]",
    "corrected_fraction": "trained tokens that the importance correction truncated or masked"
    " [fraction]",
    "kl_reference": "estimate of KL(policy || reference), mean over trained tokens [nats/token]",
    "routes_differing_fraction": "experts of the generator that the trainer did not take"
    " [fraction of layers x tokens x experts per token]",
    "routes_differing_live_fraction": "experts of the generator that the trainer's routers would"
    " not have chosen [fraction]",
    "ratio_outside_0.9_1.1": "trained tokens with a ratio outside [0.9, 1.1] [fraction]",
    "mismatch_kl": "estimate of KL(pi_gen || pi_train), mean of ratio - 1 - log ratio [nats/token]",
    "mismatch_kl_sequence_max": "greatest such sum over one completion [nats]",
    "entropy": "mean entropy of the trainer's distribution [nats/token]",
    "grad_norm": "global gradient norm before clipping [norm]",
    "learning_rate": "of the step [1]",
    # agreement of trainer and generator under the same weights
    "logprob_error_max": "greatest |trainer - generator| log-prob, single-version tokens [nats]",
    "logprob_error_mean": "mean of the same [nats]",
    "logprob_error_tokens": "tokens compared [tokens]",
    # time
    "step_seconds": "from the end of the previous step to the end of this one [s]",
    "train_seconds": "forward, backward and optimizer [s]",
    "publish_seconds": "export of the weights by the trainer [s]",
    "pause_seconds": "time in which no token moved on an engine, mean over engines [s]",
    "transfer_seconds": "reading, checking and loading the weights, part of the pause [s]",
    "trainer_wait_fraction": "share of the step in which the trainer waited [fraction]",
    "generator_wait_fraction": "share of the step in which engines had nothing to decode"
    " [fraction]",
    "generator_tokens_per_second": "all engines together [tokens/s]",
    "trainer_tokens_per_second": "trained batch tokens by step_seconds [tokens/s]",
    "requests_in_flight": "requests decoding when the weights were swapped [requests]",
    "aborted_requests": "requests that ended unfinished since the start; must stay 0 [requests]",
    # events
    "file": "file that the event is about",
    "rows": "rows that the event is about [rows]",
}
"""Name -> meaning and [unit]."""
