"""From the text of a turn to the assistant's message, by vLLM's tool parsers."""

import itertools
import logging
from typing import Any

from megatron_rl.rollouts.chat import Message


class CallParser:
    """Finds the tool calls in a turn.

    Args:
        name: of a tool parser of vLLM (`rollout.tool_parser`).
        tokenizer: the model's.
        tools: schemas in the form of OpenAI's chat interface.

    Raises:
        ValueError: vLLM has no such parser, or it has it for its server alone.
    """

    def __init__(self, name: str, tokenizer: Any, tools: list[dict[str, Any]]) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        try:
            parser = ToolParserManager.get_tool_parser(name)
        except KeyError as e:
            known = ", ".join(sorted(ToolParserManager.list_registered()))
            raise ValueError(f"rollout.tool_parser is {name!r}: vLLM has {known}") from e
        # What it cannot read is the policy's mistake, not an error with a traceback.
        logging.getLogger(parser.__module__).setLevel(logging.CRITICAL)
        self._request = ChatCompletionRequest(messages=[], tools=tools, model="policy")
        self._parser, self._tokenizer = parser, tokenizer
        self._eos = tokenizer.eos_token or ""
        self._numbers = itertools.count()
        try:
            self("", [])
        except NotImplementedError as e:
            raise ValueError(
                f"rollout.tool_parser is {name!r}: vLLM's parser of this name reads no text"
            ) from e

    def __call__(self, text: str, token_ids: list[int]) -> Message:
        """Return the message of a turn, given with its special tokens.

        What the parser cannot read stays in the content.
        """
        # A parser keeps what it has streamed, so that each turn takes a new one.
        parser = self._parser(self._tokenizer, self._request.tools)
        parsed = parser.extract_tool_calls(text.removesuffix(self._eos), self._request)
        if not parsed.tool_calls:
            content = self._tokenizer.decode(token_ids, skip_special_tokens=True)
            return {"role": "assistant", "content": content}
        return {
            "role": "assistant",
            "content": parsed.content or "",
            "tool_calls": [
                {
                    "id": f"call{next(self._numbers):05d}",
                    "type": "function",
                    "function": {"name": c.function.name, "arguments": c.function.arguments},
                }
                for c in parsed.tool_calls
            ],
        }
