"""Examples of the supervised stage: forms of rows, masks, order, drops, positions."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.data import examples as module
from megatron_rl.data.examples import Example, Examples, Position
from megatron_rl.data.question import DataError
from tests.trainer.sft_cases import (
    as_row,
    conversations,
    save_byte_tokenizer,
    sft_config,
    write_rows,
)

CONVERSATIONS = conversations()
ROWS = [as_row(turns) for turns in CONVERSATIONS]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_byte_tokenizer(tmp_path)
    return tmp_path


def examples(model: Path, rows: list[dict[str, Any]] | Path, **overrides: Any) -> Examples:
    source = rows if isinstance(rows, Path) else write_rows(model / "rows.jsonl", rows)
    return Examples(sft_config(model, source, **overrides), model)


def flat(steps: list[tuple[list[Example], Position]]) -> list[Example]:
    return [example for step, _ in steps for example in step]


def epoch(stream: Examples, number: int = 0) -> list[Example]:
    """Return the examples of one epoch, in order."""
    out = []
    for example, position in stream._examples(Position(epoch=number)):
        if position.epoch > number:
            break
        out.append(example)
    return out


def test_prompt_and_completion_are_the_chat_template_of_the_conversation(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    wanted = []
    for turns in CONVERSATIONS:
        whole = tokenizer.apply_chat_template(turns, tokenize=False)
        end = whole.rindex("<assistant>") + len("<assistant>")
        ids = [tokenizer(t, add_special_tokens=False).input_ids for t in (whole[:end], whole[end:])]
        assert ids[1][-1] == tokenizer.eos_token_id
        wanted.append(tuple(ids))
    made = epoch(examples(model, ROWS))
    assert sorted(made) == sorted(wanted)
    assert made != wanted  # shuffled


def test_all_forms_and_files_of_a_row_give_the_same_examples(model: Path) -> None:
    import datasets

    first = epoch(examples(model, ROWS))
    complete = [{"messages": turns} for turns in CONVERSATIONS]
    halves = [{"prompt": t[:-1], "completion": t[-1:]} for t in CONVERSATIONS]
    named = [{"p": t[:-1], "r": t[-1]["content"], "answer": "7"} for t in CONVERSATIONS]
    datasets.Dataset.from_list(complete).to_parquet(model / "rows.parquet")
    datasets.Dataset.from_list(halves).save_to_disk(str(model / "saved"))
    (model / "folder").mkdir()
    write_rows(model / "folder" / "train-1.jsonl", ROWS[:10])
    write_rows(model / "folder" / "train-2.jsonl", ROWS[10:])
    fields = {"sft__prompt_field": "p", "sft__response_field": "r"}
    for form, options in (
        *((complete, {}), (halves, {}), (named, fields)),
        *((model / "rows.parquet", {}), (model / "saved", {}), (model / "folder", {})),
    ):
        assert epoch(examples(model, form, **options)) == first, form


def test_thinking_that_the_prompt_has_opened_is_not_opened_again(model: Path) -> None:
    rows = [{"prompt": "1+1=?", "response": r} for r in ("<think>\nx</think>2", "\nx</think>2")]
    for start, opened in (("<think>", True), ("", False)):
        stream = examples(model, rows, generation__think_start=start)
        texts = {
            tuple(stream._tokenizer.decode(part, skip_special_tokens=False) for part in example)
            for example in epoch(stream)
        }
        prompt = f"<bos><user>1+1=?<assistant>{start}"
        completions = {"\nx</think>2<eos>", "<think>\nx</think>2<eos>"}
        assert texts == {(prompt, c) for c in completions if not (opened and "<think>" in c)}


def test_each_epoch_has_every_row_once_in_its_own_order_whatever_the_window(model: Path) -> None:
    for window in (1, 5, 100):
        stream = examples(model, ROWS, sft__shuffle_rows=window)
        first, second = epoch(stream), epoch(stream, 1)
        assert sorted(first) == sorted(second)
        assert len(first) == len(ROWS)
        assert first != second, window
    assert first != epoch(examples(model, ROWS, seed=5))


def test_rows_are_read_as_they_are_needed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, rows_of = [], module.read_rows
    monkeypatch.setattr(module, "read_rows", lambda s: (read.append(r) or r for r in rows_of(s)))
    stream = examples(model, ROWS * 100, sft__shuffle_rows=50)
    assert next(stream.steps(Position()))[0]
    assert len(read) == 50 + module.ENCODED_ROWS


def test_a_step_is_full_and_a_row_that_did_not_fit_begins_the_next(model: Path) -> None:
    stream = examples(model, ROWS, sft__tokens_per_step=100)
    steps = list(islice(stream.steps(Position()), 8))
    sizes = [[len(p) + len(c) for p, c in step] for step, _ in steps]
    assert all(sum(step) <= 100 for step in sizes)
    for step, after in pairwise(sizes):
        assert sum(step) + after[0] > 100
    alone = examples(model, ROWS, sft__tokens_per_step=1)
    assert [len(step) for step, _ in islice(alone.steps(Position()), 4)] == [1] * 4


def test_steps_continue_from_every_position(model: Path) -> None:
    options = {"sft__shuffle_rows": 7, "sft__max_sequence_tokens": 50}
    steps = list(islice(examples(model, ROWS, **options).steps(Position()), 12))
    assert steps[-1][1].epoch > 0
    for i, (_, position) in enumerate(steps[:-1]):
        position = Position(**json.loads(json.dumps(asdict(position))))
        again = examples(model, ROWS, **options).steps(position)
        assert list(islice(again, 11 - i)) == steps[i + 1 :], i


def test_other_rows_than_those_of_the_checkpoint_are_refused(model: Path) -> None:
    _, position = next(examples(model, ROWS).steps(Position()))
    changed = [{**ROWS[0], "response": "other"}, *ROWS[1:]]
    for rows, options in ((changed, {}), (ROWS[:1], {}), (ROWS, {"seed": 5})):
        with pytest.raises(DataError, match=r"rows\.jsonl: its rows.*not those of the checkpoint"):
            next(examples(model, rows, **options).steps(position))


def test_long_rows_are_dropped_and_counted(model: Path) -> None:
    lengths = [len(p) + len(c) for p, c in epoch(examples(model, ROWS))]
    limit = sorted(lengths)[10]
    stream = examples(model, ROWS, sft__max_sequence_tokens=limit)
    kept = epoch(stream)
    assert len(kept) == sum(n <= limit for n in lengths)
    *_, (_, position) = islice(stream._examples(Position()), len(kept) + 1)
    assert position.dropped["long"] >= len(ROWS) - len(kept)
    with pytest.raises(DataError, match=r"no row is within sft\.max_sequence_tokens = 3; dropped"):
        next(examples(model, ROWS, sft__max_sequence_tokens=3).steps(Position()))


HELD_OUT = "Find the number of ways to seat five guests at a round table with nine chairs."


def test_rows_that_overlap_with_held_out_questions_are_dropped(model: Path) -> None:
    write_rows(model / "set.jsonl", [{"problem": HELD_OUT, "answer": "7"}])
    write_rows(model / "task.jsonl", [{"problem": f"{HELD_OUT} Twice.", "answer": "7"}])
    copies = [
        {"prompt": f"Please solve: {HELD_OUT.upper()}", "response": "12"},
        {"messages": [{"role": "system", "content": "s"}, *CONVERSATIONS[0]]},
        {"prompt": "2+2=?", "response": "4"},
    ]
    write_rows(model / "all.jsonl", [{"problem": f"Question {i}", "answer": "7"} for i in range(9)])
    task = {"kind": "jsonl", "path": str(model / "all.jsonl"), "heldout_prompts": 1,
            "heldout": str(model / "task.jsonl")}  # fmt: skip
    against = {"sft__against": [str(model / "set.jsonl")]}
    clean = examples(model, copies)
    assert len(epoch(clean)) == 3
    stream = examples(model, copies, **against)
    assert "rows.jsonl: 3 rows, 1 of them dropped, as they overlap" in stream.check()
    assert len(epoch(stream)) == 2
    # Held-out questions of the task: a text is compared by its words, an expression as a whole.
    assert len(epoch(examples(model, copies, tasks={"text": task}))) == 2
    heldout = module.load_split(sft_config(model, model).tasks["arithmetic"], 1234)[1]
    sums = [{"prompt": q.prompt, "response": "1"} for q in heldout[:3]]
    other = {"prompt": heldout[0].prompt.replace("+", "-"), "response": "1"}
    assert other["prompt"] not in {q.prompt for q in heldout}
    assert len(epoch(examples(model, [*sums, other]))) == 1


def test_bad_rows_are_named_by_line_before_the_first_step(model: Path) -> None:
    good, user = {"prompt": "a", "response": "b"}, {"role": "user", "content": "x"}
    for bad, message in (
        ({"prompt": "a"}, r"rows\.jsonl:2: no response \(response, completion, output\); it has"),
        ({"prompt": "a", "response": ""}, r"rows\.jsonl:2: no response"),
        ({"response": "a"}, r"rows\.jsonl:2: no prompt"),
        ({"messages": [user]}, r"rows\.jsonl:2: no response: .* not user"),
        ({"messages": []}, r"rows\.jsonl:2: no response: .* not none"),
        ({"messages": [user, user]}, r"rows\.jsonl:2: no response: .* not user, user"),
        ({"messages": "a"}, r"rows\.jsonl:2: messages are a str"),
        ({"messages": [{"role": "user"}, user]}, r"rows\.jsonl:2: a turn has no role or no text"),
        ({"prompt": 3, "response": "b"}, r"rows\.jsonl:2: a turn has no role or no text"),
        ([1], r"rows\.jsonl:2: expected an object"),
    ):
        with pytest.raises(DataError, match=message):
            examples(model, [good, bad]).check()  # type: ignore[list-item]
    for rows in ([], [good]):
        stream = examples(model, rows, sft__against=[str(write_rows(model / "b.jsonl", [
            {"problem": "a", "answer": "1"}]))])  # fmt: skip
        with pytest.raises(
            DataError, match=r"no row to train on in .*rows\.jsonl: . rows, . of them dropped"
        ):
            stream.check()
    with pytest.raises(DataError, match=r"nowhere\.jsonl: no such file"):
        examples(model, model / "nowhere.jsonl").check()


def test_a_model_without_what_a_row_needs_is_refused(model: Path) -> None:
    settings = json.loads((model / "tokenizer_config.json").read_text())
    config = sft_config(model, model)
    sft = config.sft.model_copy(update={"source": None})
    with pytest.raises(ConfigError, match=r"sft\.source is missing"):
        Examples(config.model_copy(update={"sft": sft}), model)
    del settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match="the model has no chat template"):
        epoch(examples(model, ROWS))
    assert len(epoch(examples(model, [r for r in ROWS if "question" in r]))) == 8
    (model / "tokenizer_config.json").write_text("{}")
    with pytest.raises(DataError, match="has no eos_token"):
        examples(model, ROWS)


def test_demonstrations_are_rows_of_the_same_stage(tmp_path: Path) -> None:
    from megatron_rl.config import RunConfig
    from megatron_rl.data.prompt_format import save_tiny_tokenizer
    from megatron_rl.data.prompts import demonstrations

    save_tiny_tokenizer(tmp_path)
    config = RunConfig.model_validate({"sft": {"prompts": 6, "tokens_per_step": 60}})
    stream = Examples(config, tmp_path)
    made = {
        tuple("".join(stream._tokenizer.id_to_token(t) for t in part) for part in example)
        for example in epoch(stream)
    }
    assert made == set(demonstrations(config))
    assert flat(list(islice(stream.steps(Position()), 3)))


def test_the_example_has_the_constants_of_the_paper() -> None:
    from megatron_rl.config import load_config
    from megatron_rl.trainer.sft import learning_rate

    config = load_config("examples/sft_8b.yaml")
    assert (config.sft.tokens_per_step, config.sft.max_sequence_tokens) == (2_000_000, 12288)
    assert config.sft.tokens_per_step * config.sft.steps == 32_000_000_000
    assert {learning_rate(config, step) for step in (99, 8000, 15999)} == {3e-5}
    assert config.schedule.micro_batch_tokens == config.sft.max_sequence_tokens
    assert config.data_parallel == 32
