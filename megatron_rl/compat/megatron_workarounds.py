"""Changes that Megatron-Core needs to run on CPU with gloo, one per module; see `megatron_cpu`.

The docstring of each says why; a test looks for its evidence, so that a release which no longer
needs it is noticed.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

Change = Callable[[Any], None]
WORKAROUNDS: dict[str, tuple[str, Change]] = {}
"""Module -> (text of its source without which the change is no longer needed, the change)."""


def _workaround(module: str, evidence: str) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        WORKAROUNDS[f"megatron.core.{module}"] = (evidence, change)
        return change

    return register


@_workaround("jit", "jit_fuser = torch.compile")
def _no_compiler(module: Any) -> None:
    """Fuse no small functions: on CPU it would start a C++ compiler for no gain."""
    module.disable_jit_fuser()


@_workaround("tensor_parallel.random", "torch.cuda.default_generators[idx]")
def _cpu_random_state(module: Any) -> None:
    """Read and write the CPU's generator: the RNG tracker does that of a CUDA device."""
    module._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    module._set_cuda_rng_state = lambda new_state, *_, **__: torch.set_rng_state(new_state)
    # fork() warns when the CPU generator moves, which is intended here.
    logging.getLogger(module.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


@_workaround("tensor_parallel.mappings", "all_gather(output_tensor_list, input_, group=group)")
def _uneven_collectives(module: Any) -> None:
    """Pad collectives of uneven sizes (tensor x expert parallel), which gloo lacks."""
    gather, scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather_uneven(input_: Any, group: Any, sizes: Any = None, *rest: Any, **named: Any) -> Any:
        if sizes is None or group.size() == 1:
            return gather(input_, group, sizes, *rest, **named)
        sizes = [int(n) for n in sizes]
        padded = input_.new_zeros([max(sizes), *input_.shape[1:]])
        padded[: input_.shape[0]] = input_
        parts = gather(padded, group).split(max(sizes))
        return torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])

    def scatter_uneven(input_: Any, group: Any, sizes: Any = None, *rest: Any, **named: Any) -> Any:
        if sizes is None or group.size() == 1:
            return scatter(input_, group, sizes, *rest, **named)
        total = input_.contiguous().clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split([int(n) for n in sizes])[group.rank()].clone()

    module._gather_along_first_dim = gather_uneven
    module._reduce_scatter_along_first_dim = scatter_uneven


def _with_cuda_type_names(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        real: Any = torch.Tensor.type

        def type_name(*args: Any, **kwargs: Any) -> Any:
            name = real(*args, **kwargs)
            return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name

        torch.Tensor.type = type_name
        try:
            return function(*args, **kwargs)
        finally:
            torch.Tensor.type = real

    return wrapper


@_workaround("optimizer.clip_grads", "assert param.grad.type() == 'torch.cuda.FloatTensor'")
def _accept_cpu_gradients(module: Any) -> None:
    """Accept gradients on CPU: upstream compares them with a CUDA type name."""
    module.clip_grad_by_total_norm_fp32 = _with_cuda_type_names(module.clip_grad_by_total_norm_fp32)


@_workaround("optimizer.optimizer", "elif param.type() == 'torch.cuda.FloatTensor'")
def _accept_cpu_parameters(module: Any) -> None:
    """Accept parameters on CPU: upstream compares them with a CUDA type name."""
    half = module.Float16OptimizerWithFloat16Params
    half.__init__ = _with_cuda_type_names(half.__init__)


@_workaround("optimizer.distrib_optimizer", "elif model_param.type() == 'torch.cuda.FloatTensor'")
def _accept_cpu_shards(module: Any) -> None:
    """Accept parameters on CPU: upstream compares them with a CUDA type name."""
    cls = module.DistributedOptimizer
    build = cls.__dict__["_build_model_and_main_param_groups"].__func__
    cls._build_model_and_main_param_groups = classmethod(_with_cuda_type_names(build))


@_workaround("transformer.torch_norm", "assert not config.sequence_parallel")
def _norm_with_sequence_parallel(module: Any) -> None:
    """Allow torch's norms under sequence parallelism, which needs only a mark."""
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


@_workaround("transformer.moe.moe_utils", "if torch.is_tensor(tensor) and tensor.is_cuda:")
def _split_sizes_on_cpu(module: Any) -> None:
    """Convert split sizes that are on the CPU already: all_to_all refuses tensors."""

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module.maybe_move_tensor_to_cpu = move
