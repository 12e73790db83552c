"""Functions and classes that a configuration names by their import path."""

from importlib import import_module
from typing import Any


def imported(path: str) -> Any:
    """Return the function or class at `package.module:name`.

    Raises:
        ValueError: there is none; the message has the path, the cause and the remedy.
    """
    module, colon, name = path.partition(":")
    if not colon:
        raise ValueError(f"{path!r}: write it as `package.module:name`")
    try:
        value = getattr(import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise ValueError(f"{path!r}: {e}; is it on PYTHONPATH?") from e
    if not callable(value):
        raise ValueError(f"{path!r}: not callable")
    return value
