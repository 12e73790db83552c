"""What a generator asks vLLM for, and what a finished request has sampled."""

from __future__ import annotations

from collections.abc import Sequence

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from megatron_rl.generator.interruption import Piece
from megatron_rl.messages import VersionSpan
from megatron_rl.models.routed_experts import UNKNOWN, Routes

_ONLY_FIRST_AND_LAST = 2**31 - 1


def sampling(max_tokens: int, temperature: float) -> SamplingParams:
    """Parameters of one request; no seed of its own: vLLM's CPU build dies of it."""
    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        skip_clone=True,
        # The first token tells that the request was prefilled; all others come at the end, since
        # each output wakes this process.
        output_kind=RequestOutputKind.DELTA,
        stream_interval=_ONLY_FIRST_AND_LAST,
    )


def scoring() -> SamplingParams:
    """Parameters of a request for the log-probs of its own prompt."""
    return SamplingParams(
        temperature=1.0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        skip_clone=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def piece_of(outputs: Sequence[RequestOutput], routes: Routes | None = None) -> Piece:
    """What a finished request sampled.

    Args:
        outputs: of the request.
        routes: experts of its tokens.

    Raises:
        RuntimeError: log-probs or experts are not those of the tokens.
    """
    parts = [output.outputs[0] for output in outputs]
    token_ids = [token for part in parts for token in part.token_ids]
    if [token for part in parts for token in part.logprobs.token_ids] != token_ids:
        raise RuntimeError(
            f"vLLM returned log-probs of other tokens than it sampled (request"
            f" {outputs[-1].request_id}); this version does not do what the generator relies on"
        )
    last = parts[-1]
    inputs = len(outputs[-1].prompt_token_ids or ()) + len(token_ids) - 1
    if routes is not None and (len(routes) < inputs or (routes[:inputs] == UNKNOWN).any()):
        known = int((routes[:inputs] != UNKNOWN).all(axis=(1, 2)).sum())
        raise RuntimeError(
            f"vLLM told the experts of {known} of {inputs} tokens (request"
            f" {outputs[-1].request_id}); this version does not do what the generator relies on"
        )
    return Piece(
        token_ids=token_ids,
        logprobs=[float(x) for part in parts for x in part.logprobs.logprobs],
        spans=[VersionSpan(int(s.version), s.start, s.end) for s in last.weight_versions or ()],
        finish_reason=str(last.finish_reason),
        routes_NLK=None if routes is None else routes[:inputs],
    )
