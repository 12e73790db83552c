"""A session of the endpoint: the conversation of one agent with the policy, kept for training.

The agent sees text; ids, log-probs and weight versions of every turn stay here, in a `Rollout`. A
request that continues the conversation is appended to the exact ids of the turns before it.
"""

import asyncio
import uuid
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_rl.config.rollout_settings import RolloutSettings
from megatron_rl.messages import TurnLimits
from megatron_rl.rollouts.chat import ChatTemplate, History, HistoryError, Message, Tools
from megatron_rl.rollouts.endpoint.chat_requests import RequestRefused, comparable, for_template
from megatron_rl.rollouts.rollout import Rollout, RolloutError, RolloutPolicy
from megatron_rl.rollouts.tool_calls import CallParser
from megatron_rl.rollouts.turns import fitting


@dataclass(frozen=True, slots=True)
class PolicyAnswer:
    """The answer to a request."""

    message: dict[str, Any]  # of OpenAI's chat API: `role`, `content`, `tool_calls`
    finish_reason: str  # `stop`, `length` or `tool_calls`
    prompt_tokens: int
    completion_tokens: int


class Session:
    """One agent's conversation. Requests are answered one at a time; others wait for their turn."""

    def __init__(
        self,
        policy: RolloutPolicy,
        limits: TurnLimits,
        settings: RolloutSettings,
        think_start: str = "",
    ) -> None:
        """Begin without a conversation: the first request has it; `limits` are of each turn."""
        self.id = uuid.uuid4().hex
        self.rollout = Rollout()
        self.failure: Exception | None = None
        """Why the rollout cannot be used, whatever the agent makes of it."""
        self.used_up = False  # True if a request was refused because no turn or no token was left
        self._policy, self._limits, self._settings = policy, limits, settings
        self._template = ChatTemplate(policy.tokenizer, settings.history, think_start)
        self._history: History | None = None
        self._known: list[Message] = []
        self._asked: list[Message] = []
        self._tools: Tools | None = None
        self._parser = CallParser(settings.tool_parser, policy.tokenizer)
        self._context: list[int] = []
        self._new: tuple[bool, list[int]] = (False, [])
        self._reply: PolicyAnswer | None = None
        self._lock = asyncio.Lock()
        self._closed = False
        self._working: set[asyncio.Task[Any]] = set()

    async def complete(
        self, messages: list[Message], tools: Tools | None = None, longest: int | None = None
    ) -> PolicyAnswer:
        """Answer with a turn of the policy to messages that `chat_requests.check` has passed.

        It has at most `longest` tokens, a forced phrase not counted. The last request once more
        gets the answer that it had: its client had lost it. RequestRefused: the session has ended,
        nothing is left of its budgets, or the messages do not continue and history is `refuse`.
        """
        task = asyncio.current_task()
        assert task is not None
        self._working.add(task)
        try:
            async with self._lock:
                return await self._complete(messages, tools, longest)
        except RequestRefused:
            raise
        except Exception as e:
            self.failure = e  # the rollout function raises it
            raise
        finally:
            self._working.discard(task)

    def close(self) -> None:
        """Answer nothing more; requests in flight are cancelled."""
        self._closed = True
        for task in self._working:
            task.cancel()

    async def _complete(
        self, messages: list[Message], tools: Tools | None, longest: int | None
    ) -> PolicyAnswer:
        if self._closed or self.failure is not None:
            reason = f": {self.failure}" if self.failure else ""
            raise RequestRefused(f"session {self.id} has ended{reason}")
        compared = [comparable(m) for m in messages]
        same = self._history is not None and compared == self._asked and tools == self._tools
        if same and self._reply is not None:
            return self._reply
        wanted = self._limits if longest is None else fitting(self._limits, longest)
        if wanted is None:
            raise RequestRefused(f"`max_tokens` is {longest}; a turn with thinking has at least 2")
        if self.rollout.turns >= self._settings.max_turns:
            self._use_up(f"its {self._settings.max_turns} turns (rollout.max_turns)")
        if not same:
            self._take(messages, compared, tools)
        begins, new = self._new
        context = new if begins else self._context + new
        space = self._policy.max_tokens - 1 - self._policy.forced_tokens - len(context)
        if (limits := fitting(wanted, space)) is None:
            self._use_up(
                f"the longest sequence of {self._policy.max_tokens} tokens (rollout.max_tokens);"
                f" the conversation has {len(context)}"
            )
        turn = await self._policy.generate(context, limits)
        if self._closed:
            raise RequestRefused(f"session {self.id} has ended")
        # Nothing was recorded before this line: a request that was cancelled can be made again.
        (self.rollout.prompt if begins else self.rollout.give)(new)
        self.rollout.add(turn)
        self._context = context + turn.token_ids
        message = self._parser(turn.token_ids, self._tools)
        calls = message.get("tool_calls", [])
        self.rollout.tool_calls += len(calls)
        assert self._history is not None
        self._history.answer(list(turn.token_ids), for_template(message))
        self._known = [*compared, comparable(message)]
        reason = "tool_calls" if calls and turn.finish_reason == "stop" else turn.finish_reason
        self._reply = PolicyAnswer(message, reason, len(context), len(turn.token_ids))
        return self._reply

    def _take(self, messages: list[Message], compared: list[Message], tools: Tools | None) -> None:
        """Take new messages: a continuation, or a conversation of its own."""
        known, history = self._known, self._history
        count = len(known)
        waiting = history is not None and self._reply is None  # its request was cancelled
        follows = compared[:count] == known and len(compared) > count and tools == self._tools
        try:
            if history is not None and follows and not waiting:
                extension = history.extend([for_template(m) for m in messages[count:]])
                self._new = extension.starts_over, list(extension.token_ids)
            else:
                if self.rollout.turns and self._settings.history == "refuse":
                    raise HistoryError(
                        "the messages (or the tools) do not continue the conversation: its"
                        f" {count} messages must come first and as they were. With"
                        " rollout.history: split, what follows is trained as a sequence of its own"
                    )
                self._history = History(self._template, [for_template(m) for m in messages], tools)
                self._new = True, list(self._history.prompt)
        except HistoryError as e:
            self.failure = RolloutError("history", f"session {self.id}: {e}")
            raise RequestRefused(str(e)) from e
        self._tools, self._asked, self._reply = tools, compared, None

    def _use_up(self, what: str) -> NoReturn:
        self.used_up = True
        self.rollout.finish_reason = "length"
        raise RequestRefused(f"session {self.id} has used up {what}")
