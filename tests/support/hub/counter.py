"""An environment of verifiers with tools: count to a number."""

import verifiers.v1 as vf

__all__ = ["Counting"]


class CountState(vf.State):
    """What the tools share with the reward."""

    value: int = 0


class CountData(vf.TaskData):
    """Where to count to."""

    goal: int


class Counter(vf.Toolset[vf.ToolsetConfig, CountState]):
    """A counter."""

    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int) -> str:
        """Adds to the counter."""
        self.state.value += a
        return f"it is {self.state.value}"


class CountConfig(vf.TaskConfig):
    """Where the tool runs."""

    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class CountTask(vf.Task[CountData, CountState, CountConfig]):
    """The counter counts, whatever is said."""

    @classmethod
    def toolsets(cls, config: CountConfig) -> list[vf.Toolset]:
        return [Counter(config.tools)]

    @vf.reward
    async def reached(self, trace: vf.Trace) -> float:
        """1 at the goal."""
        return float(trace.state.value == self.data.goal)


class CountingConfig(vf.TasksetConfig):
    task: CountConfig = CountConfig()


class Counting(vf.Taskset[CountTask, CountingConfig]):
    """Five goals."""

    def load(self) -> list[CountTask]:
        made = [CountData(prompt=f"Count to {n}.", goal=n) for n in range(3, 8)]
        return [CountTask(data, self.config.task) for data in made]


if __name__ == "__main__":
    Counter.run()
