"""The metrics of a run: every name in metrics.jsonl, with its meaning and unit.

The table is also the file's first line. A new metric needs an entry here.
"""

METRICS: dict[str, str] = {  # name -> meaning and [unit]
    # every row
    "kind": "`step` (one optimizer step), `eval` (the held-out prompts at one weight version),"
    " `sets` (an evaluation set at one weight version) or `event`",
    "unix_seconds": "time of writing the row [s since 1970]",
    "nonfinite": "names whose value was NaN or infinite (null in the row)",
    "step": "step rows: index of the update, from 0; all others: weight version (updates made"
    " before it) [optimizer steps]",
    "event": "name of the event (event rows)",
    # compute: cumulative, in every row but events
    "compute_tokens": "completion tokens of trained batches and of evaluations, with work that a"
    " kill lost [tokens]",
    "compute_device_hours": "wall_seconds x ranks of trainer and generators (1 if they share a GPU)"
    " [device hours]",
    "compute_flops": "2 x active parameters per token of compute_tokens + 6 x per trained token"
    " [FLOP]",
    "compute_train_tokens": "compute_tokens without evaluations and lost work [tokens]",
    "compute_train_device_hours": "compute_device_hours without lost work and evaluations, which"
    " have their fraction of the completions in flight: of the generators' time, and of the"
    " trainer's while it waits [device hours]",
    "compute_train_flops": "compute_flops without evaluations and lost work [FLOP]",
    "wall_seconds": "time since the first request of RL: evaluations, checkpoints and lost work"
    " count; the start of a process, and what follows the last row before a kill, do not [s]",
    # evaluation
    "pass_rate": "mean over held-out prompts of the fraction of correct completions [fraction]",
    "pass_rate_stderr": "standard error of pass_rate from sampling, for these prompts [fraction]",
    "pass_at_n": "held-out prompts with at least one correct completion [fraction]",
    "num_prompts": "held-out prompts [prompts]",
    "samples_per_prompt": "the n of mean@n [completions]",
    "eval_seconds": "time from the first request to the last verdict [s]",
    "eval_completion_tokens_mean": "mean length of held-out completions [tokens]",
    "eval_truncated_fraction": "held-out completions truncated at the budget [fraction]",
    "eval_entropy": "mean of -log p over the sampled tokens of held-out completions, without forced"
    " tokens: an estimate of the policy's entropy at the sampling temperature [nats/token]",
    "tasks": "task -> the same names over its prompts (runs of several tasks)",
    "sets": "evaluation set -> the same names over its prompts (`evaluation.sets`)",
    # rewards and prompts of a step
    "tokens": "completion tokens of the batch, including dropped prompts [tokens]",
    "tokens_trained": "completion tokens with a loss weight above 0 [tokens]",
    "completions": "completions of the batch, including dropped prompts [completions]",
    "reward_mean": "mean verified reward of the batch's completions with a reward [reward units]",
    "train_pass_rate": "correct completions of the batch, without verifier time-outs [fraction]",
    "completions_without_reward": "completions whose verdict gives no reward [completions]",
    "prompts_trained": "prompts with a loss weight above 0 [prompts]",
    "prompts_dropped_zero_variance": "prompts whose completions all had equal rewards [prompts]",
    "prompts_differing": "prompts whose completions differ in reward [prompts]",
    "prompts_refilled": "extra prompts drawn to replace dropped ones [prompts]",
    "length_penalty_mean": "mean length penalty of the trained completions [reward units]",
    "prompts_excluded": "prompts that No-Positive-Resampling leaves out of the epoch [prompts]",
    "prompt_ids": "prompts of the batch, in order [ids]",
    "epoch": "passes over the prompt set at the draw of the batch's last prompt [epochs]",
    "verdicts": "verdict -> completions [completions]",
    "frequent_failure": "most frequent reason of the verdicts that are not correct [text]",
    "alarms": "alarm -> its message [text]",
    "verifier_waiting": "completions waiting for a verdict at the end of the step [completions]",
    "verifier_deaths": "verifier workers that died and were replaced, since the start [workers]",
    "verifier_bugs": "unexpected exceptions in verifiers since the start [completions]",
    "completions_truncated": "completions truncated at the token budget [completions]",
    "completions_interrupted": "completions with interrupted thinking [completions]",
    "completion_tokens_mean": "mean length of the batch's completions [tokens]",
    "completion_tokens_max": "longest completion of the batch [tokens]",
    # staleness
    "lag_mean": "trained minus sampling weight version, mean over tokens [optimizer steps]",
    "lag_max": "maximum of these lags [optimizer steps]",
    "lag_histogram": "lag in optimizer steps -> tokens [tokens]",
    "multi_version_fraction": "completions sampled by two or more weight versions [fraction]",
    "multi_version_fraction_long": "the same among completions over 16 tokens [fraction]",
    "completions_long": "completions over 16 tokens in the batch [completions]",
    # loss
    "loss": "sum(loss_weight x term) over the batch [nats]",
    "ratio_mean": "pi_train / pi_gen over trained tokens, before the cap [ratio]",
    "ratio_max": "maximum of these ratios [ratio]",
    "ratio_min": "minimum of these ratios [ratio]",
    "ratio_std": "standard deviation of these ratios [ratio]",
    "clipped_fraction": "trained tokens whose ratio the loss clipped or masked [fraction]",
    "corrected_fraction": "trained tokens truncated or masked by the correction [fraction]",
    "kl_reference": "estimate of KL(policy || reference), mean over trained tokens [nats/token]",
    "routes_differing_fraction": "routed experts of the generator that the trainer did not use"
    " [fraction of layers x tokens x experts per token]",
    "routes_differing_live_fraction": "routed experts of the generator that the trainer's routers"
    " would not have chosen [fraction]",
    "ratio_outside_0.9_1.1": "trained tokens with a ratio outside [0.9, 1.1] [fraction]",
    "mismatch_kl": "estimate of KL(pi_gen || pi_train), mean of ratio - 1 - log ratio [nats/token]",
    "mismatch_kl_sequence_max": "maximum of this sum over one completion [nats]",
    "entropy": "mean entropy of the trainer's distribution [nats/token]",
    "grad_norm": "global gradient norm before clipping [norm]",
    "learning_rate": "learning rate of the step [1]",
    # agreement of trainer and generator under the same weights
    "logprob_error_max": "maximum |trainer - generator| log-prob, single-version tokens [nats]",
    "logprob_error_mean": "mean of the same [nats]",
    "logprob_error_tokens": "compared tokens [tokens]",
    # time
    "step_seconds": "time from the end of the previous step to the end of this one [s]",
    "train_seconds": "forward, backward and optimizer step [s]",
    "publish_seconds": "export of the weights by the trainer [s]",
    "stores_seconds": "time from a version's announcement until the last store has it [s]",
    "stores_trainer_bytes": "weights that stores took from the trainer's, since the last row [B]",
    "pause_seconds": "time without decoding during a weight update, mean over generators [s]",
    "transfer_seconds": "loading the weights, part of the pause [s]",
    "trainer_wait_fraction": "share of the step in which the trainer waited [fraction]",
    "generator_wait_fraction": "share of time without a request to decode on generators [fraction]",
    "generator_tokens_per_second": "tokens sampled by all generators [tokens/s]",
    "trainer_tokens_per_second": "trained batch tokens / step_seconds [tokens/s]",
    "requests_in_flight": "requests that were decoding at a weight update [requests]",
    "aborted_requests": "requests that ended unfinished since the start; must stay 0 [requests]",
    # events
    "file": "file of the event",
    "rows": "rows of the event [rows]",
}

COMPUTE = (*(name for name in METRICS if name.startswith("compute_")), "wall_seconds")
"""Cumulative metrics, in every step and eval row."""
SPENT = tuple(name for name in COMPUTE if "_train_" not in name)
"""Those that count all that ran: they never go back, whatever a resumed run trains again."""
