"""Verdicts on programs: they run in a sandbox, and their outputs are compared outside it."""
