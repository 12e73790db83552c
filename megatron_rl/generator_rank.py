"""A generator rank of a pretraining script, in a process without Megatron.

    python -m megatron_rl.generator_rank CONFIG.json

The configuration is a JSON file, which is removed; torchrun's variables say the rest. It is no
part of the plug-in's package, whose import is Megatron's: generators' environments may lack it.
"""

import os
import sys
from pathlib import Path

from megatron_rl.config import RunConfig
from megatron_rl.generator.role import run_generator_rank
from megatron_rl.launch import connect_store


def main(path: str) -> None:
    """Serve as the generator of this rank, with the configuration at `path`."""
    file = Path(path)
    config = RunConfig.model_validate_json(file.read_text())
    file.unlink()
    run_generator_rank(config, int(os.environ["RANK"]), connect_store(config))


if __name__ == "__main__":
    main(sys.argv[1])
