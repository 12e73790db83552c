"""`megatron-rl view`: data of the page, hostile text, errors, --follow, the page in a browser."""

import base64
import json
import os
import re
import socket
import threading
import time
import zlib
from html import unescape

import msgspec
import numpy as np
import pyarrow
import pytest
from tokenizers import Tokenizer, models

from megatron_rl import messages as m
from megatron_rl.cli import app
from megatron_rl.commands.view import cli
from megatron_rl.commands.view.page import LOGPROB_STEP, encode, render
from megatron_rl.liveness import GONE_SECONDS, Sign, born
from megatron_rl.metrics.metrics_file import MetricsError
from megatron_rl.metrics.rollouts import COLUMNS, RolloutWriter, arrow_schema, record_batch
from megatron_rl.metrics.terminal import UNSEEN
from megatron_rl.section import ConfigError
from tests.commands.browser import BROWSER, NO_BROWSER, dom

HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>@DATA@&lt;"
    "\x1b]0;taken\x07\x1b[2J \u202eright to left\u202c \r\x9b1mend"
)
TYPES = {"float64": "<f8", "int32": "<i4", "int16": "<i2", "uint8": "u1", "uint16": "<u2",
         "uint32": "<u4"}  # fmt: skip


PROMPT = np.array([25, 24, 23], "<i4").tobytes()


def row(index, **values):
    tokens = 5 + index
    logprobs = np.linspace(-0.5, -30.0, tokens).astype("<f4")
    return {
        "kind": "train", "step": 3, "set": "", "task": "sums", "prompt_id": 7, "group": 3,
        "index": index, "engine": "generator-0", "prompt": "2+3=?", "prompt_token_ids": PROMPT,
        "completion": f"text {index}", "token_ids": np.arange(tokens, dtype="<i4").tobytes(),
        "logprobs": logprobs.tobytes(), "versions": [(1, 2), (3, tokens - 2)],
        "ratios": np.linspace(0.5, 1.5, tokens).astype("<f4").tobytes(),
        "entropies": np.linspace(0.0, 2.0, tokens).astype("<f4").tobytes(),
        "origins": [(0, 1), (1, 1), (0, tokens - 2)], "finish_reason": "stop",
        "verdict": "wrong" if index % 2 else "correct", "verdict_reason": "", "reward": 1.0,
        "advantage": None, "loss_weight": 0.25, "trained": True, "dropped_because": "",
        "lag_max": 2, "seconds_to_arrive": 1.5, "seconds_to_verify": 0.5, "unix_seconds": 1.7e9,
        **values,
    }  # fmt: skip


def table_of(rows):
    return pyarrow.Table.from_batches([record_batch(rows)], arrow_schema())


def write(run, step, rows):
    """Write a file of a step; the completions' texts are those of the rows."""
    texts = iter([one["completion"] for one in rows])
    writer = RolloutWriter(run / "rollouts", 1e9, lambda ids: next(texts), step)
    writer.write("step", step, rows)
    writer.close()


