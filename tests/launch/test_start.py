import pytest

from megatron_rl.config import ConfigError, RunConfig
from megatron_rl.data.prompt_format import save_tiny_tokenizer
from megatron_rl.models import start_checkpoint as start
from megatron_rl.models import tiny


def config(tmp_path, **changes) -> RunConfig:
    values = {"output_dir": tmp_path, "sft": {"steps": 5, "prompts": 6}}
    return RunConfig(**values | changes)


def test_a_tiny_model_needs_the_supervised_stage_once_per_settings(tmp_path):
    c = config(tmp_path)
    assert start.needs_supervised_stage(c)
    directory = start.start_directory(c)
    tiny.create("tiny_scout", directory, save_tiny_tokenizer)
    assert start.needs_supervised_stage(c)  # weights without a mark may be incomplete
    start.mark_made(c, directory)
    assert not start.needs_supervised_stage(c)
    for other in (
        config(tmp_path, seed=99),
        config(tmp_path, sft={"steps": 6}),
        config(tmp_path, task={"heldout_prompts": 50}),
    ):
        assert start.needs_supervised_stage(other)


def test_settings_of_the_rl_stage_do_not_repeat_it(tmp_path):
    c = config(tmp_path)
    start.start_directory(c).mkdir(parents=True)
    start.mark_made(c, start.start_directory(c))
    assert not start.needs_supervised_stage(config(tmp_path, schedule={"steps": 7}, optimizer={
        "learning_rate": 1e-3}, evaluation={"first_step": 5}))  # fmt: skip


def test_a_given_start_checkpoint_must_be_a_model_directory(tmp_path):
    c = config(tmp_path, start_checkpoint=tmp_path / "nowhere")
    assert not start.needs_supervised_stage(c)
    with pytest.raises(ConfigError, match=r"start_checkpoint: .*nowhere has no config\.json"):
        start.start_directory(c)
