"""The generators' environment: asked by a process of its interpreter, then judged here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_rl.commands.doctor import device_probe
from megatron_rl.commands.doctor.child import ProcessFailed, output_of
from megatron_rl.commands.doctor.result import Result, fail, note, ok

PROBE = Path(__file__).with_name("device_probe.py")


def ask(python: str) -> tuple[dict[str, Any] | None, Result]:
    """What the interpreter says about its environment, and the line for the report."""
    check = "generator environment"
    try:
        # -P: the folder of device_probe.py holds modules that are not meant for its path.
        text = output_of([python, "-P", str(PROBE)])
    except ProcessFailed as e:
        return None, fail(
            check,
            f"{python}: {e}",
            "give roles.generator_python (or MEGATRON_RL_GENERATOR_PYTHON) an interpreter that"
            " works, or leave it out when vLLM is in this environment",
        )
    line = next(x for x in text.splitlines() if x.startswith(device_probe.MARK))
    answer: dict[str, Any] = json.loads(line.removeprefix(device_probe.MARK))
    if answer["versions"]["megatron_rl"] is None:
        return answer, fail(
            check,
            f"{python} has no megatron_rl",
            f"{python} -m pip install --no-deps this package there",
        )
    known = {k: v for k, v in answer["versions"].items() if v}
    return answer, ok(check, f"{python}: " + ", ".join(f"{k} {v}" for k, v in known.items()))


def check_features(answer: dict[str, Any]) -> list[Result]:
    """One line for each feature of vLLM that a run uses."""
    results = []
    for name, said in answer["features"].items():
        check = f"vLLM: {name}"
        if "error" in said:
            results.append(
                fail(check, said["error"], "install a vLLM of the supported range: see setup.py")
            )
        else:
            results.append(ok(check, "present"))
    return results


def check_nccl(
    trainer: dict[str, Any], generator: dict[str, Any] | None, *, cuda: bool
) -> list[Result]:
    """NCCL on both sides, and whether they are one library.

    Args:
        trainer: what `device_probe.nccl` says in the trainer's environment: {"value": ...} or {"error"}.
        generator: the same of the generators' environment; None if it could not be asked.
        cuda: whether torch finds a GPU.
    """
    check = "NCCL"
    if not cuda:
        return [note(check, "no GPU: processes talk over gloo, NCCL is not used")]
    sides = {"trainer": trainer} | ({"generator": generator} if generator is not None else {})
    for side, said in sides.items():
        if "error" in said or said["value"]["version"] is None:
            why = said.get("error", "torch has loaded no libnccl.so.2")
            remedy = f"install a torch with CUDA in the {side}'s environment"
            return [fail(check, f"{side}: {why}", remedy)]
    found = {side: said["value"] for side, said in sides.items()}
    text = ", ".join(f"{side} {v['version']} ({v['path']})" for side, v in found.items())
    if len({v["version"] for v in found.values()}) > 1:
        path = found["trainer"]["path"]
        return [
            fail(
                check,
                f"two versions: {text}",
                f"load one library on both sides: VLLM_NCCL_SO_PATH={path} for the generators",
            )
        ]
    return [ok(check, text)]


def check_patches(trainer: dict[str, Any], generator: dict[str, Any] | None) -> list[Result]:
    """One line for each upstream fault that this project mends, in the environment that counts."""
    from megatron_rl.patching import load_patches
    from megatron_rl.patching.required import is_needed

    unneeded = {p.name for p in load_patches() if not is_needed(p)}
    results = []
    for side, answer in (("trainer", trainer), ("generator", generator)):
        if answer is None:
            continue
        said, python = answer["patches"], answer["python"]
        if "error" in said:
            continue  # megatron_rl is missing there, which has a line of its own
        for row in said["value"]:
            if (row["role"] == "generator") != (side == "generator"):
                continue
            results.append(_patch_line(row, python, row["name"] in unneeded))
    return results


def _patch_line(row: dict[str, str], python: str, unneeded: bool) -> Result:
    check = f"patch {row['name']}"
    if row["state"] == "APPLIED":
        return ok(check, f"applied to {row['detail']}")
    if row["state"] in ("ABSENT", "MENDED"):
        return note(check, f"{row['detail']}: nothing to patch")
    if unneeded:
        return note(check, "not applied, and the faulty code is not used here")
    return fail(
        check,
        f"{row['state'].lower()}: {row['detail']} ({row['fault']})",
        f"{python} -m megatron_rl.patching apply",
    )
