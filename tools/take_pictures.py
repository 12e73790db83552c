#!/usr/bin/env python3
"""Take the pictures of README.md: `python tools/take_pictures.py runs/demo`.

Both pages are written again, and headless Chromium opens them without a network. Each picture is
cut below its height and has 256 colors.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from megatron_rl.metrics import read_rollouts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.commands.browser import BROWSER, FLAGS

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTH, SCALE = 1100, 1.5  # CSS pixels, and pixels of the picture per CSS pixel
VIEW_HEIGHT, REPORT_HEIGHT = 1130, 800
MOST_BYTES = 300_000
LOAD_MILLISECONDS, SECONDS = 30_000, 180


def picture(page: Path, fragment: str, into: Path, height: int) -> None:
    """Write a PNG of a page; SystemExit if the browser is missing, or the file is too large."""
    if BROWSER is None:
        sys.exit("take_pictures: no Chromium is on PATH (Debian: apt install chromium)")
    with tempfile.TemporaryDirectory() as work:
        raw = Path(work) / "raw.png"
        command = [
            BROWSER, *FLAGS, "--hide-scrollbars", f"--user-data-dir={work}/profile",
            f"--window-size={WIDTH},{height}", f"--force-device-scale-factor={SCALE}",
            f"--virtual-time-budget={LOAD_MILLISECONDS}", f"--screenshot={raw}",
            f"{page.resolve().as_uri()}#{fragment}",
        ]  # fmt: skip
        subprocess.run(command, check=True, timeout=SECONDS, capture_output=True)
        with Image.open(raw) as image:
            small = image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
            small.save(into, optimize=True)
    size = into.stat().st_size
    print(f"{into}: {small.width} x {small.height}, {size / 1000:.0f} kB")
    if size > MOST_BYTES:
        sys.exit(f"take_pictures: {into} has {size} bytes, over {MOST_BYTES}: lower its height")


def shown_row(run: Path) -> str:
    """Return the fragment of view.html for the trained completion whose ratios are farthest from 1.

    Of the same step are those in the table.
    """
    keys = ["kind", "step", "set", "group", "index"]
    table = read_rollouts(run / "rollouts", [*keys, "ratios"])
    table = table.sort_by([(name, "ascending") for name in keys])  # the order of the page's rows
    far = [0.0 if row is None else np.nansum(np.abs(np.log(row.to_numpy())))
           for row in (one.values for one in table["ratios"])]  # fmt: skip
    row = int(np.argmax(far))
    return f"kind=train&step={table['step'][row]}&color=ratio&row={row}"


def main() -> None:
    """Take both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("--into", type=Path, default=IMAGES, help="folder [docs/images]")
    options = parser.parse_args()
    for command in ("view", "report"):
        subprocess.run([sys.executable, "-m", "megatron_rl.cli", command, options.run], check=True)
    picture(
        options.run / "view.html", shown_row(options.run), options.into / "view.png", VIEW_HEIGHT
    )
    picture(options.run / "report.html", "", options.into / "report.png", REPORT_HEIGHT)


if __name__ == "__main__":
    main()
