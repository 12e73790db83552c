"""Keep the terminal for the run: third-party notices that a user can do nothing about are hidden.

`MEGATRON_RL_VERBOSE=1` shows them all. Errors are always shown, and nothing of this package's own
goes through here.
"""

from __future__ import annotations

import logging
import os
import warnings

CHATTY = ("megatron", "torch", "vllm", "transformers", "absl")


def quiet_third_parties() -> None:
    """Raise the level of third-party loggers and warnings, here and in processes started later."""
    if os.environ.get("MEGATRON_RL_VERBOSE") == "1":
        return
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("GLOO_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore")
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
