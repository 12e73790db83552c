"""`megatron-rl view`: the completions of a run as one page, or in the terminal."""
