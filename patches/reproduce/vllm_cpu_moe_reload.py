"""vLLM on CPU: a layer of experts computes something else after its own weights are loaded again.

    python vllm_cpu_moe_reload.py         # exit status 1 where the fault is, 0 where it is not

No error is raised: the kernels read plain weights as packed ones.
"""

import os
import sys
import tempfile

os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", TORCHDYNAMO_DISABLE="1")

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.model_loader import reload

EXPERTS, WIDTH, TOKENS = 4, 64, 8


def main() -> int:
    torch.manual_seed(0)
    config = VllmConfig()
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config), torch.no_grad():
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1)
        experts = FusedMoEFactory(
            num_experts=EXPERTS, top_k=2, hidden_size=WIDTH, intermediate_size=WIDTH, prefix="moe"
        )
        model = torch.nn.ModuleDict({"moe": experts})
        reload.record_metadata_for_reloading(model)
        weights = {
            (shard, expert): torch.randn(WIDTH, WIDTH) / 8
            for shard in ("w1", "w2", "w3")
            for expert in range(EXPERTS)
        }
        hidden, logits = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, EXPERTS)

        def load() -> None:
            for name, parameter in model.named_parameters():
                for (shard, expert), weight in weights.items():
                    if ("w2_" in name) == (shard == "w2"):
                        parameter.weight_loader(
                            parameter, weight, name, shard_id=shard, expert_id=expert
                        )

        def forward() -> torch.Tensor:
            with set_forward_context(None, config, num_tokens=TOKENS):
                return experts(hidden, logits)

        load()
        for module in model.modules():
            if hasattr(method := getattr(module, "quant_method", None), "moe_kernel"):
                method.process_weights_after_loading(module)
        first = forward()
        reload.initialize_layerwise_reload(model)
        load()
        reload.finalize_layerwise_reload(model, None)
        difference = (forward() - first).abs().max().item()
    print(f"difference after loading the same weights again: {difference:.3g}")
    if difference > 1e-5:
        print("FAULT: the experts' weights are wrong after a reload")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
