"""A taskset of the tests: a sum, with a server of tools."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from verifiers.v1.mcp.toolset import SharedToolsetConfig


class SumData(vf.TaskData):
    """One sum."""

    answer: str


class SumTask(vf.Task[SumData]):
    """A sum: 1 for the right number in the last message."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Compare the last message with the answer."""
        return float(trace.last_reply.strip() == self.data.answer)


class SumTools(vf.Toolset[SharedToolsetConfig]):
    """The tools."""

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class SumConfig(vf.TasksetConfig):
    """The settings."""

    tasks: int = 2


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    """Sums, and the server that all of them use."""

    def load(self) -> Iterator[SumTask]:
        """Yield the tasks."""
        for number in range(self.config.tasks):
            yield SumTask(SumData(prompt=f"What is {number} plus 4?", answer=str(number + 4)), self.config.task)

    @classmethod
    def toolsets(cls, config: SumConfig) -> list[vf.Toolset]:
        """Return the server of tools."""
        return [SumTools(SharedToolsetConfig())]


__all__ = ["SumTaskset"]

if __name__ == "__main__":
    SumTools.run()
