"""The base class of environments: Atropos's method names, with defaults.

An environment is driven by `serving`, `processing`, `evaluating` and `commands`:

    config_init ─▶ __init__ ─▶ setup ─▶ ( get_next_item ─▶ collect_trajectories ─▶
                                              postprocess_histories )* ─▶ cleanup per step:
                                              wandb_log, evaluate, save_checkpoint

Source: atroposlib 0.4.0, BaseEnv. Departures: an item whose rollout fails is repeated and counted,
not lost; `collect_trajectories` keeps every field of its items; `self.rng` and sampling seeds
follow from the config's seed.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import random
import time
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml

from halteres.clients.inference import InferenceClient, Sampling
from halteres.config.discovery import in_file_name
from halteres.config.problem import MissingPackage
from halteres.environments.config import APIServerConfig, BaseEnvConfig
from halteres.environments.evaluating import AnswersOf, evaluate_items
from halteres.environments.records import Records
from halteres.environments.scored import ScoredDataGroup, ScoredDataItem, finite, group_of, items_of
from halteres.environments.scorers import MEASURE, WITHOUT_CAGE, Scorers
from halteres.environments.scoring import GroupScoring
from halteres.errors import (
    EnvironmentFailed,
    EnvironmentGaveUp,
    NotFound,
    UserError,
    boundary,
    contained,
)
from halteres.files import replace_file
from halteres.models import builtin_path
from halteres.rewards.reward_list import RewardList
from halteres.rollouts.groups import Round, complete, settle
from halteres.rollouts.rng import Draw, one_rollout
from halteres.rollouts.sampler import Sampler
from halteres.tokenizer import Message, Tokenizer, load_tokenizer
from halteres.types import FailedRollout, Trajectory

log = logging.getLogger(__name__)

Backlog = list[Any]
"""Items to be rolled out next, before `get_next_item` is asked again."""


WRITE_IT = "Write it, and held-out figures are told."


class NoEvaluation(EnvironmentFailed):
    """The environment has no held-out tasks: nothing is wrong with it, and there will be no
    held-out figure.
    """

    code = "no_evaluation"

    def __init__(self, title: str, why: str, next: str) -> None:
        super().__init__(f"{title} cannot be evaluated.", why, next)


class BaseEnv:
    """A source of tasks and scores.

    Write `get_next_item` and `collect_trajectory` (or `collect_trajectories`). For one prompt and
    one answer `SingleTurnEnv` is shorter, for episodes of several turns `MultiTurnEnv`.
    """

    name: ClassVar[str | None] = None
    variants: ClassVar[tuple[str, ...]] = ()
    """Names of the environments of a family, the first the default; they are read from the source
    text. A family's config class has a field `variant`; its `config_init` is given the variant
    where it takes an argument.
    """
    trainer_defaults: ClassVar[Mapping[str, float | int | str]] = {}
    """Settings of the trainer that a run of this environment begins with: field -> value."""
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    unsafe_scorer: ClassVar[bool] = False
    """Its scorer runs, or evaluates, what the model wrote, or may hang on it: it goes into a cage
    (`env.cage`).
    """
    scores_in_worker: ClassVar[bool] = False
    """Its scorer asks a process of its own already, and stays where it is."""
    checkpoint_dir: str = ""  # of the trainer, known once the environment is registered

    def __init__(
        self,
        config: BaseEnvConfig,
        server_configs: Sequence[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        self.config = config
        self.server_config = server_configs[0]
        folder = tokenizer_folder(config.tokenizer_name)
        self.tokenizer: Tokenizer = load_tokenizer(str(folder))
        self.server: Sampler = make_sampler(config, self.server_config, self.tokenizer)
        self.records = Records(
            config.run_dir, self.tokenizer, config.success_threshold, config.token_limits
        )
        self.curr_step = 0  # batches that the trainer has been given
        # of the item being drawn now
        self.rng: random.Random = Draw(seed=config.seed, step=0, ordinal=0).rng()
        self.last_evaluation: dict[str, float] = {}
        self.rewards: RewardList | None = None
        try:
            self.scorer_workers = Scorers(type(self), config, folder, self._note_missing_cage)
            if config.all_rewards:
                self.rewards = RewardList(
                    config.all_rewards, config.reward_aggregation, self.scorer_workers.function
                )
        except UserError as error:  # started again, it would fail at the same
            self.records.end(EnvironmentGaveUp(error.what, error.why, error.next))
            raise

    def _note_missing_cage(self, missing: str) -> None:
        evidence = f"An unsafe scorer runs without a cage: {missing}"
        log.warning("%s", evidence)
        self.records.notice("scorer_uncaged", self.curr_step, evidence, WITHOUT_CAGE)

    @classmethod
    def cli(cls, arguments: Sequence[str] | None = None) -> None:
        """`serve`, `process`, `evaluate` or `describe`, as the arguments say; ends the process."""
        # commands drive environments, so they import this module
        from halteres.environments.commands import main

        main(cls, arguments)

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, Sequence[APIServerConfig]]:
        """The environment's own defaults."""
        return cls.env_config_cls(), [APIServerConfig()]

    @classmethod
    def missing_packages(cls, config: Any) -> Sequence[MissingPackage]:
        """Packages that it needs with this config and that are not installed: no run is started."""
        return ()

    def scorer_state(self) -> Mapping[str, Any]:
        """Attributes of this object that scorers read, where they run in a process of their own:
        name -> value. That process has what `__init__` made of the config; what `load_dataset`,
        `get_next_item` or an episode set is named here, in values that `pickle` takes. It is called
        for every answer, and what it gives is sent where it has changed. What a scorer sets on
        `self` does not come back.
        """
        return {}

    async def call_scorer(self, method: str, *arguments: Any) -> float:
        """The score that a method gives, in whichever process it runs.

        Raises:
            EnvironmentFailed: it gave none, or no finite number.
        """
        workers = self.scorer_workers.of_environment
        if workers is not None and workers.has(method):
            return await workers.score(self, method, arguments)
        where = f"{self.title}.{method}"
        with contained(EnvironmentFailed, where):
            score = await awaited(getattr(self, method)(*arguments))
        return finite(score, where)

    async def call_measure(self, *arguments: Any) -> Mapping[str, float]:
        """What `measure` gives, in whichever process it runs. Raises as `call_scorer`."""
        workers = self.scorer_workers.of_environment
        if workers is not None:
            if not workers.has(MEASURE):
                return {}
            return await workers.measure(self, arguments)
        with contained(EnvironmentFailed, f"{self.title}.{MEASURE}"):
            return await awaited(getattr(self, MEASURE)(*arguments))

    async def setup(self) -> None:
        """Called once, before the first item; by default it calls `load_dataset`."""
        await awaited(self.load_dataset())

    def load_dataset(self) -> Awaitable[None] | None:
        """Load what items are drawn from, into attributes of this object; `async def` or not."""

    async def get_next_item(self) -> Any:
        """The next task, drawn with `self.rng`; None: no more now."""
        raise NotImplementedError(f"{type(self).__name__} needs get_next_item.")

    async def collect_trajectory(
        self, item: Any
    ) -> tuple[Trajectory | ScoredDataItem | list[ScoredDataItem] | None, Backlog]:
        """One rollout of the item, scored: a trajectory, or its sequences (`items_of` makes them of
        a trajectory).
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs collect_trajectory or collect_trajectories."
        )

    async def collect_trajectories(
        self, item: Any
    ) -> tuple[ScoredDataGroup | list[ScoredDataGroup] | None, Backlog]:
        """A group of rollouts; None drops the item. By default `group_size` calls of
        `collect_trajectory`.

        Raises:
            GroupFailed: rollouts failed again and again; it holds what went wrong.
        """
        backlog: Backlog = []

        async def one(rollout: int, attempt: int) -> list[ScoredDataItem]:
            where = f"{self.title}.collect_trajectory"
            with one_rollout(rollout, attempt), contained(EnvironmentFailed, where):
                scored, more = await self.collect_trajectory(item)
            backlog.extend(more or ())
            if not scored:
                raise EnvironmentFailed(f"{where} gave no rollout.")
            items = items_of(scored) if isinstance(scored, Trajectory) else scored
            items = items if isinstance(items, list) else [items]
            finite(items[0]["scores"], where)
            return items

        async def attempt(
            num_missing: int, number: int
        ) -> list[list[ScoredDataItem] | FailedRollout]:
            return await asyncio.gather(
                *(settle(one(rollout, number)) for rollout in range(num_missing))
            )

        return await self.complete_group(item, attempt), backlog

    async def complete_group(
        self, item: Any, attempt: Round[list[ScoredDataItem]]
    ) -> ScoredDataGroup:
        """A whole group of rounds of rollouts, scored by the config's `rewards` where there are
        any.

        Raises:
            GroupFailed: rollouts failed again and again; it holds what went wrong.
        """
        scoring = None if self.rewards is None else GroupScoring(self.rewards, item, self.curr_step)

        async def scored(
            num_missing: int, number: int
        ) -> Sequence[list[ScoredDataItem] | FailedRollout]:
            outcomes = await attempt(num_missing, number)
            return outcomes if scoring is None else await scoring.add(outcomes)

        group = group_of(
            *await complete(self.config.group_size, scored, self.config.rollout_retries)
        )
        return group if scoring is None else await scoring.finished(group)

    def taken_counts(self) -> dict[str, int]:
        """What the judges among the config's `rewards` did since the last call of this:
        judge/NAME/calls, …
        """
        return {} if self.rewards is None else self.rewards.taken_counts()

    async def postprocess_histories(
        self, trajectories: ScoredDataGroup | list[ScoredDataGroup] | None
    ) -> ScoredDataGroup | list[ScoredDataGroup] | None:
        """A last look at what was collected; what is given back is sent."""
        return trajectories

    def eval_items(self) -> Sequence[Any]:
        """The held-out items of an evaluation, `eval_tasks` of them, the same every time."""
        raise NoEvaluation(self.title, "Its class has no eval_items.", WRITE_IT)

    async def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, float] | None:
        """Measure the policy on held-out tasks; `eval/…` metrics, returned or given to
        `evaluate_log`.
        """
        raise NoEvaluation(self.title, "Its class has no evaluate.", WRITE_IT)

    async def evaluate_held_out(self, answers_of: AnswersOf) -> Mapping[str, float]:
        """Answer each of `eval_items` once greedily and `eval_samples` times at temperature 1, and
        log it.
        """
        with boundary(EnvironmentFailed, f"{self.title}.eval_items"):
            items = self.eval_items()
        if not items:
            raise NoEvaluation(
                self.title, "It has no held-out tasks: eval_items gave none.", "Hold some out."
            )
        started = time.time()
        panel = None
        if self.config.panel:
            panel = RewardList(self.config.panel, elsewhere=self.scorer_workers.function)
        try:
            metrics, samples = await evaluate_items(
                items,
                answers_of,
                self.config,
                rewards=self.rewards,
                panel=panel,
                step=self.curr_step,
            )
        finally:
            if panel is not None:
                await panel.close()
        await self.evaluate_log(
            metrics,
            start_time=started,
            end_time=time.time(),
            generation_parameters={
                "temperature": [0.0, 1.0],
                "max_new_tokens": self.config.max_new_tokens,
            },
            samples=samples,
        )
        return metrics

    async def evaluate_log(
        self,
        metrics: Mapping[str, float],
        *,
        task_name: str | None = None,
        model_name: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        generation_parameters: Mapping[str, Any] | None = None,
        samples: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Keep an evaluation's metrics, and write its files where `data_dir_to_save_evals` names a
        folder.
        """
        self.last_evaluation = dict(metrics)
        if not self.config.data_dir_to_save_evals:
            return
        seconds = None if start_time is None or end_time is None else end_time - start_time
        report = {
            "config_general": {
                "model_name": model_name or self.server_config.model_name,
                "total_evaluation_time_seconds": seconds,
                "generation_parameters": dict(generation_parameters or {}),
            },
            "results": {
                f"atropos|{task_name or self.title}|0": dict(metrics),
                "all": dict(metrics),
            },
        }
        files = {  # the metrics last
            "evaluate_config.yaml": yaml.safe_dump(
                self.config.model_dump(mode="json"), sort_keys=False
            ),
            "samples.jsonl": "".join(json.dumps(dict(sample)) + "\n" for sample in samples),
            "metrics.json": json.dumps(report, indent=2) + "\n",
        }
        folder = Path(self.config.data_dir_to_save_evals)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            replace_file(folder / name, text.encode())

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Write the step's metrics; add your own to the map, then call this."""
        self.records.log(self.curr_step, wandb_metrics or {})

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        """Write `data`, whose keys are attributes of this object, to be found again by
        `load_checkpoint`.
        """
        folder = self.checkpoint_folder
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / f"step-{step}.json", json.dumps(dict(data or {})).encode())

    def load_checkpoint(self) -> None:
        """Set the attributes saved at the current step, where there is a file of that step."""
        file = self.checkpoint_folder / f"step-{self.curr_step}.json"
        if file.is_file():
            for name, value in json.loads(file.read_text(encoding="utf-8")).items():
                setattr(self, name, value)

    async def cleanup(self) -> None:
        """Called after every group, and once at the end."""

    async def disconnect(self) -> None:
        """Close the connections to servers; the next request opens new ones."""
        await self.server.close()

    def chat_of(self, prompt: str | Sequence[Message]) -> list[dict[str, Any]]:
        """A chat that begins with this: the config's system prompt and a user's message, or whole
        messages.
        """
        if not isinstance(prompt, str):
            return [dict(message) for message in prompt]
        system = self.config.system_prompt
        first = [] if system is None else [{"role": "system", "content": system}]
        return [*first, {"role": "user", "content": prompt}]

    @property
    def title(self) -> str:
        """The environment's name, or its class's."""
        return self.name or type(self).__name__

    @property
    def to_mend(self) -> str:
        """What its user mends where its rollouts fail: the file of its class."""
        return inspect.getfile(type(self))

    @property
    def wandb_name(self) -> str:
        """The name under which it registers."""
        return self.config.wandb_name or self.title

    @property
    def checkpoint_folder(self) -> Path:
        """Where `save_checkpoint` writes."""
        return Path(self.checkpoint_dir or ".") / "env_checkpoints" / in_file_name(self.wandb_name)


async def set_up(env: BaseEnv) -> None:
    """Call `setup`, once what the scorers' process does not know of is told from what it does."""
    if env.scorer_workers.of_environment is not None:
        env.scorer_workers.of_environment.note_made(env)
    await env.setup()


async def awaited(value: Any) -> Any:
    """What an author's method gave, `async def` or not."""
    return await value if inspect.isawaitable(value) else value


def tokenizer_folder(name: str) -> Path:
    """The folder of a built-in model, or the folder that `name` is.

    Raises:
        NotFound: neither.
    """
    folder = builtin_path(name) or Path(name)
    if not folder.is_dir():
        raise NotFound(
            f"There is no tokenizer '{name}'.",
            "tokenizer_name is a built-in model's name or a model folder; nothing is downloaded.",
            "Give the folder's path with --env.tokenizer_name.",
        )
    return folder


def make_sampler(config: BaseEnvConfig, server: APIServerConfig, tokenizer: Tokenizer) -> Sampler:
    """The sampler of these settings; a model_name other than "default" pins that model."""
    client = InferenceClient(
        server.base_url,
        api_key=server.api_key,
        model=None if server.model_name in ("", "default") else server.model_name,
        timeout_s=server.timeout,
        ready_within_s=server.ready_within,
        max_connections=server.num_max_requests_at_once,
    )
    defaults = Sampling(max_new_tokens=config.max_new_tokens, temperature=config.temperature)
    return Sampler(
        client,
        tokenizer,
        defaults,
        max_sequence=config.max_token_length,
        server_type=server.server_type,
    )
