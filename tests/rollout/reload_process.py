"""What vLLM's CPU build holds after a reload, without the mends: printed for the test.

`EXPERTS` names the weights that an engine holds wrongly after a reload with those it had, `TIED`
says whether a tied LM head multiplies with the embedding that was loaded.

The engine runs inside this process (no third import of vLLM), without the role around it.
"""

import json
import os
import sys
from pathlib import Path

from tests.rollout import tiny_models
from tests.rollout.conftest import run_config


def tied_head_is_right(vllm_config) -> bool:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )
    from vllm.model_executor.model_loader import reload

    with set_current_vllm_config(vllm_config), torch.no_grad():
        embedding = VocabParallelEmbedding(64, 64)
        model = torch.nn.ModuleDict({"embed": embedding, "head": ParallelLMHead(64, 64)})
        model["head"] = model["head"].tie_weights(embedding)
        reload.record_metadata_for_reloading(model)
        embedding.weight.data.normal_()
        for layer in model.values():
            layer.quant_method.process_weights_after_loading(layer)
        new = torch.randn(64, 64)
        reload.initialize_layerwise_reload(model)
        embedding.weight.weight_loader(embedding.weight, new)
        reload.finalize_layerwise_reload(model, vllm_config.model_config)
        assert embedding.weight.equal(new)
        head = model["head"]
        return head.cpu_linear(torch.eye(64), head.weight, None).T.equal(new)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    model_dir = tiny_models.save("llama4", 0, folder / "model")
    config = run_config(model_dir)
    from megatron_rl.rollout.environment import prepare_environment

    prepare_environment(config, str(model_dir))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from safetensors.torch import load_file
    from vllm.v1.engine.llm_engine import LLMEngine

    from megatron_rl.rollout.settings import engine_args
    from megatron_rl.rollout.weight_transfer import update_info
    from megatron_rl.weights.transports.disk import DiskPublisher

    engine = LLMEngine.from_engine_args(engine_args(config, 0, str(model_dir)))
    weights = tiny_models.checkpoint(model_dir)
    manifest = DiskPublisher(folder / "weights").publish(1, iter(weights.items()), 2**20)
    engine.collective_rpc("start_weight_update")
    engine.collective_rpc("update_weights", args=(update_info(manifest),))
    engine.collective_rpc("finish_weight_update")
    path = Path(engine.collective_rpc("save_held_weights")[0])
    held = load_file(path)
    path.unlink()
    wrong = [n for n in weights if not held[n].equal(weights[n])]
    print("EXPERTS " + json.dumps(sorted(wrong)))
    print("TIED " + json.dumps(tied_head_is_right(engine.vllm_config)))
