"""Readers of every format, choice of columns, units, repairs and errors."""

import json

import numpy as np
import pytest

from megatron_rl.scaling import PointsError, read
from megatron_rl.scaling.io import ReadOptions, read_many

C = [10.0, 20.0, 30.0, 40.0, 50.0]
R = [0.2, 0.3, 0.4, 0.45, 0.47]


def write(path, text):
    path.write_text(text)
    return path


def metrics(path, rows, torn=False):
    """metrics.jsonl as the orchestrator writes it."""
    head = {"kind": "schema", "schema": "megatron_rl.metrics/1", "fields": {}}
    lines = [json.dumps(r) for r in [head, *rows]]
    path.write_text("\n".join(lines) + "\n" + ('{"kind":"ev' if torn else ""))
    return path


def evaluation(step, rate, **more):
    return {
        "kind": "eval",
        "step": step,
        "compute_tokens": step * 1000,
        "compute_device_hours": step * 0.01,
        "compute_flops": step * 1e12,
        "pass_rate": rate,
        "pass_rate_stderr": 0.013,
        "num_prompts": 96,
        "samples_per_prompt": 16,
        **more,
    }


def test_metrics_jsonl_is_read_as_it_is(tmp_path):
    rows = [{"kind": "step", "step": 1, "loss": 0.5, "compute_device_hours": 9.9}]
    rows += [evaluation(s, r) for s, r in zip((0, 20, 40, 60), R, strict=False)]
    (tmp_path / "my_run").mkdir()
    (s,) = read(metrics(tmp_path / "my_run" / "metrics.jsonl", rows))
    assert s.name == "my_run"
    assert s.unit == "device-hours"
    np.testing.assert_allclose(s.compute, [0, 0.2, 0.4, 0.6])
    np.testing.assert_allclose(s.stderr, 0.013)
    (same,) = read(tmp_path / "my_run")
    np.testing.assert_allclose(same.compute, s.compute)


@pytest.mark.parametrize("column", ["tokens", "compute_tokens"])
def test_compute_column_of_metrics_is_chosen_by_short_or_full_name(tmp_path, column):
    path = metrics(tmp_path / "metrics.jsonl", [evaluation(s, r) for s, r in enumerate(R)])
    (s,) = read(path, ReadOptions(compute_column=column))
    assert s.unit == "tokens"
    np.testing.assert_allclose(s.compute, [0, 1000, 2000, 3000, 4000])


def test_tasks_of_metrics_are_one_series_each(tmp_path):
    rows = [
        evaluation(
            s, r,
            tasks={
                "math": {"pass_rate": r / 2, "pass_rate_stderr": 0.02}, "code": {"pass_rate": r},
            },
        )
        for s, r in enumerate(R)
    ]  # fmt: skip
    (tmp_path / "run").mkdir()
    series = {s.name: s for s in read(metrics(tmp_path / "run" / "metrics.jsonl", rows))}
    assert set(series) == {"run", "run:math", "run:code"}
    np.testing.assert_allclose(series["run:math"].reward, np.array(R) / 2)
    np.testing.assert_allclose(series["run:math"].stderr, 0.02)


def test_resumed_and_killed_run_is_repaired_and_stated(tmp_path):
    rows = [evaluation(0, 0.2), evaluation(20, 0.3), evaluation(20, 0.35), evaluation(40, 0.4)]
    (s,) = read(metrics(tmp_path / "metrics.jsonl", rows, torn=True))
    np.testing.assert_allclose(s.reward, [0.2, 0.35, 0.4])
    assert any("torn" in r for r in s.repairs)
    assert any("resume" in r for r in s.repairs)


def test_metrics_without_evaluations_are_an_error(tmp_path):
    with pytest.raises(PointsError, match=r"metrics\.jsonl: no evaluation rows"):
        read(metrics(tmp_path / "metrics.jsonl", [{"kind": "step", "step": 1}]))


def test_several_series_and_comments_of_a_csv(tmp_path):
    text = "# points\nseries,gpu_hours,pass_rate\na,1,.1\nb,1,.3\na,2,.2\n"
    a, b = read(write(tmp_path / "x.csv", text))
    assert (a.name, b.name) == ("a", "b")
    np.testing.assert_allclose(a.reward, [0.1, 0.2])
    (only,) = read(tmp_path / "x.csv", ReadOptions(series=["b"]))
    assert only.name == "b"


