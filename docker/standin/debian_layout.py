"""Give a copied CPython the folders that Debian and Ubuntu give theirs.

    python3.12 debian_layout.py FOLDER        FOLDER: its lib/python3.12

`pip install` then goes to /usr/local/lib/python3.12/dist-packages, and the packages of apt in
/usr/lib/python3/dist-packages are seen, behind it. Virtual environments keep site-packages.
"""

import re
import sys
from pathlib import Path

LOCAL = """
    'posix_local': {
        'stdlib': '{installed_base}/lib/python{py_version_short}',
        'platstdlib': '{platbase}/lib/python{py_version_short}',
        'purelib': '{base}/local/lib/python{py_version_short}/dist-packages',
        'platlib': '{platbase}/local/lib/python{py_version_short}/dist-packages',
        'include': '{installed_base}/include/python{py_version_short}{abiflags}',
        'platinclude': '{installed_platbase}/include/python{py_version_short}{abiflags}',
        'scripts': '{base}/local/bin',
        'data': '{base}/local',
    },"""
# site.py itself is frozen into the interpreter.
FOLDERS = (
    "import site; any(map(site.addsitedir, "
    "['/usr/local/lib/python3.12/dist-packages', '/usr/lib/python3/dist-packages']))\n"
)
PREFERRED = """
        'prefix': 'posix_local' if sys.prefix == sys.base_prefix else 'posix_prefix',"""


def replace(path: Path, *, pattern: str, text: str, last: bool = False) -> None:
    """Replace the first or last match of a pattern; an unknown source is an error."""
    source = path.read_text()
    matches = list(re.finditer(pattern, source))
    if not matches:
        raise SystemExit(f"{path}: no {pattern!r}: this CPython is laid out in another way")
    match = matches[-1 if last else 0]
    path.write_text(source[: match.start()] + text + source[match.end() :])


def main(library: Path) -> None:
    """Change sysconfig.py of a standard library, and add the folders to the path."""
    (library / "site-packages").mkdir(exist_ok=True)
    (library / "site-packages" / "debian.pth").write_text(FOLDERS)
    sysconfig = library / "sysconfig.py"
    replace(sysconfig, pattern=r"(?<=\n_INSTALL_SCHEMES = \{)", text=LOCAL)
    replace(sysconfig, pattern=r"\n        'prefix': 'posix_prefix',", text=PREFERRED, last=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
