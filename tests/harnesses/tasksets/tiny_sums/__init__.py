"""Sums of the kind that the built-in model knows, as a taskset of verifiers 0.4."""

import verifiers.v1 as vf

ASK = """Question: What is the value of {a} + {b}? Give the result as a whole number.
Please reason step by step, and put your final answer within \\boxed{{}}."""


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return 1.0 if f"\\boxed{{{self.data.answer}}}" in (trace.last_reply or "") else 0.0


class SumsConfig(vf.TasksetConfig):
    num_tasks: int = 1


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> list[SumTask]:
        pairs = [(9 + n, 8) for n in range(self.config.num_tasks)]
        return [
            SumTask(SumData(prompt=ASK.format(a=a, b=b), answer=a + b), self.config.task)
            for a, b in pairs
        ]


__all__ = ["SumsTaskset"]