def test_one_reward_column_per_run(tmp_path):
    path = write(tmp_path / "x.csv", "gpu_hours,ScaleRL,GRPO\n1,.1,.2\n2,.3,.25\n")
    series = read(path, ReadOptions(reward_column=["ScaleRL", "GRPO"]))
    assert [s.name for s in series] == ["ScaleRL", "GRPO"]
    np.testing.assert_allclose(series[1].reward, [0.2, 0.25])


def test_csv_exported_from_wandb(tmp_path):
    text = (
        '"Step","one - eval/pass_rate","one - eval/pass_rate__MIN","one - eval/pass_rate__MAX",'
        '"two - eval/pass_rate"\n"0","0.1","0.1","0.1",""\n"20","0.2","0.2","0.2","0.3"\n'
    )
    one, two = read(write(tmp_path / "export.csv", text))
    assert (one.name, two.name, one.unit) == ("one", "two", "steps")
    np.testing.assert_allclose(two.compute, [20])
    assert "1 rows without two - eval/pass_rate left out" in two.repairs


def test_percent_is_detected_stated_and_can_be_denied(tmp_path):
    path = write(tmp_path / "x.csv", "gpu_hours,pass_rate\n1,10\n2,20.5\n3,30\n")
    (s,) = read(path)
    np.testing.assert_allclose(s.reward, [0.1, 0.205, 0.3])
    assert "pass_rate read as percent" in s.repairs
    with pytest.raises(PointsError, match="line 2, column 'pass_rate'"):
        read(path, ReadOptions(percent=False))


def test_seconds_are_converted_to_hours_and_tokens_are_not(tmp_path):
    path = write(tmp_path / "x.csv", "gpu_seconds,tokens,pass_rate\n3600,5,.1\n7200,6,.2\n")
    (s,) = read(path, ReadOptions(compute_unit="gpu-hours"))
    np.testing.assert_allclose(s.compute, [1, 2])
    assert s.unit == "GPU-hours"
    with pytest.raises(PointsError, match="tokens cannot be converted"):
        read(path, ReadOptions(compute_column="tokens", compute_unit="gpu-hours"))


def test_number_of_samples_gives_standard_errors(tmp_path):
    path = write(tmp_path / "x.csv", "gpu_hours,pass_rate,num_samples\n1,.5,100\n2,.6,400\n")
    (s,) = read(path)
    np.testing.assert_allclose(s.stderr, [0.05, 0.0245], rtol=0.02)
    assert any("binomial" in r for r in s.repairs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu_hours,pass_rate\n1,nan\n2,N/A\n", r"x\.csv: no evaluations"),
        ("gpu_hours,pass_rate\n1,.1\n2,high\n", r"line 3, column 'pass_rate': not a number"),
        ("gpu_hours,pass_rate\n1,.1\n2,.2\n3,7\n", r"line 4, column 'pass_rate'.*outside.*--per"),
        (
            "gpu_hours,reward\n1,-.2\n2,.4\n",
            r"line 2, column 'reward'.*outside \[0, 1\] \(-0.2\). This is no pass rate: .*\(1 \+ r",
        ),
        ("gpu_hours,reward\n1,200\n2,500\n", r"\(200\). Give fractions.* divide by"),
        ("gpu_hours,pass_rate\n1,2%\n2,.3\n", r"line 3, .*only some cells have"),
        ("gpu_hours,pass_rate\n1,5,0,25\n", r"line 2: 4 cells under 2 columns.*decimal points"),
        ("gpu_hours,pass_rate\n1'125,.2\n", r"line 2, column 'gpu_hours'.*no separator of thous"),
        ("gpu_hours,pass_rate\n1 125,.2\n", r"line 2, column 'gpu_hours'.*no separator of thous"),
        ("Step,a - x/score,a - y/score\n1,.1,.2\n", r"be the reward: a - x/score, a - y/score. "),
        ("gpu_hours;pass_rate\n1;0,25\n", r"line 2, column 'pass_rate'.*'0,25'. Write a decimal p"),
        ('gpu_hours,pass_rate\n"1,125",.2\n', r"line 2, column 'gpu_hours'.*no separator of thous"),
        ("1,.1\n2,.2\n", r"line 1: no header line"),
        ("# points of Monday\n1,.1\n2,.2\n", r"line 2: no header line"),
        ("gpu_hours,pass_rate\n-1,.1\n", r"line 2, column 'gpu_hours'.*negative"),
        ("gpu_hours,pass_rate\n1,.1,5\n", r"line 2: 3 cells under 2 columns"),
        ("gpu_hours,gpu_hours\n1,.1\n", r"line 1, column 'gpu_hours': two columns"),
        ("hours,pass\n1,.1\n", r"line 1: no compute column .*--compute-column; there are: hours"),
        ("gpu_hours,pass\n1,.1\n", r"no reward column .*--reward-column"),
        ("", "the file is empty"),
        ("gpu_hours,pass_rate\n", "the file is empty or has no rows"),
    ],
)  # fmt: skip
def test_bad_tables_name_file_line_and_column(tmp_path, text, message):
    with pytest.raises(PointsError, match=message):
        read(write(tmp_path / "x.csv", text))


