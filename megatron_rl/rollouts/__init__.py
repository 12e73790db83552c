"""From a prompt to its completions: single turns with interruption, tools, environments."""
