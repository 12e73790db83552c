"""One-sided reads from the memory of another process, by NIXL: RDMA, EFA, TCP or shared memory.

All that this package needs of a transfer engine; another one would replace this file alone. One
thread uses an agent. Every call works through NIXL's queue, and so does `progress`, which a process
that is read over TCP has to call every few milliseconds.
"""

import importlib
import logging
from collections.abc import Sequence
from typing import Any

from megatron_rl.weights.store import Bytes


class PeerLostError(ConnectionError):
    """The other process ended, or the connection to it broke."""


class Agent:
    """This process as a reader and as a source; its name differs from its peers'.

    Raises:
        ImportError: NIXL is not installed.
    """

    def __init__(self, name: str) -> None:
        try:
            api = importlib.import_module("nixl_cu13._api")
        except ModuleNotFoundError as e:
            raise ImportError(
                f"weights travel between nodes by NIXL ({e}): pip install nixl-cu13, or set"
                " weights.directory to a folder that all nodes share"
            ) from e
        logging.getLogger(api.logger.name).setLevel(logging.WARNING)
        # Its own thread would poll without a pause.
        options = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = api.nixl_agent(name, options)

    def register(self, regions: Sequence[Bytes]) -> None:
        """Make memory readable by peers, and usable as the target of reads."""
        self._agent.register_memory(self._descriptors(regions))

    def metadata(self, regions: Sequence[Bytes]) -> bytes:
        """Return what a peer passes to `connect` to read these registered regions."""
        descriptors = self._descriptors(regions)
        # Without the buffers of reads, which change: NIXL refuses a peer whose memory has changed.
        return bytes(self._agent.get_partial_agent_metadata(descriptors, True, ["UCX"]))

    def _descriptors(self, regions: Sequence[Bytes]) -> Any:
        spans = [(region.ctypes.data, region.size, 0, "") for region in regions if region.size]
        return self._agent.get_reg_descs(spans, "DRAM")

    def connect(self, metadata: bytes) -> str:
        """Return the name of the peer of this description."""
        name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def read(self, peer: str, spans: Sequence[tuple[int, Bytes]]) -> Any:
        """Start to read (address at the peer, own memory) pairs; return a handle for `done`.

        Raises:
            PeerLostError: the peer is gone.
        """
        local = [(into.ctypes.data, into.size, 0) for _, into in spans]
        remote = [(address, into.size, 0) for address, into in spans]
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(local, "DRAM"),
                self._agent.get_xfer_descs(remote, "DRAM"),
                peer,
            )
            self._agent.transfer(handle)
        except Exception as e:  # NIXL's exceptions have no base of their own
            raise PeerLostError(f"{type(e).__name__}: {e}") from e
        return handle

    def done(self, handle: Any) -> bool:
        """Return True once the bytes of a read are here; PeerLostError: they will not come."""
        try:
            state = self._agent.check_xfer_state(handle)
            if state == "DONE":
                handle.release()
        except Exception as e:
            raise PeerLostError(f"{type(e).__name__}: {e}") from e
        if state == "ERR":
            raise PeerLostError("the read failed")
        return bool(state == "DONE")

    def progress(self) -> None:
        """Serve what peers have asked for."""
        self._agent.get_new_notifs()
