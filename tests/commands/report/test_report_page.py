"""`megatron-rl report`: values of the page, several runs, bad input, the page in a browser."""

import json
import os
import re
from contextlib import closing
from html import unescape

import numpy as np
import pytest

from megatron_rl.cli import app
from megatron_rl.commands.report.report_page import render
from megatron_rl.commands.report.run_facts import best_and_worst, read_run, slowest_prompts
from megatron_rl.config import RunConfig
from megatron_rl.config.load import save_config
from megatron_rl.metrics import run_report
from megatron_rl.metrics.metrics_file import MetricsWriter
from megatron_rl.metrics.run_report import write_pages, write_report
from megatron_rl.section import ConfigError
from tests.commands.browser import BROWSER, NO_BROWSER, dom
from tests.commands.view.test_view import HOSTILE, row, sign, write

STEPS, PER_STEP = 60, 1000


def make_run(folder, steps=STEPS, *, evaluations=12, configured=None, **changes):
    """Write a run on a sigmoid that ends at 0.8; one of its generators is lost at step 20."""
    folder.mkdir(parents=True, exist_ok=True)
    if configured is not None:
        save_config(RunConfig.model_validate({"output_dir": str(folder), **configured}))
    at = np.geomspace(1, max(steps, 2), evaluations).round().astype(int) if evaluations else []
    noise = np.random.default_rng(0).normal(0, 0.004, steps + 2)
    with closing(MetricsWriter(folder / "metrics.jsonl")) as writer:
        for step in range(steps + 1):
            compute = {f"compute_{name}": float(PER_STEP * step)
                       for name in ("tokens", "train_tokens", "train_device_hours")}  # fmt: skip
            if step in at:
                rate = 0.25 + 0.55 / (1 + (5 * PER_STEP / (PER_STEP * step)) ** 1.4) + noise[step]
                part = {"pass_rate": rate, "pass_rate_stderr": 0.004}
                writer.write("eval", {"step": step, **part, "tasks": {"sums": part}, **compute})
            if step == 20:
                lost = {"completions_again": 3, "completions_continued": 1, "tokens_continued": 9}
                about = {"generator": "generator-1", "reason": f"killed {HOSTILE}"}
                writer.write("event", {"event": "generator_lost", "step": step, **about, **lost})
                back = {"generator": "generator-1", "recovery_seconds": 7.25}
                writer.write("event", {"event": "generator_ready", "step": step, **back})
            if step < steps:
                writer.write("step", {
                    "step": step, "tokens": PER_STEP, "completions": 100, "reward_mean": step / 10,
                    "completions_truncated": 4, "entropy": 0.5, "grad_norm": 1.0 + step % 7,
                    "step_seconds": 1.0 + step % 2, "trainer_busy_fraction": 0.25 + step % 2 / 2,
                    "generator_wait_fraction": 0.125, **compute, **changes,
                })  # fmt: skip
    return folder


def page_of(*folders):
    return render([read_run(folder, folder.name) for folder in folders])


def charts_of(page):
    """Return title -> chart of a page."""
    data = json.loads(re.search(r'id="json">(.*?)</script>', page)[1])
    return {chart["title"]: chart for chart in data["charts"]}


def text_of(page):
    """Return the text of a page, without its scripts."""
    body = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.DOTALL)
    return unescape(re.sub(r"<[^>]*>", "\n", body))


def cells(page, first):
    """Return the cells of the rows of tables that begin with a text."""
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", page, re.DOTALL)
    split = [[unescape(c) for c in re.findall(r"<td[^>]*>(.*?)</td>", r, re.DOTALL)] for r in rows]
    return [each for each in split if each and each[0] == first]


