"""Sampling parameters for vLLM, and the tokens that a finished request sampled."""

from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from megatron_rl.generator.interruption import SampledTokens
from megatron_rl.messages import VersionSpan
from megatron_rl.models.routed_experts import UNKNOWN, RoutedExperts

_COMMON: dict[str, Any] = {"flat_logprobs": True, "detokenize": False, "skip_clone": True}


def sampling(max_tokens: int, temperature: float) -> SamplingParams:
    """Return the parameters of one request; without a seed, which crashes vLLM's CPU build."""
    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        logprobs=0,
        # The first token shows that the request was prefilled; all others come at the end, since
        # each output wakes this process.
        output_kind=RequestOutputKind.DELTA,
        stream_interval=2**31 - 1,
        **_COMMON,
    )


def scoring() -> SamplingParams:
    """Return the parameters of a request for the log-probs of its own prompt."""
    kind = RequestOutputKind.FINAL_ONLY
    return SamplingParams(
        temperature=1.0, max_tokens=1, prompt_logprobs=0, output_kind=kind, **_COMMON
    )


def sampled_tokens(
    outputs: Sequence[RequestOutput], routes: RoutedExperts | None = None
) -> SampledTokens:
    """Return the tokens that a finished request sampled, from its outputs in order.

    The experts are those of its tokens from the first one of the prompt.

    Raises:
        RuntimeError: the log-probs or the experts are not those of the tokens.
    """
    parts = [output.outputs[0] for output in outputs]
    token_ids = [token for part in parts for token in part.token_ids]
    if [token for part in parts for token in part.logprobs.token_ids] != token_ids:
        raise RuntimeError(
            f"vLLM returned log-probs of other tokens than it sampled (request"
            f" {outputs[-1].request_id}): unsupported behavior of this release"
        )
    last = parts[-1]
    inputs = len(outputs[-1].prompt_token_ids or ()) + len(token_ids) - 1
    if routes is not None and (len(routes) < inputs or (routes[:inputs] == UNKNOWN).any()):
        known = int((routes[:inputs] != UNKNOWN).all(axis=(1, 2)).sum())
        raise RuntimeError(
            f"vLLM returned the experts of {known} of {inputs} tokens (request"
            f" {outputs[-1].request_id}): unsupported behavior of this release"
        )
    return SampledTokens(
        token_ids=token_ids,
        logprobs=[float(x) for part in parts for x in part.logprobs.logprobs],
        spans=[VersionSpan(int(s.version), s.start, s.end) for s in last.weight_versions or ()],
        finish_reason=str(last.finish_reason),
        routes_NLK=None if routes is None else routes[:inputs],
    )
