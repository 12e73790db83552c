"""vLLM on CPU: a request with a seed ends the engine when it is prefilled in parts.

    python vllm_cpu_seeded_prefill.py     # exit status 1 where the fault is, 0 where it is not

The token that is sampled after an unfinished part is discarded, and so is its noise: on a GPU by
the generator's offset, which a generator on a CPU has not. With the prefix cache the same request
has no unfinished part, and must get the same tokens.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.update(
    VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR", TORCHDYNAMO_DISABLE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", HF_HUB_OFFLINE="1",
)  # fmt: skip

from vllm import LLM, SamplingParams

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64,
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
}  # fmt: skip
PROMPT, TOKENS, PART = list(range(1, 61)), 8, 32


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        llm = LLM(
            folder, skip_tokenizer_init=True, load_format="dummy", dtype="float32", block_size=32,
            enforce_eager=True, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=PART,
            kv_cache_memory_bytes=2**24,
        )  # fmt: skip
        params = SamplingParams(seed=7, max_tokens=TOKENS, ignore_eos=True, detokenize=False)

        def sampled() -> list[int]:
            (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
            return list(output.outputs[0].token_ids)

        try:
            in_parts = sampled()
        except RuntimeError as e:
            print(f"FAULT: a seeded request that is prefilled in parts ends the engine: {e}")
            return 1
        if (at_once := sampled()) != in_parts:
            print(f"FAULT: prefilled in parts it gets {in_parts}, at once {at_once}")
            return 1
    print(f"prefilled in parts and at once, a seed gives the same {TOKENS} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
