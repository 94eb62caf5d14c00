"""The service's process: its command line, and one service answering on one socket until it is told
to end.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect

from halteres.config import environ
from halteres.errors import Conflict, HalteresError, InvalidConfig, ServerError
from halteres.files import replace_file
from halteres.logins import is_web_address, refused
from halteres.loopback import HOST, MOST_HEAD_BYTES, Server, is_loopback, open_listener, url_of
from halteres.models import TINY
from halteres.process import begin
from halteres.service.base import BaseModel, base_model
from halteres.service.fleet import Fleet, Host
from halteres.service.fleet_options import add_arguments, fleet_of
from halteres.service.gateway.gateway import Gateway, gateway_over
from halteres.service.gateway.routes import GatewayRoutes
from halteres.service.http import (
    CountRequests,
    Guard,
    Meter,
    RequestCounts,
    on_bug,
    on_error,
    on_gone,
    on_missing,
)
from halteres.service.inference.answering import Inference
from halteres.service.inference.http import Shutdown
from halteres.service.inference.routes import InferenceRoutes
from halteres.service.keys import KeyFile, Keys
from halteres.service.limits import read_allowances
from halteres.service.routes.checkpoints import CheckpointRoutes
from halteres.service.routes.sessions import SessionRoutes
from halteres.service.routes.training import TrainingRoutes
from halteres.service.running_services import registered_card
from halteres.service.service import Options, Service, locked, opened

log = logging.getLogger(__name__)


def main() -> int:
    """Run until SIGTERM, SIGINT or the end of the lifeline; exit code 0, or 1 with one sentence."""
    arguments = parser().parse_args()
    begin("service", private=True)
    collect_seldom()
    try:
        asyncio.run(_run(arguments))
    except HalteresError as error:
        sys.stderr.write(f"error: {error.sentence}\n")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


NEW_OBJECTS, YOUNG_ROUNDS, OLD_ROUNDS = 20_000, 20, 20
"""After how many new objects garbage is collected, and which of the rounds look at older objects
too. By Python's own numbers (700, 10, 10) every answer of a sampler, which has a few objects for
each token, begins several rounds: with 600 requests under way they took a third of the service's
time, and held up everybody for as long as 0.2 s.
"""


def collect_seldom() -> None:
    """Collect garbage less often from now on, and never look again at what was imported: reference
    counts free nearly everything. For this process alone.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, YOUNG_ROUNDS, OLD_ROUNDS)


async def _run(arguments: argparse.Namespace) -> None:
    state, base = arguments.state, base_model(arguments.model)
    fleet, options, tls = fleet_of(arguments, base), _options(arguments), _tls(arguments)
    keys = KeyFile(state).read()
    try:  # beyond the loopback only with keys
        may_leave = bool(keys) or options.require_keys
        bound = open_listener(
            arguments.port, arguments.listen_fd, host=arguments.host, beyond=may_leave
        )
    except Conflict as error:
        next_step = (
            f"{error.next} A second service on this machine needs a --state DIR of its own, too."
        )
        raise Conflict(error.what, error.why, next_step) from error
    except InvalidConfig as error:
        next_step = error.next or f"Make a key first: halteres keys create NAME --state {state}"
        raise InvalidConfig(error.what, error.why, next_step) from error
    with bound:
        beyond = not is_loopback(bound.getsockname()[0])
        if beyond and tls is None:
            log.warning(
                "Keys and data are readable on the way: use --certificate, or a proxy that ends "
                "TLS before it."
            )
        if beyond and not any(key.state(time.time()) == "valid" for key in keys):
            log.warning(
                "No key of %s is valid: nobody can use this service until one is made.", state
            )
        await serve(
            state,
            base,
            fleet,
            bound,
            replace(options, require_keys=options.require_keys or beyond),
            tls,
        )


