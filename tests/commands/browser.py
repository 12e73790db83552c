"""A browser without a network, for pages that are opened from the disk."""

import shutil
import subprocess

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--proxy-server=127.0.0.1:1", "--host-resolver-rules=MAP * ~NOTFOUND")  # fmt: skip
"""Options of a browser that shows nothing and fetches nothing."""
NO_BROWSER = "no Chromium is here"


def dom(page, fragment, profile):
    """Return the document that the browser makes of a page.

    An error on the console fails the test; so does anything that the page fetches.
    """
    done = subprocess.run(
        [BROWSER, *FLAGS, "--enable-logging=stderr", f"--user-data-dir={profile}",
         "--virtual-time-budget=60000", "--window-size=1200,900", "--dump-dom",
         f"{page.as_uri()}#{fragment}"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert console == []
    return done.stdout
