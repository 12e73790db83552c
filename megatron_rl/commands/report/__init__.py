"""`megatron-rl report`: one page about a run, or about several side by side."""
