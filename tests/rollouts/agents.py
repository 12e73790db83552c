"""An agent that knows the policy by its `base_url` alone, and calls the tool itself."""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

from megatron_rl.data.lookup import lookup

TOOLS: Any = [{"type": "function", "function": {"name": "lookup", "parameters": {}}}]
TURNS = 5


async def look_up(base_url: str, api_key: str, row: dict[str, Any]) -> None:
    """Answer the policy's lookups until it makes none; the task's verifier judges its last turn."""
    messages: list[Any] = list(row["messages"])
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=60, max_retries=2) as client:
        for _ in range(TURNS):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, tools=TOOLS
            )
            message = answer.choices[0].message
            if not message.tool_calls:
                return
            messages.append(message)
            for call in message.tool_calls:
                key = str(json.loads(call.function.arguments).get("key"))
                content = lookup(key)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
