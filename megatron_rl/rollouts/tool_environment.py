"""Tools as an environment: a turn's calls are answered, and a turn without any is the last.

It runs in the worker processes of `environments.host`, which see to tools that hang, die or flood.
What the policy did wrong, such as arguments that do not fit, is told to it; what a tool does wrong
fails the rollout.
"""

import asyncio
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError, validate_call
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
)

from megatron_rl.import_path import imported
from megatron_rl.rewards.code.sandbox import run_tests
from megatron_rl.rewards.verifier_settings import SandboxSettings
from megatron_rl.rollouts.environments.protocol import Opening, Step

PATH = f"{__name__}:ToolEnvironment"
PYTHON = "python"
PYTHON_SCHEMA = {
    "type": "function",
    "function": {
        "name": PYTHON,
        "description": "Run a Python program and return what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
        },
    },
}


class ToolError(Exception):
    """A tool tells the policy, by this text, what is wrong with its call."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy can call, sync or async, and its schema as OpenAI's clients do."""

    schema: dict[str, Any]
    function: Callable[..., Any]


class ToolEnvironment:
    """One episode with tools; the verifier of the task judges its last turn.

    Its `tools` are `python`, with the `sandbox` of the verifiers and its output cut to so many
    characters, or import paths `package.module:function`; calls of one turn run at the same time.
    """

    def __init__(self, tools: list[str], sandbox: dict[str, Any], output_characters: int) -> None:
        settings = SandboxSettings.model_validate(sandbox)
        loaded = [load_tool(tool, settings, output_characters) for tool in tools]
        self._tools = {str(tool.schema["function"]["name"]): tool for tool in loaded}

    def reset(self, row: dict[str, Any]) -> Opening:
        """Begin with the messages of the row."""
        return Opening(messages=row["messages"], tools=[t.schema for t in self._tools.values()])

    async def step(self, message: dict[str, Any]) -> Step:
        """Answer the calls of a turn, at the same time; without any, the episode is over."""
        calls = message.get("tool_calls") or []
        if not calls:
            return Step(done=True)
        results = await asyncio.gather(*(self._call(call["function"]) for call in calls))
        return Step(
            messages=[
                {"role": "tool", "tool_call_id": call["id"], "name": name, "content": result}
                for call, (name, result) in zip(calls, results, strict=True)
            ]
        )

    async def _call(self, call: dict[str, Any]) -> tuple[str, str]:
        """Return the tool's name and its result, or what is wrong with the call."""
        name = call["name"]
        if (tool := self._tools.get(name)) is None:
            return name, f"error: no tool {name!r}; there are {', '.join(self._tools)}"
        try:
            arguments = dict(json.loads(call["arguments"]))
        except (ValueError, TypeError) as e:
            return name, f"error: the arguments are no JSON object: {e}"
        function = validate_call(tool.function)
        try:
            if inspect.iscoroutinefunction(tool.function):
                result = await function(**arguments)
            else:
                result = await asyncio.to_thread(function, **arguments)
        except ValidationError as e:
            wrong = "; ".join(f"{'.'.join(map(str, x['loc']))}: {x['msg']}" for x in e.errors())
            return name, f"error: the arguments do not fit: {wrong}"
        except ToolError as e:
            return name, f"error: {e}"
        return name, result if isinstance(result, str) else json.dumps(result)


def load_tool(path: str, sandbox: SandboxSettings, output_characters: int) -> Tool:
    """Return `python`, or an imported function; ValueError: there is none, or it has no schema."""
    if path == PYTHON:

        def python(code: str) -> str:
            output = run_python(code, sandbox)
            more = len(output) - output_characters
            return output[:output_characters] + f" ... {more} more" * (more > 0)

        return Tool(PYTHON_SCHEMA, python)
    try:
        function = imported(path)
    except ValueError as e:
        raise ValueError(f"tool {e}; or give `{PYTHON}`") from e
    try:
        return Tool(get_json_schema(function), function)
    except (ValueError, DocstringParsingException, TypeHintParsingException) as e:
        raise ValueError(
            f"tool {path!r}: {e}; give each argument a type in its signature, of JSON's, and a line"
            " in its docstring (`Args:`)"
        ) from e


def run_python(code: str, sandbox: SandboxSettings) -> str:
    """Return what a program prints, or how it ended; SandboxUnavailable: without isolation."""
    (result,) = run_tests(code, [{"stdin": ""}], sandbox)
    if result.status == "ok":
        return result.stdout
    return f"{result.stdout}error: {result.status}: {result.error}"
