"""The orchestrator's part of a checkpoint.

Layout of `orchestrator.msgpack`: one line of JSON (`format`, `blake2b` of the rest), then a
MessagePack map. A file with another checksum is refused. It lies in the folder of Megatron's part,
which is renamed into place as one, so both parts are always of the same step.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.config import ConfigError
from megatron_rl.files import replace_file
from megatron_rl.messages import Sample
from megatron_rl.orchestrator.groups import Group
from megatron_rl.rewards import Verdict

FILE = "orchestrator.msgpack"
FORMAT = "megatron_rl.orchestrator/7"


class SavedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that was dispatched and not trained; missing completions are generated again."""

    index: int
    prompt_id: int
    samples: list[Sample]
    verdicts: dict[int, Verdict]  # verdicts by completion; missing ones are computed again
    failed: bool = False  # `Group.failed`
    dropped: set[int] = set()  # `Group.dropped`


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a resumed run apart from weights and optimizer."""

    step: int  # steps trained
    fingerprint: str  # hash of the data set
    sets: dict[str, str] = {}  # hash of each evaluation set
    prompts_per_step: int
    consumed: int  # groups below this index were trained
    groups: list[SavedGroup]
    curriculum: dict[str, Any]
    compute: dict[str, float]  # `RunMetrics.compute`
    aborted: int


def saved_groups(groups: Iterable[Group]) -> list[SavedGroup]:
    """Return the groups of a checkpoint, with the completions that have arrived."""
    return [
        SavedGroup(
            index=g.index, prompt_id=g.prompt_id, samples=g.ordered, verdicts=g.verdicts,
            failed=g.failed, dropped=g.dropped,
        ) for g in groups
    ]  # fmt: skip


def restored_groups(state: State, make: Callable[[int, int], Group], routed: bool) -> list[Group]:
    """Return the saved groups, each from `make(index, prompt_id)`.

    Completions with routed experts where the run has none, or without (`routed`), are made again.
    """
    groups = [make(saved.index, saved.prompt_id) for saved in state.groups]
    for group, saved in zip(groups, state.groups, strict=True):
        group.failed, group.dropped = saved.failed, saved.dropped
        if all(bool(s.routes) == routed for s in saved.samples):
            group.samples = {s.index: s for s in saved.samples}
            group.verdicts = saved.verdicts
    return groups


def save_state(state: State, directory: Path) -> None:
    """Write the state into a checkpoint folder that is not in place yet."""
    body = msgspec.msgpack.encode(state)
    header = {"format": FORMAT, "blake2b": _checksum(body)}
    replace_file(directory / FILE, json.dumps(header).encode() + b"\n" + body)


def load_state(
    directory: Path, fingerprint: str, prompts_per_step: int, sets: Mapping[str, str] = {}
) -> State:
    """Read the state of a checkpoint.

    Evaluation sets may be new; one that is not must have the same questions.

    Raises:
        ConfigError: no such file, torn file, another format, another data set or step size.
    """
    path = directory / FILE
    if not path.exists():
        raise ConfigError(f"{path}: missing; the checkpoint is not of a megatron_rl run")
    head, _, body = path.read_bytes().partition(b"\n")
    try:
        header = json.loads(head)
    except ValueError:
        header = {"format": FORMAT, "blake2b": ""}  # a torn first line
    if header.get("format") != FORMAT:
        raise ConfigError(f"{path}: format {header.get('format')!r}, this version reads {FORMAT!r}")
    if header["blake2b"] != _checksum(body):
        raise ConfigError(f"{path}: its checksum differs; take an older checkpoint (--resume STEP)")
    state = msgspec.msgpack.decode(body, type=State, strict=False)
    if state.fingerprint != fingerprint:
        raise ConfigError(
            f"{path}: made with another data set ({state.fingerprint}, now {fingerprint}); resume"
            " with the same task and seed, or start a new output_dir"
        )
    for name, now in sets.items():
        if state.sets.get(name, now) != now:
            raise ConfigError(
                f"{path}: evaluation.sets.{name} had other questions; give it another name"
            )
    if state.prompts_per_step != prompts_per_step:
        raise ConfigError(
            f"schedule.prompts_per_step is {prompts_per_step}: the run in {path} has"
            f" {state.prompts_per_step}; resume with the same"
        )
    return state


def _checksum(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=16).hexdigest()
