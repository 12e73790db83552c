"""An environment of the package `verifiers`: the chains of `data.lookup`, its table behind MCP."""

import verifiers.v1 as vf

from megatron_rl.config import LookupTask
from megatron_rl.data import lookup as chains

__all__ = ["Lookups"]


class LookupData(vf.TaskData):
    answer: str


class Table(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = None  # a tiny model can name one tool only

    @vf.tool
    def lookup(self, key: str) -> str:
        """Look a key up in the table."""
        return chains.lookup(key)


class Lookup(vf.Task[LookupData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return 1.0 if the last message is the answer."""
        return float(trace.last_reply == f"\\boxed{{{self.data.answer}}}")

    @vf.reward(weight=-0.5)
    async def guessed(self, trace: vf.Trace) -> float:
        """Return 1.0 for an answer without a single lookup."""
        return float(trace.num_turns == 1)


class Lookups(vf.Taskset[Lookup, vf.TasksetConfig]):
    def load(self) -> list[Lookup]:
        task = LookupTask(train_prompts=400, heldout_prompts=1)
        questions, _ = chains.make_split(task, seed=0)
        return [Lookup(LookupData(prompt=q.prompt, answer=q.gold)) for q in questions]

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Table(vf.SharedToolsetConfig())]


if __name__ == "__main__":
    Table.run()
