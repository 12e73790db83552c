"""The interpreter of the generator ranks, where vLLM lives in an environment of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config import ConfigError, RunConfig

VARIABLE = "MEGATRON_RL_GENERATOR_PYTHON"
_ENTERED = "MEGATRON_RL_GENERATOR_ENTERED"
# They belong to the environment that is left; torchrun's variables and all others go along.
_LEFT_BEHIND = ("PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


def generator_python(config: RunConfig) -> str | None:
    """`roles.generator_python`, else the environment variable; None: every role's interpreter.

    Raises:
        ConfigError: it is no executable file.
    """
    chosen = config.roles.generator_python
    source = "roles.generator_python"
    if chosen is None and os.environ.get(VARIABLE):
        chosen, source = Path(os.environ[VARIABLE]), VARIABLE
    if chosen is None:
        return None
    path = chosen.expanduser().absolute()
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise ConfigError(
            f"{source} is {chosen}: no executable file is there; give the path of the python of an"
            " environment with vLLM and megatron_rl (ENV/bin/python)"
        )
    return str(path)


def enter_generator_python(config: RunConfig, arguments: Sequence[str]) -> None:
    """Replace this process by the same command in the generators' interpreter, if it is another.

    The process keeps its id and torchrun's variables, so torchrun goes on to watch it.

    Args:
        config: the run's configuration.
        arguments: of `megatron-rl`, as this rank was started.

    Raises:
        ConfigError: the interpreter is no executable file.
    """
    # A link into another environment's bin is that environment: the paths count, not their target.
    python = generator_python(config)
    if python in (None, sys.executable) or os.environ.get(_ENTERED) == python:
        return
    environment = {k: v for k, v in os.environ.items() if k not in _LEFT_BEHIND}
    environment[_ENTERED] = python
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(python, [python, "-m", "megatron_rl.cli", *arguments], environment)