def test_the_page_has_the_values_of_the_run(tmp_path) -> None:
    run = make_run(tmp_path / "run", configured={"schedule": {"steps": 60}, "seed": 5})
    write_report(run, run / "metrics.jsonl", phases={"rl": 90.0}, fit_compute="flops",
                 versions={"torch": "2.13.0"})  # fmt: skip
    page = page_of(run)
    charts = charts_of(page)
    reward = charts["Reward"]["lines"][0]
    assert reward["x"] == list(range(STEPS))
    assert reward["y"] == pytest.approx([step / 10 for step in range(STEPS)])
    assert charts["Truncated and interrupted completions"]["lines"][0]["y"] == [0.04] * STEPS
    assert charts["Reward"]["marks"] == [[20, "generator_lost generator-1"]]
    # Steps of 1 s at 0.25 and of 2 s at 0.75: (0.25 + 1.5) / 3 = 58%; generators 1 - 0.125.
    assert cells(page, "busy: trainer, generators")[0][1] == "58%, 88%"
    (lost,) = [row for row in cells_of_events(page) if row[2] == "generator_lost"]
    (back,) = [row for row in cells_of_events(page) if row[2] == "generator_ready"]
    assert (lost[1], back[3]) == ("20", "7.25")
    assert "completions_again 3; completions_continued 1; tokens_continued 9" in lost[4]
    assert cells(page, "torch") == [["torch", "2.13.0"]]
    text = text_of(page)
    assert "the run has ended after 60 steps" in text
    assert re.search(r"\n3 of \d+ keys differ from the defaults", text)  # output_dir, too
    assert cells(page, "seed")[0][:3] == ["seed", "5", "1234"]
    assert len(cells(page, "seed")) == 2  # with the keys that differ, and with all
    assert len(cells(page, "model")) == 1


def cells_of_events(page):
    section = page[page.index('id="Faults and recoveries"') :]
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", section[: section.index("</section>")], re.DOTALL)
    return [[unescape(c) for c in re.findall(r"<td[^>]*>(.*?)</td>", r, re.DOTALL)] for r in rows][
        1:
    ]


