"""A vLLM as the service has it: a process of ours, or one at an address, which its operator
keeps alive.

Both are hosts of `service.fleet`. Ours is started, watched and ended by `engine.process` like any
engine, behind a Unix socket, so that no port is taken and no other client can load weights. Its
front process knows no lifeline, and leaves its engine and workers behind when it is killed: so it
runs under a process of ours (`python -m halteres.engine.vllm`), which leads their group.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from halteres.config import environ
from halteres.engine.process import EngineHost, RestartPolicy, silence
from halteres.engine.protocol import EngineGone, ModelInfo
from halteres.engine.vllm.adapters import LARGEST, AdapterFolders, Projections
from halteres.engine.vllm.client import MOST_LIKELY, MOST_SAMPLES, Demands, VllmSamples
from halteres.errors import HalteresError, InvalidConfig, NotReady, ServerError, boundary
from halteres.logins import without_logins
from halteres.process import Child

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that `--max-lora-rank` takes
BATCHED_ADAPTERS = 4  # of one batch, `--max-loras`; more take turns
BATCHED_TOKENS = 4096  # of one step on a CPU, where a prompt is read whole
POLL_S = 0.2  # between two looks whether it listens
READY_S = 900.0  # a large model is loaded, compiled and measured
RETRY_S = 1.0  # between two looks whether an address answers again

SOCKET = "vllm"  # its name

OURS = (
    *("--uds", "--host", "--port", "--api-key"),
    *("--served-model-name", "--dtype", "--max-model-len", "--gpu-memory-utilization"),
    *("--enable-scale-out", "--enable-prompt-tokens-details"),
    *("--enable-lora", "--max-lora-rank", "--max-loras", "--max-cpu-loras"),
    *("--lora-target-modules", "--max-logprobs", "--logprobs-mode"),
    "--enable-chunked-prefill",
)
"""Options that the service sets, or that would undo what it sets; with `--no-`, too."""

MOST_SEQUENCES = "--max-num-seqs"

QUIET = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}

logger = logging.getLogger(__name__)


def rank_of_server(rank: int) -> int:
    """The smallest `--max-lora-rank` that takes adapters of this rank."""
    return next(one for one in RANKS if one >= rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmCommand:
    """Which `vllm serve` to start."""

    given: str  # the executable, and further arguments of its user, as a shell has them
    demands: Demands
    # what the engine that trains is, once it is known; type and device are its own where they are
    # `auto`
    trainer: Callable[[], ModelInfo | None] = lambda: None
    base: Projections
    folders: AdapterFolders
    cache_gb: float | None = None  # on a CPU, for keys and values; None: 1
    memory_share: float = 0.5  # of a GPU's memory
    threads: int | None = None
    environment: dict[str, str] = field(default_factory=dict[str, str])  # for tests

    def check(self) -> None:
        """InvalidConfig where it cannot be started so, or the user's arguments say what is ours to
        say.
        """
        for word in self._given()[1:]:
            option = _option(word)
            positive = option.replace("--no-", "--", 1)
            # vLLM knows an option by its beginning, too
            if len(option) > 2 and any(one.startswith((option, positive)) for one in OURS):
                raise InvalidConfig(
                    f"inference.vllm says {option}, which the service sets itself.",
                    next="Leave it out; docs/vllm.md says which setting it follows.",
                )
        self._most_sequences()

    def settled(self) -> VllmCommand:
        """The command for now, as the engine that trains is."""
        demands, trainer = self.demands, self.trainer()
        dtype, device = demands.dtype, demands.device
        if dtype == "auto":
            dtype = "float32"
            if trainer is not None:
                dtype = trainer.dtype
        if device == "auto":
            device = "cpu"
            if trainer is not None:
                device = trainer.device
        most = self._most_sequences() or MOST_SAMPLES
        demands = replace(
            demands,
            dtype=dtype,
            device=device,
            largest=LARGEST[dtype],
            most_samples=min(MOST_SAMPLES, most),
        )
        return replace(self, demands=demands)

    def argv(self, socket: Path) -> list[str]:
        """The command line of one that is settled."""
        executable, *further = self._given()
        demands = self.demands
        ours: dict[str, list[str]] = {
            "--uds": [str(socket)],
            "--served-model-name": [demands.name],
            "--dtype": [demands.dtype],
            "--enable-scale-out": [],
            "--enable-prompt-tokens-details": [],
            "--enable-lora": [],
            "--max-lora-rank": [str(rank_of_server(demands.rank))],
            "--max-loras": [str(min(BATCHED_ADAPTERS, demands.places))],
            "--max-cpu-loras": [str(demands.places)],
            "--lora-target-modules": self.base.targets,
            "--max-logprobs": [str(MOST_LIKELY + 1)],
            "--logprobs-mode": ["processed_logprobs" if demands.tempered else "raw_logprobs"],
        }
        if demands.context:
            ours["--max-model-len"] = [str(demands.context)]
        if demands.device == "cpu":
            # a seeded request whose prompt is read in parts ends its worker there
            ours["--no-enable-chunked-prefill"] = []
            # the user's own comes later and holds
            ours["--max-num-batched-tokens"] = [str(max(BATCHED_TOKENS, self.base.context))]
        else:
            ours["--gpu-memory-utilization"] = [f"{self.memory_share:g}"]
        if demands.device == "cpu" and self._most_sequences() is None:
            further += [MOST_SEQUENCES, str(MOST_SAMPLES)]
        written = [word for option, values in ours.items() for word in (option, *values)]
        return [executable, "serve", str(demands.folder), *written, *further]

    def _given(self) -> list[str]:
        try:
            words = shlex.split(self.given)
        except ValueError as error:
            raise InvalidConfig(f"inference.vllm cannot be read: {error}.") from error
        if not words or shutil.which(words[0]) is None:
            raise InvalidConfig(
                f"There is no executable '{words[0] if words else ''}'.",
                "inference.samplers asks for a vLLM.",
                "Install vLLM in an environment of its own (docs/vllm.md), and name its command: "
                "inference.vllm=/path/to/bin/vllm.",
            )
        return words

    def _most_sequences(self) -> int | None:
        """What the user says that it decodes at a time; None where nothing is said."""
        words = self._given()[1:]
        for number, word in enumerate(words):
            if _option(word) == MOST_SEQUENCES:
                value = "".join(words[number + 1 : number + 2])
                if "=" in word:
                    value = word.partition("=")[2]
                if not value.isdecimal() or int(value) < 1:
                    raise InvalidConfig(
                        f"inference.vllm says {MOST_SEQUENCES} '{value}'.",
                        "It must be a whole number above 0.",
                    )
                return int(value)
        return None

    def variables(self) -> dict[str, str]:
        """Its environment: no secrets."""
        changes = {**QUIET, "VLLM_LOGGING_LEVEL": "INFO"}
        if self.demands.device == "cpu":
            changes["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(self.cache_gb or 1)))
            changes["OMP_NUM_THREADS"] = str(self.threads or 1)
        return environ.for_sandboxed(**changes, **self.environment)

    def spawn(self, log: IO[bytes]) -> SpawnedVllm:
        """Start it; `log` takes what it says."""
        return self.settled()._spawn(log)

    def _spawn(self, log: IO[bytes]) -> SpawnedVllm:
        # a socket's path has 103 bytes at most (macOS)
        short = len(os.fsencode(tempfile.gettempdir())) < 70
        folder = Path(tempfile.mkdtemp(prefix="halteres-", dir=None if short else "/tmp"))  # noqa: S108 - private
        try:
            self.folders.clear()
            process = Child(
                [sys.executable, "-m", __package__ or "", str(folder), *self.argv(folder / SOCKET)],
                environment=self.variables(),
                stdout=log,
                stderr=log,
                before_exit=self.folders.clear,  # none of its group reads them any more
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return SpawnedVllm(process, folder, self)


def _option(word: str) -> str:
    """The option that a word of a command line is, as vLLM spells it: it takes "_" for "-"."""
    name = word.partition("=")[0].partition(".")[0]
    if name.startswith("--"):
        return name.replace("_", "-")
    return ""


@dataclass(frozen=True, slots=True)
class SpawnedVllm:
    """A process that loads its model."""

    process: Child
    folder: Path  # of the socket, whose name goes once it is connected to no more
    command: VllmCommand

    async def connect(self) -> VllmSamples:
        """The sampler, once it answers and was seen to be what is needed."""
        socket = str(self.folder / SOCKET)
        self.process.exit.add_done_callback(
            lambda _: shutil.rmtree(self.folder, ignore_errors=True)
        )
        command = self.command
        client, _ = await answering(
            lambda: VllmSamples(command.demands, command.base, command.folders, address=socket)
        )
        return client


async def answering(
    make: Callable[[], VllmSamples], poll_s: float = POLL_S
) -> tuple[VllmSamples, ModelInfo]:
    """A client of a vLLM, as soon as that answers, and its first answer; waiting is the caller's to
    bound. InvalidConfig where it cannot be used.
    """
    while True:
        client = make()
        try:
            await client.open()
            return client, await client.info()
        except EngineGone:
            await client.disconnect()
        except BaseException:
            await client.disconnect()
            raise
        await asyncio.sleep(poll_s)


class RemoteVllm(EngineHost[VllmSamples]):
    """A vLLM at an address, which its operator keeps alive. When it goes away it is waited for;
    whatever answers then is another one, which holds nothing.
    """

    def __init__(
        self,
        url: str,
        demands: Demands,
        base: Projections,
        folders: AdapterFolders,
        *,
        on_death: Callable[[HalteresError], None] = lambda _: None,
        policy: RestartPolicy | None = None,
    ) -> None:
        super().__init__()
        self._url, self._demands, self._base, self._folders = url, demands, base, folders
        self._on_death, self._policy = on_death, policy or RestartPolicy(ready_s=READY_S)
        self.pid = None

    async def stop(self) -> None:
        """Unload what was loaded there, and let it be."""
        engine, was_ready = self._engine, self.state == "ready"
        if engine is not None and was_ready:
            try:
                async with asyncio.timeout(self._policy.ping_s):
                    await engine.close()
            except (HalteresError, TimeoutError) as error:
                logger.warning("What was loaded at %s stays there: %s", self._shown, error)
        await super().stop()
        if engine is not None:
            await engine.disconnect()

    @property
    def _shown(self) -> str:
        return without_logins(self._url)

    async def _keep_alive(self) -> None:
        was_ready = False
        while True:
            try:
                with boundary(ServerError, "The connection to a sampler"):
                    client, info = await self._connected()
            except HalteresError as failure:
                self.failure = failure
                if not was_ready:
                    await self._set("failed")
                    return
                # it may be started as it was before, another time
                self._on_death(failure)
                await asyncio.sleep(self._policy.max_backoff_s)
                continue
            self._engine, self.info = client, info
            self.restarts += was_ready
            was_ready = True
            await self._set("ready")
            self.failure = await self._end_of(client)
            await self._set("starting")
            await client.disconnect()
            self._on_death(self.failure)

    async def _connected(self) -> tuple[VllmSamples, ModelInfo]:
        def make() -> VllmSamples:
            return VllmSamples(self._demands, self._base, self._folders, address=self._url)

        try:
            async with asyncio.timeout(self._policy.ready_s):
                client, info = await answering(make, RETRY_S)
                try:
                    # not before: until then it may have names loaded from them
                    await asyncio.to_thread(self._folders.clear)
                except BaseException:
                    await client.disconnect()
                    raise
                return client, info
        except TimeoutError:
            raise NotReady(
                f"The sampler at {self._shown} does not answer.",
                f"It had {self._policy.ready_s:g} s.",
                "Start it, or take it out of inference.samplers.",
            ) from None

    async def _end_of(self, client: VllmSamples) -> HalteresError:
        """Wait until it is gone, or answers no more; returns why."""
        silent_s = self._policy.silent_s
        silent = asyncio.create_task(silence(client, self._policy.ping_s, silent_s), name="pings")
        broken = asyncio.create_task(client.broken.wait(), name="sampler gone")
        try:
            await asyncio.wait((silent, broken), return_when=asyncio.FIRST_COMPLETED)
        finally:
            silent.cancel()
            broken.cancel()
            await asyncio.gather(silent, broken, return_exceptions=True)
        return client.failure or EngineGone(
            f"The sampler at {self._shown} answered nothing for {silent_s:g} s."
        )
