"""From the tasks of a configuration to tokenized prompts, training and held-out ones."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.data import load_prompts, read_format
from megatron_rl.data.prompt_format import PromptFormat, save_tiny_tokenizer
from megatron_rl.data.prompts import demonstrations
from megatron_rl.data.question import DataError

STEP = {"prompts_per_step": 2}
TWO = {
    "sums": {"kind": "arithmetic", "products": "none"},
    "products": {"kind": "arithmetic", "products": "one"},
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    save_tiny_tokenizer(tmp_path)
    return Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


def maths(folder: Path, rows: int = 30) -> Path:
    path = folder / "maths.jsonl"
    lines = [{"question": f"{i}+{i}=?", "answer": str(2 * i), "source": "x"} for i in range(rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def config(tmp_path: Path, **values: Any) -> RunConfig:
    return RunConfig(schedule=STEP, start_checkpoint=tmp_path, **values)


def data_set(tmp_path: Path, **values: Any) -> RunConfig:
    task = {"kind": "jsonl", "path": maths(tmp_path), "template": "{prompt}", "heldout_prompts": 5}
    return config(tmp_path, task=task | values)


def test_the_prompts_of_each_task_stand_together_with_ids_over_all(tokenizer: Tokenizer) -> None:
    shared = {"train_prompts": 10, "heldout_prompts": 4}
    both = RunConfig(task=shared, tasks=TWO, schedule=STEP)
    prompts = load_prompts(both, tokenizer)
    assert [p.id for p in prompts.train] == list(range(20))
    assert [p.id for p in prompts.heldout] == list(range(8))
    assert [p.task for p in prompts.train] == ["sums"] * 10 + ["products"] * 10
    assert prompts.sizes == {"sums": 10, "products": 10}
    assert prompts.verifiers == ["exact"]
    assert {p.text[-len("<think>") :] for p in prompts.train} == {"<think>"}


def test_a_task_is_the_same_alone_and_in_a_mixture(tokenizer: Tokenizer) -> None:
    shared = {"train_prompts": 10, "heldout_prompts": 4}
    both = RunConfig(task=shared, tasks=TWO, schedule=STEP)
    alone = RunConfig(task={**TWO["products"], **shared}, schedule=STEP)
    first, second = load_prompts(both, tokenizer), load_prompts(alone, tokenizer)
    assert [p.text for p in first.heldout[4:]] == [p.text for p in second.heldout]
    assert first.fingerprint != second.fingerprint


def test_heldout_questions_of_a_data_set_are_set_apart_by_the_seed(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    def texts(seed: int) -> tuple[set[str], set[str]]:
        prompts = load_prompts(data_set(tmp_path, seed=seed), tokenizer)
        return {p.text for p in prompts.train}, {p.text for p in prompts.heldout}

    train, heldout = texts(1)
    assert (len(train), len(heldout)) == (25, 5)
    assert not train & heldout
    assert texts(1) == (train, heldout)
    assert texts(2)[1] != heldout


def test_a_heldout_set_of_its_own_is_never_trained_on(tmp_path: Path, tokenizer: Tokenizer) -> None:
    own = tmp_path / "held.jsonl"
    # The second one is in the training set as well.
    rows = [{"question": "77+1=?", "answer": "78"}, {"question": "3+3=?", "answer": "6"}]
    own.write_text("".join(json.dumps(r) + "\n" for r in rows))
    prompts = load_prompts(data_set(tmp_path, heldout=str(own), train_prompts=20), tokenizer)
    assert [p.question.gold for p in prompts.heldout] == ["78", "6"]
    assert len(prompts.train) == 20
    assert "<bos>3+3=?<think>" not in {p.text for p in prompts.train}
    with pytest.raises(DataError, match="evaluation set 'nowhere' is unknown"):
        load_prompts(data_set(tmp_path, heldout="nowhere"), tokenizer)


def test_rows_carry_verifier_and_meta(tmp_path: Path, tokenizer: Tokenizer) -> None:
    c = data_set(tmp_path, verifier="tests.rewards.custom_rewards:even", meta_fields=("source",))
    prompts = load_prompts(c, tokenizer)
    assert prompts.verifiers == ["tests.rewards.custom_rewards:even"]
    assert prompts.train[0].question.meta == {"source": "x"}
    exact = load_prompts(data_set(tmp_path, verifier="exact"), tokenizer)
    assert exact.train[0].question.meta == {"eos": "<eos>"}


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"template": "what is {prompt}"}, ConfigError, "task: question .* does not know"),
        ({"heldout_prompts": 30}, DataError, "leave none to train on; lower heldout_prompts"),
        ({"path": Path("nowhere.jsonl")}, DataError, r"nowhere\.jsonl: no such file"),
        ({"answer_field": "gold"}, DataError, r"no answer \(gold\)"),
        ({"heldout_prompts": 29}, ConfigError, "prompts_per_step is 2: the tasks have 1"),
    ],
)
def test_data_that_cannot_be_used_are_named(
    tmp_path: Path,
    tokenizer: Tokenizer,
    values: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        load_prompts(data_set(tmp_path, **values), tokenizer)


def test_long_prompts_are_refused_or_left_out(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    def short(**values: Any) -> RunConfig:
        return RunConfig.model_validate(
            data_set(tmp_path, **values).model_dump() | {"generation": {"max_prompt_tokens": 7}}
        )

    # `<bos>5+5=?<think>` has 7 tokens, with two digits it has 9.
    with pytest.raises(ConfigError, match=r"max_prompt_tokens is 7.*task\.drop_long_prompts"):
        load_prompts(short(), tokenizer)
    kept = load_prompts(short(drop_long_prompts=True), tokenizer)
    assert 0 < len(kept.train) <= 10
    dropped, part = 25 - len(kept.train), 5 - len(kept.heldout)
    reason = "dropped, longer than generation.max_prompt_tokens = 7"
    assert capsys.readouterr().err.splitlines() == [
        f"task: {dropped} of 25 train prompts {reason}",
        f"task: {part} of 5 heldout prompts {reason}",
    ]
    assert [p.id for p in kept.train] == list(range(len(kept.train)))


def test_demonstrations_are_in_the_shares_of_the_tasks(tokenizer: Tokenizer) -> None:
    c = RunConfig(
        tasks={"sums": {"weight": 3.0, **TWO["sums"]}, "products": TWO["products"]},
        sft={"prompts": 40, "demonstrations_per_prompt": 2},
    )
    made = Counter("*" in prompt for prompt, _ in demonstrations(c))
    assert made == {False: 60, True: 20}


def test_what_one_task_holds_out_no_other_trains_on(tokenizer: Tokenizer) -> None:
    # Two tasks of one kind: of 154 expressions of two operands both hold out 40.
    same = {"kind": "arithmetic", "operand_weights": [1.0], "train_prompts": 300}
    tasks = {"a": {**same, "seed": 1}, "b": {**same, "seed": 2}}
    c = RunConfig(task={"heldout_prompts": 40}, tasks=tasks, schedule=STEP, sft={"prompts": 300})
    prompts = load_prompts(c, tokenizer)
    heldout = {p.text for p in prompts.heldout}
    assert len(heldout) > 40
    assert not heldout & {p.text for p in prompts.train}
    assert not heldout & {prompt for prompt, _ in demonstrations(c)}
    assert [p.id for p in prompts.train] == list(range(len(prompts.train)))


def test_a_prompt_ends_with_the_marker_that_opens_thinking() -> None:
    def chat(opening: str) -> Any:
        return lambda turns: (
            "".join(f"<{t['role']}>{t['content']}" for t in turns) + (f"<assistant>{opening}")
        )

    assert PromptFormat()("1+1=?") == "<bos>1+1=?<think>"
    opened = PromptFormat(chat=chat("\n<think>\n"))
    assert opened("1+1=?") == "<user>1+1=?<assistant>\n<think>\n"  # as the model knows it
    closed = PromptFormat(chat=chat("\n"))
    assert closed("1+1=?") == "<user>1+1=?<assistant>\n<think>"
    thoughtless = PromptFormat(think_start="", chat=chat("\n\n"))
    assert thoughtless("1+1=?") == "<user>1+1=?<assistant>\n\n"


def test_the_format_is_the_models_own(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    form = read_format(tmp_path, "<think>")
    assert (form.bos, form.eos, form.chat) == ("<bos>", "<eos>", None)
    path = tmp_path / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {
        "chat_template": "{{ bos_token }}{% for m in messages %}({{ m.content }}){% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    }
    path.write_text(json.dumps(settings))
    assert read_format(tmp_path, "<think>")("1+1") == "<bos>(1+1)=<think>"


def test_without_a_chat_template_the_tokenizer_decides_on_the_first_token(tmp_path: Path) -> None:
    def first(adds: bool | None, opening: str | None, **settings: Any) -> str:
        path = tmp_path / "tokenizer.json"
        save_tiny_tokenizer(tmp_path)
        if opening is not None:
            tokenizer = Tokenizer.from_file(str(path))
            tokens = [(opening, tokenizer.token_to_id(opening))]
            tokenizer.post_processor = TemplateProcessing(f"{opening} $A", special_tokens=tokens)
            tokenizer.save(str(path))
        values = {"bos_token": "<bos>", **settings} | (
            {} if adds is None else {"add_bos_token": adds}
        )
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(values))
        return read_format(tmp_path, "")("1+1")

    assert first(None, None) == "1+1"  # it names a token, and adds none
    assert first(None, "<bos>") == "<bos>1+1"
    assert first(None, "<pad>", bos_token=None) == "<pad>1+1"
    assert first(False, "<bos>") == "1+1"
    assert first(True, None) == "<bos>1+1"
    assert first(True, None, bos_token={"content": "<bos>"}) == "<bos>1+1"
    assert first(None, "<bos>", chat_template="{{ bos_token }}({{ messages[0].content }})") == (
        "<bos>(1+1)"
    )


def test_evaluation_sets_have_prompts_of_their_own_with_a_warning_of_overlaps(
    tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": f"{i}+{i}=?", "answer": str(2 * i), "kind": "exact"} for i in (0, 7, 50)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = {name: {"source": str(path), "every_steps": 5} for name in ("first", "second")}
    values = data_set(tmp_path, heldout_prompts=5).model_dump()
    both = RunConfig.model_validate(values | {"evaluation": {"sets": sets}})
    plain, prompts = load_prompts(data_set(tmp_path), tokenizer), load_prompts(both, tokenizer)
    assert (prompts.train, prompts.heldout) == (plain.train, plain.heldout)
    assert prompts.fingerprint == plain.fingerprint  # a set may be new in a resumed run
    assert [p.id for p in prompts.evaluated] == list(range(5 + 3 + 3))
    assert [p.text for p in prompts.sets["second"]] == [
        f"<bos>{row['prompt']}<think>" for row in rows
    ]
    assert {p.task for p in prompts.sets["second"]} == {"second"}
    assert prompts.verifiers == ["exact", "math"]
    assert prompts.set_fingerprints["first"] == prompts.set_fingerprints["second"]
    trained = {p.text for p in prompts.train} & {p.text for p in prompts.sets["first"]}
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2 and trained
    assert f"evaluation.sets.first: {len(trained)} of 25 training prompts of task ov" in warnings[0]
    assert f"--against {path}" in warnings[0]
    # Without an overlap there is no warning; a prompt that is too long is an error of the set.
    path.write_text(json.dumps({"prompt": "12345-6789=?", "answer": "1", "kind": "exact"}) + "\n")
    load_prompts(both, tokenizer)
    assert capsys.readouterr().err == ""
    short = {"generation": {"max_prompt_tokens": 9}}
    with pytest.raises(ConfigError, match=r"evaluation.sets.first has 14 tokens; raise it$"):
        load_prompts(RunConfig.model_validate(both.model_dump() | short), tokenizer)
