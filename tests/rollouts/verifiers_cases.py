"""A taskset of the package `verifiers` with a tool, and an environment with a user."""

import verifiers.v1 as vf

__all__ = ["Sums", "TalkingEnvironment"]


class SumData(vf.TaskData):
    answer: int


class Adder(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return 1.0 if the last message is the sum."""
        return float(said(trace)[-1] == str(self.data.answer))

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        """Return 1.0 divided by the number of turns."""
        if said(trace)[-1] == "fault of the rubric":
            raise ZeroDivisionError("the rubric failed")
        return 1.0 / trace.num_turns

    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return said(trace)[-1:] == ["enough"]


def said(trace: vf.Trace) -> list[str]:
    """Return what the policy said."""
    messages = trace.branches[-1].messages if trace.branches else []
    return [m.content or "" for m in messages if m.role == "assistant"]


class SumsConfig(vf.TasksetConfig):
    length: int = 3


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> list[SumTask]:
        return [
            SumTask(SumData(prompt=f"{n}+{n}", system_prompt="Add.", answer=2 * n))
            for n in range(self.config.length)
        ]

    @classmethod
    def toolsets(cls, config: SumsConfig) -> list[vf.Toolset]:
        return [Adder(vf.SharedToolsetConfig())]


class TalkConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    hints: int = 0


class TalkingEnvironment(vf.Env[TalkConfig]):
    """It says `again` as often as its configuration and the number of the task allow."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            reply = await talk.turn()
            for _ in range(min(self.config.hints, task.data.idx)):
                if not reply.terminated:
                    reply = await talk.turn("again")


if __name__ == "__main__":
    Adder.run()
