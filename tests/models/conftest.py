"""Megatron-Core is changed for CPU, whatever a test module imports first."""

from __future__ import annotations

from megatron_rl import compat

compat.install()
