"""Megatron-Core is mended before a test module imports it."""

from __future__ import annotations

from megatron_rl.compat import megatron_cpu

megatron_cpu.install()
