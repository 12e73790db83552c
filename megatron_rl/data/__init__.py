"""Prompt sets: questions and their right answers."""

from megatron_rl.data.prompt_format import read_format
from megatron_rl.data.prompts import Prompt, PromptSet, load_prompts

__all__ = ["Prompt", "PromptSet", "load_prompts", "read_format"]
