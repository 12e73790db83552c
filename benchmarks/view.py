"""Size and ready time of the page of `megatron-rl view`, in Debian's Chromium without a network.

    python benchmarks/view.py [--completions 10000] [--tokens 300] [--looks 5]

Tokens are random ids of a vocabulary of 152,064; log-probs, ratios and entropies have no pattern,
and texts are random words: what compression takes off a real run's page comes on top. The ready
time is what the page itself notes, from the start of its loading to its first frame with table and
token strip.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from megatron_rl.commands.view.page import encode, render
from megatron_rl.metrics.rollouts import arrow_schema, record_batch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.commands.browser import BROWSER, FLAGS, NO_BROWSER

LOAD_SECONDS = 60.0


class Words:
    """Stands for a tokenizer: a random word of 1 to 8 letters per id."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        letters = rng.integers(97, 123, (152_064, 8), dtype=np.uint8)
        lengths = rng.integers(1, 9, 152_064)
        self.words = [bytes(w[:n]).decode() for w, n in zip(letters, lengths, strict=True)]

    def decode_batch(self, ids, skip_special_tokens):
        return [self.words[one] for (one,) in ids]


def rows(completions, tokens, words):
    """Return rows of 16 completions per group and 512 per step."""
    rng = np.random.default_rng(1)
    result = []
    for n in range(completions):
        ids = rng.integers(0, 152_064, tokens).astype("<i4")
        logprobs = -rng.exponential(0.5, tokens).astype("<f4")
        step, change = n // 512, int(rng.integers(0, tokens + 1))
        right = bool(rng.integers(0, 2))
        result.append({
            "kind": "train", "step": step, "set": "", "task": "math", "prompt_id": n // 16 % 200,
            "group": n // 16, "index": n % 16, "engine": f"generator-{n % 4}",
            "prompt": f"Question {n // 16 % 200}: how many?", "prompt_token_ids": b"",
            "completion": " ".join(words.words[i] for i in ids), "token_ids": ids.tobytes(),
            "logprobs": logprobs.tobytes(),
            "ratios": np.exp(rng.normal(0, 0.05, tokens)).astype("<f4").tobytes(),
            "entropies": rng.exponential(0.5, tokens).astype("<f4").tobytes(),
            "versions": [(step, change), (step + 1, tokens - change)],
            "origins": [(0, tokens)], "finish_reason": "stop",
            "verdict": "correct" if right else "wrong", "verdict_reason": f"{n} is the answer",
            "reward": float(right), "advantage": float(rng.normal()), "loss_weight": 1e-4,
            "trained": True, "dropped_because": "", "lag_max": 1, "seconds_to_arrive": rng.random(),
            "seconds_to_verify": rng.random(), "unix_seconds": 1.7e9 + n,
        })  # fmt: skip
    return result


class Browser:
    """Chromium, by its debugging pipe: JSON texts with a zero byte after each."""

    def __init__(self, program: str, profile: str) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # The pipe's ends are 3 and 4 in the browser; the shell moves them there.
        moved = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", moved, "bash", program, "--remote-debugging-pipe",
             f"--user-data-dir={profile}", *FLAGS, "about:blank"],
            pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._rest, self._count = b"", 0

    def call(self, method: str, session: str = "", **params: object) -> dict:
        """Return the result of a method."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        os.write(self._out, json.dumps(message | ({"sessionId": session} if session else {}))
                 .encode() + b"\0")  # fmt: skip
        while True:
            while b"\0" not in self._rest:
                if not (part := os.read(self._in, 2**20)):
                    raise RuntimeError("the browser has ended")
                self._rest += part
            one, _, self._rest = self._rest.partition(b"\0")
            if (answer := json.loads(one)).get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def ready_seconds(self, url: str) -> float:
        """Return the ready time of a page in a new tab."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.navigate", session, url=url)
        end, ready = time.monotonic() + LOAD_SECONDS, "document.documentElement.dataset.ready"
        while time.monotonic() < end:
            value = self.call("Runtime.evaluate", session, expression=ready)["result"].get("value")
            if value is not None:
                self.call("Target.closeTarget", targetId=target)
                return int(value) / 1000
            time.sleep(0.1)
        raise TimeoutError(f"the page was not ready after {LOAD_SECONDS:.0f} s")

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(30)


def main() -> None:
    import pyarrow

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("completions", 10_000), ("tokens", 300), ("looks", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    words = Words()
    batch = record_batch(rows(options.completions, options.tokens, words))
    table = pyarrow.Table.from_batches([batch], arrow_schema())
    begin = time.perf_counter()
    page = render(*encode(table, words), {"title": "benchmark", "state": ""})
    print(f"written in {time.perf_counter() - begin:.1f} s, {len(page.encode()) / 1e6:.1f} MB")
    if BROWSER is None:
        sys.exit(f"{NO_BROWSER}: no ready time")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder, "view.html")
        file.write_text(page)
        browser = Browser(BROWSER, f"{folder}/profile")
        try:
            times = [browser.ready_seconds(file.as_uri()) for _ in range(options.looks)]
        finally:
            browser.close()
    shown = ", ".join(f"{seconds:.2f}" for seconds in times)
    print(f"ready in {statistics.median(times):.2f} s (median of {shown})")


if __name__ == "__main__":
    main()
