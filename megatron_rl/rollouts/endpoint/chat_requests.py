"""Requests of the chat API: what is refused, and messages as the session compares them."""

import json
from typing import Any

from pydantic import ValidationError

PROTOCOL = "vllm.entrypoints.openai.chat_completion.protocol"
ROLES = ("system", "developer", "user", "assistant", "tool")
_ONLY_NULL = (
    *("allowed_token_ids", "chat_template", "documents", "function_call", "prompt_logprobs"),
    *("structured_outputs", "thinking_token_budget", "truncate_prompt_tokens"),
)
_ZERO = ("frequency_penalty", "min_p", "min_tokens", "presence_penalty", "top_logprobs")
_FALSE = ("continue_final_message", "echo", "ignore_eos", "logprobs", "use_beam_search")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_ONLY_NULL, ()),
    **dict.fromkeys(_ZERO, (0,)),
    **dict.fromkeys(_FALSE, (False,)),
    **dict.fromkeys(("n", "repetition_penalty", "top_p"), (1,)),
    **dict.fromkeys(("bad_words", "functions", "stop_token_ids"), ([],)),
    **dict.fromkeys(("chat_template_kwargs", "logit_bias"), ({},)),
    "add_generation_prompt": (True,),
    "response_format": ({"type": "text"},),
    "stop": ([], ""),
    "tool_choice": ("auto",),
    "top_k": (-1, 0),
}
"""Parameters that would change what is sampled or shown, and their values that do not; null is
always one."""


class RequestRefused(ValueError):
    """A request that the agent must not make (HTTP 400); its session is as it was before."""


def parsed(content: bytes) -> dict[str, Any]:
    """Return the body of a request; RequestRefused: it is no JSON object."""
    try:
        body = json.loads(content)
    except ValueError as e:
        raise RequestRefused(f"the body of the request is no JSON: {e}") from e
    if not isinstance(body, dict):
        raise RequestRefused("the body of the request is no JSON object: give one with `messages`")
    return body


def check(body: dict[str, Any], temperature: float) -> int | None:
    """Return the longest answer that a request asks for, or None; RequestRefused: a wrong one."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.exceptions import VLLMClientError

    _check_messages(body.get("messages"))
    _check_tools(body.get("tools"))
    for name in ("messages", "tools"):
        try:
            json.dumps(body.get(name), ensure_ascii=False).encode()
        except UnicodeEncodeError as e:
            raise RequestRefused(f"`{name}` has a character that is not Unicode: {e}") from e
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise RequestRefused(
                f"`{name}` is {value!r}: the policy is trained on what it samples, which the run"
                " configures (`generation`); leave the parameter out"
            )
    # The messages are checked above; of the rest a copy, for vLLM changes what it takes.
    rest = json.loads(json.dumps(body | {"messages": []}))
    try:
        request = dict(ChatCompletionRequest.model_validate(rest))
    except ValidationError as e:
        wrong = [f"`{'.'.join(map(str, x['loc']))}`: {x['msg']}" for x in e.errors()]
        raise RequestRefused("; ".join(wrong)) from e
    except VLLMClientError as e:
        raise RequestRefused(str(e)) from e
    if request["temperature"] not in (None, temperature):
        raise RequestRefused(
            f"`temperature` is {request['temperature']}, and the run samples at {temperature}"
            " (generation.temperature); leave the parameter out"
        )
    lengths = [request[name] for name in ("max_tokens", "max_completion_tokens")]
    given = [length for length in lengths if length is not None]
    if any(length < 1 for length in given):
        raise RequestRefused(f"`max_tokens` is {min(given)}; give at least 1")
    return min(given, default=None)


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise RequestRefused("`messages` is no list of at least one message")
    calls: set[str] = set()
    for i, message in enumerate(messages):
        at = f"messages[{i}]"
        if not isinstance(message, dict):
            raise RequestRefused(f"`{at}` is no object: give one with `role` and `content`")
        role = message.get("role")
        if role not in ROLES:
            raise RequestRefused(f"`{at}.role` is {role!r}; give one of {', '.join(ROLES)}")
        if not isinstance(message.get("name"), str | None):
            raise RequestRefused(f"`{at}.name` is no string")
        if message.get("content") is not None or role != "assistant":
            _check_content(message.get("content"), f"{at}.content")
        if role == "assistant":
            calls |= _call_ids(message.get("tool_calls"), f"{at}.tool_calls")
        call = message.get("tool_call_id")
        if role == "tool" and not (isinstance(call, str) and call in calls):
            raise RequestRefused(
                f"`{at}.tool_call_id` is {call!r}; give the id of a call in the `tool_calls` of a"
                " message before it"
            )


def _check_content(content: Any, at: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise RequestRefused(f"`{at}` is no text: give a string, or a list of parts of type text")
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise RequestRefused(f"`{at}[{i}].type` is {kind!r}; the policy reads text only")
        if not isinstance(part.get("text"), str):
            raise RequestRefused(f"`{at}[{i}].text` is no string")


def _call_ids(calls: Any, at: str) -> set[str]:
    if calls is not None and not isinstance(calls, list):
        raise RequestRefused(f"`{at}` is no list")
    for i, call in enumerate(calls or []):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestRefused(f"`{at}[{i}].function.name` is no string")
        if not isinstance(function.get("arguments"), str | dict | None):
            raise RequestRefused(f"`{at}[{i}].function.arguments` is no string")
        if not isinstance(call.get("id"), str):
            raise RequestRefused(f"`{at}[{i}].id` is no string")
    return {call["id"] for call in calls or []}


def _check_tools(tools: Any) -> None:
    if tools is not None and not isinstance(tools, list):
        raise RequestRefused("`tools` is no list of functions' schemas")
    for i, tool in enumerate(tools or []):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestRefused(f"`tools[{i}].function.name` is no string")


def for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of the API as chat templates take it: text, and arguments as values."""
    result = {k: message[k] for k in ("role", "tool_call_id", "name") if message.get(k) is not None}
    result["content"] = _text(message.get("content"))
    if message.get("tool_calls"):
        result["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": _arguments(call["function"].get("arguments")),
                },
            }
            for call in message["tool_calls"]
        ]
    return result


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Return what makes a message the same as another one, however its client writes it."""
    plain = for_template(message)
    functions = [call["function"] for call in plain.get("tool_calls", [])]
    return {
        "role": plain["role"],
        "content": plain["content"],
        "tool_calls": [(f["name"], json.dumps(f["arguments"], sort_keys=True)) for f in functions],
        "tool_call_id": plain.get("tool_call_id"),
    }


def _text(content: str | list[dict[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] for part in content)


def _arguments(arguments: Any) -> Any:
    """Return the value of a call's arguments; as it is if it is no JSON (the policy's mistake)."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments
