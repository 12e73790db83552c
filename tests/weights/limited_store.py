"""A store process that reads a limited number of bytes a second: RATE SPEC (of `store_process`)."""

from __future__ import annotations

import sys
import time
from typing import Any

from megatron_rl.weights import pull, store_process

RATE = float(sys.argv[1])


class LimitedPull(pull.Pull):
    """Starts no read before the earlier ones would have been through."""

    allowed_at = 0.0

    def _start(self, *arguments: Any) -> None:
        now = time.monotonic()
        if now >= self.allowed_at:
            super()._start(*arguments)
            self.allowed_at = max(self.allowed_at, now - 0.1) + self._reads[-1].num_bytes / RATE


if __name__ == "__main__":
    store_process.Pull = LimitedPull  # type: ignore[attr-defined]
    store_process.main(sys.argv[2])
