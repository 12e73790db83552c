"""Conversations of several turns: exact prefixes, the template's own text, rewriting noticed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.data.prompt_format import save_tiny_tokenizer
from megatron_rl.rollouts.chat import MARK, ChatTemplate, History, HistoryError
from tests.rollouts import templates

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}},
    }
]
ENDS = {"llama3": "<|eot_id|>", "llama4": "<|eot|>", "qwen3": "<|im_end|>", "smollm2": "<|im_end|>"}
BETWEEN = {"llama3": "", "llama4": "", "qwen3": "\n", "smollm2": "\n"}
QUESTION = {"role": "user", "content": "the question"}
markup = st.sampled_from(
    [
        "<|im_end|>\n<|im_start|>user\n",
        "<|eot_id|>",
        "<|eot|>",
        "<|begin|>",
        "<tool_call>",
        "{{ x }}",
    ]
)


def joined(characters: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    parts = st.text(characters, max_size=5) | markup | st.sampled_from([" ", "\n", "é🙂"])
    return st.lists(parts, max_size=4).map(lambda p: "".join(p).replace(MARK, "").strip())


texts = joined(st.characters(codec="utf-8"))
latin = joined(st.characters(codec="latin-1", exclude_categories=["Cc"]))
"""SmolLM2 has no tokens for some bytes."""
tokenizer = cache(templates.tokenizer)


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {"id": "call00000", "type": "function", "function": function}


@st.composite
def turns(
    draw: st.DrawFn, texts: st.SearchStrategy[str] = texts
) -> list[tuple[list[int], str, dict[str, Any], list[dict[str, Any]]]]:
    """Draw turns of the policy: random ids, how they end, the message, and what answers it."""
    made = []
    for _ in range(draw(st.integers(1, 3))):
        ids = draw(st.lists(st.integers(0, 255), max_size=6))
        message: dict[str, Any] = {"role": "assistant", "content": draw(texts)}
        answers = [{"role": "user", "content": draw(texts)}]
        if draw(st.booleans()):
            message["tool_calls"] = [
                call(draw(st.sampled_from(['{"a":  1}', {"a": "x"}, "broken"])))
                for _ in range(draw(st.integers(1, 2)))
            ]
            answers = [{"role": "tool", "content": draw(texts)} for _ in message["tool_calls"]]
        made.append((ids, draw(st.sampled_from(["end", "call", "cut"])), message, answers))
    return made


def expected(name: str, answers: list[dict[str, Any]]) -> str:
    """Return what these templates write after the token that ends a turn."""
    if name.startswith("llama"):
        start, end, stop = (*templates.SPECIAL[name][:2], ENDS[name])
        roles = [(a["role"].replace("tool", "ipython"), a["content"]) for a in answers]
        text = "".join(f"{start}{role}{end}\n\n{content}{stop}" for role, content in roles)
        return f"{text}{start}assistant{end}\n\n"
    if name == "qwen3" and answers[0]["role"] == "tool":
        results = [f"\n<tool_response>\n{a['content']}\n</tool_response>" for a in answers]
        text = f"<|im_start|>user{''.join(results)}<|im_end|>\n"
    else:
        text = "".join(f"<|im_start|>{a['role']}\n{a['content']}<|im_end|>\n" for a in answers)
    return f"{text}<|im_start|>assistant\n"


def converse(name: str, words: Any, conversation: list[Any], system: str) -> None:
    template = ChatTemplate(words)
    messages = [{"role": "system", "content": system}, QUESTION]
    history = History(template, messages, TOOLS)
    sequence = list(history.prompt)
    assert words.decode(sequence) == template.text(messages, TOOLS).replace(MARK, "")
    specials = {i for i, token in words.added_tokens_decoder.items() if token.special}
    end = words.convert_tokens_to_ids(ENDS[name])
    ends = {end}
    if name.startswith("llama"):
        ends.add(words.convert_tokens_to_ids(templates.SPECIAL[name][3]))
    for sampled, ending, message, answers in conversation:
        ids = [*sampled, end] if ending == "end" else list(sampled)
        if ending == "call" and name.startswith("llama"):
            ids.append(words.convert_tokens_to_ids(templates.SPECIAL[name][3]))
        closed = bool(ids) and ids[-1] in ends
        history.answer(ids, message)
        extension = history.extend(answers)
        assert not extension.starts_over
        text = BETWEEN[name] + expected(name, answers)
        assert words.decode(extension.token_ids) == ("" if closed else ENDS[name]) + text
        # Markers are the template's alone: contents that have their text do not get their ids.
        plain = [{**answer, "content": "x"} for answer in answers]
        markers = words.encode(
            ("" if closed else ENDS[name]) + BETWEEN[name] + expected(name, plain),
            add_special_tokens=False,
        )
        kept = [i for i in extension.token_ids if i in specials]
        assert kept == [i for i in markers if i in specials]
        sequence += ids + extension.token_ids
    if name.startswith("llama"):
        assert sequence.count(words.bos_token_id) == 1
        assert sequence[0] == words.bos_token_id
    assert history.messages[:2] == messages
    assert len(history.messages) == 2 + sum(1 + len(a) for *_, a in conversation)


@pytest.mark.parametrize("name", ["llama3", "llama4", "qwen3"])
@settings(max_examples=60, deadline=None)
@given(conversation=turns(), system=texts)
def test_extensions_are_the_templates_text_after_the_exact_ids(
    name: str, conversation: list[Any], system: str
) -> None:
    converse(name, tokenizer(name), conversation, system)


def test_extensions_of_smollm2(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(str(smollm2))

    @settings(max_examples=40, deadline=None)
    @given(conversation=turns(latin), system=latin)
    def every(conversation: list[Any], system: str) -> None:
        converse("smollm2", words, conversation, system)

    every()
    ChatTemplate(words).check()


def thinking(form: str) -> dict[str, Any]:
    if form == "apart":
        return {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    return {"role": "assistant", "content": "<think>\nhm\n</think>\n\nso"}


@pytest.mark.parametrize("form", ["apart", "in the content"])
@pytest.mark.parametrize("name", ["qwen3", "deepseek"])
def test_removed_thinking_is_refused_or_starts_over(name: str, form: str) -> None:
    follow = [{"role": "user", "content": "and <|im_end|> now"}]
    history = History(ChatTemplate(tokenizer(name)), [QUESTION])
    history.answer([5, 6], thinking(form))
    with pytest.raises(HistoryError, match=r"chat template.*rollout\.history: split"):
        history.extend(follow)

    template = ChatTemplate(tokenizer(name), "split")
    history = History(template, [QUESTION])
    history.answer([5, 6], thinking(form))
    extension = history.extend(follow)
    assert extension.starts_over
    text = template.text([QUESTION, thinking(form), *follow])
    assert extension.token_ids == template.encode(text)
    assert "hm" not in text
    history.answer([7], {"role": "assistant", "content": "yes"})
    assert history.extend(follow).starts_over is False


@settings(max_examples=60, deadline=None)
@given(conversation=turns(), thoughtful=st.lists(st.booleans(), min_size=3, max_size=3))
def test_a_sequence_starts_over_only_where_thinking_is_removed(
    conversation: list[Any], thoughtful: list[bool]
) -> None:
    template = ChatTemplate(tokenizer("qwen3"), "split")
    history = History(template, [QUESTION], TOOLS)
    lost = False
    for (ids, _, message, answers), thinks in zip(conversation, thoughtful, strict=False):
        history.answer(ids, message | ({"reasoning_content": "hm"} if thinks else {}))
        extension = history.extend(answers)
        lost = lost or thinks
        asks = answers[0]["role"] == "user"
        assert extension.starts_over == (lost and asks)
        lost = lost and not asks
        if extension.starts_over:
            text = template.text(history.messages, TOOLS)
            assert extension.token_ids == template.encode(text)
        else:
            text = "<|im_end|>\n" + expected("qwen3", answers)
            assert template.tokenizer.decode(extension.token_ids) == text


def test_thinking_is_kept_between_tool_calls_and_lost_after_the_next_question() -> None:
    history = History(ChatTemplate(tokenizer("qwen3")), [QUESTION], TOOLS)
    for _ in range(2):
        history.answer([5], thinking("apart") | {"tool_calls": [call({"a": 1})]})
        assert not history.extend([{"role": "tool", "content": "2"}]).starts_over
    history.answer([5], {"role": "assistant", "content": "so"})
    with pytest.raises(HistoryError, match="changes earlier turns"):
        history.extend([QUESTION])


@pytest.mark.parametrize(
    ("name", "tools", "kept"),
    [
        ("llama3", None, True),
        ("llama3", TOOLS, True),
        ("llama4", TOOLS, True),
        ("qwen3", TOOLS, True),
        ("qwen3", None, False),
        ("deepseek", None, False),
        ("deepseek", TOOLS, False),
    ],
)
def test_check_refuses_the_templates_that_change_history(name: str, tools: Any, kept: bool) -> None:
    ChatTemplate(tokenizer(name), "split").check(tools)
    if kept:
        ChatTemplate(tokenizer(name)).check(tools)
    else:
        with pytest.raises(HistoryError, match=r"rollout\.history"):
            ChatTemplate(tokenizer(name)).check(tools)


def test_check_refuses_a_template_without_results_of_tools() -> None:
    words = templates.tokenizer("qwen3")
    words.chat_template = words.chat_template.replace("'tool'", "'ipython'")
    with pytest.raises(HistoryError, match="leaves out the messages of the role 'tool'"):
        ChatTemplate(words).check(TOOLS)


def test_turns_alternate_and_what_the_template_refuses_is_named() -> None:
    words = templates.tokenizer("llama3")
    history = History(ChatTemplate(words), [QUESTION])
    with pytest.raises(HistoryError, match="call answer"):
        history.extend([QUESTION])
    history.answer([5], {"role": "assistant", "content": None})
    with pytest.raises(HistoryError, match="call extend"):
        history.answer([5], {"role": "assistant", "content": ""})
    words.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(HistoryError, match="refuses a conversation of the roles user, assist"):
        history.extend([QUESTION])


def test_a_truncated_turn_gets_its_end_whatever_token_it_stopped_at() -> None:
    words = tokenizer("qwen3")
    (newline,) = words.encode("\n")
    history = History(ChatTemplate(words), [QUESTION])
    history.answer([5, newline], {"role": "assistant", "content": "x"})
    text = "<|im_end|>\n" + expected("qwen3", [QUESTION])
    assert words.decode(history.extend([QUESTION]).token_ids) == text


@pytest.mark.parametrize("name", ["qwen3", "deepseek"])
def test_every_turn_of_the_policy_opens_thinking_once(name: str) -> None:
    words = tokenizer(name)
    think = words.convert_tokens_to_ids("<think>")
    history = History(ChatTemplate(words, think_start="<think>"), [QUESTION])
    history.answer([5], {"role": "assistant", "content": "cut"})
    assert history.prompt.count(think) == 1
    assert history.extend([QUESTION]).token_ids.count(think) == 1


def test_the_tiny_models_call_their_tool(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    save_tiny_tokenizer(tmp_path, tools=True)
    words = AutoTokenizer.from_pretrained(str(tmp_path))
    template = ChatTemplate(words, think_start="<think>")
    template.check(TOOLS)
    history = History(template, [{"role": "user", "content": "2+3=?"}], TOOLS)
    assert words.decode(history.prompt) == "<bos>2+3=?<think>"
    eos = words.convert_tokens_to_ids("<eos>")
    history.answer([7, eos], {"role": "assistant", "content": None, "tool_calls": [call("{}")]})
    ids = history.extend([{"role": "tool", "content": "5"}]).token_ids
    assert words.decode(ids) == "<tool_response>5</tool_response><think>"


def test_thinking_that_the_template_never_shows_is_noticed() -> None:
    words = templates.tokenizer("deepseek")
    words.chat_template = words.chat_template.replace("<think>\\n' }}", "' }}")
    history = History(ChatTemplate(words), [QUESTION])
    history.answer([5], thinking("in the content"))
    with pytest.raises(HistoryError, match="removes the thinking"):
        history.extend([QUESTION])


def test_a_result_follows_its_call_whose_arguments_are_a_mapping() -> None:
    words = templates.tokenizer("qwen3")
    looked_up = "messages[loop.index0 - 1].tool_calls[0].function.arguments.key ~ message.content"
    words.chat_template = words.chat_template.replace(
        "<tool_response>\\n' ~ message.content", f"<tool_response>\\n' ~ {looked_up}"
    )
    history = History(ChatTemplate(words), [QUESTION], TOOLS)
    message = {"role": "assistant", "content": "", "tool_calls": [call('{"key": "k"}')]}
    history.answer([5], message)
    ids = history.extend([{"role": "tool", "content": "5"}]).token_ids
    text = expected("qwen3", [{"role": "tool", "content": "k5"}])
    assert words.decode(ids) == f"<|im_end|>\n{text}"
    assert message["tool_calls"] == [call('{"key": "k"}')]
