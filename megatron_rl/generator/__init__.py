"""The generator: vLLM's engine, in-flight weight updates, forced-length interruption."""
