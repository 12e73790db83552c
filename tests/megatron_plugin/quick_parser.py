"""Megatron's parser of arguments, whose help is read from Megatron's source once per process.

Megatron parses the source of each configuration class for every parser, half of what a rank of
these tests would do. A fork server imports this module before its forks.
"""

from __future__ import annotations

import argparse
from functools import cache

from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments

from megatron_rl.megatron_plugin import flags

_read = ArgumentGroupFactory._get_field_docstrings


@cache
def _docstrings(config: type) -> dict[str, str]:
    return _read(ArgumentGroupFactory.__new__(ArgumentGroupFactory), config)


ArgumentGroupFactory._get_field_docstrings = lambda _, config: dict(_docstrings(config))
add_megatron_arguments(argparse.ArgumentParser())
flags.rules()