def _options(arguments: argparse.Namespace) -> Options:
    reward_models = dict[str, str]()
    for given in arguments.reward_model:
        name, _, address = given.partition("=")
        if not name or not is_web_address(address):
            raise InvalidConfig(
                f"'{refused(given)}' is no reward model.",
                "It is NAME=URL: the service loads none itself.",
                "halteres reward serve DIR gives it an address.",
            )
        reward_models[name] = address
    trajectory_server = arguments.trajectory_server
    if trajectory_server is not None and not is_web_address(trajectory_server):
        raise InvalidConfig(
            f"'{refused(trajectory_server)}' is no trajectory server.",
            next="Give its address: --trajectory-server http://127.0.0.1:8000.",
        )
    return Options(
        sample_logprobs=arguments.sample_logprobs,
        own_key=environ.service_key(),
        require_keys=arguments.require_keys,
        strict_context=arguments.strict_context,
        refuse_stable_reinforce=arguments.refuse_stable_reinforce,
        replay_s=arguments.replay_s,
        weights_bytes=int(arguments.weights_gb * 1e9) if arguments.weights_gb else None,
        limits=read_allowances(arguments.state, arguments.limit),
        reward_models=reward_models,
        trajectory_server=trajectory_server,
    )


def _tls(arguments: argparse.Namespace) -> Tls | None:
    certificate, key = arguments.certificate, arguments.certificate_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise InvalidConfig("--certificate and --certificate-key come together.")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise InvalidConfig(
            f"The certificate {certificate} and its key {key} cannot be used.",
            f"{error}.",
            "Give the chain with --certificate and its key, without a password, with "
            "--certificate-key: both PEM.",
        ) from error
    return Tls(certificate, key)


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    found = argparse.ArgumentParser(prog="halteres serve", description="The training service.")
    add = found.add_argument
    add(
        "--state",
        type=Path,
        default=environ.home() / "service",
        help="directory that everything durable is kept in",
    )
    add("--host", default=HOST, help="where to listen; beyond the loopback only with keys")
    add("--port", type=int, default=8001, help="0 takes a free one")
    add("--listen-fd", type=int, help="an inherited socket that listens already")
    add("--model", default=TINY, help="a built-in name, a name in the store, or a model folder")
    add_arguments(found)
    add("--require-keys", action="store_true", help="ask for a key also while none was made")
    add(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of every tenant; see docs",
    )
    add(
        "--reward-model",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="by which `best_of` may choose",
    )
    groups = "where groups of gateway sessions are posted; its token: HALTERES_TRAJECTORY_TOKEN"
    add("--trajectory-server", metavar="URL", help=groups)
    add("--sample-logprobs", choices=("raw", "tempered"), default="raw", help="of sampled tokens")
    strict = "refuse a max_tokens that does not fit beside the prompt, rather than shorten it"
    add("--strict-context", action="store_true", help=strict)
    refuse = "rather than compute it by a formula of ours"
    add("--refuse-stable-reinforce", action="store_true", help=refuse)
    replay = "engine seconds after which an adapter's restore point is due; 0: after every request"
    add("--replay-s", type=float, default=Options().replay_s, help=replay)
    weights = (
        "for adapters and snapshots in the engine, in 10^9 bytes; those unused for longest leave "
        "it; default: a quarter"
        " of the memory that the model leaves free (on a GPU, say how much)"
    )
    add("--weights-gb", type=float, help=weights)
    add("--certificate", type=Path, help="for TLS: PEM file with the chain")
    add("--certificate-key", type=Path, help="... and the file of its private key")
    return found


KEEP_ALIVE_S = 900
"""How long an idle connection is kept: a client that reuses one just as it is closed would see an
error.
"""

DRAIN_S = 2  # how long answers under way may take after the end was asked for


def worth_a_line(record: logging.LogRecord) -> bool:
    """Whether uvicorn's record is written: not its warnings, one for each bad request, nor the
    traceback of an answer that is cancelled because it did not end in time, of which it says so in
    a line of its own.
    """
    cancelled = record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)
    return record.levelno != logging.WARNING and not cancelled


def create_app(service: Service, gateway: Gateway, shutdown: Shutdown | None = None) -> Starlette:
    """The routes over an open service and its gateway, those called most first; `shutdown` cuts
    answers short.
    """
    counts, inference, options = RequestCounts(), Inference(service), service.options
    routes = (
        TrainingRoutes(service),
        InferenceRoutes(inference),
        GatewayRoutes(gateway, inference),
        SessionRoutes(service),
        CheckpointRoutes(service),
    )
    keys = Keys(service.state, required=options.require_keys, own=options.own_key)
    app = Starlette(
        routes=[route for part in (*routes, counts) for route in part.table()],
        middleware=[
            Middleware(CountRequests, counts=counts),
            Middleware(Guard, keys=keys, meter=Meter(options.limits), sessions=gateway),
        ],
        exception_handlers={
            HalteresError: on_error,
            HTTPException: on_missing,
            ClientDisconnect: on_gone,
            Exception: on_bug,
        },
    )
    app.state.shutdown = shutdown or Shutdown()
    return app