def read_page(page):
    """Return head and arrays of a page, read as its documentation says."""
    head = json.loads(re.search(r'id="json">(.*?)</script>', page)[1])
    data = zlib.decompress(base64.b64decode(re.search(r'id="data">(.*?)</script>', page)[1]))
    arrays, at = {}, 0
    for name, kind, length in head["arrays"]:
        arrays[name] = np.frombuffer(data, TYPES[kind], length, at)
        at += -(-arrays[name].nbytes // 8) * 8
    assert at == len(data)
    return head, arrays


def text_at(arrays, code):
    ends = [0, *arrays["text_ends"].tolist()]
    return arrays["text_bytes"][ends[code] : ends[code + 1]].tobytes().decode()


def words():
    """Return a tokenizer of the words a to z, and of the begin of a tool call."""
    letters = {chr(97 + i): i for i in range(26)}
    return Tokenizer(models.WordLevel(letters | {"<tool_call>": 26}, "a"))


def talk(index, token_ids, origins, versions=None):
    """Return a row of several turns; `origins` are pairs of an index and a number of tokens."""
    arrays = {name: bytes(4 * len(token_ids)) for name in ("logprobs", "ratios", "entropies")}
    versions = versions or [(1, len(token_ids))]
    ids = np.array(token_ids, "<i4").tobytes()
    return row(index, token_ids=ids, origins=origins, versions=versions, **arrays)


TALKS = [
    # A prompt with tools; a turn with a call, and its result; a turn that an interruption parts.
    talk(0, [0, 1, 26, 2, 3, 4, 5, 6], [(3, 2), (0, 2), (2, 1), (0, 1), (1, 1), (0, 1)],
         [(1, 3), (2, 5)]),
    talk(1, [1, 26], [(0, 1), (0, 1)]),  # a call in a single turn, after the question's prompt
    talk(2, [0, 2, 3, 4], [(3, 1), (0, 1), (2, 1), (0, 1)]),  # an environment without tools
    talk(3, [26, 1, 2], [(0, 1), (3, 1), (0, 1)]),  # the history begins again with the result
]  # fmt: skip


def test_the_page_has_every_value_of_the_rows() -> None:
    rows = [row(i, step=i, completion=f"answer {i} {HOSTILE}") for i in range(4)]
    rows[1] |= {"engine": None, "reward": None, "trained": False, "ratios": None, "entropies": None}
    rows[2]["prompt_token_ids"] = rows[0]["token_ids"]
    rows[3]["ratios"] = np.array([0, 1e-40, 1, np.nan, np.inf, 1, 1, 1], "<f4").tobytes()
    rows[2]["logprobs"] = np.array([0, -0.0013, -70, -np.inf, np.nan, -1, -2], "<f4").tobytes()
    table = table_of(rows)
    head, arrays = read_page(render(*encode(table, words()), {"title": HOSTILE, "state": ""}))
    assert (head["rows"], head["title"]) == (4, HOSTILE)
    assert list(head["columns"]) == [n for n, (t, _) in COLUMNS.items() if t[:5] != "list "]
    for name, (kind, _) in head["columns"].items():
        values = arrays[f"column:{name}"].tolist()
        if kind == "string":
            values = [None if code < 0 else text_at(arrays, code) for code in values]
        else:
            values = [None if value != value else value for value in values]
        assert values == table[name].to_pylist(), name
    ends = arrays["token_ends"].tolist()
    assert ends == [5, 11, 18, 26]
    ids = arrays["vocabulary"][arrays["tokens"]]
    assert np.array_equal(ids, np.concatenate(table["token_ids"].to_pylist()))
    assert text_at(arrays, arrays["pieces"][arrays["tokens"][2]]) == "c"
    assert arrays["versions"][:5].tolist() == [1, 1, 3, 3, 3]
    steps = arrays["logprobs"].astype(float)
    assert steps[11:16].tolist() == [0, -1, head["lowest"], head["lowest"], head["nan"]]
    exact = np.concatenate(table["logprobs"].to_pylist())
    kept = np.isfinite(exact) & (exact > -65)
    assert np.abs(steps * LOGPROB_STEP - exact)[kept].max() <= LOGPROB_STEP / 2 + 1e-6
    assert (arrays["ratios"][5:11] == head["nan"]).all()  # the second row has none
    assert (arrays["entropies"][5:11] == head["nan"]).all()
    ratios = np.exp(arrays["ratios"][:5] * LOGPROB_STEP)
    assert ratios == pytest.approx(np.linspace(0.5, 1.5, 5), rel=1.01e-3)
    entropies = arrays["entropies"][18:26] * LOGPROB_STEP
    assert entropies == pytest.approx(np.linspace(0.0, 2.0, 8), abs=1.01e-3)
    lowest = head["lowest"]
    assert arrays["ratios"][18:23].tolist() == [lowest, lowest, 0, head["nan"], -lowest]
    prompts = np.split(arrays["vocabulary"][arrays["prompt_tokens"]], arrays["prompt_ends"][:-1])
    own = [prompts[i].tolist() for i in arrays["prompt_of"]]
    assert own == table["prompt_token_ids"].to_pylist()
    assert len(prompts) == 2


def test_turns_and_tool_results_are_columns_of_the_page() -> None:
    head, arrays = read_page(render(*encode(table_of(TALKS), words()), {"title": "", "state": ""}))
    assert arrays["column:turns"].tolist() == [2, 1, 2, 2]
    assert arrays["column:results"].tolist() == [1, 0, 0, 1]
    assert arrays["segment_ends"].tolist() == [6, 6, 10, 13]
    texts = [text_at(arrays, code) for code in arrays["segment_texts"]]
    marks = [head["marks"][mark] for mark in arrays["segment_marks"]]
    first = [("a b", ""), ("<tool_call> c", "tool call"), ("d", "tool result")]
    assert list(zip(texts, marks, strict=True))[:6] == [*first, ("e", ""), ("f", ""), ("g", "")]
    assert marks[6:] == ["", "", "", "", "tool call", "tool result", ""]
    _, plain = encode(table_of(TALKS))  # without a tokenizer
    assert plain["column:turns"].tolist() == [2, 1, 2, 2]
    assert "column:results" not in plain
    assert "column:turns" not in encode(table_of(TALKS[1:2]), words())[1]


def test_arrays_that_are_not_one_per_token_are_refused() -> None:
    for name in ("logprobs", "ratios", "entropies"):
        with pytest.raises(MetricsError, match=f"not as many {name} as tokens"):
            encode(table_of([row(0), row(1, **{name: bytes(8)})]))
    _, arrays = encode(table_of([row(0, ratios=None), row(1, ratios=None)]))
    assert "ratios" not in arrays
    assert "entropies" not in arrays


def test_hostile_text_is_never_markup_of_the_page() -> None:
    rows = [row(0, **{n: HOSTILE for n, (t, _) in COLUMNS.items() if t == "string"})]
    page = render(*encode(table_of(rows)), {"title": HOSTILE, "state": HOSTILE})
    assert page.count("<script") == page.count("</script>") == 3
    assert "<img" not in page
    assert "\x1b" not in page


def test_the_terminal_shows_controls_as_their_code(tmp_path, capsys) -> None:
    write(tmp_path, 3, [row(0, completion=f"{HOSTILE}\n[red]{'x' * 200_000}", task=HOSTILE)])
    app(["view", str(tmp_path), "--text"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert not UNSEEN.search(shown)
    assert "⟨U+001B⟩]0;taken⟨U+0007⟩" in shown
    assert "⟨U+202E⟩right to left" in shown
    assert "\n[red]" + "x" * 200_000 + "\n" in shown
    with pytest.raises(ConfigError, match="--row 1: the rows are 0 to 0"):
        app(["view", str(tmp_path), "--text", "--row", "1"], standalone_mode=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], r"rollouts: no rollout files.*metrics\.rollouts_every_steps above 0"),
        (["--steps", "7-3"], "--steps 7-3: write the first and the last step as 3-7"),
        (["--text", "--follow"], "leave --follow and --out out"),
        (["--follow"], "no rollout files"),
    ],
)
def test_what_cannot_be_shown_has_an_error_with_the_remedy(tmp_path, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        app(["view", str(tmp_path), *options], standalone_mode=False)
    assert not (tmp_path / "view.html").exists()


def test_steps_take_a_part_and_a_page_has_a_limit(tmp_path, monkeypatch) -> None:
    for step in range(4):
        write(tmp_path, step, [row(i, step=step) for i in range(2)])
    out = tmp_path / "other.html"
    app(["view", str(tmp_path), "--steps", "1-2", "--out", str(out)], standalone_mode=False)
    _, arrays = read_page(out.read_text())
    assert arrays["column:step"].tolist() == [1, 1, 2, 2]
    with pytest.raises(ConfigError, match="--steps 8: .*rollouts has no file of these steps"):
        app(["view", str(tmp_path), "--steps", "8"], standalone_mode=False)
    monkeypatch.setattr(cli, "MOST_BYTES", 1000)
    with pytest.raises(ConfigError, match="take a part: --steps A-B"):
        app(["view", str(tmp_path)], standalone_mode=False)


def sign(run, **values):
    own = {"run": str(run), "role": "trainer", "rank": 0, "host": socket.gethostname(),
           "pid": os.getpid(), "born": born(os.getpid()), "incarnation": 0, "state": "training",
           "step": 4, "time": time.time(), "limit": 600.0, **values}  # fmt: skip
    work = run / "alive.tmp"
    work.write_bytes(msgspec.json.encode(Sign(**own)))
    work.rename(run / "alive.json")


def test_a_run_has_ended_by_its_sign(tmp_path) -> None:
    assert "no run signs" in cli.run_state(tmp_path)
    sign(tmp_path)
    assert cli.run_state(tmp_path) == ""
    sign(tmp_path, state="ended")
    assert cli.run_state(tmp_path) == "the run has ended at step 4"
    sign(tmp_path, limit=-1.0)
    assert "has stopped at step 4" in cli.run_state(tmp_path)
    sign(tmp_path, born=1)  # killed just now: torchrun may start it again
    assert cli.run_state(tmp_path) == ""
    sign(tmp_path, born=1, time=time.time() - GONE_SECONDS - 1)
    assert "has stopped at step 4" in cli.run_state(tmp_path)


def test_follow_writes_the_page_again_until_the_run_has_ended(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(cli, "LOOK_SECONDS", 0.02)
    sign(tmp_path)
    page, options = tmp_path / "view.html", {"standalone_mode": False}
    follower = threading.Thread(
        target=app, args=(["view", str(tmp_path), "--follow"],), kwargs=options, daemon=True
    )
    follower.start()
    for step in range(2):
        write(tmp_path, step, [row(0, step=step)])
        end = time.monotonic() + 60
        while not page.exists() or read_page(page.read_text())[0]["rows"] != step + 1:
            assert time.monotonic() < end, "the page does not have the new file"
            time.sleep(0.02)
    assert "the run goes on" in page.read_text()
    assert follower.is_alive()
    sign(tmp_path, state="ended", step=2)
    follower.join(60)
    assert not follower.is_alive()
    assert "the run has ended at step 2" in page.read_text()


@pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)
def test_the_page_in_a_browser_without_a_network(tmp_path) -> None:
    words().save(str(tmp_path / "tokenizer.json"))
    steps = {2: 5, 3: 7}  # wrong in step 3: 1, 3, 5
    for step, count in steps.items():
        rows = [row(i, step=step, completion=f"{i} {HOSTILE}") for i in range(count)]
        rows[1] |= {"verdict_reason": HOSTILE, "prompt": "p" * 200_000}
        write(tmp_path, step, rows)
    app(["view", str(tmp_path)], standalone_mode=False)
    page = tmp_path / "view.html"
    shown = dom(page, "step=3&verdict=wrong", tmp_path / "profile")
    assert 'data-ready="' in shown
    assert 'data-rows="3"' in shown
    assert len(re.findall(r'<div class="row[ "]', shown)) == 3
    tokens = re.findall(r'<span class="(token[^"]*)"[^>]*>([^<]*)</span>', shown)
    assert tokens[:3] == [("token prompt", text) for text in "zyx"]
    tokens = tokens[3:]
    assert [text for _, text in tokens] == ["a", "b", "c", "d", "e", "f"]  # of completion 1
    assert [kind for kind, _ in tokens].count("token forced") == 1
    assert "version 1</span>" in shown
    assert "all 200000 characters" in shown
    body = shown[shown.index("<body") :]
    assert "<img" not in body
    text = unescape(re.sub(r"<script.*?</script>|<[^>]*>", "", body, flags=re.DOTALL))
    assert "1 " + cli.visible(HOSTILE).replace("\n", "") in text
    assert str(tmp_path) in re.search(r"<title>(.*?)</title>", shown)[1]


@pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)
def test_a_page_without_rows_or_with_a_bad_filter_says_so(tmp_path) -> None:
    write(tmp_path, 3, [row(i) for i in range(3)])
    app(["view", str(tmp_path)], standalone_mode=False)
    shown = dom(tmp_path / "view.html", "step=x&color=logprob", tmp_path / "profile")
    assert 'data-rows="0"' in shown
    assert 'aria-invalid="true"' in shown
    assert "0 of 3 completions." in shown


@pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)
def test_tokens_are_colored_by_ratio_or_entropy_where_the_files_have_them(tmp_path) -> None:
    write(tmp_path, 3, [row(0, ratios=m.float_bytes([0.5, np.nan, 1.0, 1.1, 1.5])), row(1)])
    app(["view", str(tmp_path)], standalone_mode=False)
    colors = {}
    for color in ("ratio", "entropy"):
        shown = dom(tmp_path / "view.html", f"color={color}&row=0", tmp_path / color)
        own = re.findall(r'<span class="token[^"]*" data-token="\d"( style="[^"]*")?', shown)
        colors[color] = [len(set(own)), own.count("")]
        assert f'<option value="{color}">' in shown
    assert colors == {"ratio": [5, 1], "entropy": [5, 0]}  # a forced token has no ratio
    write(tmp_path, 3, [row(0, ratios=None, entropies=None)])
    app(["view", str(tmp_path)], standalone_mode=False)
    shown = dom(tmp_path / "view.html", "color=ratio", tmp_path / "none")
    assert 'data-ready="' in shown
    assert '<option value="logprob">' in shown
    assert '<option value="ratio">' not in shown
    assert "version 1</span>" in shown  # the color of a link that this page does not have


@pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)
def test_turns_are_one_below_the_other_with_roles_versions_and_calls(tmp_path) -> None:
    words().save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, 3, TALKS)
    app(["view", str(tmp_path)], standalone_mode=False)
    shown = dom(tmp_path / "view.html", "row=0", tmp_path / "talk")
    conversation = shown[shown.index('id="talk"') : shown.index('id="legend"')]
    heads = re.findall(r'<p class="note who">(.*?)</p><div class="text (\w+)">(.*?)<', conversation)
    assert heads == [
        ("Prompt: 2 tokens", "prompt", "a b"),
        (
            'Turn 1: 2 tokens, versions 1, 2 <b class="">tool call</b>',
            "sampled",
            "&lt;tool_call&gt; c",
        ),
        ("Given, tool result: 1 tokens", "given", "d"),
        ("Turn 2: 1 tokens, version 2 ", "sampled", "e"),
        ("Forced into turn 2: 1 tokens", "forced", "f"),
        ("Turn 2, continued: 1 tokens, version 2 ", "sampled", "g"),
    ]
    assert "given: underlined" in shown
    tokens = re.findall(r'class="token ([a-z]*)"', shown)  # without the question's three
    assert tokens == ["prompt"] * 2 + ["sampled"] * 2 + ["given", "sampled", "forced", "sampled"]
    shown = dom(tmp_path / "view.html", "turns=2&results=1..&row=1", tmp_path / "single")
    assert 'data-rows="2"' in shown
    conversation = shown[shown.index('id="talk"') : shown.index('id="legend"')]
    assert re.findall(r'<div class="text (\w*)">(.*?)<', conversation) == [
        ("prompt", "2+3=?"),
        ("", "text 1"),
    ]
