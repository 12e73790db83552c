import re
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from megatron_rl.config import ConfigError, LookupTask, RunConfig
from megatron_rl.data import load_prompts, read_format
from megatron_rl.data.lookup import KEYS, demonstrations, lookup, make_split
from megatron_rl.data.prompt_format import TOKENS, save_tiny_tokenizer
from megatron_rl.data.prompts import demonstrations as demonstrations_of
from megatron_rl.rewards import Outcome
from megatron_rl.rewards.task_verifiers import make_verifier
from megatron_rl.rewards.verifier_settings import VerifierSettings

TASK = LookupTask(train_prompts=500, heldout_prompts=100)
CALL = '<tool_call>{"name": "lookup", "arguments": {"key": "4733"}}</tool_call>'
TURNS = [
    {"role": "user", "content": "2;4733?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "lookup", "arguments": {"key": "4733"}}}],
    },
    {"role": "tool", "name": "lookup", "content": "6550"},
    {"role": "assistant", "content": "\\boxed{6550}"},
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_tiny_tokenizer(tmp_path, tools=True)
    return tmp_path


def test_the_answer_is_the_key_that_the_lookups_lead_to() -> None:
    for question in make_split(TASK, 3)[0]:
        hops, key = question.prompt.rstrip("?").split(";")
        found = [key]
        for _ in range(int(hops)):
            found.append(lookup(found[-1]))
        assert {int(x) for x in found} <= {*KEYS}
        assert question.gold == found[-1]


def test_the_table_is_the_same_in_every_process_and_spreads_keys() -> None:
    assert (lookup("4733"), lookup("1000")) == ("6550", "3763")
    assert len({lookup(str(key)) for key in KEYS}) > 0.6 * len(KEYS)


def test_heldout_questions_are_unique_and_in_neither_stage() -> None:
    train, heldout = make_split(TASK, 3)
    prompts = {q.prompt for q in heldout}
    shown = {re.split(r"(?<=\?)", text[len("<bos>") :])[0] for text, _ in demonstrate()}
    assert len(prompts) == 100
    assert len({q.prompt for q in train}) == 500
    assert shown <= {q.prompt for q in train}
    assert not prompts & {q.prompt for q in train}
    tasks = {
        "first": TASK.model_copy(update={"seed": 1}),
        "second": TASK.model_copy(update={"seed": 2, "heldout_prompts": 4000}),
    }
    config = RunConfig.model_validate({"tasks": tasks, "sft": {"prompts": 200}})
    other = tuple("<bos>" + q.prompt for q in make_split(tasks["second"], 2)[1])
    assert not [prompt for prompt, _ in demonstrations_of(config) if prompt.startswith(other)]


def test_more_questions_than_there_are_is_an_error_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"has 9000 questions.*= 9001: lower them"):
        make_split(LookupTask(hops=(2, 2), train_prompts=9000, heldout_prompts=1), 3)
    with pytest.raises(ValueError, match="fewest, then the most"):
        LookupTask(hops=(3, 2))
    with pytest.raises(ValueError, match="tools is empty"):
        LookupTask(tools=())


def test_demonstrations_often_stop_too_early_and_never_copy_wrongly() -> None:
    verify = make_verifier("math", VerifierSettings())
    questions = {q.prompt: q for q in make_split(TASK, 3)[0]}
    outcomes: Counter[Outcome] = Counter()
    for prompt, completion in demonstrate():
        asked, _, turns = prompt.removeprefix("<bos>").partition("?")
        known = re.findall(r"\d{4}", turns or asked)[-1]
        assert re.findall(r"\d+", completion) == [known]
        if completion.startswith("\\boxed{"):
            question = questions[asked + "?"]
            outcomes[verify(completion, question.gold, question.meta).outcome] += 1
    assert outcomes.total() == 1000
    assert set(outcomes) == {Outcome.CORRECT, Outcome.WRONG}
    assert 0.2 < outcomes[Outcome.CORRECT] / 1000 < 0.33


def test_turns_survive_tokenizer_and_template(directory: Path) -> None:
    from transformers import AutoTokenizer
    from transformers.utils import get_json_schema

    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    for prompt, completion in demonstrate(50):
        ids = tokenizer.encode(prompt + completion, add_special_tokens=False)
        assert tokenizer.unk_token_id not in ids
        assert max(ids) < 32
        assert "".join(tokenizer.convert_ids_to_tokens(ids)) == prompt + completion
        assert len(tokenizer.encode(completion, add_special_tokens=False)) == 7
    template, schema = tokenizer.apply_chat_template, get_json_schema(lookup)
    texts = [template(TURNS[:n], tools=[schema], tokenize=False) for n in (1, 2, 3, 4)]
    assert texts[3] == f"{texts[2]}\\boxed{{6550}}<eos>"
    assert texts[2] == f"{texts[1]}<tool_response>6550</tool_response>"
    assert texts[1] == f"{texts[0]}{CALL}<eos>"
    assert texts[0] == "<bos>2;4733?"


def test_a_run_without_tools_has_the_same_ids_and_no_template(tmp_path: Path) -> None:
    vocabulary = {}
    for tools in (False, True):
        (folder := tmp_path / str(tools)).mkdir()
        save_tiny_tokenizer(folder, tools)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        vocabulary[tools] = tokenizer.get_vocab()
        assert (folder / "chat_template.jinja").exists() == tools
    assert vocabulary[False] == {token: i for i, token in enumerate(TOKENS)}
    assert vocabulary[False].items() < vocabulary[True].items()
    assert sorted(vocabulary[True].values()) == list(range(29))


def test_prompts_are_the_questions_alone(directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    config = RunConfig.model_validate({"task": TASK, "schedule": {"prompts_per_step": 4}})
    prompts = load_prompts(config, tokenizer, read_format(directory, think_start=""))
    assert {len(p.token_ids) for p in prompts.train} == {8}
    assert prompts.train[0].text == "<bos>" + make_split(TASK, config.seed)[0][0].prompt


def demonstrate(count: int = 500) -> list[tuple[str, str]]:
    return list(demonstrations(TASK, 3, count, 2))
