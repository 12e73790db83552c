"""Hooks of the documents' build (`mkdocs.yml`): links that leave docs/ become the file's path.

On the forge they are links; a site that is built from docs/ alone has nothing to link to.
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
    """Replace each link out of docs/; a warning (an error under --strict) where no file is."""
    here = posixpath.dirname(f"docs/{page.file.src_uri}")

    def path_of(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, match[2].split("#")[0]))
        if target.startswith("docs/"):
            return match[0]
        if not (ROOT / target).exists():
            log.warning("%s: there is no %s", page.file.src_uri, target)
        text = match[1].strip("`")
        return f"`{target}`" if text in target else f"{match[1]} (`{target}`)"

    return LINK.sub(path_of, markdown)
