"""The environment `agent`: a program of the user's plays the episodes, and talks to the service as
it would to OpenAI or Anthropic.

    task ─▶ a session of the gateway ─▶ the program, in a folder of its own ─▶ what the session
    captured ─▶ the reward function's score

The program is started once for every rollout. Its variables name the session's addresses and key
(`clients.gateway.OpenSession`) and the task's file; none of this user's secrets are among
them. What is trained on are the tokens that the engine sampled, whatever the program made of them.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import field_validator, model_validator
from pydantic_core import PydanticCustomError

from halteres.clients.gateway import GatewayClient
from halteres.environments.base import NoEvaluation
from halteres.environments.config import APIServerConfig, BaseEnvConfig, setting
from halteres.environments.episodes import Episode, EpisodeConfig, EpisodeEnv
from halteres.environments.program import Played, Programs, check_program
from halteres.environments.scratch_folders import make_folder, remove_abandoned
from halteres.environments.tasks import ADD_TASKS, NONE_HELD_OUT, Task, load_tasks
from halteres.errors import (
    EnvironmentFailed,
    HalteresError,
    InvalidConfig,
    InvalidData,
    NotReady,
    SamplerFailed,
    ServerError,
)
from halteres.rewards.functions import RewardFunction, Sample
from halteres.rollouts.rng import next_sampling_seed, pinned_version
from halteres.types import Outcome, PolicyVersion, StopReason, Turn

MOST_SHOWN = 500
"""Characters of a program's last words in an error."""

SPARE_S = 120.0
"""How much longer than its program a session lives: until it was read."""


ENDED_WITHIN_S = 5.0
"""How long episodes that were given up may take to end their sessions."""


