"""The environment `text_gym`: text environments of other packages, GEM's and Gymnasium's, each in
its own Python.

The package is never imported here: it may want other versions of what Halteres needs.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from halteres.config.problem import MissingPackage
from halteres.config.reach import declared
from halteres.environments.cage import gym_workers
from halteres.environments.config import APIServerConfig, BaseEnvConfig, setting
from halteres.environments.multi_turn import MultiTurnConfig, MultiTurnEnv, Reply, Step
from halteres.environments.worker_process import WorkerProcess, WorkerRefused
from halteres.errors import InvalidConfig
from halteres.rollouts.rng import held_out_seeds

RESET_S, STEP_S = 60.0, 30.0
"""How long an episode may take to begin, and a step to be taken."""

INSTALLED_AS = {"gem": "gem-llm"}  # where the package index has another name
INSTALL = "Install it into a Python of its own, and name that by env.python."

MOST_EPISODES = 1024
"""Played at once; further ones wait for a process."""


class TextGymConfig(MultiTurnConfig):
    """Settings of `text_gym`."""

    make: str = setting(
        "gem:make",
        "MODULE:FUNCTION that makes the environment of an id",
        reaches="code",
        pattern=r"^\w[\w.]*:\w+$",
    )
    task: str = setting(
        "game:GuessTheNumber-v0-easy",
        "id of the environment, as its package names it",
        reaches="id",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="further arguments of the function",
        json_schema_extra=declared("code"),
    )
    python: str | None = setting(
        None, "path of a Python that has the package; default: this one", reaches="code"
    )
    view: Literal["chat", "concat", "last"] = setting(
        "chat",
        "what the policy sees: a growing chat, all observations in one message, or the last alone",
    )
    prompt_template: str = setting(
        "{observation}\nPlease reason step by step, and put your final answer within \\boxed{}.",
        "the user's message; {observation} is replaced",
        reaches="nothing",
    )


class TextGymEnv(MultiTurnEnv):
    """A text environment of another package with GEM's or Gymnasium's interface (env.make,
    env.task, env.python).
    """

    name = "text_gym"
    trainer_defaults: ClassVar[Mapping[str, float | int | str]] = {
        "gamma": 0.9,
        "advantage": "rebn",
    }
    env_config_cls: ClassVar[type[BaseEnvConfig]] = TextGymConfig
    worker: WorkerProcess | None = None  # of one episode
    config: TextGymConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # narrowed, and only ever read

    @classmethod
    def config_init(cls) -> tuple[TextGymConfig, Sequence[APIServerConfig]]:
        """Batches of 32 episodes, 8 at once, each in a process of its own; only full marks are a
        success.
        """
        config = TextGymConfig(
            group_size=1,
            batch_size=32,
            max_turns=100,
            max_num_workers=8,
            max_eval_workers=8,
            success_threshold=0.999,
            ensure_scores_are_not_same=False,
            total_steps=-1,
        )
        return config, [APIServerConfig()]

    @classmethod
    def missing_packages(cls, config: TextGymConfig) -> Sequence[MissingPackage]:
        """That of env.make; another Python's packages are seen when it is started."""
        package = config.make.partition(":")[0].partition(".")[0]
        if config.python is not None or importlib.util.find_spec(package) is not None:
            return ()
        return (MissingPackage(package=INSTALLED_AS.get(package, package), fix=INSTALL),)

    async def load_dataset(self) -> None:
        """See that the package, and in it the environment, is there.

        Raises:
            InvalidConfig: it is not, or does not speak in texts.
        """
        config = self.config
        # of all episodes, which are copies of this object
        self.workers = gym_workers(
            "text",
            config.make,
            config.task,
            json.dumps(config.options),
            size=MOST_EPISODES,
            python=config.python,
        )
        try:
            await self.workers.ask({"seed": 0}, RESET_S)
        except WorkerRefused as error:
            raise InvalidConfig(
                f"{self.config.make}({self.config.task!r}) cannot be played.",
                error.what,
                "Set env.make, env.task and env.options, and env.python to a Python that has the "
                "package.",
            ) from error

    async def get_next_item(self) -> dict[str, Any]:
        """A seed of the training split."""
        return {"task": self.config.task, "seed": self.rng.getrandbits(32)}

    def eval_items(self) -> list[dict[str, Any]]:
        """The same seeds for every run."""
        return [
            {"task": self.config.task, "seed": seed}
            for seed in held_out_seeds(self.config.eval_tasks)
        ]

    async def reset(self, task: Any) -> str:
        """The first observation; a process is this episode's alone until it ends."""
        self.worker = await self.workers.take()
        self.observations: list[str] = []
        return self._message(await self.worker.ask({"seed": task["seed"]}, RESET_S))

    async def step(self, reply: Reply) -> Step:
        """Play the policy's answer."""
        assert self.worker is not None, "an episode begins with its reset"  # noqa: S101
        played = await self.worker.ask({"action": reply.text}, STEP_S)
        outcome = None
        if played["truncated"] and not played["terminated"]:
            outcome = "turn_limit"
        return Step(
            messages=self._message(played),
            reward=played["reward"],
            done=played["terminated"] or played["truncated"],
            fresh=self.config.view != "chat",
            outcome=outcome,
        )

    def close(self) -> None:
        """The next episode may have the process; one that was killed starts anew."""
        if self.worker is not None:
            self.workers.give_back(self.worker)

    def _message(self, played: Any) -> str:
        self.observations.append(played["observation"])
        shown = self.observations[-1:]
        if self.config.view == "concat":
            shown = self.observations
        observation = played["prefix"] + "\n".join(shown)
        if played["suffix"]:
            observation += f"\n{played['suffix']}"
        return self.config.prompt_template.replace("{observation}", observation)


if __name__ == "__main__":
    TextGymEnv.cli()