def test_missing_names_are_listed_with_the_existing_ones(tmp_path):
    path = write(tmp_path / "x.csv", "series,gpu_hours,pass_rate\na,1,.1\n")
    with pytest.raises(PointsError, match="no series 'z'. There are: a"):
        read(path, ReadOptions(series=["z"]))
    with pytest.raises(PointsError, match="column 'flops': no compute column"):
        read(path, ReadOptions(compute_column="flops"))
    with pytest.raises(PointsError, match="no such file"):
        read(tmp_path / "absent.csv")
    with pytest.raises(PointsError, match="not a file of a wandb run.*exported from a chart"):
        read(write(tmp_path / "run.wandb", ""))
    with pytest.raises(PointsError, match="line 2: not JSON"):
        read(write(tmp_path / "x.jsonl", '{"a": 1}\n{oops\n{"a": 2}\n'))


def test_same_names_of_two_files_get_prefixes(tmp_path):
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        write(tmp_path / run / "x.csv", "series,gpu_hours,pass_rate\ns,1,.1\n")
    paths = [tmp_path / "a" / "x.csv", tmp_path / "b" / "x.csv"]
    names = [s.name for s in read_many(paths)]
    assert names == ["a/x/s", "b/x/s"]


def test_parquet_is_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"gpu_hours": C, "pass_rate": R, "run": ["r"] * 5})
    parquet.write_table(table, tmp_path / "x.parquet")
    (s,) = read(tmp_path / "x.parquet")
    assert s.name == "r"
    np.testing.assert_allclose(s.reward, R)
    with pytest.raises(PointsError, match="not a Parquet file"):
        read(write(tmp_path / "y.parquet", "no"))


def test_tensorboard_directories_are_read(tmp_path):
    writer_module = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    writer = writer_module.EventFileWriter(str(tmp_path / "run"))
    for i, (c, r) in enumerate(zip(C, R, strict=True)):
        tags = {"eval/compute_device_hours": c, "eval/pass_rate": r, "train/pass_rate": 0.9}
        value = [Summary.Value(tag=t, simple_value=v) for t, v in tags.items()]
        writer.add_event(Event(step=i * 20, summary=Summary(value=value)))
    writer.close()
    (s,) = read(tmp_path / "run")
    assert s.name == "run"
    np.testing.assert_allclose(s.compute, C)
    np.testing.assert_allclose(s.reward, R, rtol=1e-6)
    (steps,) = read(tmp_path / "run", ReadOptions(compute_column="step"))
    np.testing.assert_allclose(steps.compute, [0, 20, 40, 60, 80])


# Compute next to steps, resumed at step 20.
RESUMED = "step,gpu_hours,pass_rate\n0,0,.2\n20,1,.3\n40,2,.4\n20,1.1,.35\n40,2.1,.45\n60,3,.5\n"
RUNS = "0,.2\n{0},10,.3\n{1},0,.4\n{1},10,.6\n"