def test_the_fit_has_its_band_and_plain_words(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    page = page_of(run)
    charts = charts_of(page)
    for title in ("Held-out pass rate", "Pass rate, task sums"):
        kinds = [line["kind"] for line in charts[title]["lines"]]
        assert sorted(kinds) == ["band", "band", "dash", "dots", "line"]
        guide = next(g for g in charts[title]["guides"] if g[0] == "y")
        assert guide[1] == pytest.approx(0.8, abs=0.03)
    assert re.search(r"The fitted curve ends at a pass rate of A 0\.\d+ \[0\.\d+, \d\.\d+\]", page)
    assert "With twice the compute of the last evaluation (120,000 training device hours)" in page


def test_a_run_of_2000_steps_is_thinned_and_says_so(tmp_path) -> None:
    run = make_run(tmp_path / "run", steps=2000, tasks={})
    page = page_of(run)
    assert len(page) < 500_000
    band, line = charts_of(page)["Gradient norm"]["lines"]
    assert len(line["x"]) == 400  # 2,000 steps in groups of 5
    assert line["y"][0] == pytest.approx(np.mean([1, 2, 3, 4, 5]))
    assert (band["low"][1], band["high"][1]) == (1, 7)  # of 6, 7, 1, 2, 3
    assert "mean of up to 5 steps" in charts_of(page)["Gradient norm"]["notes"][-1]


def test_slowest_prompts_and_best_and_worst_completions(tmp_path) -> None:
    run = make_run(tmp_path / "run")
    for step in range(3):
        rows = [
            row(i, step=step, prompt_id=10 * step + i, group=10 * step + i, prompt=f"p{step}{i}",
                completion=f"c{step}{i} {HOSTILE}", reward=1.0 if i else -1.0,
                seconds_to_verify=0.5,
                advantage=float(step + i), seconds_to_arrive=float(i if step else 20 - i))
            for i in range(4)
        ]  # fmt: skip
        write(run, step, rows)
    facts = read_run(run, "run")
    slow, which = slowest_prompts(facts)
    assert [r["prompt_id"] for r in slow[:5]] == [0, 1, 2, 3, 13]
    assert [r["seconds_mean"] for r in slow[:2]] == [20.5, 19.5]
    assert which == "Of all 3 rollout files of steps."
    shown, _ = best_and_worst(facts)
    best, worst = shown["Best completions"], shown["Worst completions"]
    assert [r["prompt"] for r in best] == ["p23", "p13", "p22"]  # advantages 5, 4, 4
    assert {r["prompt"] for r in worst} == {"p00", "p10", "p20"}  # reward -1
    page = page_of(run)
    assert cells(page, "sums")[0][1:5] == ["0", "20.5", "20.5", "1"]
    assert "<img" not in page
    assert page.count("<script") == page.count("</script>") == 2
    assert "\x1b" not in page


def test_several_runs_have_one_line_each_and_their_differences(tmp_path) -> None:
    names = ("one", "two", "three")
    runs = [
        make_run(tmp_path / name, steps=20 * (i + 1), reward_mean=float(i),
                 configured={"seed": i, "schedule": {"max_lag_steps": 4}})
        for i, name in enumerate(names)
    ]  # fmt: skip
    out = tmp_path / "all.html"
    app(["report", *map(str, runs), "--out", str(out)], standalone_mode=False)
    page = out.read_text()
    lines = charts_of(page)["Reward: reward_mean"]["lines"]
    assert [line["name"] for line in lines] == [*names]
    assert [line["color"] for line in lines] == [0, 1, 2]
    assert [(len(line["x"]), line["y"][0]) for line in lines] == [(20, 0), (40, 1), (60, 2)]
    dots = [
        line for line in charts_of(page)["Held-out pass rate"]["lines"] if line["kind"] == "dots"
    ]
    assert [line["name"] for line in dots] == [*names]
    assert cells(page, "steps, tokens")[0][1:] == ["20, 20,000", "40, 40,000", "60, 60,000"]
    differing = page[page.index('id="Configurations"') :]
    differing = differing[: differing.index("</section>")]
    assert cells(differing, "seed") == [["seed", "0", "1", "2"]]
    assert not cells(differing, "schedule.max_lag_steps")
    with pytest.raises(ConfigError, match="one run is there twice"):
        app(["report", str(runs[0]), str(runs[0])], standalone_mode=False)


def test_a_killed_run_with_a_torn_line_has_a_page_that_says_so(tmp_path) -> None:
    run = make_run(tmp_path / "run", steps=5, evaluations=0)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    sign(run, born=1, time=1.7e9, limit=1e12)
    (run / "final_error.json").write_text('{"error": "RunError: no engine"}')
    app(["report", str(run)], standalone_mode=False)
    text = text_of((run / "report.html").read_text())
    assert "the run has stopped at step 4" in text
    assert "it has failed: RunError: no engine" in text
    assert "The run has not written its report (summary.json)" in text
    assert "config.yaml: it is not there" in text
    assert "no evaluation has been measured yet" in text
    assert "No rollout files of steps are there (metrics.rollouts_every_steps)" in text
    (run / "config.yaml").write_text("a: [")
    (run / "rollouts").mkdir()
    (run / "rollouts" / "step_000000.parquet").write_bytes(b"torn")
    text = text_of(page_of(run))
    assert "config.yaml: ParserError" in text
    assert "The rollout files cannot be read: step_000000.parquet" in text


def test_a_run_without_a_step_has_a_page_that_says_so(tmp_path) -> None:
    run = make_run(tmp_path / "run", steps=0, evaluations=0)
    page = page_of(run)
    assert "no step has been trained yet" in text_of(page)
    assert charts_of(page) == {}


def test_a_run_that_goes_on_after_its_report_is_not_over(tmp_path) -> None:
    run = make_run(tmp_path / "run", steps=5)
    write_report(run, run / "metrics.jsonl", phases={}, fit_compute="flops", versions={})
    sign(run, state="evaluating")
    assert read_run(run, "run").state == "the run has ended after 5 steps"
    later = (run / "summary.json").stat().st_mtime + 1
    os.utime(run / "metrics.jsonl", (later, later))
    assert read_run(run, "run").state == "the run goes on"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such folder: RUN must be the output_dir of a run"),
        ("", "schema None in its first line.*RUN must be"),
        ('{"kind": "schema", "schema": "other/1"}\n', "schema 'other/1'.*this version"),
    ],
)
def test_bad_input_names_the_folder_and_the_remedy(tmp_path, content, message) -> None:
    run = tmp_path / "run"
    if content is not None:
        run.mkdir()
        with pytest.raises(ConfigError, match=f"{run}: it has no metrics.jsonl: RUN must be"):
            app(["report", str(run)], standalone_mode=False)
        (run / "metrics.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=rf"{run}.*{message}"):
        app(["report", str(run)], standalone_mode=False)
    assert not (run / "report.html").exists()
    with pytest.raises(ConfigError, match="nowhere is no folder: make it"):
        app(["report", str(run), "--out", str(tmp_path / "nowhere" / "x")], standalone_mode=False)


def test_the_end_of_a_run_writes_both_pages_and_no_fault_of_theirs_ends_it(
    tmp_path, monkeypatch
) -> None:
    run = make_run(tmp_path / "run", steps=5, evaluations=3)
    (no_rollouts,) = write_pages(run)[1:]
    assert re.match(rf"no {run}/view.html: .*no rollout files are there", no_rollouts)
    write(run, 3, [row(i) for i in range(2)])
    lines = write_pages(run)
    assert lines[0] == f"open {run}/report.html in a browser: the report"
    assert lines[-1] == f"open {run}/view.html in a browser: the completions"
    assert (run / "view.html").stat().st_size > 0
    (late,) = write_pages(run, 0.01)
    assert late.startswith("no report.html: ") and "timed out after 0.01 seconds" in late
    (run / "metrics.jsonl").unlink()
    (missing,) = write_pages(run)
    assert missing.startswith(f"no report.html: megatron-rl: {run}: it has no metrics.jsonl")
    monkeypatch.setattr(run_report.sys, "executable", str(tmp_path / "none"))
    (absent,) = write_pages(run)
    assert absent.startswith("no report.html: ") and "No such file" in absent


@pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)
@pytest.mark.parametrize("width", [1200, 390])
def test_the_page_in_a_browser_without_a_network(tmp_path, width) -> None:
    run = make_run(tmp_path / f"run {HOSTILE[9:40].replace('/', '')}")
    write(run, 3, [row(i, completion=f"{i} {HOSTILE} {'w' * 3000}", group=i) for i in range(4)])
    (run / "config.yaml").write_text(json.dumps({"model": HOSTILE, "x": "y" * 500}))
    page = tmp_path / "page.html"
    app(["report", str(run), "--out", str(page)], standalone_mode=False)
    # A window of Chromium has 500 pixels at least, and the page no rule for windows.
    narrow = page.read_text().replace("<html ", f'<html style="width:{width}px" ')
    (tmp_path / "narrow.html").write_text(narrow)
    shown = dom(tmp_path / "narrow.html", "", tmp_path / "profile")
    svgs = [int(each) for each in re.findall(r'<svg width="(\d+)"', shown)]
    assert max(svgs) <= width - 28
    assert min(svgs) > 300
    count = int(re.search(r'data-charts="(\d+)"', shown)[1])
    assert count == len(charts_of(page.read_text())) > 8
    assert shown.count("<svg") == count
    assert not re.search(r' d="[^"]*NaN', shown)
    assert re.search(r'data-overflow="(-?\d+)"', shown)[1] == "0"
    body = shown[shown.index("<body") :]
    assert "<img" not in body
    assert "<title>taken" not in shown
    assert "⟨U+001B⟩]0;taken⟨U+0007⟩" in text_of(body)
