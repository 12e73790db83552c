"""From the tokens of a turn to the assistant's message, by vLLM's tool parsers."""

import itertools
import logging
from typing import Any

import msgspec

from megatron_rl.rollouts.chat import Message, Tools


class CallParser:
    """Finds the tool calls in a turn, by the tool parser of this name (`rollout.tool_parser`).

    Raises:
        ValueError: vLLM has no such parser, or it has it for its server alone.
    """

    def __init__(self, name: str, tokenizer: Any) -> None:
        self._name, self._tokenizer = name, tokenizer
        self._numbers = itertools.count()
        self._loaded: dict[bytes, tuple[Any, Any]] = {}
        """Parser and request of vLLM, by the tools, which are mostly the same."""

    def __call__(self, token_ids: list[int], tools: Tools | None) -> Message:
        """Return the message of a turn; calls that the parser cannot read stay in the content.

        ValueError: vLLM has no such parser, or it has it for its server alone.
        """
        decode, calls, content = self._tokenizer.decode, [], None
        if tools:
            text = decode(token_ids, skip_special_tokens=False)
            parsed = self._parsed(text.removesuffix(self._tokenizer.eos_token or ""), tools)
            calls, content = parsed.tool_calls, parsed.content
        if not calls:
            return {"role": "assistant", "content": decode(token_ids, skip_special_tokens=True)}
        return {
            "role": "assistant",
            "content": content or "",
            "tool_calls": [
                {
                    "id": f"call{next(self._numbers):05d}",
                    "type": "function",
                    "function": {"name": c.function.name, "arguments": c.function.arguments},
                }
                for c in calls
            ],
        }

    def _parsed(self, text: str, tools: Tools) -> Any:
        key = msgspec.json.encode(tools)
        if key not in self._loaded:
            self._loaded[key] = self._load(tools)
        new_parser, request = self._loaded[key]
        try:
            # A parser keeps what it has streamed, so that each turn takes a new one.
            return new_parser(self._tokenizer, request.tools).extract_tool_calls(text, request)
        except NotImplementedError as e:
            raise ValueError(
                f"rollout.tool_parser is {self._name!r}: vLLM's parser of this name reads no text"
            ) from e

    def _load(self, tools: Tools) -> tuple[Any, Any]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        try:
            parser = ToolParserManager.get_tool_parser(self._name)
        except KeyError as e:
            known = ", ".join(sorted(ToolParserManager.list_registered()))
            raise ValueError(f"rollout.tool_parser is {self._name!r}: vLLM has {known}") from e
        # What it cannot read is the policy's mistake, not an error with a traceback.
        logging.getLogger(parser.__module__).setLevel(logging.CRITICAL)
        return parser, ChatCompletionRequest(messages=[], tools=tools, model="policy")
