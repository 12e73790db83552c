"""Compute kernels and their torch references."""
