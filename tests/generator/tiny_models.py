"""Tiny random models with a character tokenizer, as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = [
    "<pad>", "<bos>", "<eos>", "<unk>", "<think>", "</think>", "\\boxed{", "}",
    *"0123456789+-*/=?;()abcdef",
]  # fmt: skip
EOS, THINK, END = 2, 4, 5


def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({t: i for i, t in enumerate(VOCABULARY)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<think>", "</think>"],
    )


def build(kind: str, seed: int) -> Any:
    """Return a random model in fp32 whose distributions are not flat.

    Args:
        kind: `llama` (tied embeddings), `llama4`, `qwen3` (tied), `qwen3_moe`, or `qwen3_moe_fp8`,
            whose matrices can be divided into blocks of 128 x 128.
        seed: of the weights.
    """
    tied = kind in ("llama", "qwen3")
    common: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1 if kind == "llama4" else 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-5,
    }
    if kind == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(intermediate_size=192, **common))
    elif kind == "qwen3":
        from transformers import Qwen3Config, Qwen3ForCausalLM

        model = Qwen3ForCausalLM(Qwen3Config(intermediate_size=192, **common))
    elif kind.startswith("qwen3_moe"):
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        if kind == "qwen3_moe_fp8":
            common |= {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
        qwen = Qwen3MoeConfig(
            intermediate_size=192,
            moe_intermediate_size=128 if kind == "qwen3_moe_fp8" else 64,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            **common,
        )
        model = Qwen3MoeForCausalLM(qwen)
    else:
        from transformers import Llama4ForCausalLM, Llama4TextConfig

        config = Llama4TextConfig(
            intermediate_size=96,
            intermediate_size_mlp=96,
            num_local_experts=4,
            num_experts_per_tok=1,
            interleave_moe_layer_step=1,
            no_rope_layers=[1, 1, 0],
            use_qk_norm=True,
            attention_chunk_size=8192,
            **common,
        )
        model = Llama4ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            head = "embed_tokens" if model.config.tie_word_embeddings else "lm_head"
            gain = 3.0 if head in name else 1.0
            parameter.data.copy_(noise * gain / parameter.shape[-1] ** 0.5)
            if head in name:
                parameter.data[[EOS, END]] *= 0.3  # ends are rare: completions are long
        else:
            parameter.data.copy_(1 + 0.1 * noise)
    return model.float().eval()


def save(kind: str, seed: int, directory: Path) -> Path:
    build(kind, seed).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def reference_logprobs(models: dict[int, Any], prompt: list[int], tokens: list[int],
                       spans: list[Any]) -> torch.Tensor:  # fmt: skip
    """Log-probs of a completion whose KV cache was kept over weight updates.

    A token is the output of the forward pass over the one before it, so version spans of tokens,
    shifted by one, are the spans of input positions; the prompt belongs to the first span.
    """
    from transformers import DynamicCache

    ids, cache, logits, start = prompt + tokens, DynamicCache(), [], 0
    for span in spans:
        end = len(prompt) + span.end - 1
        inputs = torch.tensor([ids[start:end]])
        with torch.no_grad():
            logits.append(
                models[span.version](inputs, past_key_values=cache, use_cache=True).logits[0]
            )
        start = end
    every = torch.log_softmax(torch.cat(logits), -1)[len(prompt) - 1 :]
    return every.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    """Tensors of a Hugging Face directory by the checkpoint's own names."""
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")
