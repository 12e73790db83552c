"""vLLM's end of the transport `disk`, in each worker process: check, then load layer by layer."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

import msgspec
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from megatron_rl.compat import vllm_cpu
from megatron_rl.messages import Manifest
from megatron_rl.weights.transports.disk import read_buckets


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    # Rotary tables are computed, not loaded; vLLM warns about them on every update.
    return not record.getMessage().endswith("RotaryEmbedding: Failed to load weights")


@dataclass
class DiskInitInfo(WeightTransferInitInfo):
    """Nothing is needed beyond the manifests."""


@dataclass
class DiskUpdateInfo(WeightTransferUpdateInfo):
    """One version; `manifest` is the JSON of a `megatron_rl.messages.Manifest`."""

    manifest: str


def update_info(manifest: Manifest) -> dict[str, str]:
    """What `AsyncLLM.update_weights` carries to the workers."""
    return {"manifest": json.dumps(msgspec.to_builtins(manifest))}


class DiskWeightTransferEngine(WeightTransferEngine):
    """Loads a version from its buckets; each bucket's checksum is compared before it is used.

    The names and shapes of the whole version were compared with the model's by the generator
    before the engine was paused. An error raised here leaves the engine between two versions: the
    generator reports it and ends, it never goes on decoding.
    """

    init_info_cls = DiskInitInfo
    update_info_cls = DiskUpdateInfo

    def init_transfer_engine(self, init_info: DiskInitInfo) -> None:
        """No connection is needed."""
        logging.getLogger(initialize_layerwise_reload.__module__).addFilter(_is_worth_a_line)

    def start_weight_update(self) -> None:
        """Prepare the layers for loading: parameters in checkpoint layout, on `meta`."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: DiskUpdateInfo) -> None:
        """Load every tensor of the version.

        Raises:
            WeightsError: a bucket is missing, torn, or holds other tensors than announced.
        """
        manifest = msgspec.json.decode(update_info.manifest, type=Manifest)
        self.model.load_weights(read_buckets(manifest))

    def finish_weight_update(self) -> None:
        """Process what waits for the last tensor (attention layers)."""
        finalize_layerwise_reload(self.model, self.model_config)
        vllm_cpu.pack_tied_head_again(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""
