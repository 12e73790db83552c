"""The command line: output, JSON, exit codes, pictures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl.scaling import fit
from megatron_rl.scaling.cli import app
from megatron_rl.scaling.errors import MissingExtra, PointsError
from megatron_rl.scaling.plot import save_plot
from tests.scaling.points import PATH, R0, published

ROOT = Path(__file__).parents[2]


def call(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


def test_fit_prints_a_table_and_writes_json(tmp_path):
    out = tmp_path / "fit.json"
    result = call(
        "fit", PATH, "--series", "gspo", "--r0", 0.395, "--skip", 1400, "--json", out,
        "--fit-until", 5000, "--bootstrap", 100,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "gspo" in result.output
    assert "R0 0.395 fixed, given" in result.output
    assert "moving-block bootstrap" in result.output
    data = json.loads(out.read_text())
    assert data["A"]["low"] < data["A"]["value"] < data["A"]["high"]
    assert data["prediction"]["points"] == 3
    assert data["bootstrap"]["A"]["low"] <= data["A"]["value"]


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
