"""The mends that Megatron-Core needs on CPU with gloo, one per module; see `megatron_cpu`."""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


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


def _distributed_optimizer(module: Any) -> None:
    cls = module.DistributedOptimizer
    build = cls.__dict__["_build_model_and_main_param_groups"].__func__
    cls._build_model_and_main_param_groups = classmethod(_with_cuda_type_names(build))


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
        "parameters are compared with a CUDA type name",
        "elif param.type() == 'torch.cuda.FloatTensor'",
        _accept_cpu_parameters,
    ),
    Mend(
        "megatron.core.optimizer.distrib_optimizer",
        "parameters are compared with a CUDA type name",
        "elif model_param.type() == 'torch.cuda.FloatTensor'",
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
