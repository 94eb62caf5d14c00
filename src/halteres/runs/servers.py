"""A run's servers: where they are, the secret that a request must bring; a training service for the
length of a block.

The secret reaches those who may know it by a variable of the run's processes, and by two files that
the run's owner alone may read (wiring.json, and config.yaml for the environment). It comes in a
request's `Authorization`: an inference client sends it as its `api_key`; a client of the trajectory
server has it as the password of the address.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from halteres.clients import json_client
from halteres.clients.trajectories.address import Address
from halteres.config import environ
from halteres.config.sampler_list import (
    Given,
    are_exact,
    as_given,
    as_text,
    key_variables,
    samplers_of,
)
from halteres.config.settings import InferenceSettings
from halteres.errors import HalteresError, InvalidConfig, NotReady, ProcessFailed
from halteres.files import NOT_JSON, read_regular, tail
from halteres.logins import passwords_in
from halteres.process import Child, alive
from halteres.redaction import Redactor, secret_values
from halteres.runs.directory import RunDirectory, runs_home
from halteres.runs.state import RunState, locked

WIRING = "wiring.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One server."""

    url: str  # without login
    # None: it asks for none, or we may not know it
    key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """Those of one run; None: not known yet."""

    service: Server | None = None
    trajectories: Server | None = None
    sampling: Server | None = None  # where environments sample: the service, or the run's relay

    @property
    def redactor(self) -> Redactor:
        """Strikes their keys out of a text."""
        all_of_them = (self.service, self.trajectories, self.sampling)
        return Redactor(one.key for one in all_of_them if one and one.key)


class _Keys(msgspec.Struct, frozen=True, kw_only=True):
    """What of wiring.json is not in run.json."""

    api_key: str | None = None
    api_url: str | None = None


def servers_of(run: RunDirectory) -> Servers:
    """Addresses from run.json, keys from wiring.json; no key where that cannot be read or is older
    than keys.
    """
    state = run.state()
    service, api = state.urls.get("service"), state.urls.get("api")
    try:
        keys = msgspec.json.decode(read_regular(run.path / WIRING), type=_Keys)
        if keys.api_url:
            Address.of(keys.api_url)  # whether it is one
    except (OSError, InvalidConfig, *NOT_JSON):
        keys = _Keys()
    found = Servers()
    if service:
        one = Server(url=service, key=keys.api_key)
        found = replace(found, service=one, sampling=one)
    if api:
        found = replace(
            found, trajectories=Server(url=api, key=Address.of(keys.api_url or api).token)
        )
    relay = state.urls.get("relay")
    if relay and found.trajectories is not None:
        # the run's own servers have one secret
        found = replace(found, sampling=Server(url=relay, key=found.trajectories.key))
    return found


def redactor_of(run: RunDirectory) -> Redactor:
    """Strikes out what this process and the run keep secret: also the keys of its servers, and the
    keys and passwords among its settings, as far as we may read them.
    """
    secrets = {*Redactor.of_this_process().secrets, *servers_of(run).redactor.secrets}
    with suppress(HalteresError):
        config = run.config()
        secrets |= {*secret_values(config), *passwords_in(config)}
    return Redactor(secrets)


def new_secret() -> str:
    """144 random bits, in the form that every version of the SDK takes for a key.

    So short that the address which holds it fits into a line of 80 columns: atroposlib 0.4.0 prints
    its config, broken there, and half a secret is struck out of no log.
    """
    return f"tml-run-{secrets.token_urlsafe(18)}"


