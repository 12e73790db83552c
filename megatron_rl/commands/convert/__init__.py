"""Checkpoints between Hugging Face and Megatron's distributed format, streamed from disk to disk.

    safetensor     safetensors files read and written piece by piece
    keys           what a parameter is called in a Megatron checkpoint
    distributed    parts of a Megatron checkpoint's tensors, by byte ranges
    pieces         what goes where in a Megatron checkpoint
    job            work folder, resuming, checksums
    to_megatron, to_huggingface     the two directions; `cli` is `megatron-rl convert`

No process ever holds more than a few copies of one parameter. Imports torch, not Megatron.
"""
