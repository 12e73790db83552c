"""Patches of upstream wheels: known by hash, applied and reversed to the byte, asked for by a run.

`patches/` holds one unified diff per upstream fault, as upstream could take it, and `patches.toml`,
which says for each release of the wheel what a file's hash is without and with the patch. Nothing
is guessed: a file that is neither is left alone and named.

    python tools/apply_patches.py list | check | apply | reverse     [NAME ...]
    python -m megatron_rl.patching apply                             (the same, without a checkout)

Only the files that a diff names change, each by a rename, so a hard link into an installer's cache
stays as it was. The wheel's RECORD stays too: it says what upstream shipped, and neither
`pip uninstall` nor `pip check` compares its hashes. Installing the wheel again brings the original
back, and a run then says so (`require`).

This room needs the standard library only: it works in an environment that has nothing else yet.
"""

from megatron_rl.patching.manifest import Patch, State, Status, load_patches
from megatron_rl.patching.required import PatchNeededError, require
from megatron_rl.patching.wheel import PatchError, apply, reverse, state_of

__all__ = [
    "Patch",
    "PatchError",
    "PatchNeededError",
    "State",
    "Status",
    "apply",
    "load_patches",
    "require",
    "reverse",
    "state_of",
]
