"""Commands other than training; nothing that a run executes imports them."""
