"""A harness of the package `verifiers` that runs in the worker: the conversation, and its tools.

It does what the package's `null` harness does (turns of the policy, tools of the task by MCP, no
code of the model), which starts a Python process for each episode, and installs it from a registry.
"""

import json
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]  # where the package looks for it


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Turns of the policy until one has no call of a tool."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """Run one segment of the conversation against the package's endpoint."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = []
        if system:
            messages.append({"role": "system", "content": system})
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(m) for m in prompt or []]
        seconds = self.config.tool_timeout
        specs = {name: {"url": url, "timeout": seconds} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None, max_retries=0)
            )
            tools, dispatch, servers = await connect_mcp({"mcpServers": specs}, stack)
            request: dict[str, Any] = {"model": ctx.model, "messages": messages}
            if tools:
                request["tools"] = tools
            while True:
                completion = await client.chat.completions.create(**request)
                message = completion.choices[0].message.model_dump(exclude_none=True)
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    messages.append(
                        {
                            "role": "tool",
                            "tool_call_id": call["id"],
                            "name": call["function"]["name"],
                            "content": await _result(call["function"], dispatch, servers),
                        }
                    )


async def _result(function: dict[str, Any], dispatch: Any, servers: Any) -> Any:
    """Return a tool's result; what the policy did wrong is a result too."""
    name = function["name"]
    if name not in dispatch:
        return f"error: unknown tool {name!r}"
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except json.JSONDecodeError as e:
        return f"error: the arguments are not JSON: {e}"
    if not isinstance(arguments, dict):
        return "error: the arguments are not a JSON object"
    return await call_mcp(servers, dispatch, name, arguments)
