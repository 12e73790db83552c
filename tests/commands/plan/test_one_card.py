"""The example of a pretrained model fits one card, also with other models by its key alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli import main

ROOT = Path(__file__).parents[3]
COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "num_key_value_heads": 8,
    "attention_bias": False,
}
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "Qwen3-0.6B": (
        596_049_920,
        {
            "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024,
            "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "head_dim": 128, "vocab_size": 151936, "rope_theta": 1000000, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 40960, "rope_scaling": None,
        },
    ),
    "Llama-3.2-1B-Instruct": (
        1_235_814_400,
        {
            "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048,
            "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "head_dim": 64, "vocab_size": 128256, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072, "mlp_bias": False,
            "rope_scaling": {
                "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            },
        },
    ),
}  # fmt: skip
"""Parameters as published, and what decides them of the published config.json."""


def commands() -> dict[str, list[str]]:
    """Return model -> options of the example on one card, as the documentation has them."""
    text = (ROOT / "docs/gpus.md").read_text()
    card = re.search(r'^CARD="(.*)"$', text, re.M)
    assert card
    lines = re.findall(r"^bash examples/scalerl_smollm.sh \$CARD ([^#\n]*)", text, re.M)
    rows = [[*card[1].split(), *line.split()] for line in lines]
    return {Path(row[-1]).name: row for row in rows if "--model" in row}


@pytest.mark.parametrize("name", MODELS)
def test_the_documented_options_fit_one_card(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters, config = MODELS[name]
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**COMMON, **config}))
    options = [*commands()[name][:-1], str(folder), "--roles.host_gib", "96"]

    def plan(*more: str) -> tuple[Any, str]:
        with pytest.raises(SystemExit) as ended:
            main(["plan", "--config", f"{ROOT}/examples/scalerl_smollm.yaml", *options, *more])
        return ended.value.code, capsys.readouterr().out

    code, printed = plan()
    assert code == 0, printed
    assert f"{parameters:,} parameters" in printed and "fits 1 GPUs" in printed
    # A smaller card is refused, so the answer is not always yes.
    code, printed = plan("--roles.gpu_gib", "16")
    assert code == 3
    assert "does not fit" in printed
