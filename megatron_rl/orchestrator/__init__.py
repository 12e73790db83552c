"""The orchestrator: dispatch, staleness, verification, batches, evaluation, metrics, state.

One asyncio process beside trainer rank 0. It talks ZeroMQ to the trainer and the generators and
imports neither torch nor Megatron nor vLLM.
"""