@pytest.mark.parametrize(
    ("name", "text", "series", "repair"),
    [
        # Evaluations that were written twice: the last counts, as in metrics.jsonl.
        ("x.csv", RESUMED, {"x": ([0, 1.1, 2.1, 3], [0.2, 0.35, 0.45, 0.5])}, "the last counts"),
        ("x.csv", "gpu_hours,pass_rate\n1,.3\n2,.4\n2,.5\n", {"x": ([1, 2], [0.3, 0.5])}, "last"),
        # wandb's own column of names, in any case.
        (
            "x.csv",
            "Name,Step,pass_rate\na," + RUNS.format("a", "b"),
            {"a": ([0, 10], [0.2, 0.3]), "b": ([0, 10], [0.4, 0.6])},
            None,
        ),
        ("x.csv", "Step,run - v2 - eval/pass_rate\n1,.1\n", {"run - v2": ([1], [0.1])}, None),
        # A column of text that follows the run is no second run.
        ("x.csv", "node,gpu_hours,pass_rate\na,1,.1\na,2,.2\nb,3,.3\nb,4,.4\n",
         {"x": ([1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4])}, None),
        # Charts of two runs: the cells that one run leaves empty are no text.
        ("x.csv", "Step,a - pass_rate,b - pass_rate\n1,.3,\n2,,.3\n3,.3,\n4,,.3\n",
         {"a": ([1, 3], [0.3, 0.3]), "b": ([2, 4], [0.3, 0.3])}, "2 rows without"),
        # Validation before the first step, without compute.
        ("x.csv", "gpu_hours,pass_rate\n,.1\n1,.2\n", {"x": ([1], [0.2])}, "without gpu_hours"),
        (
            "x.csv",
            "gpu_hours,pass_rate\n1,.2\n2,NaN\n3,None\n4,N/A\n5,inf\n6,.5\n-inf,.6\n",
            {"x": ([1, 6], [0.2, 0.5])},
            "4 rows without pass_rate left out",
        ),
        # numpy.savetxt with a header, tabs, blanks.
        ("x.csv", "# gpu_hours,pass_rate\n1e+00,2e-01\n2,.3\n", {"x": ([1, 2], [0.2, 0.3])}, None),
        ("x.txt", "# gpu_hours pass_rate\n1.0e+00 2.0e-01\n", {"x": ([1], [0.2])}, None),
        ("x.csv", "gpu_hours\tpass_rate\n1\t.2\n", {"x": ([1], [0.2])}, None),
        ("x.csv", "gpu_hours;pass_rate\n1;.2\n", {"x": ([1], [0.2])}, None),
        ("x.csv", "# of me\n# gpu_hours,pass_rate\n# of Monday\n1,.2\n", {"x": ([1], [0.2])}, None),
        ("x.txt", "# gpu_hours pass_rate\n1\t.2\n", {"x": ([1], [0.2])}, None),
        ("x.txt", "gpu_hours   pass_rate\n  1.0   0.2  \n", {"x": ([1], [0.2])}, None),
        ("x.csv", "sep=;\ngpu_hours;pass_rate\n1;.2\n", {"x": ([1], [0.2])}, None),
        # A percent sign counts below 1 too.
        ("x.csv", "gpu_hours,pass_rate\n1,0.5%\n2,0.9 %\n", {"x": ([1, 2], [0.005, 0.009])}, "per"),
        # The reward of a chart with several metrics; names of runs that hold the separator.
        (
            "x.csv",
            "Step,r - v1 - eval/pass_rate,r - v2 - eval/pass_rate,r - v1 - loss,r - v2 - loss\n"
            "0,.1,.2,.5,.6\n",
            {"r - v1": ([0], [0.1]), "r - v2": ([0], [0.2])},
            None,
        ),
        ("x.csv", "step,gpu_hours,acc\n0,0,.2\n0,0,.3\n", {"x": ([0], [0.3])}, "the last counts"),
        # A counter that a checkpoint restored repeats about the same compute.
        ("x.csv", "step,gpu_hours,pass_rate\n0,0,.2\n20,1,.3\n40,2,.35\n40,1.7,.36\n60,3,.4\n",
         {"x": ([0, 1, 1.7, 3], [0.2, 0.3, 0.36, 0.4])}, "the last counts"),
        # Charts and histories of runs with several tasks.
        (
            "x.csv",
            "eval/step,r - eval/pass_rate,r - eval/tasks/math/pass_rate\n0,.1,.2\n1,.3,.4\n",
            {"r": ([0, 1], [0.1, 0.3]), "r:math": ([0, 1], [0.2, 0.4])},
            None,
        ),
        (
            "x.csv",
            "_step,train/compute_device_hours,train/tasks/a/pass_rate,eval/compute_device_hours,"
            "eval/pass_rate,eval/tasks/a/pass_rate,eval/tasks/b.c/pass_rate\n"
            "0,,,0,.1,.2,.3\n1,.5,.9,,,,\n2,,,1,.2,.3,.5\n",
            {"x": ([0, 1], [0.1, 0.2]), "x:a": ([0, 1], [0.2, 0.3]), "x:b.c": ([0, 1], [0.3, 0.5])},
            "1 rows without eval",
        ),
    ],
)  # fmt: skip
def test_tables_of_other_tools_give_the_right_series(tmp_path, name, text, series, repair):
    result = read(write(tmp_path / name, text))
    assert {s.name for s in result} == set(series)
    for s in result:
        np.testing.assert_allclose(s.compute, series[s.name][0])
        np.testing.assert_allclose(s.reward, series[s.name][1])
        assert (repair is None) == (not s.repairs)
        assert repair is None or any(repair in r for r in s.repairs)


