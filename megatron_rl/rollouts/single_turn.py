"""ScaleRL's rollout: one turn with forced-length interruption."""

from megatron_rl.rollouts.rollout import Rollout, RolloutPolicy, RolloutPrompt


async def single_turn(prompt: RolloutPrompt, policy: RolloutPolicy) -> Rollout:
    """Sample one turn after the question's prompt; go on with what another engine had begun."""
    rollout = Rollout()
    rollout.add(
        await policy.generate(
            prompt.token_ids, prompt.limits, begun=prompt.begun, grown=prompt.grown
        )
    )
    return rollout
