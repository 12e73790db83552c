"""The page of `megatron-rl view`: the columns of rollout files in one self-contained HTML file.

The page is `page.html` with the script `page.js`. Its data are inert text: a JSON head (names,
types and lengths of the arrays), and the arrays one after the other, little-endian, each padded to
8 bytes, zlib's format, base64:

    text_bytes, text_ends   all different texts, UTF-8 [bytes]; where each ends [texts]
    column:<name>           float64 [rows], null as NaN; or int32 [rows], index of a text or -1
    token_ends              where the tokens of each row end [rows]
    tokens, versions        index in the vocabulary, and weight version [all tokens]
    origins                 index in `message_parts.ORIGINS` [all tokens]
    logprobs                in steps of `LOGPROB_STEP` [all tokens]
    ratios, entropies       logarithm, and entropy, in the same steps [all tokens]; not there if no
                            row has them
    prompt_of, prompt_ends  index of each row's prompt [rows]; where each ends [different prompts]
    prompt_tokens           as `tokens`, of the different prompts
    vocabulary, pieces      token id, and index of its text or -1 [different tokens]
    segment_ends            where the segments (runs of one origin) of each row end [rows]; a single
                            turn has none. Not there if no row has any, or without a tokenizer
    segment_texts           index of the text of each [all segments]
    segment_marks           index in `MARKS` [all segments]
"""

import base64
import hashlib
import itertools
import json
import re
import zlib
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import yaml
from tokenizers import Tokenizer

from megatron_rl.messages import ORIGINS
from megatron_rl.metrics.metrics_file import MetricsError
from megatron_rl.metrics.rollouts import COLUMNS
from megatron_rl.metrics.terminal import UNSEEN
from megatron_rl.scaling.plot import COLORS

