"""Sampling parameters for vLLM, and the tokens that its requests sample."""

import random
from typing import Any

from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from megatron_rl.messages import VersionSpan
from megatron_rl.rollouts.interruption import SampledTokens

_COMMON: dict[str, Any] = {"flat_logprobs": True, "detokenize": False, "skip_clone": True}
ONLY_AT_THE_END = 2**31 - 1


def request_seed(seed: int, completion: str, start: int) -> int:
    """Return the seed of the request for a completion's tokens from `start` on.

    It depends on the run's `seed` and on the completion's name in the run, not on the engine, or on
    what it samples at the same time.
    """
    return random.Random(f"request {seed} {completion} {start}").getrandbits(63)


def sampling(
    max_tokens: int, temperature: float, interval: int = ONLY_AT_THE_END, seed: int | None = None
) -> SamplingParams:
    """Return the parameters of one request; without a seed, the engine's noise is its own.

    Its outputs come with the first token, which shows that the request was prefilled, and then
    every `interval` tokens: each one wakes this process.
    """
    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        logprobs=0,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=interval,
        seed=seed,
        **_COMMON,
    )


def scoring() -> SamplingParams:
    """Return the parameters of a request for the log-probs of its own prompt."""
    kind = RequestOutputKind.FINAL_ONLY
    return SamplingParams(
        temperature=1.0, max_tokens=1, prompt_logprobs=0, output_kind=kind, **_COMMON
    )


class RequestTokens:
    """The tokens that a request of an AsyncLLM samples, output by output."""

    def __init__(self, llm: Any, request_id: str) -> None:
        self._processor, self._request_id, self._count = llm.output_processor, request_id, 0

    def of(self, output: RequestOutput) -> SampledTokens:
        """Return the tokens of the next output.

        Raises:
            RuntimeError: the log-probs are not those of the tokens.
        """
        (part,) = output.outputs
        start = self._count
        self._count = end = start + len(part.token_ids)
        if list(part.logprobs.token_ids) != list(part.token_ids):
            raise RuntimeError(
                f"vLLM returned log-probs of other tokens than it sampled (request"
                f" {self._request_id}): unsupported behavior of this release"
            )
        versions = part.weight_versions if output.finished else self._versions()
        return SampledTokens(
            token_ids=list(part.token_ids),
            logprobs=[float(x) for x in part.logprobs.logprobs],
            spans=[
                VersionSpan(int(v.version), max(v.start, start) - start, min(v.end, end) - start)
                for v in versions or ()
                if v.start < end and v.end > start
            ],
            finish_reason=str(part.finish_reason or ""),
        )

    def _versions(self) -> Any:
        """Return the versions of the tokens so far; only a request's last output has them."""
        (request,) = self._processor.external_req_ids.get(self._request_id, [None])
        state = self._processor.request_states.get(request)
        return None if state is None else state._weight_version_spans()
