"""Conversations of several turns under a chat template, exact to the token.

The policy's turns are the ids that the engine sampled; nothing of the history is encoded again.
What lies between two of its turns is encoded alone: the end of its turn, as far as it did not
sample it, the new messages, and the opening of its next turn. That text comes from a rendering in
which a sentinel stands for the policy's turn, so it does not matter how the template would have
written that turn.
"""

import json
import re
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

from jinja2 import TemplateError

Message = dict[str, Any]
Tools = list[dict[str, Any]]  # schemas in the form of OpenAI's chat interface
SENTINEL, THINKING, RESULT = "Turn7f3a91c0", "Thinking5d02be77", "Result19c4e6a2"
MARK = "\ufdd0"
"""Stands in a special token's text that a content has, to be encoded as plain text; a noncharacter
of Unicode, so no text has it."""
CALL_ENDS = ("<|eom_id|>", "<|eom|>")
"""A model may end a turn that calls a tool with these where its template writes another end."""
OPENED_THINKING = re.compile(r"<think>\s*(</think>\s*)?$")
REMEDY = (
    "set rollout.history: split, which trains what follows as a sequence of its own, or give the "
    "model a chat template that keeps them"
)


class HistoryError(ValueError):
    """The chat template changes earlier turns, or it cannot be used for several turns."""


@dataclass(frozen=True)
class Extension:
    """Tokens between two turns: after the exact ids so far, or the prompt of another sequence."""

    token_ids: list[int]
    starts_over: bool


