"""Benchmarks of the verifiers: errors beside math-verify's, and speed with and without bombs."""