class Tls(NamedTuple):
    """What a server shows that it is who it says."""

    certificate: Path  # PEM, with the chain
    key: Path  # PEM, private


class ServiceServer(Server):
    """A server that ends open polls, and answers under way, before it waits for connections."""

    def __init__(self, service: Service, gateway: Gateway, tls: Tls | None = None) -> None:
        self._service, self._shutdown = service, Shutdown()
        logging.getLogger("uvicorn.error").addFilter(worth_a_line)
        super().__init__(
            uvicorn.Config(
                create_app(service, gateway, self._shutdown),
                http="h11",
                ws="none",
                lifespan="off",
                access_log=False,
                log_config=None,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=DRAIN_S,
                h11_max_incomplete_event_size=MOST_HEAD_BYTES,
                server_header=False,
                ssl_certfile=tls.certificate if tls else None,
                ssl_keyfile=tls.key if tls else None,
            )
        )

    def end(self) -> None:
        """End in order."""
        self._service.futures.close()
        self._shutdown.begin()
        super().end()


async def serve(
    state: Path,
    base: BaseModel,
    fleet: Fleet,
    bound: socket.socket,
    options: Options,
    tls: Tls | None = None,
) -> None:
    """Serve until a signal comes; raises where the state directory is taken, or the engine cannot
    be started or named.
    """
    url = url_of(bound, "https" if tls else "http")
    with locked(state):
        async with (
            opened(state, base, fleet, options) as service,
            gateway_over(service) as gateway,
        ):
            server = ServiceServer(service, gateway, tls)
            file = ServiceFile(state, fleet, url, bound.getsockname()[1])
            tasks = [asyncio.create_task(_start(file, server), name="engines' start")]
            for host in fleet.hosts:
                naming = _name_successors(host, file)
                tasks.append(asyncio.create_task(naming, name="engine's successors"))
            try:
                with registered_card(url, state):
                    await server.serve(sockets=[bound])
            finally:
                for task in tasks:
                    task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
        for failure in ended:
            if isinstance(failure, HalteresError):
                raise failure


@dataclass(frozen=True, slots=True)
class ServiceFile:
    """STATE/service.json: the processes of a service, for those that watch them."""

    state: Path
    fleet: Fleet
    url: str
    port: int

    def write(self) -> None:
        """Name those that run now."""
        content = {
            "pid": os.getpid(),
            "engine_pid": self.fleet.trainer.pid,
            "sampler_pids": [host.pid for host in self.fleet.samplers],
            "port": self.port,
            "url": self.url,
            "started_at": time.time(),
        }
        file = self.state / "service.json"
        try:
            replace_file(file, msgspec.json.encode(content))
        except OSError as error:
            raise ServerError(
                f"{file} cannot be written.",
                f"{error.strerror or error}.",
                f"See that {self.state} is yours to write and not full, and start the service "
                "again.",
            ) from error


async def _start(file: ServiceFile, server: ServiceServer) -> None:
    """Start the engines, one after the other, for each looks how much memory is free; one that
    cannot be started ends the service. Each is named as soon as it is ready: the trainer is, and
    trains, while a sampler still loads its model.
    """
    try:
        for host in file.fleet.hosts:
            await host.start()
            file.write()
    except HalteresError:
        server.end()
        raise
    log.info("The training service answers on %s (state in %s).", file.url, file.state)


async def _name_successors(host: Host[Any], file: ServiceFile) -> None:
    """Write the file again whenever another engine has taken the place of one that died."""
    while host.state not in ("failed", "stopped"):
        await host.settled(restarts=host.restarts + 1)
        try:
            file.write()
        except ServerError as error:  # its readers miss a process id; clients miss nothing
            log.error("%s", error)
