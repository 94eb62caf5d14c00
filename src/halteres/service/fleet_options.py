"""The engines of a service, as its command line asks for them."""

from __future__ import annotations

import argparse
import json
import logging
import re
import secrets
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import get_args

from halteres.config import environ, sampler_list
from halteres.config.sampler_list import Sampler
from halteres.engine.connection import LinkedEngine
from halteres.engine.process import EngineCommand, EngineProcess, Ranks, RestartPolicy
from halteres.engine.protocol import AskedType, Samples, Trains
from halteres.engine.shapes import MAX_RANK
from halteres.engine.vllm.adapters import TARGETS, AdapterFolders, Projections
from halteres.engine.vllm.client import Demands
from halteres.engine.vllm.server import READY_S, RemoteVllm, VllmCommand
from halteres.errors import HalteresError, InvalidConfig
from halteres.files import read_regular, replace_file
from halteres.process import usable_cores
from halteres.service.base import BaseModel
from halteres.service.fleet import Fleet, Host

MOST_RANKS = 1024  # of a trainer
MOST_ID = 64  # bytes of a service's id

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that say which engines there are, and how they compute."""
    add = parser.add_argument
    add("--engine", choices=("torch", "scripted"), default="torch")
    add(
        "--samplers",
        type=_samplers,
        default=0,
        metavar="N|LIST",
        help="what only samples: a number of engines, each a process; or own, vllm and addresses "
        "of vLLMs (URL, or 'URL VARIABLE' with its key), separated by commas; 0: the engine that "
        "trains does",
    )
    add("--vllm", default="vllm", help="command of samplers called vllm, and further arguments")
    add("--vllm-memory", type=float, default=0.45, help="share of a GPU's memory that one takes")
    add("--vllm-adapters", type=int, default=16, help="adapters that a vLLM holds at a time")
    add("--weights-folder", type=Path, help="folder that samplers at addresses see, for weights")
    add("--lora-rank", type=int, default=32, help="largest rank of an adapter that vLLMs must take")
    add("--context", type=int, default=0, help="tokens of the longest sequence, for vLLMs")
    add("--trainer-ranks", type=int, default=1, help="processes that train as one")
    add(
        "--shard",
        action="store_true",
        help="each rank of the trainer has a part of the base model; it does not sample then",
    )
    add("--trainer-machines", type=int, default=1, help="that these ranks are on, this one first")
    add(
        "--trainer-address",
        type=_address,
        metavar="HOST:PORT",
        help="of this machine, where ranks of other machines find those of this one",
    )
    add("--threads", type=int, help="of each engine; default: cores - 1, shared among them")
    add(
        "--cache-gb",
        type=float,
        help="for keys and values of sequences; default: see inference.cache_gb",
    )
    add("--dtype", choices=get_args(AskedType), default="auto", help="of the base weights")
    add(
        "--device",
        choices=environ.DEVICES,
        help="what engines compute on; default: HALTERES_DEVICE, or cpu",
    )


def _samplers(text: str) -> sampler_list.Given:
    try:
        return sampler_list.as_given(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}") from error


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is not HOST:PORT")
    return host, int(port)


def ranks_of(arguments: argparse.Namespace) -> Ranks | None:
    """The ranks of the trainer; None for one process. InvalidConfig where they cannot be started
    so.
    """
    number, machines = arguments.trainer_ranks, arguments.trainer_machines
    if not 1 <= number <= MOST_RANKS or machines < 1 or number % machines:
        raise InvalidConfig(
            f"{number} ranks on {machines} machines cannot be started.",
            f"There are 1 to {MOST_RANKS}, equally many on every machine.",
            "Set --trainer-ranks to a multiple of --trainer-machines.",
        )
    if machines > 1 and arguments.trainer_address is None:
        raise InvalidConfig(
            f"The ranks of {machines} machines do not know where to meet.",
            next="Set --trainer-address to this machine's address and a free port.",
        )
    if machines == 1 and arguments.trainer_address is not None:
        raise InvalidConfig(
            "--trainer-address is where ranks of several machines meet.",
            "All ranks of this service are on one.",
            "Set --trainer-machines, or leave --trainer-address out.",
        )
    if arguments.shard and not sampler_list.samplers_of(arguments.samplers):
        raise InvalidConfig(
            "A trainer with a sharded base model does not sample.",
            "No other engine of this service does.",
            "Add --samplers: vllm, an address of one, or a number of engines.",
        )
    if number == 1 and not arguments.shard:
        return None
    if arguments.engine != "torch":
        raise InvalidConfig(
            f"The engine '{arguments.engine}' has one process.",
            "Only that of torch trains as several ranks.",
            "Leave --trainer-ranks and --shard out.",
        )
    return Ranks(
        number=number,
        shard=arguments.shard,
        machines=machines,
        address=arguments.trainer_address,
    )


def fleet_of(arguments: argparse.Namespace, base: BaseModel) -> Fleet:
    """The engine that trains, and what samples. InvalidConfig where a sampler cannot be asked for
    so.
    """
    samplers = sampler_list.samplers_of(arguments.samplers)
    ranks = ranks_of(arguments)
    num_own = 1 + sum(one.kind != "remote" for one in samplers)
    if ranks is not None:
        num_own += ranks.here - 1
    command = EngineCommand(
        backend=arguments.engine,
        folder=base.folder,
        name=base.name,
        threads=arguments.threads or max(1, (usable_cores() - 1) // num_own),
        cache_gb=arguments.cache_gb,
        dtype=arguments.dtype,
        device=arguments.device,
    )
    state: Path = arguments.state

    def engine(name: str, command: EngineCommand = command) -> EngineProcess[LinkedEngine]:
        return EngineProcess(
            command,
            state / f"{name}.log",
            on_death=lambda why: note_end(state / f"{name}_exit.json", why),
            on_restart=lambda: log.warning(
                "The engine runs again; what it held comes back when it is asked for."
            ),
        )

    trainer, vllm = engine("engine", replace(command, ranks=ranks)), None
    if not sampler_list.are_exact(samplers):
        vllm = _Vllms(arguments, base, trainer, command.threads or 1)

    def sampler(number: int, one: Sampler) -> Host[Samples]:
        name = f"sampler-{number}"
        if one.kind == "own" or vllm is None:
            return engine(name)
        return vllm.host(name, one)

    hosts = [sampler(number, one) for number, one in enumerate(samplers, 1)]
    if sampler_list.has_own(samplers):
        return Fleet.of(trainer, *hosts)
    return Fleet.of(trainer, *hosts, targets=TARGETS, max_rank=arguments.lora_rank)


class _Vllms:
    """The hosts of vLLMs, of one kind of demands."""

    def __init__(
        self, arguments: argparse.Namespace, base: BaseModel, trainer: Host[Trains], threads: int
    ) -> None:
        self._arguments, self._threads, self._base = arguments, threads, base
        self._trainer = trainer
        if not 1 <= arguments.lora_rank <= MAX_RANK:
            raise InvalidConfig(
                f"--lora-rank is {arguments.lora_rank}.", f"It must be 1 to {MAX_RANK}."
            )
        self._projections = Projections.of(base.folder)

    def host(self, name: str, sampler: Sampler) -> Host[Samples]:
        """A process of ours, or an address."""
        state: Path = self._arguments.state

        def on_death(why: HalteresError) -> None:
            note_end(state / f"{name}_exit.json", why)

        if sampler.kind == "vllm":
            return EngineProcess(
                self._command(name),
                state / f"{name}.log",
                on_death=on_death,
                policy=RestartPolicy(ready_s=READY_S),
            )
        key = None
        if sampler.variable:
            environ.hold_back((sampler.variable,))
            key = environ.sampler_key(sampler.variable)
            if key is None:
                raise InvalidConfig(
                    f"The variable {sampler.variable} is not set.",
                    f"inference.samplers says that it has the key of {sampler.url}.",
                    "Set it where the service is started.",
                )
        demands = self._demands(f"The vLLM at {sampler.url}", key)
        return RemoteVllm(
            sampler.url, demands, self._projections, self._folders(name), on_death=on_death
        )

    def _command(self, name: str) -> VllmCommand:
        arguments = self._arguments
        command = VllmCommand(
            given=arguments.vllm,
            demands=self._demands("vLLM", None),
            trainer=lambda: self._trainer.info,
            base=self._projections,
            folders=self._folders(name),
            cache_gb=arguments.cache_gb,
            memory_share=arguments.vllm_memory,
            threads=self._threads,
        )
        command.check()  # refused now rather than once the trainer has loaded its model
        return command

    def _demands(self, title: str, key: str | None) -> Demands:
        arguments, base = self._arguments, self._base
        return Demands(
            title=title,
            name=base.name,
            names=base.names,
            folder=base.folder,
            context=min(arguments.context, self._projections.context or arguments.context),
            rank=arguments.lora_rank,
            places=arguments.vllm_adapters,
            tempered=arguments.sample_logprobs == "tempered",
            dtype=arguments.dtype,
            device=arguments.device or environ.device(),
            key=key,
        )

    def _folders(self, name: str) -> AdapterFolders:
        """Below the folder that both see, or the service's own."""
        state: Path = self._arguments.state
        shared: Path | None = self._arguments.weights_folder
        if shared is None:
            return AdapterFolders(state.absolute() / f"held-{name}")
        # other services use it too, also of other machines, where a state may have the same path
        return AdapterFolders(
            shared.expanduser().absolute() / f"halteres-{service_id(state)}-{name}"
        )


def service_id(state: Path) -> str:
    """The service's own, which no other has: random, made once for its state."""
    file = state / "id"
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            replace_file(file, secrets.token_hex(8).encode())
        found = read_regular(file, MOST_ID).decode()
    except (OSError, ValueError) as error:
        raise InvalidConfig(
            f"The state directory {state} cannot be used.", f"{error}.", "Make it writable."
        ) from error
    if not re.fullmatch(r"[0-9a-f]{16}", found):
        raise InvalidConfig(
            f"{file} is damaged.",
            "It has 16 hexadecimal digits, which name the service's weights.",
            "Remove it: the next start makes another.",
        )
    return found


def note_end(file: Path, why: HalteresError) -> None:
    """An engine has ended: a line for the log, and a file for programs
    (`runs.supervision.run_processes`).
    """
    log.error("%s", why)
    exit = {"pid": why.details.get("pid"), "code": why.details.get("exit_code")}
    with suppress(OSError):  # the log has it
        replace_file(file, json.dumps(exit).encode())
