"""What each process of a run is: command, port, keys, patience, restarts, when it is ready, in which order all stop.

Sockets are bound before any process starts, so that no two runs can race for a port, and never at a port at which
clients look for a server unasked. Readiness is asked for, not guessed by sleeping.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from halteres.clients import plain
from halteres.config import environ
from halteres.config.program import EnvironmentProgram
from halteres.config.settings import Settings
from halteres.errors import NotReady
from halteres.rewards.components import secret_variables
from halteres.runs.served import service_arguments
from halteres.runs.servers import Server
from halteres.runs.starting.reward_models import reward_folders
from halteres.runs.state import Phase
from halteres.runs.supervision.children import GRACE_S

WELL_KNOWN = (8000, 8001, 8002)
"""Ports of `halteres serve trajectories`, `halteres serve` and `halteres reward serve`: who calls there does not mean a
run."""

BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket on 127.0.0.1 that listens already: who connects early waits, and is not refused."""

    socket: socket.socket

    @property
    def port(self) -> int:
        """Its port."""
        return self.socket.getsockname()[1]

    @property
    def descriptor(self) -> int:
        """For the child that serves it."""
        return self.socket.fileno()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Let go of it; a child that inherited it keeps it."""
        self.socket.close()


def listen() -> Listener:
    """Any free port but the well-known ones."""
    listener = Listener(socket.create_server(("127.0.0.1", 0), backlog=BACKLOG))
    if listener.port not in WELL_KNOWN:
        return listener
    try:
        return listen()  # while this one is held, the next is another
    finally:
        listener.close()


FIRST_S, GROWTH, LONGEST_S = 0.05, 1.4, 0.5
ANSWER_WITHIN_S = 2.0


class Probe(Protocol):
    """One question."""

    async def __call__(self) -> bool:
        """Whether the role is ready now."""
        ...


@dataclass(frozen=True, slots=True)
class Answers:
    """An HTTP server answers 200."""

    url: str
    key: str | None = field(default=None, repr=False)

    async def __call__(self) -> bool:
        """Ask once."""
        return await get_json(self.url, self.key) is not None


@dataclass(frozen=True, slots=True)
class Exists:
    """A file was touched."""

    file: Path

    async def __call__(self) -> bool:
        """Look once."""
        return self.file.exists()


@dataclass(frozen=True, slots=True)
class Registered:
    """The trajectory server knows an environment."""

    api_url: str
    key: str | None = field(default=None, repr=False)

    async def __call__(self) -> bool:
        """Ask once."""
        told = await get_json(f"{self.api_url}/v1/diagnostics", self.key)
        return bool(told and told.get("environments"))


async def until_ready(probe: Probe) -> None:
    """Return once the probe says yes. The caller sets the deadline."""
    pause = FIRST_S
    while not await probe():
        await asyncio.sleep(pause)
        pause = min(pause * GROWTH, LONGEST_S)


async def get_json(url: str, key: str | None = None) -> Mapping[str, Any] | None:
    """The JSON object behind a URL of ours; None where there is no good answer (yet). `key`: where one is asked for."""
    return await asyncio.to_thread(_get_json, url, key)


def _get_json(url: str, key: str | None) -> Mapping[str, Any] | None:
    try:
        return plain.get_json(url, ANSWER_WITHIN_S, key)
    except (plain.Refused, NotReady):
        return None


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
class RunContext:
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


RolesOf = Callable[[RunContext], tuple[Role, ...]]
"""Makes the roles of a run; tests put stand-ins here."""


def cast(context: RunContext) -> tuple[Role, ...]:
    """The roles of a run, in the order in which they are started."""
    if context.api is None:
        return (_reward_trainer(context),)
    own_service = () if context.service is None else (_service(context, context.service),)
    reward = () if context.reward is None else (_reward(context, context.reward),)
    return (*own_service, _api(context, context.api), *reward, _trainer(context), _env(context, context.api))


def _service(context: RunContext, listener: Listener) -> Role:
    tempered = ("--sample-logprobs", "tempered") if context.tempered else ()
    return Role(
        name="service",
        title="Training service",
        command=(
            *_module("halteres.service", "--state", str(context.path / "service")),
            *("--listen-fd", str(listener.descriptor), "--model", context.base_model),
            *(*service_arguments(context.settings.inference), *tempered),
        ),
        phase="api",
        ready=Answers(f"{listener.url}/api/v1/healthz"),
        variables={environ.SERVICE_KEY: context.secret},
        ready_within_s=300,
        listener=listener,
        restarts=2,  # what it accepted is in its journal, and its clients ask again by themselves
    )


def _api(context: RunContext, listener: Listener) -> Role:
    database = str(context.path / "api" / "trajectories.sqlite")
    return Role(
        name="api",
        title="API server",
        command=_module("halteres.trajectories", "--database", database, "--listen-fd", str(listener.descriptor)),
        phase="api",
        ready=Answers(f"{listener.url}/v1/diagnostics", context.secret),
        variables=_token(context),
        ready_within_s=60,
        listener=listener,
        restarts=2,  # its groups are in the database
    )


def _reward(context: RunContext, listener: Listener) -> Role:
    folders = tuple(str(folder) for folder in reward_folders(context.settings.env))
    threads = context.settings.inference.threads
    return Role(
        name="reward",
        title="Reward server",
        command=(
            # On the CPU: the accelerator's memory is the engine's, whose admission has counted it.
            *_module("halteres.rewards", *folders, "--listen-fd", str(listener.descriptor), "--device", "cpu"),
            *(("--threads", str(threads)) if threads else ()),
        ),
        phase="api",
        ready=Answers(f"{listener.url}/health", context.secret),
        variables={environ.REWARD_KEY: context.secret},
        ready_within_s=300,
        listener=listener,
        restarts=2,  # it holds nothing, and its clients ask again by themselves
    )


def _trainer(context: RunContext) -> Role:
    return Role(
        name="trainer",
        title="Trainer",
        command=_module("halteres.training", "--run", str(context.path)),
        phase="trainer",
        ready=Exists(context.path / "control" / "trainer.ready"),
        ready_within_s=420,
        # The keys are in wiring.json; who has the variables too knows what to strike out of its words.
        keys=() if context.service else (environ.API_KEY,),
        variables=_token(context),
    )


def _env(context: RunContext, api: Listener) -> Role:
    config, metrics = context.path / "config.yaml", context.path / "metrics.jsonl"
    return Role(
        name="env",
        title="Environment",
        command=context.environment.command_in_run(
            "serve", "--config", str(config), metrics=metrics, name=context.run_name
        ),
        folder=context.environment.working_directory,
        phase="environment",
        ready=Registered(api.url, context.secret),
        ready_within_s=480,
        restarts=2,  # it holds nothing but rollouts in flight
        keys=secret_variables(context.settings.env),
        variables=_token(context),
    )


def _reward_trainer(context: RunContext) -> Role:
    return Role(
        name="trainer",
        title="Reward trainer",
        command=_module("halteres.rewards.torch", "--run", str(context.path)),
        phase="trainer",
        ready=Exists(context.path / "control" / "trainer.ready"),
        ready_within_s=1800,  # it reads every row as tokens first
        grace_s=30,  # it ends after its step, with a checkpoint
    )


def _token(context: RunContext) -> dict[str, str]:
    return {environ.TRAJECTORY_TOKEN: context.secret}


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)