EMPTY_CELLS = "nan,NaN,-nan,inf,-inf,1e999,None,NULL,N/A,#N/A,<NA>,NaT,-,--,?,#DIV/0!, ,missing"


def test_every_spelling_of_no_number_is_left_out_and_reported(tmp_path):
    for cell in EMPTY_CELLS.split(","):
        for row, column in ((f"2,{cell}", "pass_rate"), (f"{cell},.3", "gpu_hours")):
            (s,) = read(write(tmp_path / "x.csv", f"gpu_hours,pass_rate\n1,.2\n{row}\n3,.4\n"))
            assert (s.compute.tolist(), s.reward.tolist()) == ([1, 3], [0.2, 0.4]), cell
            assert s.repairs == (f"1 rows without {column} left out",), cell
    lines = [{"gpu_hours": 1, "pass_rate": 0.2}, {"gpu_hours": 2, "pass_rate": float("nan")}]
    lines += [{"gpu_hours": float("inf"), "pass_rate": 0.3}, {"gpu_hours": 3}]
    (s,) = read(write(tmp_path / "x.jsonl", "\n".join(map(json.dumps, lines))))
    assert (s.compute.tolist(), len(s.repairs)) == ([1], 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "step,gpu_hours,pass_rate\n0,0,.2\n10,1,.3\n20,2,.4\n30,.5,.45\n40,1.5,.5\n",
            "line 5, column 'gpu_hours': compute goes back to .5 at step 30. Does it start again",
        ),
        (
            "iteration,tokens,pass_rate\n0,0,.2\n20,10,.3\n40,20,.4\n40,10.2,.45\n60,20,.5\n",
            "line 5, column 'tokens': compute goes back to 10.2 at iteration 40. Does it start",
        ),
        ("run_id,Step,pass_rate\n1," + RUNS.format("1", "2"), "rows of 1 and 2.*column 'run_id'"),
        ("trial,Step,pass_rate\n0,0,.2\n1,0,.3\n0,9,.4\n1,9,.6\n", "rows of 0 and 1.*'trial'"),
        ("who,Step,pass_rate\na," + RUNS.format("a", "b"), "rows of a and b.*series-column 'who'"),
        ("seed,Step,pass_rate\n1," + RUNS.format("1", "2"), "mixes rows of 1 and 2.*column 'seed'"),
    ],
)  # fmt: skip
def test_mixed_runs_are_refused_with_the_remedy(tmp_path, text, message):
    path = write(tmp_path / "x.csv", text)
    with pytest.raises(PointsError, match=message):
        read(path)
    column = text.partition(",")[0]
    if column not in ("step", "iteration"):
        assert [len(s) for s in read(path, ReadOptions(series_column=column))] == [2, 2]


def test_epoch_of_an_evaluation_is_that_of_the_last_step_before_it(tmp_path):
    rows = [evaluation(0, 0.2)]
    for step, epoch in enumerate([1, 1, 2, 2, 3]):
        rows += [{"kind": "step", "step": step, "epoch": epoch}, evaluation(step + 1, 0.3)]
    (s,) = read(metrics(tmp_path / "metrics.jsonl", rows))
    np.testing.assert_allclose(s.epoch, [0, 1, 1, 2, 2, 3])
    (s,) = read(write(tmp_path / "x.csv", "gpu_hours,pass_rate,epoch\n2,.3,1\n1,.2,0\n"))
    np.testing.assert_allclose(s.epoch, [0, 1])


