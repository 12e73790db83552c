"""`megatron-rl data prepare`: turn published data sets into files of a run."""
