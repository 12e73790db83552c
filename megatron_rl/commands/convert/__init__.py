"""Conversion between Hugging Face directories and Megatron's distributed checkpoints.

    safetensors_directory   tensors of a Hugging Face directory
    keys, distributed       parameters of a Megatron checkpoint: their names and their values
    to_megatron, to_huggingface     the two directions
    resumable               files that are written once each, checksums
    cli                     `megatron-rl convert`

Imports torch, not Megatron.
"""
