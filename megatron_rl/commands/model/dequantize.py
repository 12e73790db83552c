"""Write a GGUF file as a Hugging Face directory in fp32: `python -m ...dequantize FILE OUT`.

A process of its own: transformers decides while it is imported whether `gguf` and `accelerate` are
there, which only this conversion needs.
"""

import sys
from functools import cache
from pathlib import Path


def dequantize(file: Path, out: Path) -> None:
    """Write model and tokenizer of a GGUF file as fp32 weights, as `save_pretrained` does."""
    import gguf

    # transformers reads the file four times and maps names once per module: 46 s without these.
    gguf.GGUFReader = cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # These are still set, and save_pretrained refuses quantized models.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model, "quantization_method"):
        del model.quantization_method
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    dequantize(Path(sys.argv[1]), Path(sys.argv[2]))
