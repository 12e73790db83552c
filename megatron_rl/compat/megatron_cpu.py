"""Megatron-Core 0.19 on CPU with gloo.

    from megatron_rl.compat import megatron_cpu
    megatron_cpu.install()          # before the first `import megatron.core`

Inert where `torch.cuda.is_available()`. No file is changed: an import hook gives every module of
`megatron.core` a private view of `torch` whose "cuda" is the CPU (`cpu_torch`), and then applies
the mends below, each to one module. Outside of `megatron.core` only `Tensor.cuda`, `Module.cuda`
and `Tensor.record_stream` change, which raise without CUDA anyway.

Every mend names the line of upstream that makes it necessary; a test looks for that line, so
that a release which mends it itself is noticed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import logging
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_rl.compat import cpu_torch

PACKAGE = "megatron.core"
VERSIONS = (0, 19)
"""Release line that the mends were written for and tested with."""


@dataclass(frozen=True, slots=True)
class Mend:
    """One change to one module of Megatron-Core, applied right after the module ran."""

    module: str
    reason: str
    evidence: str
    """Text in the module's source without which the mend is no longer needed."""
    apply: Callable[[types.ModuleType], None]


def _no_compiler(module: Any) -> None:
    module.disable_jit_fuser()


def _cpu_random_state(module: Any) -> None:
    module._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    module._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(
        new_state
    )
    # fork() warns when the CPU generator moves; here it is the one that is meant to.
    logging.getLogger(module.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    real: Any = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = real(self, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name

    torch.Tensor.type = type_name
    try:
        yield
    finally:
        torch.Tensor.type = real


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _cuda_type_names():
            return function(*args, **kwargs)

    return wrapper


def _accept_cpu_gradients(module: Any) -> None:
    module.clip_grad_by_total_norm_fp32 = _with_cuda_type_names(module.clip_grad_by_total_norm_fp32)


def _accept_cpu_parameters(module: Any) -> None:
    half = module.Float16OptimizerWithFloat16Params
    half.__init__ = _with_cuda_type_names(half.__init__)
    _seed_state(half)
    _seed_state(module.FP32Optimizer)


def _distributed_optimizer(module: Any) -> None:
    cls = module.DistributedOptimizer
    build = cls.__dict__["_build_model_and_main_param_groups"].__func__
    cls._build_model_and_main_param_groups = classmethod(_with_cuda_type_names(build))
    _seed_state(cls)
    put, load = cls._set_main_param_and_optimizer_states, cls.load_state_dict

    def put_with_step(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        # torch's Adam keeps a `step` beside the moments, which the loaded tensors lack.
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        own = {"step": state["step"]} if "step" in state else {}
        with torch.no_grad():
            put(self, model_param, {**tensors, **own})

    def load_with_own_steps(self: Any, state_dict: Any) -> None:
        # Upstream hands one `step` tensor to all parameters: each would advance it.
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    cls._set_main_param_and_optimizer_states = put_with_step
    cls.load_state_dict = load_with_own_steps


def _seed_state(cls: Any) -> None:
    sharded_state_dict = cls.sharded_state_dict

    @functools.wraps(sharded_state_dict)
    def seeded(self: Any, model_state: Any, is_loading: bool = False, *a: Any, **k: Any) -> Any:
        # An optimizer that never stepped has no state to save, or to load into.
        inner = getattr(self, "optimizer", None)
        if isinstance(inner, torch.optim.Adam | torch.optim.AdamW):
            for group in inner.param_groups:
                for param in group["params"]:
                    state = inner.state[param]
                    state.setdefault("step", torch.tensor(0.0))
                    for moment in ("exp_avg", "exp_avg_sq"):
                        if moment not in state:
                            state[moment] = torch.zeros_like(param)
        return sharded_state_dict(self, model_state, is_loading, *a, **k)

    cls.sharded_state_dict = seeded


def _norm_with_sequence_parallel(module: Any) -> None:
    make = module.WrappedTorchNorm.__new__

    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = make(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = parallel
        for param in norm.parameters():
            param.sequence_parallel = parallel
        return norm

    module.WrappedTorchNorm.__new__ = new


def _split_sizes_on_cpu(module: Any) -> None:
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module.maybe_move_tensor_to_cpu = move


def _uneven_collectives(module: Any) -> None:
    gather, scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather_uneven(
        input_: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return gather(input_, group, sizes, use_global_buffer)
        sizes = [int(n) for n in sizes]
        padded = input_.new_zeros([max(sizes), *input_.shape[1:]])
        padded[: input_.shape[0]] = input_
        parts = gather(padded, group).split(max(sizes))
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])

    def scatter_uneven(
        input_: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return scatter(input_, group, sizes, use_global_buffer)
        total = input_.contiguous().clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split([int(n) for n in sizes])[group.rank()].clone()

    module._gather_along_first_dim = gather_uneven
    module._reduce_scatter_along_first_dim = scatter_uneven


MENDS: tuple[Mend, ...] = (
    Mend(
        "megatron.core.jit",
        "small fused functions would start a C++ compiler for a gain that CPU does not have",
        "jit_fuser = torch.compile",
        _no_compiler,
    ),
    Mend(
        "megatron.core.tensor_parallel.random",
        "the RNG tracker reads and writes the generator of a CUDA device",
        "torch.cuda.default_generators[idx]",
        _cpu_random_state,
    ),
    Mend(
        "megatron.core.tensor_parallel.mappings",
        "gloo has no all_gather and reduce_scatter of uneven sizes (tensor x expert parallel)",
        "torch.distributed.all_gather(output_tensor_list, input_, group=group)",
        _uneven_collectives,
    ),
    Mend(
        "megatron.core.optimizer.clip_grads",
        "gradients are compared with a CUDA type name",
        "assert param.grad.type() == 'torch.cuda.FloatTensor'",
        _accept_cpu_gradients,
    ),
    Mend(
        "megatron.core.optimizer.optimizer",
        "parameters are compared with a CUDA type name; a fresh torch Adam has no state",
        "elif param.type() == 'torch.cuda.FloatTensor'",
        _accept_cpu_parameters,
    ),
    Mend(
        "megatron.core.optimizer.distrib_optimizer",
        "CUDA type name; and after a load all parameters share one `step` tensor of torch's Adam",
        's["step"] = step',
        _distributed_optimizer,
    ),
    Mend(
        "megatron.core.transformer.torch_norm",
        "torch's norms are refused under sequence parallelism, which needs only a mark",
        "assert not config.sequence_parallel",
        _norm_with_sequence_parallel,
    ),
    Mend(
        "megatron.core.transformer.moe.moe_utils",
        "split sizes that are on the CPU already stay tensors, which all_to_all refuses",
        "if torch.is_tensor(tensor) and tensor.is_cuda:",
        _split_sizes_on_cpu,
    ),
)


class _Finder(importlib.abc.MetaPathFinder):
    """Gives modules of Megatron-Core the private view of torch, then applies their mend."""

    def __init__(self) -> None:
        self.torch = cpu_torch.view()
        self.mends = {mend.module: mend for mend in MENDS}

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec
        loader: Any = spec.loader
        run = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            run(module)
            if module.__dict__.get("torch") is torch:
                module.__dict__["torch"] = self.torch
            if fullname in self.mends:
                self.mends[fullname].apply(module)

        loader.exec_module = exec_module
        return spec


def _itself(self: Any, *_: Any, **__: Any) -> Any:
    return self


def _module_itself(self: Any, *_: Any, **__: Any) -> Any:
    return self


def _record_stream(self: Any, stream: Any) -> None:
    pass


def installed() -> bool:
    """Whether `install` has taken effect in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install() -> None:
    """Let `megatron.core` run on CPU; does nothing where CUDA is available, or a second time.

    Raises:
        RuntimeError: another release line of Megatron-Core, or it was imported before this call.
    """
    if torch.cuda.is_available() or installed():
        return
    version = importlib.metadata.version("megatron-core")
    if tuple(int(part) for part in version.split(".")[:2]) != VERSIONS:
        raise RuntimeError(
            f"megatron-core {version} is installed: compat.megatron_cpu mends"
            f" {'.'.join(map(str, VERSIONS))}.x; install that, or run on a machine with CUDA"
        )
    if PACKAGE in sys.modules:
        raise RuntimeError(
            f"{PACKAGE} was imported before compat.megatron_cpu.install(): call install() first"
        )
    sys.meta_path.insert(0, _Finder())
    # Two functions, because torch.compile refuses one object under two of torch's names.
    torch.Tensor.cuda = _itself
    torch.nn.Module.cuda = _module_itself
    torch.Tensor.record_stream = _record_stream
