"""Rollout files of whole runs: what was trained or dropped, evaluations, restarts, failures."""

from __future__ import annotations

import dataclasses
import errno
import os
import time

import msgspec
import numpy as np
import pytest

from megatron_rl import messages as m
from megatron_rl.config import Algorithm
from megatron_rl.files import DiskFull
from megatron_rl.metrics import read_rollouts
from megatron_rl.orchestrator import RunError
from megatron_rl.orchestrator.batching import build_batch, dropped_because
from megatron_rl.orchestrator.groups import Group, GroupQueue
from megatron_rl.orchestrator.recording import Recorder, right_and_wrong
from megatron_rl.orchestrator.run_metrics import RunMetrics
from megatron_rl.rewards import Outcome, Verdict
from tests.orchestrator import peers
from tests.orchestrator.peers import AtOnce, Generator, prompt_set, run, small_config
from tests.segments import segments


def recorder_of(config, folder, step=None):
    def decode(ids):
        return " ".join(map(str, ids))

    config.output_dir = folder
    return Recorder(config, decode, step)


def recorded(config, folder, step=None, **options):
    recorder = recorder_of(config, folder, step)
    try:
        return run(config, recorder=recorder, **options)
    finally:
        recorder.close()


@pytest.fixture
def batches(monkeypatch):
    """Return the batches that the trainer gets, by step."""
    given, send = {}, m.encode

    def keep(message):
        if isinstance(message, m.Batch) and not message.stop:
            given[message.step] = message
        return send(message)

    monkeypatch.setattr(m, "encode", keep)
    return given


def trained_rows(table):
    return [row for row in table.to_pylist() if row["trained"]]


def assert_equal(batch, rows):
    """Check that the rows are the sequences of the batch, bit for bit."""
    bounds, lengths = m.ints(batch.bounds), m.ints(batch.prompt_lengths)
    assert len(lengths) == len(rows)
    flat = {
        "token_ids": m.ints(batch.token_ids), "advantages": m.floats(batch.advantages),
        "logprobs": m.floats(batch.generator_logprobs), "versions": m.ints(batch.versions),
        "weights": m.floats(batch.loss_weights),
    }  # fmt: skip
    prompts, indices = m.ints(batch.prompt_ids), m.ints(batch.completion_indices)
    for i, row in enumerate(rows):
        first, end = bounds[i] + lengths[i], bounds[i + 1]
        assert (row["prompt_id"], row["index"]) == (prompts[i], indices[i])
        assert row["prompt_token_ids"] == flat["token_ids"][bounds[i] : first].tolist()
        for name in ("token_ids", "logprobs", "versions"):
            assert row[name] == flat[name][first:end].tolist()
        n = end - first
        assert flat["advantages"][first:end] == pytest.approx([row["advantage"]] * n)
        assert flat["weights"][first:end] == pytest.approx([row["loss_weight"]] * n)


def test_the_rows_of_a_step_are_what_was_trained_and_what_was_dropped(tmp_path, batches):
    config = small_config()
    outcome = recorded(config, tmp_path)
    names = {path.name for path in (tmp_path / "rollouts").iterdir()}
    assert {name for name in names if "step" in name} == {
        f"step_{i:06d}.parquet" for i in range(12)
    }
    assert len(batches) == 12
    prompts = {p.id: p for p in prompt_set(config).train}
    for step, batch in batches.items():
        table = read_rollouts(tmp_path / "rollouts" / f"step_{step:06d}.parquet")
        assert_equal(batch, trained_rows(table))
        rows, metrics = table.to_pylist(), outcome.rows.steps[step]
        assert len(rows) == metrics["completions"] == 12
        assert sum(len(row["token_ids"]) for row in rows) == metrics["tokens"]
        assert max(row["lag_max"] for row in rows) == metrics["lag_max"]
        for row in rows:
            assert (row["kind"], row["step"], row["set"], row["task"]) == (
                "train", step, "", prompts[row["prompt_id"]].task,
            )  # fmt: skip
            assert row["prompt"] == prompts[row["prompt_id"]].text
            assert row["completion"] == " ".join(map(str, row["token_ids"]))
            assert (row["verdict"] == "correct") == (row["token_ids"][0] % 2 == 0)
            assert row["reward"] == (1.0 if row["verdict"] == "correct" else -1.0)
            assert row["lag_max"] == step - min(row["versions"])
            assert row["engine"] in ("generator-0", "generator-1")
            assert row["seconds_to_arrive"] > 0 <= row["seconds_to_verify"]
            assert row["dropped_because"] == ("" if row["trained"] else "zero variance")
            assert (row["advantage"] is not None) == row["trained"]
    table = read_rollouts(tmp_path / "rollouts")
    assert {*table["trained"].to_pylist()} == {
        True,
        False,
    }  # or the run had no dropped prompt to see