def with_login(url: str, secret: str) -> str:
    """The address for a client that knows no keys."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"run:{secret}@{parts.netloc}").geturl()


KEPT, KEPT_LOCK = "kept_service.json", "kept_service.lock"
"""Of a run whose service a chat has left running (`kept_service`): where it is, and the lock that
the process which keeps it holds as long as it lives.
"""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """kept_service.json."""

    process: dict[str, Any]  # that keeps it, as `process.identity` has it
    url: str = ""  # empty while it starts
    key: str | None = None  # that it asks for
    failure: tuple[str, str, str] | None = None  # what, why, next: it did not start


def kept_in(run: RunDirectory) -> Kept | None:
    """The service that is kept for this run, or that starts; None where there is none."""
    try:
        kept = msgspec.json.decode(read_regular(run.path / KEPT), type=Kept)
    except (OSError, *NOT_JSON):
        return None
    if alive(kept.process):
        return kept
    return None


def end_kept(run: RunDirectory) -> None:
    """End the service that is kept for this run, and wait until it is gone."""
    kept = kept_in(run)
    # the process that keeps it asks for the run's weights, too
    if kept is None or kept.process["pid"] == os.getpid():
        return
    with suppress(ProcessLookupError, PermissionError):
        os.kill(kept.process["pid"], signal.SIGTERM)
    ends = time.monotonic() + 2 * ENDS_WITHIN_S
    while alive(kept.process) and time.monotonic() < ends:
        time.sleep(ASK_EVERY_S)


def end_all_kept() -> None:
    """End every service that is kept: a run that begins wants their memory."""
    for file in runs_home().glob(f"*/{KEPT}"):
        end_kept(RunDirectory(file.parent))


READY_WITHIN_S = 300.0  # a large model takes its time to load
VLLM_S = 900.0  # how much more where a vLLM loads it: it is compiled and measured there
FREE_WITHIN_S = 300.0
"""How long the state of a run that has ended is waited for, where another evaluation, test or chat
is using it.
"""

ASK_EVERY_S, ANSWERS_WITHIN_S = 0.1, 5.0
ENDS_WITHIN_S = 15.0
# a service that computes may be slow to answer; one that has ended refuses the connection at once
GONE_AFTER_S = 30.0
SILENT_S = 120.0  # how long a service that is asked may say nothing


@contextmanager
def served(
    model: str,
    run: RunDirectory | None = None,
    *,
    arguments: Sequence[str] = (),
    log: Path | None = None,
    given_up: threading.Event | None = None,
) -> Iterator[Server]:
    """A service that can sample `model` and, given a run, its checkpoints.

    Args:
        model: the base model: a built-in name or a folder.
        run: whose state it works on; its own service is used where it is alive, and so is somebody
            else's that it has trained on.
        arguments: further ones of `python -m halteres.service`.
        log: the service's log; its state lies beside it where there is no run. Default: both end
            with it.
        given_up: set by another thread, it ends the wait for a service that is loading.

    Raises:
        NotReady: the run's state was in use all the time, the service was not ready in time, or
            given up, or gone.
    """
    if run is not None:
        own = own_service(run)
        if own is not None:
            with sampled(own, run, log=log, given_up=given_up) as server:
                yield server
            return
        # one that waits for questions of a chat gives way
        end_kept(run)
    given_up = given_up or threading.Event()
    with ExitStack() as held:
        log = (
            log
            or Path(held.enter_context(tempfile.TemporaryDirectory(prefix="halteres-")))
            / "service.log"
        )
        if run is not None:
            what = f"The weights of run {run.run_id} are in use."
            held.enter_context(locked(run.path / "service.lock", FREE_WITHIN_S, what, given_up))
        place = str((run.path if run is not None else log.parent) / "service")
        with socket.create_server(("127.0.0.1", 0)) as listener, log.open("wb") as output:
            url, descriptor = f"http://127.0.0.1:{listener.getsockname()[1]}", listener.fileno()
            options = (
                "--listen-fd",
                str(descriptor),
                "--state",
                place,
                "--model",
                model,
                *arguments,
            )
            child = Child(
                [sys.executable, "-m", "halteres.service", *options],
                environment=environ.for_loopback(*sampler_keys(arguments)),
                stdout=output,
                stderr=output,
                descriptors=(descriptor,),
            )
        held.callback(child.end, ENDS_WITHIN_S)
        _wait_until_ready(url, child, log, given_up, ready_within_s(arguments))
        yield Server(url=url)


@contextmanager
def relayed(
    service: Server,
    model: str,
    tokenizer: str,
    *,
    log: Path | None = None,
    given_up: threading.Event | None = None,
) -> Iterator[Server]:
    """A relay that samples a service of the Tinker API alone, by the SDK, as environments ask.

    Args:
        service: somebody else's.
        model: its base model.
        tokenizer: that model's folder.
        log: the relay's log; default: it ends with it.
        given_up: as of `served`.

    Raises:
        ProcessFailed, NotReady: it did not start, or not in time.
    """
    secret = new_secret()
    variables = {environ.SERVICE_KEY: secret}
    if service.key:
        variables[environ.API_KEY] = service.key
    environment_for = environ.with_keys
    if Address.of(service.url).is_here:
        environment_for = environ.for_loopback
    with ExitStack() as held:
        if log is None:
            place = held.enter_context(tempfile.TemporaryDirectory(prefix="halteres-"))
            log = Path(place) / "relay.log"
        with socket.create_server(("127.0.0.1", 0)) as listener, log.open("wb") as output:
            url, descriptor = f"http://127.0.0.1:{listener.getsockname()[1]}", listener.fileno()
            child = Child(
                [
                    sys.executable,
                    "-m",
                    "halteres.training.sampling_relay",
                    *relay_arguments(service.url, model, tokenizer),
                    "--listen-fd",
                    str(descriptor),
                ],
                environment=environment_for(**variables),
                stdout=output,
                stderr=output,
                descriptors=(descriptor,),
            )
        held.callback(child.end, ENDS_WITHIN_S)
        given_up = given_up or threading.Event()
        _wait_until_ready(url, child, log, given_up, READY_WITHIN_S, secret)
        yield Server(url=url, key=secret)


@contextmanager
def sampled(
    service: Server,
    run: RunDirectory,
    *,
    log: Path | None = None,
    given_up: threading.Event | None = None,
) -> Iterator[Server]:
    """Where the weights of a run are sampled at `own_service(run)`: there, or at a relay for the
    length of the block. `log`, `given_up`: as of `relayed`.
    """
    state = run.state()
    if not needs_relay(state):
        yield service
        return
    relay = relayed(service, state.base_model, state.tokenizer, log=log, given_up=given_up)
    with relay as server:
        yield server


def needs_relay(state: RunState) -> bool:
    """Whether a run's service is sampled by a relay that the run does not have: its own ends with
    it, and a training on a file has none.
    """
    return state.is_relayed and (state.terminal or state.kind != "rl")


def relay_arguments(service_url: str, model: str, tokenizer: str) -> tuple[str, ...]:
    """The arguments of a sampling relay, but for its socket."""
    return ("--service", service_url, "--model", model, "--tokenizer", tokenizer)


def own_service(run: RunDirectory) -> Server | None:
    """The service of a run that goes on, or somebody else's that it has trained on; None: it has
    none now.

    Raises:
        NotReady: it does not answer. Its clients would wait for it to come back.
    """
    state = run.state()
    servers = servers_of(run)
    there = servers.service if state.terminal else servers.sampling
    if there is None or (state.terminal and not state.service_given):
        return None
    try:
        json_client.get_json(f"{there.url}/api/v1/healthz", GONE_AFTER_S, there.key)
    except json_client.Refused:
        pass  # it is there
    except NotReady as error:
        raise NotReady(
            f"The service at {there.url} does not answer.",
            f"The run trained on it, and its weights are there. {error.why}",
            "Start it again at this address, on its own state; then ask again.",
        ) from error
    return there


def sampler_keys(arguments: Sequence[str]) -> tuple[str, ...]:
    """The variables that have the keys of a service's samplers, by its arguments."""
    return key_variables(_samplers_in(arguments))