def test_hours_of_a_clock_become_gpu_hours_by_the_number_of_devices(tmp_path):
    path = write(tmp_path / "x.csv", "wall_hours,pass_rate\n1,.1\n2,.2\n")
    wall = {"compute_column": "wall_hours"}
    (s,) = read(path, ReadOptions(**wall, devices=8))
    assert s.unit == "GPU-hours"
    np.testing.assert_allclose(s.compute, [8, 16])
    assert s.repairs == ("hours of 8 devices read as GPU-hours",)
    assert read(path, ReadOptions(**wall))[0].unit == "hours"
    with pytest.raises(PointsError, match="hours cannot be converted to GPU-hours.*--devices"):
        read(path, ReadOptions(**wall, compute_unit="gpu-hours"))
    path = write(tmp_path / "x.csv", "device_seconds,pass_rate\n3600,.1\n7200,.2\n")
    (s,) = read(path, ReadOptions(compute_column="device_seconds", compute_unit="gpu-hours"))
    np.testing.assert_allclose(s.compute, [1, 2])
    with pytest.raises(PointsError, match="8 devices cannot multiply compute in device-seconds"):
        read(path, ReadOptions(compute_column="device_seconds", devices=8))


def test_own_tensorboard_mirror_of_several_tasks_gives_the_series_of_metrics_jsonl(tmp_path):
    pytest.importorskip("tensorboard")
    from megatron_rl.metrics.sink import TensorBoardMirror

    tasks = [{"math": {"pass_rate": r / 2}, "code": {"pass_rate": r / 4}} for r in R]
    rows = [evaluation(20 * i, r, tasks=t) for i, (r, t) in enumerate(zip(R, tasks, strict=True))]
    mirror = TensorBoardMirror(tmp_path / "run")
    for row in rows:
        mirror.log(row | {"unix_seconds": 1.0})
        mirror.log({"kind": "step", "step": row["step"], "tasks": {"math": {"pass_rate": 0.9}}})
    mirror.close()
    (tmp_path / "own").mkdir()
    own = read(metrics(tmp_path / "own" / "metrics.jsonl", rows))
    mirrored = read(tmp_path / "run" / "tensorboard")
    for a, b in zip(own, mirrored, strict=True):
        assert a.name.partition(":")[1:] == b.name.partition(":")[1:]
        assert a.unit == b.unit
        np.testing.assert_allclose(a.compute, b.compute, rtol=1e-6)
        np.testing.assert_allclose(a.reward, b.reward, rtol=1e-6)


def test_offline_wandb_run_that_was_resumed_is_one_series_with_its_tasks(tmp_path):
    pytest.importorskip("wandb")
    from megatron_rl.metrics.sink import WandbMirror

    rates = {"math": 0.5, "code": 0.25}
    rows = [
        evaluation(20 * i, r, tasks={task: {"pass_rate": r * x} for task, x in rates.items()})
        for i, r in enumerate(R)
    ]
    resumed = [evaluation(20, 0.35), *rows[2:]]
    for first_step, part in ((0, rows[:3]), (20, resumed)):
        mirror = WandbMirror(tmp_path / "run", mode="offline", first_step=first_step)
        for row in part:
            mirror.log({"kind": "step", "step": row["step"], "pass_rate": 0.9, "label": "x"})
            mirror.log(row)
        mirror.close()
    folders = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    files = [next(folder.glob("*.wandb")) for folder in folders]
    for paths in ([tmp_path / "run"], [tmp_path / "run" / "wandb"], folders, files, files[1:]):
        series = {s.name: s for s in read_many(paths)}
        assert set(series) == {"run", "run:math", "run:code"}, paths
        np.testing.assert_allclose(series["run"].compute, [0, 0.2, 0.4, 0.6, 0.8])
        np.testing.assert_allclose(series["run"].reward, [0.2, 0.35, *R[2:]])
        np.testing.assert_allclose(series["run"].stderr, 0.013)
        assert any("the last counts" in repair for repair in series["run"].repairs)
        np.testing.assert_allclose(series["run:math"].reward[2:], np.array(R[2:]) / 2)
    # A kill tears the last record; the rows before it are read.
    files[1].write_bytes(files[1].read_bytes()[:-700])
    s = read(folders[0])[0]
    np.testing.assert_allclose(s.reward, [0.2, 0.35, *R[2:4]])
    assert any("torn" in repair for repair in s.repairs)
    # A second run in the same folder, without tasks, is a second series.
    mirror = WandbMirror(tmp_path / "run", mode="offline")
    mirror.log(evaluation(0, 0.1))
    mirror.close()
    assert [len(s) for s in read(tmp_path / "run") if ":" not in s.name] == [4, 1]
