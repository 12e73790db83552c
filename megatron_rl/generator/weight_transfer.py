"""vLLM's end of every transport, in each worker process: receive and check, then load by layers.

vLLM's weight-transfer API has init, start, update and finish. After start the layers are empty, so
everything that can be refused must be refused before: `WorkerExtension` adds two earlier calls.

    begin_weights     every worker starts to receive; the engine continues to decode
    weights_ready     polled: not yet, ready, or refused with the reason
    start_weight_update, update_weights, finish_weight_update      decoding is paused
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.distributed.weight_transfer import base as transfer
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.model_loader import reload

from megatron_rl.generator.expert_capture import CapturedRoutes
from megatron_rl.messages import Manifest
from megatron_rl.weights.transports import ReceiverInfo, open_receiver
from megatron_rl.weights.transports.base import Receiver


def _is_relevant(record: logging.LogRecord) -> bool:
    # Rotary tables are computed, not loaded; vLLM warns about them on every update.
    return not record.getMessage().endswith("RotaryEmbedding: Failed to load weights")


@dataclass
class InitInfo(transfer.WeightTransferInitInfo):
    """`receiver` is `asdict` of a `megatron_rl.weights.transports.ReceiverInfo`."""

    receiver: dict[str, Any]


@dataclass
class UpdateInfo(transfer.WeightTransferUpdateInfo):
    """One version; `manifest` is the JSON of a `megatron_rl.messages.Manifest`."""

    manifest: str


def update_info(manifest: Manifest) -> dict[str, str]:
    """Return the arguments of `AsyncLLM.update_weights` and `begin_weights`."""
    return {"manifest": msgspec.json.encode(manifest).decode()}


class ReceivedWeights(transfer.WeightTransferEngine):
    """Loads a version that a receiver of any transport holds.

    The generator compared names, shapes and dtypes of the whole version with the model's before it
    called any worker. An error raised from `receive_weights` on leaves the engine between two
    versions: the generator reports it and ends, it never continues to decode.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    receiver: Receiver | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Open this worker's receiver; a second call replaces it."""
        self.shutdown()
        info = ReceiverInfo(**init_info.receiver)
        self.receiver = open_receiver(info, self.parallel_config.rank)
        logger = logging.getLogger(reload.initialize_layerwise_reload.__module__)
        if _is_relevant not in logger.filters:
            logger.addFilter(_is_relevant)

    def start_weight_update(self) -> None:
        """Prepare the layers for loading: parameters in checkpoint layout, on `meta`."""
        reload.initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load every tensor of the version, or raise WeightsError."""
        manifest = msgspec.json.decode(update_info.manifest, type=Manifest)
        self.open_receiver.load(manifest, self.model.load_weights)

    def finish_weight_update(self) -> None:
        """Process the layers that wait for the last tensor (attention layers)."""
        reload.finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Close the receiver."""
        if self.receiver is not None:
            self.receiver.close()

    @property
    def open_receiver(self) -> Receiver:
        """The receiver; RuntimeError before `init_weight_transfer_engine`."""
        if self.receiver is None:
            raise RuntimeError("init_weight_transfer_engine comes before the first version")
        return self.receiver


class WorkerExtension(CapturedRoutes):
    """`worker_extension_cls` of a generator: calls in a worker beyond vLLM's own.

    Its methods have names that no method of vLLM's worker has.
    """

    weight_transfer_engine: ReceivedWeights

    def head_dtypes(self) -> list[str]:
        """Return the types of the logits that the model's heads compute, as torch names them."""
        modules = self.model_runner.get_model().modules()
        heads = {str(m.head_dtype) for m in modules if isinstance(m, LogitsProcessor)}
        return sorted(name.removeprefix("torch.") for name in heads)

    def begin_weights(self, manifest: str) -> None:
        """Start to receive the version of this manifest (JSON); returns at once."""
        version = msgspec.json.decode(manifest, type=Manifest)
        self.weight_transfer_engine.open_receiver.begin(version)

    def weights_ready(self) -> tuple[bool, str]:
        """Return (True if the version can be loaded, reason of a refusal or "")."""
        try:
            return self.weight_transfer_engine.open_receiver.poll(), ""
        except RuntimeError as e:  # WeightsError, or an error of gloo, NCCL or the store
            return False, f"{e}"