def test_the_rows_of_evaluations_are_in_a_file_of_their_version(tmp_path):
    config = small_config()
    outcome = recorded(config, tmp_path)
    assert len(outcome.rows.evals) >= 3
    for row in outcome.rows.evals:
        table = read_rollouts(tmp_path / "rollouts" / f"eval_{row['step']:06d}.parquet")
        verdicts = table["verdict"].to_pylist()
        assert verdicts.count("correct") / len(verdicts) == pytest.approx(row["pass_rate"])
        assert len(verdicts) == row["num_prompts"] * row["samples_per_prompt"] == 12
        assert {v for one in table["versions"].to_pylist() for v in one} == {row["step"]}
        assert {*table["trained"].to_pylist()} == {False}
        assert {*table["dropped_because"].to_pylist()} == {""}
        assert {*table["lag_max"].to_pylist()} == {0}
        for ids, logprobs in zip(table["token_ids"], table["logprobs"], strict=True):
            assert len(ids) == len(logprobs) > 0


def test_a_resumed_run_has_each_step_once(tmp_path, batches):
    config, folder = small_config(), tmp_path / "rollouts"
    recorded(config, tmp_path, seed=2, directory=tmp_path, save_before=5, stop_before=7)
    first = dict(batches)
    assert {*first} == {*range(7)}
    recorded(config, tmp_path, 5, seed=3, directory=tmp_path, resume=True)
    moved = {path.name for path in (tmp_path / "rollouts.dropped-0").glob("step*")}
    assert moved == {"step_000005.parquet", "step_000006.parquet"}
    assert len(list(folder.glob("step*"))) == 12
    for step, batch in batches.items():
        assert_equal(batch, trained_rows(read_rollouts(folder / f"step_{step:06d}.parquet")))
    carried = read_rollouts(folder / "step_000005.parquet").to_pylist()
    for row in carried:  # what came with the checkpoint has text, and no times
        assert row["completion"] and (row["engine"] is None) == (row["unix_seconds"] is None)


def completion_tokens(batch):
    bounds, lengths = m.ints(batch.bounds), m.ints(batch.prompt_lengths)
    parts = zip(bounds[:-1] + lengths, bounds[1:], strict=True)
    return np.concatenate([m.ints(batch.token_ids)[start:end] for start, end in parts])


def test_a_row_that_is_trained_has_the_trainers_results_for_its_tokens(tmp_path, monkeypatch):
    class Scoring(peers.Trainer):
        def results(self, batch):
            tokens = completion_tokens(batch)
            return {"ratios": m.float_bytes(tokens), "entropies": m.float_bytes(-tokens)}

    class Forcing(Generator):
        async def send(self, message):
            if isinstance(message, m.Sample) and message.num_tokens > 2:
                given = segments(message.num_tokens, (1, 3))
                message = msgspec.structs.replace(message, segments=given)
            await super().send(message)

    monkeypatch.setattr(peers, "Trainer", Scoring)
    monkeypatch.setattr(peers, "Generator", Forcing)
    recorded(small_config(), tmp_path, seed=2, directory=tmp_path, save_before=5, stop_before=7)
    recorded(small_config(), tmp_path, 5, seed=3, directory=tmp_path, resume=True)
    folder, forced = tmp_path / "rollouts", 0
    assert len(list(folder.glob("step*"))) == 12
    for row in read_rollouts(folder).to_pylist():
        if not row["trained"]:
            assert row["ratios"] is row["entropies"] is None
            continue
        sampled = np.array(row["origins"]) == 0
        forced += np.sum(~sampled)
        ratios, ids = np.array(row["ratios"]), np.array(row["token_ids"])
        assert (np.isnan(ratios) == ~sampled).all()
        assert (ratios[sampled] == ids[sampled]).all()
        assert row["entropies"] == (-ids).tolist()
    assert forced > 0


