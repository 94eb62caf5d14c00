"""The environment `reasoning_gym`: the tasks of the package reasoning-gym, made and scored by
itself.

The package runs in processes that can be killed: in a cage, where a task evaluates what a model
wrote.

Source: reasoning-gym 0.1.25, which has 106 tasks. Item i of a task is made from its seed + i, so an
index stands for an item.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from halteres.config.problem import MissingPackage
from halteres.config.reach import declared
from halteres.environments.answer_filters import FILTERS
from halteres.environments.answers import boxed_answer, tagged_answer
from halteres.environments.cage import WorkerLimits, WorkerPool, cage_missing, gym_workers
from halteres.environments.config import APIServerConfig, BaseEnvConfig, setting
from halteres.environments.single_turn import SingleTurnEnv
from halteres.environments.worker_process import NO_LIMITS, WorkerLost, WorkerRefused
from halteres.errors import InvalidConfig
from halteres.process import usable_cores
from halteres.tokenizer import Message

INSTALL = "pip install 'halteres[reasoning-gym]'"

EVALUATING = frozenset({*FILTERS, "composite"})
"""Tasks whose scorer runs a model's answer as Python, and the one that may hold any of them."""

LONGEST_ANSWER = 10_000
"""Characters of an answer that is scored; a longer one is none."""

MOST_MEMORY = 8 << 30
"""Bytes of address space of a scorer outside of a cage."""

MOST_WORKERS = 4
"""Scorers at once, in cages; fewer where there are fewer cores."""

MAKE_S, SCORE_S = 60.0, 10.0
"""How long an item may take to be made, and an answer to be scored."""

NUM_TRAIN, NUM_HELD_OUT = 9_000, 1_000
"""The items 0 to 8,999 are trained on, the next 1,000 are held out. (A larger data set is slow to
make for some.)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskItem:
    """One item of a task."""

    index: int
    question: str
    task: str  # whose scorer it has: of `composite`, one of those it holds


class ReasoningGymConfig(BaseEnvConfig):
    """Settings of `reasoning_gym`."""

    task: str = setting("chain_sum", "name of a reasoning-gym task", reaches="name")
    task_settings: dict[str, Any] = Field(
        default_factory=dict,
        description="its own, e.g. {max_digits: 1}",
        json_schema_extra=declared("name"),
    )
    python: str | None = setting(
        None, "path of a Python that has reasoning-gym; default: this one", reaches="code"
    )
    task_seed: int = setting(0, "of its items, the held-out ones too", ge=0, lt=2**31)
    prompt_template: str = setting(
        "{question}\nReason step by step, and put your final answer between <answer> and "
        "</answer>.",
        "the user's message; {question} is replaced",
        reaches="nothing",
    )

    @field_validator("task")
    @classmethod
    def _evaluates_no_text_outside_of_a_cage(cls, task: str) -> str:
        missing = None
        if task in EVALUATING:
            missing = cage_missing()
        if missing is not None:
            rule = (
                "another task: the scorer of '{task}' runs the model's answer as Python. {missing}"
            )
            raise PydanticCustomError("unsafe_task", rule, {"task": task, "missing": missing})
        return task


class ReasoningGymEnv(SingleTurnEnv):
    """A task of reasoning-gym (env.task), of which there are about a hundred; scored by the
    package, 0 to 1.
    """

    name = "reasoning_gym"
    scores_in_worker = True
    env_config_cls: ClassVar[type[BaseEnvConfig]] = ReasoningGymConfig
    config: ReasoningGymConfig
    held_out: Sequence[TaskItem] = ()

    @classmethod
    def config_init(cls) -> tuple[ReasoningGymConfig, Sequence[APIServerConfig]]:
        """Groups of 16, batches of 128, answers of up to 1024 tokens; only full marks are a
        success.
        """
        # the package pays 0.01 and more for a wrong answer
        config = ReasoningGymConfig(
            group_size=16,
            batch_size=128,
            max_new_tokens=1024,
            total_steps=-1,
            success_threshold=0.99,
        )
        return config, [APIServerConfig()]

    @classmethod
    def missing_packages(cls, config: ReasoningGymConfig) -> Sequence[MissingPackage]:
        """reasoning-gym; another Python's packages are seen when it is started."""
        if config.python is not None or importlib.util.find_spec("reasoning_gym") is not None:
            return ()
        return (MissingPackage(package="reasoning-gym", fix=INSTALL),)

    async def load_dataset(self) -> None:
        """Start the worker, which makes the data set.

        Raises:
            InvalidConfig: the package is missing, the task is none of its own, or the worker could
                not be started, or was not ready in time.
        """
        if self.missing_packages(self.config):
            what = "The environment reasoning_gym needs the package reasoning-gym."
            raise InvalidConfig(what, "It is not installed.", INSTALL)
        size = NUM_TRAIN + NUM_HELD_OUT
        settings = {"size": size, "seed": self.config.task_seed, **self.config.task_settings}
        self.workers = self._workers(json.dumps(settings))
        try:
            await self.item(0)
        except (WorkerRefused, WorkerLost) as error:
            raise InvalidConfig(
                f"reasoning-gym's task '{self.config.task}' cannot be used.",
                error.sentence,
                "Set env.task and env.task_settings, reasoning-gym's gallery lists its tasks; and "
                "env.python to a Python that has the package.",
            ) from error

    async def get_next_item(self) -> TaskItem:
        """An item of the training split."""
        return await self.item(self.rng.randrange(NUM_TRAIN))

    def prompt(self, item: TaskItem) -> str | Sequence[Message]:
        """The question in the template."""
        return self.config.prompt_template.replace("{question}", item.question)

    async def score_answer(self, item: TaskItem, answer: str) -> float:
        """What the task pays for the last `<answer>`, or else the last box; 0 where there is
        neither. What it pays for no answer, where its filter lets this one not pass.

        Raises:
            EnvironmentFailed: the scorer gave no score (`worker_process` has each name); the
                rollout failed, it is not worth 0.
        """
        found = tagged_answer(answer)
        found = boxed_answer(answer) if found is None else found
        if found is None or len(found) > LONGEST_ANSWER:
            return 0.0
        form = FILTERS.get(item.task)
        if form is not None and not form.passes(found):
            found = None
        reply = await self.workers.ask({"index": item.index, "answer": found}, SCORE_S)
        return float(reply["score"])

    async def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, float]:
        """As every single-turn environment, on the first `eval_tasks` held-out items."""
        count = min(self.config.eval_tasks, NUM_HELD_OUT)
        self.held_out = [await self.item(NUM_TRAIN + number) for number in range(count)]
        return await super().evaluate(*args, **kwargs)

    def eval_items(self) -> Sequence[TaskItem]:
        """Those of the evaluation under way."""
        return self.held_out

    async def item(self, index: int) -> TaskItem:
        """The item of this index, 0 to 9,999."""
        made = await self.workers.ask({"index": index}, MAKE_S)
        return TaskItem(index=index, question=str(made["question"]), task=str(made["task"]))

    def _workers(self, settings: str) -> WorkerPool:
        task, python = self.config.task, self.config.python
        if task not in EVALUATING and self.config.cage != "on":
            limits = replace(NO_LIMITS, memory_bytes=MOST_MEMORY)
            return gym_workers("reasoning", task, settings, size=1, python=python, limits=limits)
        # an answer that takes its whole time holds up no other
        size = min(MOST_WORKERS, usable_cores())
        return gym_workers(
            "reasoning", task, settings, size=size, python=python, limits=WorkerLimits(), caged=True
        )


if __name__ == "__main__":
    ReasoningGymEnv.cli()
