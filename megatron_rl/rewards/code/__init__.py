"""Verdicts on programs: they run against tests in a sandbox, and outputs are compared outside it."""
