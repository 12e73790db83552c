"""The command line: output, JSON, exit codes, pictures."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.scaling import fit
from megatron_rl.scaling.cli import app
from megatron_rl.scaling.errors import MissingExtra, PointsError
from megatron_rl.scaling.fit_result import amount
from megatron_rl.scaling.plot import save_plot, title
from megatron_rl.scaling.report import wrap
from tests.scaling.points import PATH, R0, published

ROOT = Path(__file__).parents[2]


def call(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


def test_fit_prints_a_table_and_writes_json(tmp_path):
    out = tmp_path / "fit.json"
    result = call(
        "fit", PATH, "--series", "gspo", "--r0", 0.395, "--skip", 1400, "--json", out,
        "--fit-until", 5000,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "gspo" in result.output
    assert "R0 0.395 fixed" in result.output
    data = json.loads(out.read_text())
    assert data["A"]["low"] < data["A"]["value"] < data["A"]["high"]
    assert data["prediction"]["points"] == 3


def test_json_goes_to_standard_output_alone():
    result = call("fit", PATH, "--series", "gspo", "--r0", "0.395", "--json", "-")
    assert json.loads(result.output)["name"] == "gspo"


def test_strict_exits_with_its_own_code_only_if_ill_conditioned():
    options = ("--r0", 0.395, "--skip", 1400, "--strict")
    assert call("fit", PATH, "--series", "scalerl_8b_bs768_14k", *options).exit_code == 0
    assert call("fit", PATH, "--series", "cispo_eps4", *options).exit_code == 3


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("fit", "absent.csv"), "no such file"),
        (("fit", PATH, "--r0", "zero"), "--r0 is 'zero'"),
        (("fit", PATH, "--series", "nothing"), "no series 'nothing'"),
        (("fit", PATH, "--series", "gspo", "--skip", "1e6"), "series 'gspo'"),
        (("fit", PATH, "--series", "gspo", "--method", "paper", "--r0", "fit"), "fixed R0"),
        (("compare", PATH, "--series", "gspo"), "at least two"),
    ],
)
def test_bad_calls_exit_with_code_2_and_a_reason(args, text):
    result = call(*args)
    assert result.exit_code == 2
    assert text in result.output
    assert "Traceback" not in result.output


def test_series_that_cannot_be_fitted_does_not_hide_the_others(tmp_path):
    names = ("--series", "gspo", "--series", "scalerl_bs512_ext")
    result = call("fit", PATH, *names, "--r0", 0.395, "--skip", 9000)
    assert result.exit_code == 2
    result = call("fit", PATH, *names, "--r0", 0.395, "--fit-until", 7000)
    assert result.exit_code == 2
    assert "series 'scalerl_bs512_ext'" in result.output
    assert "gspo" in result.output.split("scalerl_bs512_ext")[1]


def test_compare_ranks_and_draws(tmp_path):
    out, picture = tmp_path / "c.json", tmp_path / "c.png"
    names = [x for n in ("gspo", "fp32", "cispo_eps5") for x in ("--series", n)]
    result = call(
        "compare", PATH, *names, "--r0", 0.395, "--skip", 1400, "--json", out, "--plot", picture
    )
    assert result.exit_code == 0, result.output
    data = json.loads(out.read_text())
    assert [r["rank"] for r in data["runs"]] == [1, 2, 3]
    assert len(data["pairs"]) == 2
    assert picture.stat().st_size > 20_000


def test_compare_marks_ill_conditioned_runs_and_says_each_warning_once(tmp_path):
    out, picture = tmp_path / "c.json", tmp_path / "c.svg"
    result = call("compare", PATH, "--r0", R0, "--skip", 1400, "--json", out, "--plot", picture)
    assert result.exit_code == 0, result.output
    # No name is cut, and each is whole once its lines are joined; "..." stands for a cut cell.
    assert "…" not in result.output
    table, _, rest = result.output.partition("ranked ")
    names = [r["name"] for r in json.loads(out.read_text())["runs"]]
    joined = "".join(line.split("  ")[0].strip() for line in table.splitlines())
    for name in names:
        assert f". {name}" in joined, name
    for code in ("wide_a", "skipped", "ends_before_cmid"):
        assert len(re.findall(rf"^{code} \(", rest, re.MULTILINE)) == 1, code
    ill = [r for r in json.loads(out.read_text())["runs"] if not r["well_conditioned"]]
    assert 3 <= len(ill) < len(names)
    assert table.count("ill: median") == len(ill)
    for run in ill:
        assert run["estimate"] == "median"
        assert run["name"] in rest.split("wide_a (")[1].split(":")[0].replace("\n", "")
    svg = picture.read_text()
    assert svg.count("(ill-conditioned)") >= len(ill)
    # Dashed lines: of each ill run in both panels.
    assert svg.count("stroke-dasharray") >= 2 * len(ill)


def test_title_and_label_write_compute_alike():
    f = fit(published("scalerl_32k"), r0=R0, skip=1400)
    assert f"Cmid {amount(f.Cmid.value)} [" in title(f)
    assert "(median)" in title(f)
    assert "e+" not in title(f)


@pytest.mark.parametrize("name", ["a", "scalerl_8b_bs768_14k", "x" * 30, "run-1/loo-a.b_c", ""])
def test_names_wrap_after_separators_only(name):
    lines = wrap(name).split("\n")
    assert "".join(lines) == name
    assert all(line[-1] in "-_/.:, " for line in lines[:-1])
    assert all(len(line) <= 17 for line in lines) or "x" * 30 in lines


def test_shared_a_may_be_the_mean_of_all():
    names = [x for n in ("gspo", "fp32", "baseline_dapo_pipelinerl8") for x in ("--series", n)]
    options = ("--r0", R0, "--skip", 1400, "--shared-a", "mean", "--json", "-")
    data = json.loads(call("compare", PATH, *names, *options).output)
    mean = sum(r["A"]["value"] for r in data["runs"]) / 3
    assert data["shared_a"] == pytest.approx(mean)
    assert [r["at_shared_a"]["A"] for r in data["runs"]] == pytest.approx([mean] * 3)
    slopes = [r["at_shared_a"]["B"]["value"] for r in data["runs"]]
    assert slopes == sorted(slopes, reverse=True)


def test_own_run_is_compared_with_published_points_and_drawn_over_them(tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    s = published("fp32")
    rows = [{"kind": "schema", "schema": "megatron_rl.metrics/1"}]
    for i, (c, r) in enumerate(zip(s.compute, s.reward, strict=True)):
        rows.append({"kind": "step", "step": i, "epoch": 1 + (c > 1400)})
        rows.append({"kind": "eval", "step": i + 1, "compute_device_hours": c, "pass_rate": r})
    text = "\n".join(json.dumps(row, default=int) for row in rows)
    (own / "metrics.jsonl").write_text(text)
    plot = tmp_path / "c.svg"
    args = ("--r0", R0, "--published", "bs512", "--plot", plot)
    result = call("compare", own, "published:scalerl", *args)
    assert result.exit_code == 0, result.output
    assert "device-hours count as GPU-hours: a device is a GPU" in " ".join(result.output.split())
    assert "published: bs512 (A 0.605, B 1.77, Cmid 2,818)" in result.output
    assert "published bs512" in plot.read_text()
    # The same run twice, by epochs and by compute.
    by_epoch = call("fit", own, "--r0", R0, "--skip-epochs", 1, "--json", "-")
    by_compute = call("fit", own, "--r0", R0, "--skip", 1400, "--json", "-")
    assert json.loads(by_epoch.output)["A"] == json.loads(by_compute.output)["A"]
    assert json.loads(by_epoch.output)["n_skipped"] == 2
    page, picture = tmp_path / "f.html", tmp_path / "f.svg"
    args = ("--published", "scalerl", "--html", page, "--plot", picture)
    result = call("fit", own, "--r0", R0, *args)
    assert result.exit_code == 0, result.output
    assert "published scalerl (A 0.610" in page.read_text()
    assert "published scalerl (A 0.610" in picture.read_text()
    result = call("fit", own, "--compute-column", "step", *args)
    assert "published points are in GPU-hours, the fit is in steps" in " ".join(
        result.output.split()
    )


def test_forecast_recommends_to_stop(tmp_path):
    out = tmp_path / "p.json"
    result = call(
        "forecast", PATH, "--series", "baseline_dapo_pipelinerl8", "--r0", 0.395, "--skip", 1400,
        "--target", 0.6, "--target", 0.5, "--budget", 8000, "--json", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "stop: this run cannot pass 0.6" in " ".join(result.output.split())
    never, soon = json.loads(out.read_text())["targets"]
    assert never["compute"]["value"] is None
    assert soon["compute"]["low"] <= soon["compute"]["value"] <= soon["compute"]["high"]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_picture_shows_points_curve_and_parameters(tmp_path, ending):
    path = tmp_path / f"fit.{ending}"
    save_plot(fit(published("scalerl_8b_bs768_14k+"), r0=R0, skip=1400, fit_until=8000), path)
    assert path.stat().st_size > 20_000
    if ending == "svg":
        assert "<svg" in path.read_text()[:2000]


@pytest.mark.parametrize("form", ["linear-sigmoid", "power-law"])
def test_other_forms_are_drawn(tmp_path, form):
    save_plot(fit(published("scalerl_bs2048"), r0=R0, form=form), tmp_path / "x.png")


def test_unknown_ending_of_a_picture_is_refused(tmp_path):
    with pytest.raises(PointsError, match=r"\.png, \.svg, \.pdf"):
        save_plot(fit(published("gspo"), r0=R0), tmp_path / "x.gif")


def test_html_is_one_file_that_needs_no_network(tmp_path):
    path = tmp_path / "fit.html"
    names = ("--series", "gspo", "--series", "cispo_eps4")
    result = call("fit", PATH, *names, "--r0", 0.395, "--html", path)
    assert result.exit_code == 0, result.output
    page = path.read_text()
    assert page.count("Plotly.newPlot") >= 2
    assert 'src="http' not in page
    assert ">ill</span>" in page


def test_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match="pip install matplotlib, or pip install megatron-rl"):
        save_plot(fit(published("gspo"), r0=R0), tmp_path / "x.png")


def test_tool_is_the_same_command(tmp_path):
    tool = [sys.executable, str(ROOT / "tools" / "fit_sigmoid.py")]
    done = subprocess.run(
        [*tool, str(PATH), "--series", "gspo", "--r0", "0.395", "--json", "-"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "gspo"
