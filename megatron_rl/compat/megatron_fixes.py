"""Fixes of Megatron-Core for a trainer, of which `patches/` has diffs, and a hook that it lacks."""

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.compat.upstream import UpstreamFix


def _use_compiled_helpers(module: Any) -> None:
    if not Path(module.__file__).with_name("Makefile").exists():
        load = functools.partial(importlib.import_module, "megatron.core.datasets.helpers_cpp")
        module.compile_helpers = functools.update_wrapper(load, module.compile_helpers)


def _sum_expert_gradients(module: Any) -> None:
    for name in ("ColumnParallelLinear", "RowParallelLinear", "TELinear", "TEGroupedLinear"):
        cls = module.__dict__.get(name)
        # Each module imports the other's classes; without Transformer Engine its are mocks.
        if getattr(cls, "__module__", "") == module.__name__:
            cls.__init__ = _with_expert_groups(cls.__init__)


def _with_expert_groups(init: Any) -> Any:
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        config = arguments["config"]
        # Experts whose tensor-parallel size differs are reduced over groups of their own.
        replicated = config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        if arguments.get("is_expert") and replicated:
            for parameter in self.parameters():
                parameter.allreduce = False

    return wrapper


def _share_token_counts(module: Any) -> None:
    count = module.get_tokens_per_expert_and_token_count

    @functools.wraps(count)
    def shared(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(count).bind(*args, **kwargs).arguments
        per_expert, local, total = count(*args, **kwargs)
        if given.get("with_padding_mask"):
            # The auxiliary losses of the ranks add up to the micro-batch's: one weight for all.
            local, total = total / given["reduce_group"].size(), total.clamp(min=1)
        return per_expert, local, total

    module.get_tokens_per_expert_and_token_count = shared


def _uses_torch_adam(megatron_optimizer: Any) -> bool:
    import torch

    return isinstance(megatron_optimizer.optimizer, torch.optim.Adam | torch.optim.AdamW)


def _init_adam_state(megatron_optimizer: Any) -> None:
    """Give an Adam that never stepped its moments and step counts."""
    import torch

    adam = megatron_optimizer.optimizer
    if not _uses_torch_adam(megatron_optimizer) or adam.state:
        return
    megatron_optimizer.init_state_fn(adam, megatron_optimizer.config)
    for group in adam.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for p in group["params"]:
            device = p.device if on_device else "cpu"
            adam.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=device)


def _save_step_counts(module: Any) -> None:
    for cls in (module.Float16OptimizerWithFloat16Params, module.FP32Optimizer):
        cls.sharded_state_dict = _with_step_count(cls.sharded_state_dict)


def _with_step_count(sharded_state_dict: Any) -> Any:
    @functools.wraps(sharded_state_dict)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        _init_adam_state(self)
        state_dict = sharded_state_dict(self, *args, **kwargs)
        if _uses_torch_adam(self):
            # Upstream leaves out a count of 0.
            step = self._extract_common_per_param_step({"state": self.optimizer.state})
            if step is not None:
                state_dict.get("optimizer", state_dict)["state"]["common_step"] = step
        return state_dict

    return wrapper


def _load_step_counts(module: Any) -> None:
    import torch

    cls = module.DistributedOptimizer
    make, load = cls.state_dict, cls.load_state_dict
    set_states = cls._set_main_param_and_optimizer_states

    @functools.wraps(make)
    def state_dict(self: Any) -> Any:
        _init_adam_state(self)
        if not _uses_torch_adam(self) or self.optimizer.state:
            return make(self)
        # This rank's shard has no parameter, and upstream asserts that there is one step count.
        self.optimizer.state["no parameter"] = {"step": torch.zeros(())}
        try:
            return make(self)
        finally:
            self.optimizer.state.clear()

    @functools.wraps(load)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        load(self, state_dict)
        if _uses_torch_adam(self):
            # Upstream shares one tensor, which would advance once per parameter.
            for state in self.optimizer.state.values():
                state["step"] = state["step"].clone()

    @functools.wraps(set_states)
    @torch.no_grad()
    def set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: Any) -> None:
        if _uses_torch_adam(self):
            group, order = self.model_param_group_index_map[model_param]
            main_param = self.optimizer.param_groups[group]["params"][order]
            # `load_state_dict` has set the step count: upstream misses it among `tensors`.
            tensors = {**tensors, "step": self.optimizer.state[main_param]["step"]}
        set_states(self, model_param, tensors)

    cls.state_dict = state_dict
    cls.load_state_dict = load_state_dict
    cls._set_main_param_and_optimizer_states = set_main_param_and_optimizer_states


def before_training_schedules(begin: Callable[[int, Sequence[Any]], None]) -> None:
    """Have `megatron.training` call `begin` on every rank before each training schedule.

    Within a schedule, pipeline stages reach the script's functions at different times: nothing
    collective may happen there. `begin` gets the number of iterations that are done, and the model
    chunks as they are wrapped.
    """
    from megatron.training import get_args, training

    schedule_of = training.get_forward_backward_func

    def run(schedule: Callable[..., Any], **options: Any) -> Any:
        if not options["forward_only"]:
            begin(get_args().curr_iteration, options["model"])
        return schedule(**options)

    training.get_forward_backward_func = lambda *args, **kwargs: functools.partial(
        run, schedule_of(*args, **kwargs)
    )


_PACKAGE, _BOTH = "megatron-core", ">=0.18.2,<0.20"

FIXES = (
    UpstreamFix(
        "megatron-core-compile-helpers", _PACKAGE, _BOTH,
        "megatron.training exits at its start: the wheel has the data set helpers compiled, and no"
        " Makefile to compile them with",
        {"megatron.core.datasets.utils": (
            'command = ["make", "-C", os.path.abspath(os.path.dirname(__file__))]',
            _use_compiled_helpers,
        )},
    ),
    UpstreamFix(
        "megatron-core-torch-adam-checkpoint", _PACKAGE, _BOTH,
        "checkpoints with torch's Adam: after a load all parameters share one step count, a fresh"
        " distributed optimizer cannot be loaded into, and a step count of 0 is not saved",
        {"megatron.core.optimizer.optimizer": ("if step:\n", _save_step_counts),
         "megatron.core.optimizer.distrib_optimizer": ('s["step"] = step\n', _load_step_counts)},
        unless_importable=("transformer_engine", "apex"),
    ),
    UpstreamFix(
        "megatron-core-expert-gradients", _PACKAGE, ">=0.18.2,<0.19",
        "experts that are replicated over tensor-parallel ranks (parallel.tensor >"
        " parallel.expert_tensor, parallel.expert 1) get the gradient of their own rank's tokens"
        " only",
        {
            "megatron.core.tensor_parallel.layers": (
                "not (self.is_expert and self.expert_parallel)", _sum_expert_gradients
            ),
            "megatron.core.extensions.transformer_engine": (
                'setattr(param, "allreduce", not self.expert_parallel)', _sum_expert_gradients
            ),
        },
        fixed_in="0.19.0",
    ),
    UpstreamFix(
        "megatron-core-padded-router-losses", _PACKAGE, _BOTH,
        "with a padding mask, the routers' auxiliary loss is NaN for a micro-batch of padding, and"
        " ranks that share a micro-batch weight their parts by their own tokens",
        {"megatron.core.transformer.moe.moe_utils": (
            "local_num_tokens = local_tokens_per_expert.sum() / topk", _share_token_counts
        )},
    ),
)  # fmt: skip
