"""Policy losses, one file each: sums over tokens, never means.

All normalisation is in the loss weights, so that a loss does not depend on how the tokens are
split over micro-batches and ranks.
"""