class ProgramConfig(EpisodeConfig):
    """Settings of `agent`."""

    tasks: str = setting(
        "",
        "file of JSON lines, a task each, or a folder with train.jsonl and test.jsonl",
        reaches="path",
    )
    command: tuple[str, ...] = setting(
        (),
        "the program and its arguments, a list or a line as a shell reads it; {name} is replaced "
        "by that field of the task",
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
        300.0,
        "seconds after which an episode's program is ended; less than worker_timeout",
        gt=0,
        le=86_400,
    )
    hidden: tuple[str, ...] = setting(
        ("answer",),
        "fields of the task that the program is not given, the reward function is",
        reaches="nothing",
    )

    @model_validator(mode="after")
    def _episodes_end_before_their_group(self) -> Self:
        if 0 < self.worker_timeout <= self.program_s:
            raise PydanticCustomError(
                "program_s",
                "it must be less than worker_timeout ({worker_timeout} s), which ends a group",
                {"field": "program_s", "worker_timeout": f"{self.worker_timeout:g}"},
            )
        return self

    @field_validator("command", mode="before")
    @classmethod
    def _words_of_a_line(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        if given.startswith("["):
            return json.loads(given)
        return shlex.split(given)


class ProgramEnv(EpisodeEnv):
    """Episodes of a program that calls a model over OpenAI's or Anthropic's API (env.command)."""

    name = "agent"
    scores_in_worker = True
    env_config_cls: ClassVar[type[BaseEnvConfig]] = ProgramConfig
    config: ProgramConfig  # pyright: ignore[reportIncompatibleVariableOverride]  # narrowed, and only ever read
    reward: RewardFunction | None = None
    programs: Programs | None = None
    gateway: GatewayClient | None = None

    def __init__(
        self, config: ProgramConfig, server_configs: Sequence[APIServerConfig], **kwargs: Any
    ) -> None:
        super().__init__(config, server_configs, **kwargs)
        self._under_way = set[asyncio.Task[Any]]()  # episodes

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
        workspace = None
        if config.workspace is not None:
            workspace = Path(os.path.expanduser(config.workspace)).absolute()
        tasks = [*self.train, *self.held_out]
        check_program(config.command, workspace, tasks, config.hidden)
        remove_abandoned()
        programs = Programs(
            config.command, workspace, config.program_s, Path(make_folder()), config.hidden
        )
        self.programs = programs
        atexit.register(programs.close)
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

    @property
    def _pinned_model(self) -> str | None:
        """The weights that answer; None: the run's policy, or the base model."""
        return self.server.client.model

    async def get_next_item(self) -> Task:
        """One of the tasks to train on."""
        return self.rng.choice(self.train)

    def eval_items(self) -> Sequence[Task]:
        """The first held-out ones. NoEvaluation where the file has one task alone."""
        if not self.held_out:
            raise NoEvaluation(self.title, NONE_HELD_OUT, ADD_TASKS)
        return self.held_out[: self.config.eval_tasks]

    @property
    def to_mend(self) -> str:
        """The user's own parts."""
        return "the program of env.command, or the function of env.reward"

    async def disconnect(self) -> None:
        """Those of the gateway's client, too; the reward function's processes and the episodes'
        folders go with them. Episodes that were given up end their sessions first.
        """
        await super().disconnect()
        # a call of theirs would open new connections, which nobody closes
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=ENDED_WITHIN_S)
        if self.gateway is not None:
            await self.gateway.close()
        if self.reward is not None:
            self.reward.close()
        if self.programs is not None:
            self.programs.close()

    async def play(self, task: Task, temperature: float | None = None) -> Episode:
        """One episode of the program."""
        gateway, programs, config = self.gateway, self.programs, self.config
        assert gateway is not None, "load_dataset makes it"  # noqa: S101
        assert programs is not None, "likewise"  # noqa: S101
        if temperature is None:
            temperature = config.temperature
        with _sampler_at_fault():
            session = await gateway.open(
                task,
                model=self._pinned_model,
                pin_policy=pinned_version(),
                sampling={
                    "temperature": temperature,
                    "max_tokens": config.max_new_tokens,
                    "seed": next_sampling_seed(),
                },
                ttl_s=config.program_s + SPARE_S,
            )
        end: dict[str, Any] = {"error": "The episode was given up."}
        episode_task = asyncio.current_task()
        assert episode_task is not None, "this is a coroutine"  # noqa: S101 - for the type checker
        self._under_way.add(episode_task)
        try:
            async with programs.play(task, session.variables) as played:
                with _sampler_at_fault():
                    captured = await gateway.sequences(session.id)
                if captured.get("interrupted") and played.exit_code != 0:
                    raise SamplerFailed(
                        "The service was started again while an episode was played.",
                        "Its program did not come to a good end "
                        f"(exit code: {played.exit_code}), which may be for that.",
                    )
                episode = self._episode_of(captured, played)
                score = await self._score(task, episode, played)
            end = {"reward": score}
        finally:
            # from here on the session takes no more calls
            with suppress(HalteresError):
                await gateway.post_reward(session.id, end)
            self._under_way.discard(episode_task)
        outcome: Outcome | None = None
        if played.exit_code is None:
            outcome = "turn_limit"
        # what is paid is paid with the last turn
        episode.turns[-1] = replace(episode.turns[-1], reward=score)
        return await self._ended(episode, outcome, score)

    def _episode_of(self, captured: Mapping[str, Any], played: Played) -> Episode:
        """What a session has, as turns in the order in which its sequences hold them."""
        sequences, turns = captured["sequences"], captured["turns"]
        if not turns:
            ends = (played.errors or played.output).strip()[-MOST_SHOWN:]
            raise EnvironmentFailed(
                f"The program asked the model nothing that can be trained on (its exit code: "
                f"{played.exit_code}).",
                f"It ended with: {ends}" if ends else "It wrote nothing.",
                "Let it call OPENAI_BASE_URL or ANTHROPIC_BASE_URL, which are set for it.",
            )
        messages = sequences[0]["messages"]
        begins = next(
            (place for place, one in enumerate(messages) if one["role"] == "assistant"), 0
        )
        episode = Episode(opening=tuple(messages[:begins]), conversation=messages[begins:])
        for turn in sorted(turns, key=lambda turn: (turn["sequence"], turn["start"])):
            sequence = sequences[turn["sequence"]]
            episode.turns.append(self._turn(sequence, turn["start"], turn["stop"]))
            episode.chats.append(sequence["messages"])
        return episode

    def _turn(self, sequence: Mapping[str, Any], start: int, stop: int) -> Turn:
        tokens, versions = sequence["tokens"], sequence["versions"][start:stop]
        reason: StopReason = "stop"
        if stop == len(tokens):
            reason = sequence["stop_reason"]
        return Turn(
            prompt=tuple(tokens[:start]),
            action=tuple(tokens[start:stop]),
            logprobs=tuple(sequence["logprobs"][start:stop]),
            text=self.tokenizer.decode(tokens[start:stop], skip_special_tokens=True),
            version_min=PolicyVersion(min(versions)),
            version_max=PolicyVersion(max(versions)),
            stop_reason=reason,
        )

    async def _score(self, task: Task, episode: Episode, played: Played) -> float:
        if self.reward is None:
            return float(played.exit_code == 0)
        columns = {**task, **played.columns}
        sample = Sample(
            prompt=episode.opening,
            completion=tuple(episode.conversation),
            tokens=tuple(token for turn in episode.turns for token in turn.action),
        )
        [score] = await self.reward(columns, [sample])
        if score is None:
            raise EnvironmentFailed(
                f"{self.config.reward} gave no score.", "It gave None for a rollout."
            )
        return score


@contextmanager
def _sampler_at_fault() -> Iterator[None]:
    try:
        yield
    except (InvalidData, NotReady, ServerError) as error:
        raise SamplerFailed(error.what, error.why, error.next) from error


if __name__ == "__main__":
    ProgramEnv.cli()