def test_a_checkpoint_waits_until_the_files_before_it_are_there(tmp_path, monkeypatch):
    sync, there = os.fsync, []

    def slow(fd):
        time.sleep(0.3)
        sync(fd)

    def noted(message):
        if isinstance(message, m.StateSaved):
            there.extend(path.name for path in (tmp_path / "rollouts").glob("step_000004*"))
        return send(message)

    send = m.encode
    monkeypatch.setattr(m, "encode", noted)
    monkeypatch.setattr(os, "fsync", slow)
    recorded(small_config(steps=6), tmp_path, directory=tmp_path, save_before=5)
    assert there == ["step_000004.parquet"]


def test_a_skipped_batch_is_in_the_file_of_its_step(tmp_path, batches, monkeypatch):
    class Same(Generator):
        def ids(self, message, index, n):
            ids = super().ids(message, index, n)
            if message.evaluation < 0 and message.group < 6:
                ids[0] = 4  # two batches of three groups that are all right
            return ids

    monkeypatch.setattr(peers, "Generator", Same)
    recorded(small_config(steps=3), tmp_path)
    table = read_rollouts(tmp_path / "rollouts" / "step_000000.parquet")
    assert table.num_rows == 3 * 12
    assert table["group"].to_pylist() == sorted([*range(9)] * 4)
    rows = table.to_pylist()
    assert {row["dropped_because"] for row in rows[:24]} == {"zero variance"}
    assert_equal(batches[0], [row for row in rows if row["trained"]])


def test_a_run_that_ends_with_a_skipped_batch_has_its_completions(tmp_path):
    def right(prompt, sample):
        return Verdict(Outcome.CORRECT, "all right")

    config = small_config(max_empty_batches=2)
    with pytest.raises(RunError, match="2 batches in a row"):
        recorded(config, tmp_path, verification=AtOnce(right))
    assert read_rollouts(tmp_path / "rollouts" / "step_000000.parquet").num_rows == 2 * 12


