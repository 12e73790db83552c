"""The generator's role in its own process, as a rank of torchrun runs it."""

import sys

from megatron_rl.config import RunConfig
from megatron_rl.generator.serve import run_generator

if __name__ == "__main__":
    configuration, endpoint, model_dir = sys.argv[1:]
    run_generator(
        RunConfig.model_validate_json(configuration), 0, 2, endpoint, model_dir, version=7
    )