LOGPROB_STEP = 0.002  # nats: log-probs are off by half of it at most, ratios by 0.1%
NOT_A_NUMBER, LOWEST = -32768, -32767  # in steps; LOWEST: that, or less
TURN_COLUMNS = {
    "turns": ["int32", "turns of the policy"],
    "results": ["int32", "turns with a tool call, by their text, and a result"],
}
"""Columns of the page alone, if rows have more than single turns."""
MARKS = ("", "tool call", "tool result")
CALL = re.compile(
    r'tool[_▁]calls?|<function=|python_tag|functools\[|to=functions|"(arguments|parameters)"\s*:',
    re.IGNORECASE,
)
"""Is in the text of a turn with a tool call, in the formats with a marker or with JSON."""
_START = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-@SCRIPT@'">
"""
_TEMPLATE, _CODE = (
    (resources.files(__package__) / f"page.{kind}").read_text(encoding="utf-8")
    for kind in ("html", "js")
)


def encode(table: Any, tokenizer: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the head and the arrays of the page for rows of rollout files.

    `table` is a `pyarrow.Table`, `tokenizer` a `tokenizers.Tokenizer` for the texts of tokens:
    without it, the page shows ids. `MetricsError`: an array of tokens is not one per token.
    """
    texts, arrays = dict[str, int](), dict[str, Any]()
    for name, (kind, _) in COLUMNS.items():
        if kind == "string":
            values = table[name].to_pylist()
            codes = [-1 if v is None else texts.setdefault(v, len(texts)) for v in values]
            arrays[f"column:{name}"] = np.array(codes, "<i4")
        elif not kind.startswith("list "):
            arrays[f"column:{name}"] = table[name].cast("double").to_numpy().astype("<f8")
    lengths = _lengths(table["token_ids"])
    tokens, prompts = pc.list_flatten(table["token_ids"]).to_numpy(), dict[bytes, int]()
    ends = np.cumsum(_lengths(table["prompt_token_ids"]))
    rows = np.split(pc.list_flatten(table["prompt_token_ids"]).to_numpy(), ends[:-1])
    arrays["prompt_of"] = _packed([prompts.setdefault(r.tobytes(), len(prompts)) for r in rows])
    arrays["prompt_ends"] = _packed(np.cumsum([len(one) // 4 for one in prompts]))
    words = np.concatenate([tokens, np.frombuffer(b"".join(prompts), "<i4")])
    ids, used = np.unique(words, return_inverse=True)
    arrays["token_ends"] = _packed(np.cumsum(lengths))
    arrays["tokens"], arrays["prompt_tokens"] = map(_packed, np.split(used, [len(tokens)]))
    arrays["versions"] = _packed(_per_token(table, "versions", lengths))
    arrays["origins"] = _per_token(table, "origins", lengths).astype(np.uint8)
    arrays["logprobs"] = _steps(_per_token(table, "logprobs", lengths))
    if table["ratios"].null_count < table.num_rows:
        with np.errstate(divide="ignore"):
            arrays["ratios"] = _steps(np.log(_per_token(table, "ratios", lengths)))
        arrays["entropies"] = _steps(_per_token(table, "entropies", lengths))
    arrays["vocabulary"], pieces = _packed(ids), [-1] * len(ids)
    if tokenizer is not None:
        decoded = tokenizer.decode_batch(ids.reshape(-1, 1).tolist(), skip_special_tokens=False)
        pieces = [texts.setdefault(text, len(texts)) for text in decoded]
    arrays["pieces"] = np.array(pieces, "<i4")
    arrays |= _turns(arrays["origins"], lengths, tokens, tokenizer, texts)
    raw = [text.encode("utf-8", "backslashreplace") for text in texts]
    arrays["text_bytes"] = np.frombuffer(b"".join(raw), np.uint8)
    arrays["text_ends"] = _packed(np.cumsum([len(one) for one in raw]))
    head = {"rows": table.num_rows, "step": LOGPROB_STEP, "lowest": LOWEST, "nan": NOT_A_NUMBER,
            "columns": {n: about for n, about in (COLUMNS | TURN_COLUMNS).items()
                        if f"column:{n}" in arrays},
            "arrays": [[n, a.dtype.name, len(a)] for n, a in arrays.items()]}  # fmt: skip
    return head, arrays


def render(head: dict[str, Any], arrays: dict[str, Any], about: dict[str, Any]) -> str:
    """Return the page; `about` has its `title`, and the `state` of the run."""
    raw = b"".join(array.tobytes() + bytes(-array.nbytes % 8) for array in arrays.values())
    shown = head | about | {"colors": COLORS, "unseen": UNSEEN.pattern}
    shown |= {"origins": ORIGINS, "marks": MARKS}
    text = json.dumps(shown).replace("<", "\\u003c")
    data = base64.b64encode(zlib.compress(raw)).decode()
    return fill(_TEMPLATE, _CODE, HEAD=text, DATA=data)


def fill(template: str, code: str, **values: str) -> str:
    """Return a page with its values in place of their names (`@HEAD@`), and its script.

    The template begins with the title. Only this script runs, and nothing is fetched, whatever a
    text has in it.
    """
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    values |= {"SCRIPT": digest, "CODE": code}
    return re.sub(f"@({'|'.join(values)})@", lambda match: values[match[1]], _START + template)


def run_tokenizer(run: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of a run, from its folder or from its models; or None."""
    folders = [run, *sorted(run.glob("*")), *sorted(run.glob("*/*"))]
    if (run / "config.yaml").is_file():
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        folders += [Path(config[n]) for n in ("start_checkpoint", "model") if config.get(n)]
    files = filter(Path.is_file, (folder / "tokenizer.json" for folder in folders))
    return next((Tokenizer.from_file(str(path)) for path in files), None)


def _turns(
    origins: Any, lengths: Any, tokens: Any, tokenizer: Any, texts: dict[str, int]
) -> dict[str, Any]:
    """Return the arrays of segments and the columns of turns; none if all rows are single turns."""
    count = len(lengths)
    row_of = np.repeat(np.arange(count), lengths)
    starts = np.flatnonzero(np.diff(row_of * len(ORIGINS) + origins, prepend=-1))
    rows = row_of[starts]
    own = np.isin(origins[starts], [ORIGINS.index("sampled"), ORIGINS.index("forced")])
    talks = np.bincount(rows[~own], minlength=count) > 0
    if not talks.any():
        return {}
    continued = np.append(False, own[:-1] & (rows[1:] == rows[:-1]))
    turns = np.bincount(rows[own & ~continued], minlength=count)
    if tokenizer is None:
        return {"column:turns": turns.astype("<f8")}
    shown, parts = talks[rows], dict[bytes, int]()
    cut = itertools.compress(np.split(tokens, starts[1:]), shown)
    which = [parts.setdefault(part.tobytes(), len(parts)) for part in cut]
    decoded = tokenizer.decode_batch(
        [np.frombuffer(ids, "<i4").tolist() for ids in parts], skip_special_tokens=False
    )
    calls, called, marks = [bool(CALL.search(text)) for text in decoded], -1, list[int]()
    for row, is_own, part in zip(rows[shown].tolist(), own[shown], which, strict=True):
        if is_own:
            mark, called = ("tool call", row) if calls[part] else ("", called)
        else:
            mark, called = "tool result" if called == row else "", -1
        marks.append(MARKS.index(mark))
    is_result = np.array(marks) == MARKS.index("tool result")
    codes = [texts.setdefault(text, len(texts)) for text in decoded]
    return {
        "column:turns": turns.astype("<f8"),
        "column:results": np.bincount(rows[shown][is_result], minlength=count).astype("<f8"),
        "segment_ends": _packed(np.cumsum(np.bincount(rows[shown], minlength=count))),
        "segment_texts": np.array(codes, "<i4")[which],
        "segment_marks": np.array(marks, np.uint8),
    }


def _lengths(column: Any) -> Any:
    return pc.list_value_length(column).fill_null(0).to_numpy()


def _per_token(table: Any, name: str, lengths: Any) -> Any:
    """Return the values of a column of lists [all tokens]; NaN where a row has none."""
    column, own = table[name], _lengths(table[name])
    is_there = column.is_valid().to_numpy()
    if not np.array_equal(own, np.where(is_there, lengths, 0)):
        raise MetricsError(f"a completion has not as many {name} as tokens")
    values = pc.list_flatten(column).to_numpy()
    if is_there.all():
        return values
    every = np.full(int(lengths.sum()), np.nan)
    every[np.repeat(is_there, lengths)] = values
    return every


def _steps(values: Any) -> Any:
    steps = np.clip(np.round(values.astype("f8") / LOGPROB_STEP), LOWEST, -LOWEST)
    return np.where(np.isnan(steps), NOT_A_NUMBER, steps).astype("<i2")


def _packed(values: Any) -> Any:
    """Return integers, none negative, in the smallest type of the page that has them all."""
    return np.asarray(values, "<u4" if np.max(values, initial=0) >= 2**16 else "<u2")
