"""List, check, apply and reverse the patches on the wheels of an environment.

Exit status: 0 done, 1 (`check`) a patch is not applied, 2 an unknown wheel or file.
Without names, all patches whose wheel is installed are meant.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_rl.patching.manifest import Patch, State, load_patches
from megatron_rl.patching.wheel import PatchError, apply, reverse, state_of


def _chosen(names: Sequence[str]) -> list[Patch]:
    known = {patch.name: patch for patch in load_patches()}
    for name in names:
        if name not in known:
            raise PatchError(f"there is no patch {name!r}; there are: {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())


def _list(patches: list[Patch], site: list[str] | None) -> int:
    for patch in patches:
        status = state_of(patch, site)
        print(
            f"{patch.name}: {status.state.value} ({status.detail})\n"
            f"  fault: {patch.fault}\n"
            f"  for: {patch.distribution} {', '.join(patch.releases)}; needed by: {patch.role}\n"
            f"  upstream: {patch.upstream}\n"
            f"  reproduction: {patch.reproduction}\n"
            f"  test: {patch.test}"
        )
    return 0


def _check(patches: list[Patch], site: list[str] | None) -> int:
    worst = 0
    for patch in patches:
        status = state_of(patch, site)
        print(f"{patch.name}: {status.state.value} ({status.detail})")
        worst = max(worst, {State.NEEDED: 1, State.UNKNOWN: 2}.get(status.state, 0))
    return worst


def _turn(
    patches: list[Patch], site: list[str] | None, *, backwards: bool, all_installed: bool
) -> int:
    status, turn = 0, reverse if backwards else apply
    done, nothing = ("reversed", "is not applied") if backwards else ("applied", "is applied")
    for patch in patches:
        if all_installed and state_of(patch, site).state in (State.ABSENT, State.MENDED):
            continue
        try:
            changed = turn(patch, site)
        except PatchError as e:
            print(f"apply_patches: {e}", file=sys.stderr)
            status = 2
            continue
        print(f"{patch.name}: {done if changed else nothing + ' already'}")
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="apply_patches", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=("list", "check", "apply", "reverse"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument(
        "--site",
        action="append",
        metavar="DIR",
        help="site-packages to work on, instead of this interpreter's (may be repeated)",
    )
    options = parser.parse_args(arguments)
    try:
        patches = _chosen(options.names)
    except PatchError as e:
        print(f"apply_patches: {e}", file=sys.stderr)
        return 2
    if options.command == "list":
        return _list(patches, options.site)
    if options.command == "check":
        return _check(patches, options.site)
    backwards = options.command == "reverse"
    return _turn(patches, options.site, backwards=backwards, all_installed=not options.names)


if __name__ == "__main__":
    sys.exit(main())
