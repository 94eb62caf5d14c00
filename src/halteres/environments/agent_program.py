"""The environment `agent`: somebody's program plays the episodes, and talks to the service as it
would to OpenAI or Anthropic.

    task ─▶ a session of the gateway ─▶ the program, in a folder of its own ─▶ what the session
    captured ─▶ the reward function's score

The program is started once for every rollout. Its variables name the session's addresses and key
(`clients.gateway.OpenSession.variables`) and the task's file; none of this user's secrets are among
them. What is trained on are the tokens that the engine sampled, whatever the program made of them.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from halteres.clients.gateway import GatewayClient
from halteres.environments.config import APIServerConfig, BaseEnvConfig, setting
from halteres.environments.episodes import Episode, EpisodeConfig, EpisodeEnv
from halteres.environments.program import Played, Programs
from halteres.environments.scratch_folders import make_folder, remove_abandoned
from halteres.environments.tasks import Task, load_tasks
from halteres.errors import EnvironmentFailed, InvalidConfig
from halteres.rewards.functions import RewardFunction, Sample
from halteres.rollouts.rng import next_sampling_seed
from halteres.types import Outcome

SPARE_S = 120.0
"""How much longer than its program a session lives: until it was read."""


class ProgramConfig(EpisodeConfig):
    """Settings of `agent`."""

    tasks: str = setting(
        "",
        "file of JSON lines, a task each, or a folder with train.jsonl and test.jsonl",
        reaches="path",
    )
    command: tuple[str, ...] = setting(
        (),
        "the program and its arguments; {name} is replaced by that field of the task",
        reaches="code",
    )
    reward: str = setting(
        "",
        "FILE.py:NAME of the reward function; default: 1 where the program ends with code 0",
        reaches="code",
    )
    workspace: str | None = setting(
        None, "folder that is copied for every episode; default: an empty one", reaches="path"
    )
    program_s: float = setting(
        300.0, "seconds after which an episode's program is ended", gt=0, le=86_400
    )


class ProgramEnv(EpisodeEnv):
    """Episodes of a program that calls a model over OpenAI's or Anthropic's API (env.command)."""

    name = "agent"
    scores_in_worker = True
    env_config_cls: ClassVar[type[BaseEnvConfig]] = ProgramConfig
    config: ProgramConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # narrowed, and only ever read
    reward: RewardFunction | None = None
    programs: Programs | None = None

    @classmethod
    def config_init(cls) -> tuple[ProgramConfig, Sequence[APIServerConfig]]:
        """Groups of 8; 4 tasks at once."""
        config = ProgramConfig(group_size=8, max_num_workers=4, max_eval_workers=4, total_steps=-1)
        return config, [APIServerConfig()]

    async def load_dataset(self) -> None:
        """Read the tasks and see that the program is there. InvalidConfig, InvalidData where
        something is missing.
        """
        config = self.config
        if not config.tasks:
            raise InvalidConfig(
                "There are no tasks.", "env.tasks names no file.", "Name a file of JSON lines."
            )
        self.train, self.held_out = load_tasks(config.tasks)
        remove_abandoned()
        workspace = None
        if config.workspace is not None:
            workspace = Path(config.workspace).expanduser().absolute()
        programs = Programs(config.command, workspace, config.program_s, Path(make_folder()))
        self.programs = programs
        atexit.register(programs.close)
        programs.check()
        if config.reward:
            self.reward = RewardFunction(
                config.reward,
                elsewhere=lambda module, name, within_s: self.scorer_workers.function(
                    module, name, within_s, readable=(programs.scratch,)
                ),
                within_s=config.scorer_timeout_s,
            )
        server = self.server_config
        self.gateway = GatewayClient(
            server.base_url, api_key=server.api_key, ready_within_s=server.ready_within
        )

    async def get_next_item(self) -> Task:
        """One of the tasks to train on."""
        return self.rng.choice(self.train)

    def eval_items(self) -> Sequence[Task]:
        """The first held-out ones."""
        return self.held_out[: self.config.eval_tasks]

    async def play(self, task: Task, temperature: float | None = None) -> Episode:
        """One episode of the program."""
        assert self.programs is not None, "load_dataset makes it"  # noqa: S101
        config = self.config
        if temperature is None:
            temperature = config.temperature
        session = await self.gateway.open(
            task,
            sampling={"temperature": temperature, "seed": next_sampling_seed()},
            ttl_s=config.program_s + SPARE_S,
        )
        played = await self.programs.play(task, session.variables)
        try:
            episode = await self._captured(session.id, played)
            outcome: Outcome | None = None
            if played.exit_code is None:
                outcome = "turn_limit"
            score = await self._score(task, episode, played)
            return await self.ended(episode, outcome, score)
        finally:
            self.programs.forget(played)

    async def _captured(self, session: str, played: Played) -> Episode:
        raise NotImplementedError

    async def _score(self, task: Task, episode: Episode, played: Played) -> float:
        if self.reward is None:
            return float(played.exit_code == 0)
        columns = {
            **task,
            "folder": str(played.folder),
            "output": played.output,
            "exit_code": played.exit_code,
        }
        chat = Sample(
            prompt=episode.opening,
            completion=tuple(episode.conversation),
            tokens=tuple(token for turn in episode.turns for token in turn.action),
        )
        [score] = await self.reward(columns, [chat])
        if score is None:
            raise EnvironmentFailed(
                f"{self.config.reward} gave no score.", "It gave None for a rollout."
            )
        return score


if __name__ == "__main__":
    ProgramEnv.cli()