class ChatTemplate:
    """A tokenizer's chat template, and what to do if it changes earlier turns.

    `think_start` opens thinking in each of the policy's turns, unless the template has opened it,
    as `PromptFormat` does.
    """

    def __init__(
        self,
        tokenizer: Any,
        rewriting: Literal["refuse", "split"] = "refuse",
        think_start: str = "",
    ) -> None:
        self.tokenizer, self.rewriting, self.think_start = tokenizer, rewriting, think_start
        added = tokenizer.added_tokens_decoder
        special = [re.escape(t.content) for t in added.values() if t.special and t.content]
        # Every place where one begins, those within another one too.
        self._special = re.compile(f"(?={'|'.join(special)})(.)", re.DOTALL) if special else None
        self.special_ids = {i for i, token in added.items() if token.special}
        self.call_ends = {i for i, token in added.items() if token.content in CALL_ENDS}

    def check(self, tools: Tools | None = None) -> None:
        """Try conversations with thinking: with tool calls if there are tools, else of user turns.

        Raises `HistoryError` as `History.extend` does.
        """
        thoughts: list[Message] = [{}]
        thoughts += [{"reasoning_content": THINKING}, {"content": f"<think>\n{THINKING}"}]
        for thinking in thoughts:
            history = History(self, [{"role": "user", "content": "Question."}], tools)
            for number in range(3):
                turn: Message = {"role": "assistant", "content": "Answer.", **thinking}
                if "content" in thinking:
                    turn["content"] += "\n</think>\n\nAnswer."
                answer: Message = {"role": "user", "content": f"{RESULT}{number}"}
                if tools:
                    name = tools[0].get("function", tools[0])["name"]
                    call_id = f"call0000{number}"
                    function = {"name": name, "arguments": {"sentinel": number}}
                    turn["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
                    answer |= {"role": "tool", "tool_call_id": call_id, "name": name}
                history.answer(self.encode("Answer."), turn)
                history.extend([answer])
                if f"{RESULT}{number}" not in self.text(history.messages, tools):
                    raise HistoryError(
                        f"the chat template leaves out the messages of the role {answer['role']!r} "
                        "that follow the policy's turn: give the model one that has them"
                    )

    def text(
        self, messages: list[Message], tools: Tools | None = None, *, opened: bool = True
    ) -> str:
        """Return the template's text of a conversation, with `MARK` in contents' special tokens.

        With `opened`, it ends with the opening of the policy's turn. HistoryError: it is refused.
        """
        shown = [self._shown(message) for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                shown, tools=tools or None, tokenize=False, add_generation_prompt=opened
            )
        except (TemplateError, TypeError) as e:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise HistoryError(
                f"the chat template refuses a conversation of the roles {roles}: {e}; give the "
                "model a chat template for such conversations"
            ) from e
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text: none is added, special tokens are known, `MARK` parts it."""
        encode = self.tokenizer.encode
        return [i for part in text.split(MARK) for i in encode(part, add_special_tokens=False)]

    def encode_opened(self, text: str) -> list[int]:
        """Return the ids of a text that opens the policy's turn, with thinking opened."""
        thinks = text.rstrip().endswith(self.think_start)
        return self.encode(text if thinks else text + self.think_start)

    def _shown(self, message: Message) -> Message:
        """Return a message as templates expect it: no null content, arguments as mappings.

        Special tokens' texts are parted by `MARK`, but not in the policy's own turns: templates
        look for the markers of thinking there.
        """
        shown = deepcopy(message)
        shown["content"] = "" if message.get("content") is None else shown["content"]
        for call in shown.get("tool_calls") or []:
            function = call.get("function", call)
            function["arguments"] = _mapping(function.get("arguments"))
        return shown if message.get("role") == "assistant" else self._safe(shown)

    def _safe(self, value: Any) -> Any:
        """Return a value whose strings have no text of a special token."""
        if isinstance(value, dict):
            return {key: self._safe(part) for key, part in value.items()}
        if isinstance(value, list):
            return [self._safe(part) for part in value]
        if not isinstance(value, str):
            return value
        text = value.replace(MARK, "")
        return self._special.sub(rf"\1{MARK}", text) if self._special else text


class History:
    """One conversation: the policy's turns by their ids, all else by messages.

    Raises `HistoryError` if the template refuses the first messages.
    """

    def __init__(
        self, template: ChatTemplate, messages: list[Message], tools: Tools | None = None
    ) -> None:
        self.template, self.tools = template, tools
        self.messages = list(messages)
        self.prompt = template.encode_opened(template.text(messages, tools))
        self._shown = list(messages)  # a turn that the template refuses is its text alone
        self._last: int | None = None
        self._open = True

    def answer(self, token_ids: list[int], message: Message) -> None:
        """Take the policy's turn: the ids as sampled, and the message that was parsed from them.

        Raises:
            HistoryError: the conversation awaits no turn of the policy.
        """
        if not self._open:
            raise HistoryError("the policy has had its turn: call extend before its next one")
        shown = message
        if message.get("tool_calls"):
            try:
                self.template.text([*self._shown, message], self.tools, opened=False)
            except HistoryError:  # as Llama 3's of two calls at once, which a policy may make
                text = self.template.tokenizer.decode(token_ids, skip_special_tokens=True)
                shown = {"role": "assistant", "content": text}
        self.messages.append(message)
        self._shown.append(shown)
        self._last = token_ids[-1] if token_ids else None
        self._open = False

    def extend(self, messages: list[Message]) -> Extension:
        """Return the tokens from the end of the policy's turn to the opening of its next one.

        Raises:
            HistoryError: the template changes earlier turns and history is `refuse`; it refuses
                the messages; or the policy has had no turn.
        """
        if self._open:
            raise HistoryError("the policy has had no turn: call answer before extend")
        full = self.template.text([*self._shown, *messages], self.tools)
        if change := self._change(full):
            if self.template.rewriting == "refuse":
                raise HistoryError(f"the chat template {change}: {REMEDY}")
            extension = Extension(self.template.encode_opened(full), starts_over=True)
        else:
            extension = Extension(self._glue(messages), starts_over=False)
        self.messages += messages
        self._shown += messages
        self._open = True
        return extension

    def _change(self, full: str) -> str:
        """Return how the template changes what came before new messages; empty if it does not."""
        # Rendered now, not kept from the last turn: a template may write the date.
        *before, turn = self._shown
        opened = self.template.text(before, self.tools)
        if not _thinks(turn):
            opened = OPENED_THINKING.sub("", opened)
        if not full.startswith(opened):
            return f"changes earlier turns when messages follow, {_difference(opened, full)}"
        if not _thinks(turn):
            # Some write an empty block of thinking into a last turn without any, and only there.
            return ""
        closed = self.template.text(self._shown, self.tools, opened=False)
        if not full.startswith(closed):
            return f"changes a turn with thinking, {_difference(closed, full)}"
        # Without its calls: some leave out all content of a turn that has them.
        alone = {key: value for key, value in turn.items() if key != "tool_calls"}
        text = self.template.text([*before, alone], self.tools, opened=False)
        thinking, end, _ = str(turn.get("content") or "").partition("</think>")
        if end and thinking.rpartition("<think>")[2].strip() not in text:
            return "removes the thinking of earlier turns"
        return ""

    def _glue(self, messages: list[Message]) -> list[int]:
        *before, turn = self._shown
        plain = {"role": "assistant", "content": SENTINEL}
        end = self._after([*before, plain], opened=False)
        if calls := turn.get("tool_calls"):
            # Kept, for templates that look up the call of a tool's result.
            calling = [*before, plain | {"tool_calls": calls}]
            closed = self._after(calling, opened=False, needed=False)
            text = self._after([*calling, *messages], opened=True, needed=False)
            if not text.startswith(closed):
                raise HistoryError(
                    "the chat template changes a turn with tool calls, "
                    f"{_difference(closed, text)}: give the model one that does not"
                )
            text = end + text.removeprefix(closed)
        else:
            text = self._after([*before, plain, *messages], opened=True)
        ids = self.template.encode_opened(text)
        special = self.template.special_ids
        for i, token in enumerate(ids[: len(self.template.encode(end))]):
            if token in special:  # the token that ends a turn
                ended = self._last == token or self._last in self.template.call_ends
                return ids[i + 1 :] if ended else ids
        return ids

    def _after(self, messages: list[Message], *, opened: bool, needed: bool = True) -> str:
        """Return the text after the sentinel; all of it if there is none and none is needed."""
        text = self.template.text(messages, self.tools, opened=opened)
        _, sentinel, after = text.rpartition(SENTINEL)
        if needed and not sentinel:
            raise HistoryError(
                "the chat template leaves out the content of the assistant's turn: give the model "
                "one that has it"
            )
        return after


def _mapping(arguments: Any) -> Any:
    """Return a call's arguments as a mapping, if they are JSON of one; else as they are."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _thinks(message: Message) -> bool:
    """Return whether a message has thinking, apart or in its content."""
    apart = message.get("reasoning_content") or message.get("reasoning")
    return bool(apart) or "</think>" in str(message.get("content") or "")


def _difference(before: str, after: str) -> str:
    """Return where two texts part."""
    at = next((i for i, c in enumerate(before) if c != after[i : i + 1]), len(before))
    return f"from {before[at : at + 40]!r} to {after[at : at + 40]!r}"
