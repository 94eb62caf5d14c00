"""What each process of a run is.

Owns: command, readiness, port, keys, patience and restarts of every role; the order in which roles are stopped.
Never: starts one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from halteres.config import environ
from halteres.config.program import EnvironmentProgram
from halteres.config.settings import Settings
from halteres.rewards.components import secret_variables
from halteres.runs.served import service_arguments
from halteres.runs.servers import Server
from halteres.runs.starting.reward_models import reward_folders
from halteres.runs.state import Phase
from halteres.runs.supervision.children import GRACE_S
from halteres.runs.supervision.ports import Listener
from halteres.runs.supervision.readiness import Answers, Exists, Probe, Registered

RoleName = Literal["service", "api", "reward", "trainer", "env"]

STOP_ORDER: tuple[RoleName, ...] = ("env", "trainer", "reward", "api", "service")


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One process of a run."""

    name: RoleName
    title: str  # as errors call it
    command: tuple[str, ...]
    phase: Phase  # what a starting run says it waits for until this role is ready
    ready: Probe
    ready_within_s: float
    listener: Listener | None = None
    grace_s: float = GRACE_S  # how long it may take to end in order
    restarts: int = 0  # how often it may be started again after dying: only roles that lose nothing
    folder: Path | None = None  # where it runs; None: in the run directory
    keys: tuple[str, ...] = ()  # names of the secret variables that it is given: by default none
    variables: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)  # of its own, secrets too


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What the roles of one run are made from."""

    path: Path  # the run directory
    run_name: str
    settings: Settings
    environment: EnvironmentProgram
    base_model: str
    service: Listener | None  # None: somebody else's service is used
    inference: Server  # the service, whoever's it is
    api: Listener | None  # None: nothing is delivered, a reward model is trained
    reward: Listener | None = None  # None: the environment names no reward model in a local folder
    secret: str = field(repr=False)  # what the run's own servers ask for

    @property
    def tempered(self) -> bool:
        """The run's own service gives sampled log-probabilities at env.temperature, for training corrects by them."""
        return self.service is not None and self.settings.corrects_temperature


Casting = Callable[[Scene], tuple[Role, ...]]
"""Makes the roles of a run; tests put stand-ins here."""


def cast(scene: Scene) -> tuple[Role, ...]:
    """The roles of a run, in the order in which they are started."""
    if scene.api is None:
        return (_reward_trainer(scene),)
    own_service = () if scene.service is None else (_service(scene, scene.service),)
    reward = () if scene.reward is None else (_reward(scene, scene.reward),)
    return (*own_service, _api(scene, scene.api), *reward, _trainer(scene), _env(scene, scene.api))


def _service(scene: Scene, listener: Listener) -> Role:
    tempered = ("--sample-logprobs", "tempered") if scene.tempered else ()
    return Role(
        name="service",
        title="Training service",
        command=(
            *_module("halteres.service", "--state", str(scene.path / "service")),
            *("--listen-fd", str(listener.descriptor), "--model", scene.base_model),
            *(*service_arguments(scene.settings.inference), *tempered),
        ),
        phase="api",
        ready=Answers(f"{listener.url}/api/v1/healthz"),
        variables={environ.SERVICE_KEY: scene.secret},
        ready_within_s=300,
        listener=listener,
        restarts=2,  # what it accepted is in its journal, and its clients ask again by themselves
    )


def _api(scene: Scene, listener: Listener) -> Role:
    database = str(scene.path / "api" / "trajectories.sqlite")
    return Role(
        name="api",
        title="API server",
        command=_module("halteres.trajectories", "--database", database, "--listen-fd", str(listener.descriptor)),
        phase="api",
        ready=Answers(f"{listener.url}/v1/diagnostics", scene.secret),
        variables=_token(scene),
        ready_within_s=60,
        listener=listener,
        restarts=2,  # its groups are in the database
    )


def _reward(scene: Scene, listener: Listener) -> Role:
    folders = tuple(str(folder) for folder in reward_folders(scene.settings.env))
    threads = scene.settings.inference.threads
    return Role(
        name="reward",
        title="Reward server",
        command=(
            # On the CPU: the accelerator's memory is the engine's, whose admission has counted it.
            *_module("halteres.rewards", *folders, "--listen-fd", str(listener.descriptor), "--device", "cpu"),
            *(("--threads", str(threads)) if threads else ()),
        ),
        phase="api",
        ready=Answers(f"{listener.url}/health", scene.secret),
        variables={environ.REWARD_KEY: scene.secret},
        ready_within_s=300,
        listener=listener,
        restarts=2,  # it holds nothing, and its clients ask again by themselves
    )


def _trainer(scene: Scene) -> Role:
    return Role(
        name="trainer",
        title="Trainer",
        command=_module("halteres.training", "--run", str(scene.path)),
        phase="trainer",
        ready=Exists(scene.path / "control" / "trainer.ready"),
        ready_within_s=420,
        # The keys are in wiring.json; who has the variables too knows what to strike out of its words.
        keys=() if scene.service else (environ.API_KEY,),
        variables=_token(scene),
    )


def _env(scene: Scene, api: Listener) -> Role:
    config, metrics = scene.path / "config.yaml", scene.path / "metrics.jsonl"
    return Role(
        name="env",
        title="Environment",
        command=scene.environment.command_in_run(
            "serve", "--config", str(config), metrics=metrics, name=scene.run_name
        ),
        folder=scene.environment.working_directory,
        phase="environment",
        ready=Registered(api.url, scene.secret),
        ready_within_s=480,
        restarts=2,  # it holds nothing but rollouts in flight
        keys=secret_variables(scene.settings.env),
        variables=_token(scene),
    )


def _reward_trainer(scene: Scene) -> Role:
    return Role(
        name="trainer",
        title="Reward trainer",
        command=_module("halteres.rewards.torch", "--run", str(scene.path)),
        phase="trainer",
        ready=Exists(scene.path / "control" / "trainer.ready"),
        ready_within_s=1800,  # it reads every row as tokens first
        grace_s=30,  # it ends after its step, with a checkpoint
    )


def _token(scene: Scene) -> dict[str, str]:
    return {environ.TRAJECTORY_TOKEN: scene.secret}


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)
