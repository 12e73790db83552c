"""The algorithm in plain numbers: advantages, weights, filters, curriculum, interruption; losses.

Everything here but `losses` is numpy and runs in the orchestrator; `losses` is torch.
"""
