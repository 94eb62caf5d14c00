"""The service's process: `python -m halteres.service --state DIR --port P --engine torch|scripted ...`."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import get_args

from halteres.config import environ
from halteres.engine.process import EngineCommand, EngineProcess
from halteres.engine.protocol import BaseType
from halteres.errors import HalteresError, InvalidConfig
from halteres.files import replace_file
from halteres.loopback import HOST, is_loopback, open_listener
from halteres.models import TINY
from halteres.process import begin, usable_cores
from halteres.scores import is_address
from halteres.service.base import BaseModel, base_model
from halteres.service.fleet import Fleet
from halteres.service.server import Tls, serve
from halteres.service.service import Options
from halteres.service.tenancy.keys import KeyFile
from halteres.service.tenancy.limits import read_allowances

log = logging.getLogger(__name__)


def main() -> int:
    """Run until SIGTERM, SIGINT or the end of the lifeline; exit code 0, or 1 with one sentence."""
    arguments = _parser().parse_args()
    begin("service", private=True)
    try:
        asyncio.run(_run(arguments))
    except HalteresError as error:
        sys.stderr.write(f"error: {error.sentence}\n")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


async def _run(arguments: argparse.Namespace) -> None:
    state, base = arguments.state, base_model(arguments.model)
    fleet, options, tls = _fleet(arguments, base), _options(arguments), _tls(arguments)
    keys = KeyFile(state).read()
    try:  # beyond the loopback only with keys
        may_leave = bool(keys) or options.require_keys
        bound = open_listener(arguments.port, arguments.listen_fd, host=arguments.host, beyond=may_leave)
    except InvalidConfig as error:
        remedy = error.next or f"Make a key first: halteres keys create NAME --state {state}"
        raise InvalidConfig(error.what, error.why, remedy) from error
    with bound:
        beyond = not is_loopback(bound.getsockname()[0])
        if beyond and tls is None:
            log.warning("Keys and data are readable on the way: use --certificate, or a proxy that ends TLS before it.")
        if beyond and not any(key.state(time.time()) == "valid" for key in keys):
            log.warning("No key of %s is valid: nobody can use this service until one is made.", state)
        await serve(state, base, fleet, bound, replace(options, require_keys=options.require_keys or beyond), tls)


def _fleet(arguments: argparse.Namespace, base: BaseModel) -> Fleet:
    command = EngineCommand(
        backend=arguments.engine,
        folder=base.folder,
        name=base.name,
        threads=arguments.threads or max(1, (usable_cores() - 1) // (1 + arguments.samplers)),
        cache_gb=arguments.cache_gb,
        dtype=arguments.dtype,
        device=arguments.device,
    )

    def engine(name: str) -> EngineProcess:
        return EngineProcess(
            command,
            arguments.state / f"{name}.log",
            on_death=lambda why: note_end(arguments.state / f"{name}_exit.json", why),
            on_restart=lambda: log.warning("The engine runs again; what it held comes back when it is asked for."),
        )

    return Fleet.of(engine("engine"), *(engine(f"sampler-{number + 1}") for number in range(arguments.samplers)))


def note_end(file: Path, why: HalteresError) -> None:
    """An engine has ended: for whoever reads the log, and for programs (`runs.supervision.run_processes`)."""
    log.error("%s", why)
    exit = {"pid": why.details.get("pid"), "code": why.details.get("exit_code")}
    with suppress(OSError):  # the log has it
        replace_file(file, json.dumps(exit).encode())


def _options(arguments: argparse.Namespace) -> Options:
    reward_models = dict[str, str]()
    for given in arguments.reward_model:
        name, _, address = given.partition("=")
        if not name or not is_address(address):
            raise InvalidConfig(
                f"'{given}' is no reward model.",
                "It is NAME=URL: the service loads none itself.",
                "halteres reward serve DIR gives it an address.",
            )
        reward_models[name] = address
    return Options(
        sample_logprobs=arguments.sample_logprobs,
        own_key=environ.service_key(),
        require_keys=arguments.require_keys,
        refuse_stable_reinforce=arguments.refuse_stable_reinforce,
        replay_s=arguments.replay_s,
        weights_bytes=int(arguments.weights_gb * 1e9) if arguments.weights_gb else None,
        limits=read_allowances(arguments.state, arguments.limit),
        reward_models=reward_models,
    )


def _tls(arguments: argparse.Namespace) -> Tls | None:
    if arguments.certificate is None and arguments.certificate_key is None:
        return None
    if arguments.certificate is None or arguments.certificate_key is None:
        raise InvalidConfig("--certificate and --certificate-key come together.")
    tls = Tls(arguments.certificate, arguments.certificate_key)
    tls.check()
    return tls


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m halteres.service", description="The training service.")
    add = parser.add_argument
    add("--state", type=Path, required=True, help="directory that everything durable is kept in")
    add("--host", default=HOST, help="where to listen; beyond the loopback only with keys")
    add("--port", type=int, default=8001, help="0 takes a free one")
    add("--listen-fd", type=int, help="an inherited socket that listens already")
    add("--engine", choices=("torch", "scripted"), default="torch")
    add("--model", default=TINY, help="a built-in name, a name in the store, or a model folder")
    samplers = "engines that only sample, each a process; 0: the one that trains does"
    add("--samplers", type=int, default=0, help=samplers)
    add("--threads", type=int, help="of each engine; default: cores - 1, shared among them")
    add("--cache-gb", type=float, help="for keys and values of sequences; default: see inference.cache_gb")
    add("--dtype", choices=get_args(BaseType), default="float32", help="of the base weights")
    add("--device", choices=environ.DEVICES, help="what engines compute on; default: HALTERES_DEVICE, or cpu")
    add("--require-keys", action="store_true", help="ask for a key also while none was made")
    add("--limit", action="append", default=[], metavar="NAME=VALUE", help="of every tenant; see docs")
    add("--reward-model", action="append", default=[], metavar="NAME=URL", help="by which `best_of` may choose")
    add("--sample-logprobs", choices=("raw", "tempered"), default="raw", help="of sampled tokens")
    refuse = "rather than compute it by a formula of ours"
    add("--refuse-stable-reinforce", action="store_true", help=refuse)
    replay = "engine seconds after which an adapter's restore point is due; 0: after every request"
    add("--replay-s", type=float, default=Options().replay_s, help=replay)
    weights = (
        "for adapters and snapshots in the engine, in 10^9 bytes; those unused for longest leave it; default: a quarter"
        " of the memory that the model leaves free (on a GPU, say how much)"
    )
    add("--weights-gb", type=float, help=weights)
    add("--certificate", type=Path, help="for TLS: PEM file with the chain")
    add("--certificate-key", type=Path, help="... and the file of its private key")
    return parser


if __name__ == "__main__":
    sys.exit(main())
