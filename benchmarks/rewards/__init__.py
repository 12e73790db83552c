"""Benchmarks of the verifiers: errors compared with math-verify, speed with and without bombs."""
