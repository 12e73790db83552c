"""A pretrained model, SmolLM2-135M-Instruct: every bit there and back, the logits of transformers.

The twin of `test_roundtrip.py` and `tests/trainer/test_huggingface_parity.py`, whose models are
tiny and have random weights.
"""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.commands.convert import to_huggingface, to_megatron
from megatron_rl.commands.convert.resumable import Output
from megatron_rl.data.prompt_format import read_format
from tests.models.pretrained_worker import LAYOUTS, RANKS, SAVED, model_files
from tests.workers import run_ranks

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TOLERANCE = 1e-4
"""Of logits, relative to the largest one of their position."""
CHATS = (
    [{"role": "user", "content": "What is seven plus five?"}],
    [
        {"role": "system", "content": "You answer in French, in one sentence."},
        {"role": "user", "content": "Où se trouve la tour Eiffel ? 🗼"},
    ],
    [
        {"role": "user", "content": "Write a Python function that doubles a number."},
        {"role": "assistant", "content": "def double(x):\n    return 2 * x"},
        {"role": "user", "content": "And one that squares it, with a docstring:\n\n\t```python"},
    ],
)


@pytest.fixture(scope="module")
def folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write the conversion and the prompts; their gigabyte goes when the tests are done."""
    from tokenizers import Tokenizer

    folder = tmp_path_factory.mktemp("pretrained")
    (folder / "hf").symlink_to(smollm2)
    to_megatron.convert(smollm2, Output(folder / "megatron", 10**10, quiet=True))
    encode = Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode
    texts = map(read_format(smollm2, think_start=""), CHATS)
    prompts = [encode(text, add_special_tokens=False).ids for text in texts]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def seen(folder: Path) -> Any:
    """Return what three processes saw in all layouts."""
    run_ranks("tests.models.pretrained_worker", RANKS, folder, seconds=550)
    return json.loads((folder / "seen.json").read_text())


def test_every_name_and_bit_comes_back_out_of_every_layout(seen: Any) -> None:
    assert [
        (layout, seen[layout]["tensors"]) for layout in LAYOUTS if seen[layout]["tensors"]
    ] == []


def test_a_converted_model_that_a_layout_loads_and_saves_has_the_same_files(seen: Any) -> None:
    assert [(layout, seen[layout]["files"]) for layout in SAVED if seen[layout]["files"]] == []


def test_logits_of_chats_equal_those_of_transformers(seen: Any) -> None:
    print(json.dumps({layout: seen[layout]["errors"] for layout in LAYOUTS}))
    for layout in LAYOUTS:
        assert len(seen[layout]["errors"]) == len(CHATS)
        assert max(seen[layout]["errors"]) < TOLERANCE, layout


def test_the_conversion_converts_back_byte_for_byte(folder: Path, smollm2: Path) -> None:
    back = to_huggingface.convert(folder / "megatron", Output(folder / "back", 10**10, quiet=True))
    names = model_files(smollm2, back)
    assert {"config.json", "model.safetensors", "tokenizer.json"} < names
    assert filecmp.cmpfiles(smollm2, back, names, shallow=False)[1:] == ([], [])


def test_prompts_are_those_of_the_models_tokenizer(folder: Path, smollm2: Path) -> None:
    from transformers import AutoTokenizer

    apply = AutoTokenizer.from_pretrained(smollm2).apply_chat_template
    theirs = [apply(chat, add_generation_prompt=True, return_dict=False) for chat in CHATS]
    assert json.loads((folder / "prompts.json").read_text()) == theirs
