"""The trainer: a Hugging Face model on Megatron-Core, trained by sums of weighted token losses.

All of it is SPMD: every rank of the Megatron world makes the same calls in the same order
(`train.py`). Importing this package lets Megatron-Core run on CPU where CUDA is missing (`compat`).
"""

from megatron_rl import compat
from megatron_rl.compat import quiet

compat.install()
quiet.silence_notices()
