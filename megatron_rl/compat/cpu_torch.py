"""A view of `torch` in which the device "cuda" is the CPU, for modules that know no other device.

`view()` is a copy of the module's namespace with its own `cuda` and its own tensor factories.
The real `torch` stays as it is, because a global patch of the factories breaks
`torch.device("meta")`, on which transformers and others rely.
"""

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any, Self

import torch

CPU = torch.device("cpu")
_NAMES = "tensor as_tensor zeros ones empty full arange rand randn randint"
FACTORIES = f"{_NAMES} zeros_like ones_like empty_like full_like".split()
"""Functions whose `device="cuda"` is read as the CPU, and `pin_memory` is dropped."""


def _nothing(*_: Any, **__: Any) -> None:
    pass


class _Event:
    __init__ = record = wait = synchronize = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Self) -> float:
        return 0.0


class _Stream(_Event):
    """A stream that does everything at once, in order, so its events are always done."""

    cuda_stream, device = 0, CPU
    wait_stream = wait_event = _nothing

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


class _View(types.ModuleType):
    """A copy of a module's names; what is set on it does not reach the original."""

    def __init__(self, real: types.ModuleType, **names: Any) -> None:
        super().__init__(real.__name__)
        hooks = ("__getattr__", "__setattr__")
        self.__dict__.update({k: v for k, v in real.__dict__.items() if k not in hooks})
        self.__dict__.update(names, _real=real)

    def __getattr__(self, name: str) -> Any:  # names that the original makes on demand
        return getattr(self.__dict__["_real"], name)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        if str(kwargs.get("device")).split(":")[0] == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


def view() -> types.ModuleType:
    """Return a private `torch` for modules that hard-code the device "cuda"."""
    stream = _Stream()
    rng = {
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "manual_seed": torch.default_generator.manual_seed,
    }
    cuda = _View(
        torch.cuda,
        current_device=lambda: CPU,
        device_count=lambda: 1,
        Stream=_Stream,
        Event=_Event,
        stream=lambda *_: contextlib.nullcontext(),
        nvtx=_View(torch.cuda.nvtx, range_push=_nothing, range_pop=_nothing),
        random=_View(torch.cuda.random, **rng),
        **rng,
        **dict.fromkeys(("set_device", "synchronize", "empty_cache"), _nothing),
        **dict.fromkeys(("current_stream", "default_stream"), lambda *_: stream),
    )
    return _View(torch, cuda=cuda, **{n: _on_cpu(getattr(torch, n)) for n in FACTORIES})


def training_view() -> types.ModuleType:
    """Return the same for `megatron.training`, which insists that CUDA is available."""
    torch_view: Any = view()
    # The generation for which Megatron needs no environment variables.
    newest = types.SimpleNamespace(major=10, minor=0, total_memory=0)
    names = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    cuda = _View(
        torch_view.cuda,
        is_available=lambda: True,
        get_device_properties=lambda *_: newest,
        get_device_capability=lambda *_: (newest.major, newest.minor),
        memory_stats=lambda *_: {},
        device_memory_used=lambda *_: 0,
        **dict.fromkeys(names, lambda *_: 0),
    )
    return _View(torch_view, cuda=cuda)
