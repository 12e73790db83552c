"""vLLM on CPU: a tied LM head multiplies with the old embedding after a weight update.

python vllm_cpu_tied_head_reload.py   # exit status 1 where the fault is, 0 where it is not
"""

import os
import sys
import tempfile

os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", TORCHDYNAMO_DISABLE="1")

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import reload

SIZE = 64


def main() -> int:
    torch.manual_seed(0)
    config = VllmConfig()
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config), torch.no_grad():
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1)
        embedding = VocabParallelEmbedding(SIZE, SIZE)
        head = ParallelLMHead(SIZE, SIZE).tie_weights(embedding)
        model = torch.nn.ModuleDict({"embedding": embedding, "head": head})
        reload.record_metadata_for_reloading(model)
        embedding.weight.data.normal_()
        for layer in model.values():
            layer.quant_method.process_weights_after_loading(layer)
        for _ in range(2):  # twice: an update must not change what the next one starts from
            new = torch.randn(SIZE, SIZE)
            reload.initialize_layerwise_reload(model)
            embedding.weight.weight_loader(embedding.weight, new)
            reload.finalize_layerwise_reload(model, None)
            used = head.cpu_linear(torch.eye(SIZE), head.weight, None).T
            if not embedding.weight.equal(new) or not used.equal(new):
                print("FAULT: the tied LM head keeps its old weight after an update")
                return 1
    print("the tied LM head multiplies with the new embedding")
    return 0


if __name__ == "__main__":
    sys.exit(main())
