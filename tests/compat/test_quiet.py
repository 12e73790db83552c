"""Only named notices are silenced, and the user can have them all."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings

from megatron_rl.compat import quiet


def _python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONWARNINGS": "", **variables},
    )  # fmt: skip


NOTICES = """
import logging, warnings
from megatron_rl.compat import quiet
quiet.silence_notices(); quiet.silence_notices()
for name, starts in quiet.LOG_LINES.items():
    logging.getLogger(name).warning(starts[0] + " and more")
    logging.getLogger(name).warning("something to act on")
for message in quiet.WARNINGS:
    warnings.warn(message.replace(".*", "x") + " and more")
warnings.warn("a weight is NaN")
"""


def test_the_named_notices_are_gone_and_all_others_come_through():
    done = _python(NOTICES)
    assert done.returncode == 0, done.stderr
    assert "and more" not in done.stderr
    assert done.stderr.count("something to act on") == len(quiet.LOG_LINES)
    assert "a weight is NaN" in done.stderr


def test_a_user_can_have_all_notices():
    done = _python(NOTICES, MEGATRON_RL_VERBOSE="1")
    assert done.stderr.count(" and more") >= len(quiet.LOG_LINES) + len(quiet.WARNINGS)


def test_filters_for_other_processes_are_added_once_and_keep_the_users_own(monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "error::BytesWarning")
    quiet.ignore_in_processes("ignore:resource_tracker:UserWarning")
    quiet.ignore_in_processes("ignore:resource_tracker:UserWarning")
    assert os.environ["PYTHONWARNINGS"] == (
        "error::BytesWarning,ignore:resource_tracker:UserWarning"
    )
    code = "import warnings; warnings.warn('resource_tracker: 1'); warnings.warn('another')"
    done = _python(code, PYTHONWARNINGS=os.environ["PYTHONWARNINGS"])
    assert "resource_tracker" not in done.stderr.replace(code, "")
    assert "another" in done.stderr


def test_no_logger_and_no_category_is_silenced_as_a_whole():
    loggers = [logging.getLogger(name) for name in ("megatron", "torch", "vllm", "transformers")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.resetwarnings()
        quiet.silence_notices()
        assert all(message is not None for _, message, *_ in warnings.filters)
    assert levels == [logger.level for logger in loggers]
