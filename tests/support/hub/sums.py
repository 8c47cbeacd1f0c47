"""An environment of verifiers with one answer: the sum of two numbers."""

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    """A question, and its answer."""

    answer: str


class SumTask(vf.Task[SumData]):
    """What the last answer says counts."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 for the number alone; it cannot judge "broken"."""
        said = trace.last_reply
        if said.strip() == "broken":
            raise RuntimeError("the rubric broke")
        return float(said.split()[-1:] == [self.data.answer])

    @vf.metric
    async def words(self, trace: vf.Trace) -> float:
        """The length of the answer."""
        return float(len(trace.last_reply.split()))


class Sums(vf.Taskset[SumTask]):
    """Ten sums."""

    def load(self) -> list[SumTask]:
        made = [SumData(prompt=f"{n} + 4?", answer=str(n + 4)) for n in range(10)]
        return [SumTask(data, self.config.task) for data in made]
