"""The generator's role in its own process, as rank 2 of torchrun, after two trainer ranks."""

import sys

from torch.distributed import HashStore

from megatron_rl.config import RunConfig
from megatron_rl.generator.role import run_generator_rank

if __name__ == "__main__":
    configuration, endpoint, model_dir = sys.argv[1:]
    store = HashStore()
    store.set("orchestrator", endpoint)
    store.set("model_dir", model_dir)
    run_generator_rank(RunConfig.model_validate_json(configuration), 2, store)
