"""What each process of a run is: command, port, keys, restarts, when it is ready, in which order
all stop.

Sockets are bound before any process starts, so that no two runs can race for a port, and never at a
port at which clients look for a server unasked. Readiness is asked for, not guessed by sleeping.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from halteres.clients import json_client
from halteres.clients.trajectories.address import Address
from halteres.config import environ
from halteres.config.program import EnvironmentProgram
from halteres.config.sampler_list import key_variables
from halteres.config.settings import Settings
from halteres.errors import NotReady
from halteres.files import replace_file
from halteres.process import GRACE_S
from halteres.redaction import keep_secret
from halteres.rewards.components import secret_variables
from halteres.rewards.model_folder import names_of, path_of
from halteres.runs.directory import CRITIC, StateWriter
from halteres.runs.planning.models import reward_folders, with_places
from halteres.runs.planning.resources import workload_of
from halteres.runs.servers import (
    READY_WITHIN_S,
    WIRING,
    Server,
    relay_arguments,
    service_arguments,
    vllm_s,
    with_login,
)
from halteres.runs.start import config_text, write_resolved
from halteres.runs.state import Kind, Phase, RunState
from halteres.runs.supervision.hang_watch import HangWatch

WELL_KNOWN = (8000, 8001, 8002)
"""Ports of `halteres serve trajectories`, `halteres serve` and `halteres reward serve`: who calls
there does not mean a run.
"""

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


def listen() -> Listener:
    """Any free port but the well-known ones."""
    listener = Listener(socket.create_server(("127.0.0.1", 0), backlog=BACKLOG))
    if listener.port not in WELL_KNOWN:
        return listener
    with listener.socket:  # while this one is held, the next is another
        return listen()


async def get_json(url: str, key: str | None = None) -> Mapping[str, Any] | None:
    """The JSON object behind a URL of ours; None where there is no good answer (yet). `key`: where
    one is asked for.
    """
    try:
        return await asyncio.to_thread(json_client.get_json, url, 2.0, key)
    except (json_client.Refused, NotReady):
        return None


Probe = Callable[[], Awaitable[bool]]  # asks once whether a role is ready now


def answers(url: str, key: str | None = None, having: str = "") -> Probe:
    """Ready when an HTTP server answers 200, with something under the key `having`."""

    async def probe() -> bool:
        answer = await get_json(url, key)
        return answer is not None and (not having or bool(answer.get(having)))

    return probe


def exists(file: Path) -> Probe:
    """Ready when a file was touched."""

    async def probe() -> bool:
        return file.exists()

    return probe


RoleName = Literal["service", "relay", "api", "reward", "critic", "trainer", "env"]

STOP_ORDER: tuple[RoleName, ...] = (
    "env",
    "trainer",
    "critic",
    "reward",
    "api",
    "relay",
    "service",
)


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
    # of its own, secrets too
    variables: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    stays_here: bool = False  # it talks to this machine alone
    hang_watch: HangWatch | None = None  # where its event loop is asked for a heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """What the roles of one run are made from."""

    path: Path  # the run directory
    kind: Kind = "rl"
    run_name: str
    settings: Settings
    environment: EnvironmentProgram
    base_model: str
    tokenizer: str = ""  # folder of the base model, or its name where only the service has it
    service: Listener | None  # None: somebody else's service is used
    inference: Server  # the service, whoever's it is
    # None: nothing is delivered; a reward model is trained, or a policy on a file
    api: Listener | None
    reward: Listener | None = None  # None: the environment names no reward model in a local folder
    relay: Listener | None = None  # None: environments sample the service itself
    critic: Listener | None = None  # None: advantages are made without one
    first_step: int = 0  # that a resumed run goes on from
    secret: str = field(repr=False)  # what the run's own servers ask for

    @property
    def tempered(self) -> bool:
        """The run's own service gives sampled log-probabilities at env.temperature, for training
        corrects by them.
        """
        return self.service is not None and self.settings.corrects_temperature


@contextmanager
def prepared_run(writer: StateWriter) -> Iterator[RunContext]:
    """Bind the sockets, write the addresses into the run's files and its state; the sockets are
    closed at the end.
    """
    run, state, secret = writer.run, writer.state, environ.run_secret()
    settings = run.settings()
    keep_secret(settings.env)
    environ.hold_back(key_variables(settings.inference.samplers))
    with ExitStack() as held:

        def listening(needed: object) -> Listener | None:
            listener = None
            if needed:
                listener = listen()
            if listener:
                held.enter_context(listener.socket)
            return listener

        service = listening(state.trains_policy and not state.service_given)
        api = listening(state.kind == "rl")
        reward = listening(reward_folders(settings.env))
        relay = listening(state.is_relayed and state.kind == "rl")
        critic = listening(state.kind == "rl" and settings.trainer.uses_critic)
        if service:
            service_url = service.url
        else:
            service_url = state.urls.get("service", "")
        urls = {"service": service_url}
        own = {"api": api, "reward": reward, "relay": relay, "critic": critic}
        urls |= {name: listener.url for name, listener in own.items() if listener}
        writer.update(urls={name: url for name, url in urls.items() if url})
        context = RunContext(
            path=run.path,
            kind=state.kind,
            run_name=state.name,
            settings=settings,
            environment=state.program,
            base_model=state.base_model,
            service=service,
            inference=Server(url=service_url, key=secret if service else environ.api_key()),
            api=api,
            reward=reward,
            relay=relay,
            tokenizer=state.tokenizer,
            critic=critic,
            first_step=int((state.resume_point or {}).get("step", 0)),
            secret=secret,
        )
        if api is not None:
            _write_wiring(writer.state, context, with_login(api.url, secret))
        elif state.is_on_file:
            _write_wiring(writer.state, context, "")
        yield context


def _write_wiring(state: RunState, context: RunContext, api_url: str) -> None:
    """wiring.json and config.yaml hold keys: readable by the owner alone."""
    settings, key = context.settings, context.inference.key
    wiring = {
        "run_id": state.run_id,
        "run_dir": str(context.path),
        "service_url": context.inference.url,
        "api_url": api_url,
        "critic_url": with_login(context.critic.url, context.secret) if context.critic else "",
        "api_key": key,
        "base_model": context.base_model,
        "tokenizer": state.tokenizer,
        "is_foreign": context.environment.is_foreign,
        "tempered": context.tempered,
        "service_up_s": READY_WITHIN_S + vllm_s(settings.inference.samplers),
        "resume_from": state.resume_point,
    }
    if context.relay is not None:
        wiring["published"] = str(_published(context))
        # what environments ask is the relay, which has the service's key
        key = context.secret
    # in place of a reward model's folder stands where the run's server has it
    if context.reward is not None:
        names = {folder: name for name, folder in names_of(reward_folders(settings.env)).items()}
        root = with_login(context.reward.url, context.secret)
        settings = with_places(settings, lambda folder: f"{root}{path_of(names[folder])}")
    replace_file(context.path / WIRING, json.dumps(wiring, indent=1).encode(), private=True)
    config = config_text(settings, state, context.path, api_url=api_url, api_key=key)
    replace_file(context.path / "config.yaml", config.encode(), private=True)
    write_resolved(context.path, context.settings, state, context.path, {})


def _published(context: RunContext) -> Path:
    """Where the trainer says which version the relay is to sample."""
    return context.path / "control" / "published.json"


# makes the roles of a run; tests put stand-ins here
RolesOf = Callable[[RunContext], tuple[Role, ...]]


def _module(name: str, *arguments: object) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *map(str, arguments))


def roles_of(context: RunContext) -> tuple[Role, ...]:
    """The roles of a run, in the order in which they are started."""
    path, api, service, reward = context.path, context.api, context.service, context.reward
    trainer_ready = exists(path / "control" / "trainer.ready")
    if context.kind == "reward":
        reward_trainer = Role(
            name="trainer",
            title="Reward trainer",
            command=_module("halteres.rewards.torch", "--run", path),
            phase="trainer",
            ready=trainer_ready,
            ready_within_s=1800,  # it reads every row as tokens first
            grace_s=30,  # it ends after its step, with a checkpoint
        )
        return (reward_trainer,)
    if api is None:
        return _roles_on_file(context, trainer_ready)
    token, diagnostics = {environ.TRAJECTORY_TOKEN: context.secret}, f"{api.url}/v1/diagnostics"
    database = path / "api" / "trajectories.sqlite"
    config, metrics = str(path / "config.yaml"), path / "metrics.jsonl"
    is_here = service is not None or Address.of(context.inference.url).is_here
    api_server = Role(
        name="api",
        title="API server",
        command=_module(
            "halteres.trajectories", "--database", database, "--listen-fd", api.descriptor
        ),
        phase="api",
        ready=answers(diagnostics, context.secret),
        variables=token,
        stays_here=True,
        ready_within_s=60,
        listener=api,
        restarts=2,  # its groups are in the database
    )
    trainer = Role(
        name="trainer",
        title="Trainer",
        command=_module("halteres.training", "--run", path),
        phase="trainer",
        ready=trainer_ready,
        ready_within_s=600 + vllm_s(context.settings.inference.samplers),
        # The keys are in wiring.json; who has the variables too knows what to strike out of its
        # words.
        keys=() if service else (environ.API_KEY,),
        variables=token,
        stays_here=is_here,
    )
    hang_watch = HangWatch.of(path / "control" / "env.heartbeat", context.settings.env)
    env = Role(
        name="env",
        title="Environment",
        command=context.environment.command_in_run(
            "serve", "--config", config, metrics=metrics, name=context.run_name
        ),
        folder=context.environment.working_directory,
        phase="environment",
        ready=answers(diagnostics, context.secret, having="environments"),
        ready_within_s=480,
        restarts=2,  # it holds nothing but rollouts in flight
        keys=secret_variables(context.settings.env),
        variables={**token, **hang_watch.asked.variable},
        hang_watch=hang_watch,
    )
    roles: list[Role] = []
    if service:
        roles.append(_service(context, service))
    if context.relay:
        roles.append(_relay(context, context.relay, is_here=is_here))
    roles.append(api_server)
    if reward:
        roles.append(_reward(context, reward))
    if context.critic:
        roles.append(_critic(context, context.critic))
    return (*roles, trainer, env)


def _roles_on_file(context: RunContext, trainer_ready: Probe) -> tuple[Role, ...]:
    """The roles of a run that trains a policy on a file: its service, and the trainer."""
    service = context.service
    is_here = service is not None or Address.of(context.inference.url).is_here
    trainer = Role(
        name="trainer",
        title="Trainer",
        command=_module("halteres.training", "--run", context.path),
        phase="trainer",
        ready=trainer_ready,
        ready_within_s=1800,  # it reads every row as tokens first
        keys=() if service else (environ.API_KEY,),
        stays_here=is_here,
    )
    if service is None:
        return (trainer,)
    return (_service(context, service), trainer)


def _service(context: RunContext, listener: Listener) -> Role:
    place = ("--state", context.path / "service", "--listen-fd", listener.descriptor)
    tempered = ()
    if context.tempered:
        tempered = ("--sample-logprobs", "tempered")
    # Groups of gateway sessions go where those of the run's environment go.
    groups = ()
    if context.api is not None:
        groups = ("--trajectory-server", context.api.url)
    settings = context.settings
    computing = service_arguments(
        settings.inference,
        lora_rank=settings.trainer.lora_rank,
        context=workload_of(settings).positions,
    )
    return Role(
        name="service",
        title="Training service",
        command=_module(
            "halteres.service",
            *place,
            "--model",
            context.base_model,
            *computing,
            *groups,
            *tempered,
        ),
        phase="api",
        ready=answers(f"{listener.url}/api/v1/healthz"),
        keys=key_variables(settings.inference.samplers),
        variables={
            environ.SERVICE_KEY: context.secret,
            environ.TRAJECTORY_TOKEN: context.secret,
        },
        stays_here=True,
        ready_within_s=READY_WITHIN_S + vllm_s(settings.inference.samplers),
        listener=listener,
        restarts=2,  # what it accepted is in its journal, and its clients ask again by themselves
    )


def _relay(context: RunContext, listener: Listener, *, is_here: bool) -> Role:
    return Role(
        name="relay",
        title="Sampling relay",
        command=_module(
            "halteres.training.sampling_relay",
            *relay_arguments(context.inference.url, context.base_model, context.tokenizer),
            "--published",
            _published(context),
            "--listen-fd",
            listener.descriptor,
        ),
        phase="api",
        ready=answers(f"{listener.url}/api/v1/healthz", context.secret),
        keys=(environ.API_KEY,),
        variables={environ.SERVICE_KEY: context.secret},
        stays_here=is_here,
        ready_within_s=120,
        listener=listener,
        restarts=2,  # what it samples is in a file, and its clients ask again by themselves
    )


def _threads(context: RunContext) -> tuple[object, ...]:
    """The option for how many threads compute; none where the process decides."""
    threads = context.settings.inference.threads
    if threads is None:
        return ()
    return ("--threads", threads)


def _reward(context: RunContext, listener: Listener) -> Role:
    folders = reward_folders(context.settings.env)
    # On the CPU: the accelerator's memory is the engine's, whose admission has counted it.
    options = (
        "--listen-fd",
        listener.descriptor,
        "--device",
        "cpu",
        *_threads(context),
    )
    return Role(
        name="reward",
        title="Reward server",
        command=_module("halteres.rewards", *folders, *options),
        phase="api",
        ready=answers(f"{listener.url}/health", context.secret),
        variables={environ.REWARD_KEY: context.secret},
        stays_here=True,
        ready_within_s=300,
        listener=listener,
        restarts=2,  # it holds nothing, and its clients ask again by themselves
    )


def _critic(context: RunContext, listener: Listener) -> Role:
    trainer = context.settings.trainer
    # On the CPU, as the reward server.
    options = (
        *("--state", context.path / CRITIC, "--listen-fd", listener.descriptor),
        *("--rank", trainer.lora_rank, "--seed", context.settings.run.seed),
        *("--step", context.first_step),
        *_threads(context),
    )
    folder = trainer.critic or context.tokenizer
    return Role(
        name="critic",
        title="Critic",
        command=_module("halteres.rewards.critic", folder, *options),
        phase="api",
        ready=answers(f"{listener.url}/health", context.secret),
        variables={environ.REWARD_KEY: context.secret},
        stays_here=True,
        ready_within_s=300,
        listener=listener,
        restarts=2,  # its state is on disk after every update, and none is done twice
    )