def ready_within_s(arguments: Sequence[str]) -> float:
    """How long a service with these arguments may take until it answers."""
    return READY_WITHIN_S + vllm_s(_samplers_in(arguments))


def vllm_s(samplers: Given) -> float:
    """How much longer a service may take to start because of its vLLMs, in seconds."""
    if are_exact(samplers_of(samplers)):
        return 0.0
    return VLLM_S


def _samplers_in(arguments: Sequence[str]) -> Given:
    for option, value in pairwise(arguments):
        if option == "--samplers":
            return as_given(value)
    return 0


def _wait_until_ready(
    url: str,
    child: Child,
    log: Path,
    given_up: threading.Event,
    within_s: float,
    key: str | None = None,
) -> None:
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        if child.exit_code is not None:
            last = tail(log, 1) or [f"Exit code {child.exit_code}."]
            raise ProcessFailed("The training service did not start.", last[0])
        try:
            json_client.get_json(f"{url}/api/v1/healthz", ANSWERS_WITHIN_S, key)
            return
        except (json_client.Refused, NotReady):
            if given_up.wait(ASK_EVERY_S):
                raise NotReady("The training service is not waited for any longer.") from None
    raise NotReady(
        "The training service was not ready in time.",
        f"It had {within_s:.0f} s.",
        "Try: halteres doctor",
    )


def service_arguments(
    inference: InferenceSettings, *, lora_rank: int | None = None, context: int | None = None
) -> tuple[str, ...]:
    """The further arguments with which a service computes as these settings say.

    Args:
        lora_rank: of the largest adapter, for vLLMs.
        context: tokens of the longest sequence, for vLLMs.
    """
    given: dict[str, object] = {"--threads": inference.threads, "--cache-gb": inference.cache_gb}
    if inference.trainer_ranks > 1:
        given["--trainer-ranks"] = inference.trainer_ranks
    if inference.samplers:
        given["--samplers"] = as_text(inference.samplers)
    if not are_exact(samplers_of(inference.samplers)):
        given |= {
            "--vllm": inference.vllm,
            "--vllm-memory": inference.vllm_memory,
            "--vllm-adapters": inference.vllm_adapters,
            "--weights-folder": inference.weights_folder,
            "--lora-rank": lora_rank,
            "--context": context,
        }
    options = {
        "--engine": inference.engine,
        **given,
        "--device": inference.device,
        "--dtype": inference.dtype,
    }
    words = [word for name, value in options.items() if value for word in (name, str(value))]
    if inference.shard:
        words.append("--shard")
    return tuple(words)


async def stream(
    service: Server, path: str, body: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """POST JSON to a service for the events of its answer; closed early, it ends the sampling.

    Raises:
        Refused: it refused; its own sentence is in the error.
        NotReady: nothing came for SILENT_S, or the answer broke off.
        ProcessFailed: it failed under way.
    """
    events = json_client.post_for_events(f"{service.url}{path}", body, SILENT_S, service.key)
    try:
        async with aclosing(events):
            async for event in events:
                yield event
    except json_client.Refused as error:
        raise json_client.Refused(
            f"The service refused the request ({error.answered}).",
            error.why,
            answered=error.answered,
        ) from error
    except NotReady as error:
        raise NotReady(
            f"The service at {service.url} does not answer.",
            error.why,
            "Look at it with: halteres doctor",
        ) from error
