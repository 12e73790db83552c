"""`python -m megatron_rl.orchestrator SPEC.json`, started by trainer rank 0."""

from megatron_rl.orchestrator.main import main

if __name__ == "__main__":
    main()
