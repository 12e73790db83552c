"""The meeting point of trainer and generators of one run: the key-value store of torchrun."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address of a `TCPStore` that another process hosts, and this run's own prefix in it.

    It travels to the generators' worker processes as a plain dict (`dataclasses.asdict`).

    Example: `Rendezvous("127.0.0.1", 29500, "megatron_rl/0/weights")`.
    """

    host: str
    port: int
    prefix: str

    def connect(self, seconds: float) -> Any:
        """Return a new connection to the store, below the prefix.

        One per thread: a wait on a connection blocks everything else on it.

        Args:
            seconds: time-out of connecting and, by default, of every wait.

        Raises:
            torch.distributed.DistNetworkError: no answer from the address.
        """
        from torch.distributed import PrefixStore, TCPStore

        store = TCPStore(
            self.host, self.port, is_master=False, timeout=timedelta(seconds=max(seconds, 0.001))
        )
        return PrefixStore(self.prefix, store)


NOWHERE = Rendezvous("", 0, "")
"""For a transport that needs no store."""
