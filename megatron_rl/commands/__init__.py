"""Commands beside training; nothing that a run executes imports them."""
