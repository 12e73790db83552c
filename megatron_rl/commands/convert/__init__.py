"""Conversion between Hugging Face directories and Megatron's distributed checkpoints, by torch."""