def test_every_nth_step_is_written_or_nothing(tmp_path):
    config = small_config(steps=5)
    config.metrics.rollouts_every_steps = 2
    recorded(config, tmp_path / "some")
    steps = {path.name for path in (tmp_path / "some" / "rollouts").glob("step*")}
    assert steps == {f"step_00000{i}.parquet" for i in (0, 2, 4)}
    config.metrics.rollouts_every_steps = 0
    recorded(config, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_file_that_cannot_be_written_ends_the_run_with_its_name(tmp_path, monkeypatch):
    sync = os.fsync

    def full(fd):
        if "step_000002" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(fd)

    monkeypatch.setattr(os, "fsync", full)
    config = small_config()
    recorder = recorder_of(config, tmp_path)
    with pytest.raises(DiskFull, match=r"step_000002\.parquet: free some space"):
        run(config, recorder=recorder)
    recorder.close()
    assert read_rollouts(tmp_path / "rollouts" / "step_000001.parquet").num_rows == 12
    assert not (tmp_path / "rollouts" / "step_000002.parquet").exists()


def sample(group, index, finish="stop"):
    return m.Sample(
        group=group, index=index, prompt_id=0, evaluation=-1, token_ids=m.int_bytes([index]),
        logprobs=m.float_bytes([-1.0]), segments=segments(1), spans=[m.VersionSpan(0, 0, 1)],
        finish_reason=finish,
    )  # fmt: skip


def group_of(index, *outcomes):
    group = Group(index, 0, len(outcomes))
    for i, outcome in enumerate(outcomes):
        finish = "length" if outcome == "cut" else "stop"
        outcome = Outcome.WRONG if outcome == "cut" else outcome
        group.samples[i], group.verdicts[i] = sample(index, i, finish), Verdict(outcome, "")
    return group


def test_each_completion_that_is_not_trained_has_its_reason():
    right, wrong, late = Outcome.CORRECT, Outcome.WRONG, Outcome.TIMED_OUT
    algorithm = Algorithm(truncated="drop").resolved(16)
    mixed = group_of(0, right, wrong, late, "cut")
    equal, alone = group_of(1, right, right), group_of(2, right, late)
    queue = GroupQueue(1, lambda group: False)
    failed, _ = queue.dispatch(lambda: 0, lambda index, prompt: group_of(index, right, wrong))
    failed.samples[2] = sample(0, 2)  # it has no verdict
    assert queue.lost(0, {1}, attempts=1) is failed
    assert sorted(failed.samples) == [0, 1] and failed.complete and failed.pass_rate is None
    groups = [mixed, equal, alone]
    built = build_batch(0, groups, {0: [1]}, algorithm)
    reasons = [
        [dropped_because(g, s, built, algorithm) for s in g.ordered] for g in (*groups, failed)
    ]
    no_reward = "no reward"
    assert reasons == [
        ["", "", no_reward, "truncated"],
        ["zero variance"] * 2,
        ["no other in group", no_reward],
        ["group failed"] * 2,
    ]
    empty = dataclasses.replace(built, teaches=False)
    assert (
        dropped_because(mixed, mixed.samples[0], empty, algorithm) == "batch had nothing to learn"
    )


def test_samples_of_every_fifth_step_are_shown_and_no_text_is_decoded_twice(tmp_path):
    config, decoded = small_config(), []
    config.metrics.samples_every_steps, config.output_dir = 5, tmp_path

    def decode(ids):
        decoded.append(ids)
        return " ".join(map(str, ids))

    recorder = Recorder(config, decode)
    outcome = run(config, recorder=recorder)
    recorder.close()
    shown = outcome.rows.shown
    assert [[row["step"] for row in rows] for rows in shown] == [[0, 0], [5, 5], [10, 10]]
    assert len(decoded) == read_rollouts(tmp_path / "rollouts").num_rows
    for right, wrong in shown:
        assert (right["verdict"], right["reward"], wrong["reward"]) == ("correct", 1.0, -1.0)
        assert wrong["verdict"] == "wrong"
        assert right["group"] == wrong["group"]
        table = read_rollouts(tmp_path / "rollouts" / f"step_{right['step']:06d}.parquet")
        texts = {(r["group"], r["index"]): r["completion"] for r in table.to_pylist()}
        for row in (right, wrong):
            assert row["completion"] == texts[row["group"], row["index"]]


@pytest.mark.parametrize(("every", "steps"), [(4, [0, 4, 8]), (0, [])])
def test_samples_need_no_rollout_files(tmp_path, every, steps):
    config, decoded = small_config(), []
    config.metrics.samples_every_steps, config.metrics.rollouts_every_steps = every, 0
    config.output_dir = tmp_path
    recorder = Recorder(config, lambda ids: decoded.append(ids) or "text")
    outcome = run(config, recorder=recorder)
    recorder.close()
    assert [rows[0]["step"] for rows in outcome.rows.shown] == steps
    assert all(row["completion"] == "text" for rows in outcome.rows.shown for row in rows)
    assert len(decoded) == sum(map(len, outcome.rows.shown))
    assert not (tmp_path / "rollouts").exists()


def test_of_a_step_one_batch_is_shown_also_if_it_is_skipped(tmp_path):
    config = small_config()
    recorder, prompts = recorder_of(config, tmp_path), prompt_set(config).train
    sink = peers.Rows()
    metrics = RunMetrics(sink, config.roles)
    metrics.recorder = recorder
    for step, outcomes, expected in (
        (0, [Outcome.WRONG] * 2, ["wrong"]), (0, [Outcome.CORRECT, Outcome.WRONG], []),
        (1, [Outcome.CORRECT, Outcome.WRONG], []), (100, [Outcome.TIMED_OUT] * 2, []),
        (200, [Outcome.WRONG, Outcome.CORRECT], ["correct", "wrong"]),
    ):  # fmt: skip
        group = group_of(step, *outcomes)
        built = build_batch(step, [group], {0: [1]}, config.algorithm)
        recorder.batch(step, [group], built, prompts)
        metrics.empty_batch(step, built.metrics)
        assert [row["verdict"] for rows in sink.shown for row in rows] == expected
        sink.shown.clear()
    recorder.close()


def test_a_right_and_a_wrong_completion_are_of_one_prompt_if_there_is_one():
    def rows(*verdicts):
        return [{"group": group, "verdict": verdict} for group, verdict in verdicts]

    mixed = rows((0, "correct"), (1, "wrong"), (2, "wrong"), (2, "timed_out"), (2, "correct"))
    assert right_and_wrong(mixed) == rows((2, "correct"), (2, "wrong"))
    apart = rows((0, "wrong"), (0, "no_answer"), (1, "correct"))
    assert right_and_wrong(apart) == rows((1, "correct"), (0, "wrong"))
    assert right_and_wrong(rows((0, "timed_out"), (1, "unparsable"))) == rows((1, "unparsable"))
    assert right_and_wrong(rows((0, "correct"), (0, "timed_out"))) == rows((0, "correct"))
    assert right_and_wrong([]) == []
