"""The published models on the meta device: every name and shape, and the exact parameter count.

The reference index is what transformers would write for the same configuration; no weights are
there. (Not exercised: Transformer Engine modules, which need CUDA; their names are a pure function
of the local ones, and tested as such.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_rl.config import NAMED_MODELS
from megatron_rl.models import architecture, named_config

PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-4-scout-17b-16e": 107_769_861_120,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
}
ACTIVE = {"llama-4-scout-17b-16e": 17_172_894_720, "qwen3-30b-a3b": 3_353_032_704}


def transformers_index(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the checkpoint that transformers saves for this configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.core_model_loading import revert_weight_conversion

    kind = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    saved = revert_weight_conversion(model, model.state_dict())
    if config.get("tie_word_embeddings"):
        del saved["lm_head.weight"]  # a saved checkpoint has it once, as the embedding
    return {name: tuple(tensor.shape) for name, tensor in saved.items()}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_mapping_covers_every_name_and_shape_of_the_index(name: str) -> None:
    config = named_config(name)
    index = transformers_index(config)
    found = architecture(config)
    vision = found.passthrough(index)
    trained = {n: shape for n, shape in index.items() if n not in set(vision)}
    assert found.shapes() == trained
    # Every part of every tensor is made by one parameter.
    slots = [(hf, w.index) for w in found.weights() if w.exported for hf in w.hf]
    assert len(set(slots)) == len(slots)
    assert bool(vision) == ("vision_config" in config)
    assert all(n.startswith(("vision_model.", "multi_modal_projector.")) for n in vision)


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_megatron_model_has_exactly_the_mapped_parameters(name: str) -> None:
    import torch.distributed as dist

    from megatron_rl.trainer import megatron_build, shards
    from megatron_rl.trainer.world import destroy_world, init_world
    from tests.trainer.cases import run_config

    run, found = (
        run_config("tiny_scout", precision__params="bf16"),
        architecture(named_config(name)),
    )
    init_world(run, 0, 1, dist.HashStore())
    try:
        config = megatron_build.transformer_config(run, found, use_te=False)
        config.use_cpu_initialization = True
        with torch.device("meta"):
            module = megatron_build.build_module(run, found, config, use_te=False)
    finally:
        destroy_world()
    assert sum(p.numel() for p in module.parameters()) == PARAMETERS[name]
    own = shards.by_weight(found, [module], range(found.experts), use_te=False)
    weights = {w.megatron: w for w in found.weights()}
    # A tied output layer is a parameter of its own on other pipeline stages only.
    assert own.keys() == {name for name, w in weights.items() if w.exported}
    assert all(tuple(p.shape) == weights[n].shape for n, p in own.items())
    assert all(p.is_meta for p in own.values())


def test_counts_need_no_module() -> None:
    assert [*NAMED_MODELS] == sorted(PARAMETERS)
    for name, count in PARAMETERS.items():
        found = architecture(named_config(name))
        assert found.parameters() == count
        assert found.active_parameters() == ACTIVE.get(name, count)
    with pytest.raises(ValueError, match=r"no model 'gpt-4': known are llama-3.1-8b"):
        named_config("gpt-4")
