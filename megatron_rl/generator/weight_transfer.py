"""vLLM's end of the weight transfer, in each worker process: map a version, then load it.

vLLM's weight-transfer API has init, start, update and finish. After start the layers are empty, so
everything that can be refused or takes time must come before: the generator's own process has
locked and checked the version's bytes, and `WorkerExtension` adds two earlier calls.

    map_version         every worker maps (and pins) the version's memory; the engine decodes
    version_mapped      polled: not yet, mapped, or refused with the reason
    start_weight_update, update_weights, finish_weight_update      decoding is paused
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer import base as transfer
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.model_loader import reload

from megatron_rl.generator.expert_capture import RouteRecorder
from megatron_rl.messages import Manifest
from megatron_rl.weights.loading import NodeStores
from megatron_rl.weights.manifest import WeightsError


@dataclass
class UpdateInfo(transfer.WeightTransferUpdateInfo):
    """The version that was mapped last."""

    version: int


class StoredWeights(transfer.WeightTransferEngine):
    """Loads versions from the stores of this node.

    An error raised from `receive_weights` on leaves the engine between two versions: the generator
    reports it and ends, it never continues to decode.
    """

    init_info_cls = transfer.WeightTransferInitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        cuda = torch.cuda.is_available()
        self._stores = NodeStores(pinned=cuda)
        # A new thread of a process has device 0.
        device = (torch.cuda.set_device, (self.device,)) if cuda else (None, ())
        self._thread = ThreadPoolExecutor(1, "weights", *device)
        self.mapped: Future[tuple[Manifest, str]] = Future()
        """The version of the last `map` and its folder, or WeightsError."""

    def init_transfer_engine(self, init_info: transfer.WeightTransferInitInfo) -> None:
        """Silence a warning of every update: rotary tables are computed, not loaded."""
        text = "RotaryEmbedding: Failed to load weights"
        logger = logging.getLogger(reload.initialize_layerwise_reload.__module__)
        logger.addFilter(lambda record: not record.getMessage().endswith(text))

    def map(self, manifest: str, folder: str) -> None:
        """Start to map the version of this manifest (JSON)."""
        self.mapped = self._thread.submit(self._map, manifest, folder)

    def _map(self, manifest: str, folder: str) -> tuple[Manifest, str]:
        version = msgspec.json.decode(manifest, type=Manifest)
        self._stores.map(version, folder)
        return version, folder

    def forget(self) -> None:
        """Unmap all stores, after what was to be mapped before; nothing is loaded meanwhile."""
        self._thread.submit(self._stores.forget).result()

    def start_weight_update(self) -> None:
        """Prepare the layers for loading: parameters in checkpoint layout, on `meta`."""
        reload.initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load every tensor of the version, or raise WeightsError."""
        manifest, folder = self.mapped.result(timeout=0)
        if manifest.version != update_info.version:
            raise WeightsError(
                f"version {manifest.version} is mapped, and version {update_info.version} is to be"
                " loaded: `map_version` comes first"
            )
        self.model.load_weights(self._stores.tensors(manifest, folder))
        if torch.cuda.is_available():  # the memory may be written again once this returns
            torch.cuda.current_stream().synchronize()

    def finish_weight_update(self) -> None:
        """Process the layers that wait for the last tensor (attention layers)."""
        reload.finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """End the thread; the memory goes with the process."""
        self._thread.shutdown()


class WorkerExtension:
    """`worker_extension_cls` of a generator: calls by names that no method of vLLM's worker has."""

    model_runner: Any
    weight_transfer_engine: StoredWeights
    _routes: RouteRecorder

    def capture_routes(self) -> list[int]:
        """Record experts from now on; return the layers with experts, from 0."""
        self._routes = RouteRecorder(self.model_runner)
        return self._routes.layers

    def take_routes(self, request_ids: list[str], wanted: int | None = None) -> list[bytes]:
        """Return int16 [N, L, K] of the first `wanted` requests' input tokens; keep none."""
        return [self._routes.take(request) for request in request_ids][:wanted]

    def head_dtypes(self) -> list[str]:
        """Return the types of the logits that the model's heads compute, as torch names them."""
        modules = self.model_runner.get_model().modules()
        heads = {str(m.head_dtype) for m in modules if isinstance(m, LogitsProcessor)}
        return sorted(name.removeprefix("torch.") for name in heads)

    def map_version(self, manifest: str, folder: str) -> None:
        """Start to map the version of this manifest (JSON) in the stores of `NodeStores.map`."""
        self.weight_transfer_engine.map(manifest, folder)

    def forget_stores(self) -> None:
        """Unmap the memory of all versions."""
        self.weight_transfer_engine.forget()

    def version_mapped(self) -> tuple[bool, str]:
        """Return (True if the version can be loaded, reason of a refusal or "")."""
        mapped = self.weight_transfer_engine.mapped
        try:
            return mapped.done() and bool(mapped.result()), ""
        except WeightsError as e:
            return False, f"{e}"
