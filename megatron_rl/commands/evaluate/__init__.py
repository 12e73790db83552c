"""Evaluation of a checkpoint: a run of the orchestrator without training, and estimates."""
