"""The page of `megatron-rl view`: the columns of rollout files in one self-contained HTML file.

In `page.html` the data are inert text: a JSON head (names, types and lengths of the arrays), and
the arrays one after the other, little-endian, each padded to 8 bytes, zlib's format, base64:

    text_bytes, text_ends   all different texts, UTF-8 [bytes]; where each ends [texts]
    column:<name>           float64 [rows], null as NaN; or int32 [rows], index of a text or -1
    token_ends              where the tokens of each row end [rows]
    tokens, versions        index in the vocabulary, and weight version [all tokens]
    logprobs                in steps of `LOGPROB_STEP` [all tokens]
    vocabulary, pieces      token id, and index of its text or -1 [different tokens]
"""

import base64
import hashlib
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

from megatron_rl.metrics.metrics_file import MetricsError
from megatron_rl.metrics.rollouts import COLUMNS

LOGPROB_STEP = 0.002  # nats: log-probs are off by half of it at most
NOT_A_NUMBER, LOWEST = -32768, -32767  # in steps; LOWEST: that, or less
_TEMPLATE = (resources.files(__package__) / "page.html").read_text(encoding="utf-8")


def encode(table: Any, tokenizer: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the head and the arrays of the page for rows of rollout files.

    `table` is a `pyarrow.Table`, `tokenizer` a `tokenizers.Tokenizer` for the texts of tokens:
    without it, the page shows ids. `MetricsError`: log-probs or versions are not one per token.
    """
    texts, arrays = dict[str, int](), dict[str, Any]()
    for name, (kind, _) in COLUMNS.items():
        if kind == "string":
            values = table[name].to_pylist()
            codes = [-1 if v is None else texts.setdefault(v, len(texts)) for v in values]
            arrays[f"column:{name}"] = np.array(codes, "<i4")
        elif not kind.startswith("list "):
            arrays[f"column:{name}"] = table[name].cast("double").to_numpy().astype("<f8")
    tokens = {name: table[name] for name in ("token_ids", "logprobs", "versions")}
    lengths = {n: pc.list_value_length(c).fill_null(0).to_numpy() for n, c in tokens.items()}
    flat = {n: pc.list_flatten(c).to_numpy() for n, c in tokens.items()}
    if not all(np.array_equal(lengths["token_ids"], counts) for counts in lengths.values()):
        raise MetricsError("a completion has not as many log-probs or versions as tokens")
    ids, tokens_used = np.unique(flat["token_ids"], return_inverse=True)
    arrays["token_ends"] = _packed(np.cumsum(lengths["token_ids"]))
    arrays["tokens"], arrays["versions"] = _packed(tokens_used), _packed(flat["versions"])
    steps = np.clip(np.round(flat["logprobs"].astype("f8") / LOGPROB_STEP), LOWEST, -LOWEST)
    arrays["logprobs"] = np.where(np.isnan(steps), NOT_A_NUMBER, steps).astype("<i2")
    arrays["vocabulary"], pieces = _packed(ids), [-1] * len(ids)
    if tokenizer is not None:
        decoded = tokenizer.decode_batch(ids.reshape(-1, 1).tolist(), skip_special_tokens=False)
        pieces = [texts.setdefault(text, len(texts)) for text in decoded]
    arrays["pieces"] = np.array(pieces, "<i4")
    raw = [text.encode("utf-8", "backslashreplace") for text in texts]
    arrays["text_bytes"] = np.frombuffer(b"".join(raw), np.uint8)
    arrays["text_ends"] = _packed(np.cumsum([len(one) for one in raw]))
    head = {"rows": table.num_rows, "step": LOGPROB_STEP, "lowest": LOWEST, "nan": NOT_A_NUMBER,
            "columns": {n: about for n, about in COLUMNS.items() if f"column:{n}" in arrays},
            "arrays": [[n, a.dtype.name, len(a)] for n, a in arrays.items()]}  # fmt: skip
    return head, arrays


def render(head: dict[str, Any], arrays: dict[str, Any], about: dict[str, Any]) -> str:
    """Return the page; `about` has its `title`, and the `state` of the run."""
    from megatron_rl.scaling.plot import COLORS

    raw = b"".join(array.tobytes() + bytes(-array.nbytes % 8) for array in arrays.values())
    text = json.dumps(head | about | {"colors": COLORS}).replace("<", "\\u003c")
    code = _TEMPLATE.split("<script>")[1].split("</script>")[0]
    # Only this script runs, and nothing is fetched, whatever a text has in it.
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    values = {"HEAD": text, "SCRIPT": digest}
    values["DATA"] = base64.b64encode(zlib.compress(raw)).decode()
    return re.sub(r"@(HEAD|DATA|SCRIPT)@", lambda match: values[match[1]], _TEMPLATE)


def run_tokenizer(run: Path) -> Any:
    """Return the `tokenizers.Tokenizer` of a run, from its folder or from its models; or None."""
    folders = [run, *sorted(run.glob("*")), *sorted(run.glob("*/*"))]
    if (run / "config.yaml").is_file():
        config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        folders += [Path(config[n]) for n in ("start_checkpoint", "model") if config.get(n)]
    files = filter(Path.is_file, (folder / "tokenizer.json" for folder in folders))
    return next((Tokenizer.from_file(str(path)) for path in files), None)


def _packed(values: Any) -> Any:
    """Return integers, none negative, in the smallest type of the page that has them all."""
    return np.asarray(values, "<u4" if np.max(values, initial=0) >= 2**16 else "<u2")
