"""Hook of `mkdocs build` (mkdocs.yml): replace links that leave docs/ by the path of the file.

They work on GitHub, but the built site has docs/ only.
"""

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)\s]*)\)")
log = logging.getLogger("mkdocs.hooks")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with paths instead of links; a missing file is a warning."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")

    def path_of(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2].split("#")[0]))
        if target.startswith("docs/"):
            return match[0]
        if not (ROOT / target).exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, target)
        text = match[1].strip("`")
        return f"`{target}`" if text in target else f"{match[1]} (`{target}`)"

    return LINK.sub(path_of, markdown)
