"""vLLM's arguments for a run's configuration and checkpoint."""

import sys
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.models.registry import ModelRegistry

from megatron_rl.config import RunConfig
from megatron_rl.generator.expert_capture import returned_by_vllm
from megatron_rl.generator.vllm_plugin import WEIGHT_TRANSFER_BACKEND
from megatron_rl.models import architecture
from megatron_rl.models.safetensors_directory import read_config
from megatron_rl.rollouts.interruption import EndMarker, Interruption
from megatron_rl.weights.number_format import BLOCK, is_quantized

WORKER_EXTENSION = "megatron_rl.generator.weight_transfer.WorkerExtension"
BLOCK_TOKENS = 32  # of a KV block: the smallest that vLLM's CPU attention takes
CONCURRENT_SCORES = 8  # sequences in the engine, in addition to the completions
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def engine_args(config: RunConfig, engine_index: int, model_dir: str) -> AsyncEngineArgs:
    """Return vLLM's arguments for one engine of a run."""
    generation = config.generation
    # One more than the longest sequence: scoring a whole one asks for one more token.
    blocks = config.sequence_tokens // BLOCK_TOKENS + 1
    arguments: dict[str, Any] = {
        "model": model_dir,
        "dtype": _DTYPES[config.generator_dtype],
        "seed": config.seed + engine_index,
        "max_model_len": blocks * BLOCK_TOKENS,
        "max_num_seqs": generation.concurrent_completions + CONCURRENT_SCORES,
        "tensor_parallel_size": config.roles.generator_tensor_parallel,
        # The trainer computes log-probs from logits / temperature. So are vLLM's "processed" ones;
        # "raw" are the same at temperature 1, and cheaper.
        "logprobs_mode": "raw_logprobs" if generation.temperature == 1.0 else "processed_logprobs",
        "weight_transfer_config": {"backend": WEIGHT_TRANSFER_BACKEND},
        "worker_extension_cls": WORKER_EXTENSION,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if config.algorithm.routing_replay != "none" and returned_by_vllm():
        arguments["enable_return_routed_experts"] = True
    checkpoint = read_config(model_dir)
    text_config = checkpoint.get("text_config", checkpoint)
    if overrides := _overrides(config, checkpoint, arguments["max_model_len"]):
        arguments["hf_overrides"] = overrides
    if checkpoint is not text_config:
        # Nothing else is used: neither the images' processor nor their tower is made.
        arguments["language_model_only"] = True
    fp8 = config.weights.quantization == "fp8"  # the start checkpoint has no scales
    if fp8 or not any(Path(model_dir).glob("*.safetensors")):  # a plug-in's model
        # The weights come with the trainer's first version, before anything is generated.
        arguments["load_format"] = "dummy"
    if "attn_temperature_tuning" in text_config:
        # vLLM decides on Llama 4's query scale by `max_model_len`, the trainer by the checkpoint.
        tuning = bool(text_config["attn_temperature_tuning"])
        arguments["override_generation_config"] = {"attn_temperature_tuning": tuning}
    if torch.cuda.is_available():
        arguments["gpu_memory_utilization"] = generation.gpu_memory_fraction
    else:
        arguments |= {
            "enforce_eager": True,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": int(generation.kv_cache_gib * 2**30),
        }
    return AsyncEngineArgs(**arguments)


def _overrides(config: RunConfig, checkpoint: dict[str, Any], max_model_len: int) -> dict[str, Any]:
    text_config = checkpoint.get("text_config", checkpoint)
    overrides: dict[str, Any] = {}
    if head_dtype(config) != _DTYPES[config.generator_dtype]:
        overrides["head_dtype"] = head_dtype(config)
    if (text_config.get("attention_chunk_size") or 0) >= max_model_len:
        # No sequence leaves its first chunk: plain attention is the same, and needs one group of
        # KV blocks instead of one per kind of layer (a tenth of the engine's time on CPU).
        overrides["attention_chunk_size"] = None
    if config.weights.quantization == "fp8":
        overrides["quantization_config"] = _fp8(checkpoint, text_config)
    if checkpoint is not text_config:
        # vLLM builds the language model from `text_config` alone.
        overrides["text_config"] = dict(overrides)
    return overrides


def _fp8(checkpoint: dict[str, Any], text_config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with which vLLM's `fp8` loader expects `weights.number_format`."""
    model_type, head_dim = text_config.get("model_type"), text_config.get("head_dim") or 0
    cuda = torch.cuda.is_available()
    if not cuda and model_type == "llama4_text":
        raise ValueError(
            "weights.quantization is 'fp8': vLLM's CPU build has no FP8 experts for Llama 4, which"
            " multiplies the router's weight into their input; set it to 'none'"
        )
    # vLLM's CPU build multiplies FP8 block scales by AMX alone.
    if not cuda and not torch.cpu._is_amx_tile_supported():
        raise ValueError(
            "weights.quantization is 'fp8': vLLM multiplies FP8 weights with block scales on CUDA"
            " devices and on CPUs with AMX, and this generator has neither; set it to 'none'"
        )
    if checkpoint is not text_config:
        raise ValueError(
            f"weights.quantization is 'fp8': a checkpoint of model_type"
            f" {checkpoint.get('model_type')!r} has parts that are not trained, and vLLM would"
            " quantize them; take the text model alone, or set it to 'none'"
        )
    if model_type == "llama4_text" and head_dim % BLOCK:
        # vLLM reorders the rows of Llama 4's queries and keys within each head.
        raise ValueError(
            f"weights.quantization is 'fp8': heads of {head_dim} rows share blocks of {BLOCK} rows"
            " with one scale, which vLLM's rotary order for Llama 4 takes apart; set it to 'none'"
        )
    matrices = [n for n, shape in architecture(checkpoint).shapes().items() if len(shape) == 2]
    plain = [n.removesuffix(".weight") for n in matrices if not is_quantized(n)]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        # Routers, which vLLM would quantize by default; embedding and head.
        "modules_to_not_convert": plain,
    }


def head_dtype(config: RunConfig) -> str:
    """Return the type of the generators' logits, as torch names it."""
    return _DTYPES[config.precision.generator_head]


def check_model_class(model_dir: str) -> None:
    """Have vLLM import its class of a directory's model; ValueError names a missing package.

    It does so in another process, keeps the result, and does the same itself when it starts, but
    leaves the cause of a failure to its log.
    """
    for name in read_config(model_dir).get("architectures") or ():
        try:
            if name in ModelRegistry.models:
                ModelRegistry.models[name].inspect_model_cls()
        except RuntimeError as e:
            raise ValueError(
                f"{model_dir}: vLLM cannot import its class {name}: {str(e).splitlines()[-1]};"
                f" install what is missing in the generators' environment ({sys.executable})"
            ) from e


def interruption(config: RunConfig, tokenizer: Any) -> Interruption:
    """Return a run's interruption; ValueError: its phrase, as tokens, does not end thinking."""
    generation = config.generation
    marker = EndMarker(generation.think_end, tokenizer)
    phrase = tokenizer.encode(generation.interruption_phrase, add_special_tokens=False)
    if not marker.ends(phrase):
        raise ValueError(
            f"generation.interruption_phrase is {generation.interruption_phrase!r}: as tokens of"
            f" this model it is {tokenizer.convert_ids_to_tokens(phrase)}, which do not end with"
            f" the marker generation.think_end = {generation.think_end!r}; choose another phrase"
        )
    return Interruption([int(t) for t in phrase], marker.end)
