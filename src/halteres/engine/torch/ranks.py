"""Several processes as one trainer: N ranks, each with the base model and every adapter.

    service ──Unix socket──▶ rank 0 ──each call, as the bytes that came──▶ ranks 1 to N - 1
                                └── all execute whole calls, in one order ──┘

Owns: how ranks meet and agree that they are alike; the order of calls; what is exchanged within a
call; how all end when one does. Never: what a call computes.
Guarantees: a call succeeds on all ranks or changes nothing on any; ranks whose results differ go
on with nothing.

Adapters, moments and gradients are the same on all ranks. A pass is shared: rank r computes the
micro-batches r, r + N, ... of one plan, then gradients are summed and log-probabilities exchanged
(`passes`). Rank 0 alone samples, writes files and reads them; the others need not see its disk.

A rank is gone when its connections are. Rank 0 notices that at once, and so do all others of rank
0, also while a model is loaded. One that hangs, or whose machine is off the network, no longer
counts its seconds in the store that all of them see: from `watch` on the others end within
SILENT_S. So does a rank that the store itself does not answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from halteres.config import environ
from halteres.engine.connection import (
    NOTHING,
    Call,
    Failure,
    decode,
    encode,
    executed_by,
    outcome_of,
    packed,
    unpacked,
)
from halteres.engine.protocol import Engine
from halteres.errors import HalteresError, InvalidConfig, ProcessFailed

COMES_WITHIN_S = 300.0  # a rank, once the first one waits for it
# An exchange waits for the slowest rank's micro-batches. A rank that is gone, or hangs, is noticed
# long before.
EXCHANGE_S = 3600.0
CALLS_S = 10 * 365 * 86400.0  # for the next call of a service without work

LOOK_S, SILENT_S = 0.5, 5.0  # between two looks at each other; without a sign of life
ENDED = 70  # exit code of a rank that ends because the group cannot go on

EVERYWHERE = ("create_adapter", "forward_backward", "optim_step", "load", "drop")
"""Calls that change adapters: every rank executes them."""

AT_ONCE = ("info", "merge", "sample")
"""Calls of rank 0 that no other call has to wait for."""

PROBED_BYTES = 1 << 20  # of a weight file's beginning, middle and end, by which models are compared

T = TypeVar("T")

log = logging.getLogger(__name__)


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What all ranks of a group must have alike, in the order in which a difference is named."""

    ranks: int  # that were asked for
    version: str  # of Halteres and torch
    model: str  # digest of its configuration, and of parts of its weight files
    dtype: str  # of the base weights
    shard: bool


def card_of(folder: Path, dtype: str, ranks: int, *, shard: bool) -> Card:
    """The card of a rank with the model in this folder."""
    from importlib.metadata import version

    return Card(
        ranks=ranks,
        version=f"halteres {version('halteres')}, torch {torch.__version__}",
        model=_digest(folder),
        dtype=dtype,
        shard=shard,
    )


def _digest(folder: Path) -> str:
    found = hashlib.sha256()
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        with file.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            found.update(f"{file.name} {size}\n".encode())
            for start in (0, size // 2, max(0, size - PROBED_BYTES)):
                stream.seek(start)
                found.update(stream.read(PROBED_BYTES))
    return found.hexdigest()[:16]


class Ranks:
    """This rank's place among all, and what they do together.

    Every method that exchanges something is called by all ranks in the same order. Where an
    exchange fails, this process ends: the others cannot go on without it, nor it without them.
    """

    def __init__(self, place: environ.Torchrun, store: Store, *, shard: bool) -> None:
        self.rank, self.size, self.shard = place.rank, place.size, shard
        self._launcher: int | None = None
        if place.has_launcher:
            self._launcher = os.getppid()
        self._looks = 0
        self._calls, self._messages = _group(CALLS_S), _group(EXCHANGE_S)
        self._connections = _group(CALLS_S)
        self._store, self._is_ending = store, False
        self._count_a_second()
        for peer in self._peers():
            name = f"connection to rank {peer}"
            threading.Thread(
                target=self._watch_connection, args=(peer,), name=name, daemon=True
            ).start()

    @classmethod
    def join(cls, card: Card, device: str, within_s: float = COMES_WITHIN_S) -> Ranks:
        """Meet the other ranks at the address that torchrun gave to all of them.

        Raises:
            InvalidConfig: this process was not started by torchrun, or the ranks are not alike.
            ProcessFailed: no process listens there, or a foreign one; or a rank does not come.
        """
        place = environ.torchrun()
        if place is None:
            raise InvalidConfig(
                "This rank has no others.",
                "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set.",
                "Start it by torchrun, or by `halteres serve --trainer-ranks N`.",
            )
        store = _meet(place, card, within_s)
        backend = "gloo"
        if device == "cuda":
            # It sees one GPU (`environ.show_one_gpu`); FSDP would go by LOCAL_RANK (torch 2.13).
            torch.cuda.set_device(0)
            backend = "cpu:gloo,cuda:nccl"
        try:
            dist.init_process_group(
                backend,
                store=PrefixStore("group", store),
                rank=place.rank,
                world_size=place.size,
                timeout=timedelta(seconds=EXCHANGE_S),
            )
            return cls(place, PrefixStore("life", store), shard=card.shard)
        except RuntimeError as error:
            raise _lost(place.address, error) from error

    def watch(self) -> None:
        """From now on end where another rank gives no sign of life, the store does not answer, or
        torchrun has ended.

        It begins after the model was loaded: reading large files holds up all of Python's threads,
        and the signs of life too.
        """
        for name, target in (("other ranks", self._watch), ("store", self._watch_store)):
            threading.Thread(target=target, name=name, daemon=True).start()

    def send(self, frame: bytes) -> None:
        """Rank 0: the next call, to all others."""
        with self._together():
            size = torch.tensor([len(frame)])
            dist.broadcast(size, src=0, group=self._calls)
            dist.broadcast(_bytes(frame), src=0, group=self._calls)

    def receive(self) -> bytes:
        """Every other rank: the next call."""
        with self._together():
            size = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(size, src=0, group=self._calls)
            frame = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(frame, src=0, group=self._calls)
        return frame.numpy().tobytes()

    def exchange(self, own: bytes) -> list[bytes]:
        """What each rank has, in their order."""
        with self._together():
            sizes = torch.zeros(self.size, dtype=torch.int64)
            sizes[self.rank] = len(own)
            dist.all_reduce(sizes, group=self._messages)
            longest = int(sizes.max())
            mine = _bytes(own.ljust(longest, b"\0"))
            found = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(found, mine, group=self._messages)
        lengths = sizes.tolist()
        return [one.numpy()[:n].tobytes() for one, n in zip(found, lengths, strict=True)]

    def sum(self, tensor: Tensor) -> None:
        """The sum over all ranks, in place; the same bits on each."""
        with self._together():
            dist.all_reduce(tensor)

    def copy(self, tensor: Tensor) -> None:
        """Rank 0's numbers, into every rank's tensor of that size and type."""
        with self._together():
            dist.broadcast(tensor, src=0)

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        return min(decode(one, type=int) for one in self.exchange(encode(value)))

    def agreed(self, outcome: T | HalteresError) -> T | HalteresError:
        """This rank's outcome if none has failed; else the failure of the first that has."""
        own = packed(outcome) if isinstance(outcome, HalteresError) else None
        for part in self.exchange(encode(own)):
            failure = decode(part, type=Failure | None)
            if failure is not None:
                return unpacked(failure)
        return outcome

    def confirm(self, call: Call, result: msgspec.Raw, failure: Failure | None) -> None:
        """End where the ranks' results of a call are not the same: their adapters no longer are."""
        said = bytes(result)
        if failure is not None:
            said = f"{failure.what} {failure.why}".encode()
        digests = self.exchange(hashlib.sha256(said).digest())
        if len(set(digests)) == 1:
            return
        why = "The results of the ranks are not the same."
        if failure is not None:
            why = f"Rank {self.rank} failed alone: {failure.what} {failure.why}"
        self.end(f"{call.operation} left the ranks apart.", why)

    def end(self, what: str, why: str, *, launcher: bool = False) -> NoReturn:
        """End this process at once, and with it the group. Nothing durable is in it.

        `launcher`: end torchrun too, and with it every rank of this machine. It would wait half a
        minute for one that hangs (torch 2.13, whatever its shutdown timeout).
        """
        if self._is_ending:
            os._exit(0)
        sys.stderr.write(f"error: {ProcessFailed(what, why).sentence}\n")
        sys.stderr.flush()
        # where torchrun has ended the parent is init, or a process that adopts orphans
        parent = os.getppid()
        if launcher and parent == self._launcher:
            with suppress(OSError):
                os.kill(parent, signal.SIGKILL)
        os._exit(ENDED)

    def close(self) -> None:
        """The others may go from now on."""
        self._is_ending = True

    def end_within(self, seconds: float) -> None:
        """End in order from now on; at once after so long."""
        self._is_ending = True
        timer = threading.Timer(seconds, os._exit, (0,))
        timer.daemon = True
        timer.start()

    def leave(self) -> NoReturn:
        """End this process in order: torch's own threads would hold it up for seconds."""
        sys.stderr.flush()
        os._exit(0)

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.end(f"Rank {self.rank} lost the others.", _first_line(error))

    def _count_a_second(self) -> None:
        self._store.add(f"{self.rank}", 1)

    def _peers(self) -> list[int]:
        """Whom this rank watches: all watch rank 0, which watches all."""
        if self.rank == 0:
            return list(range(1, self.size))
        return [0]

    def _watch_connection(self, peer: int) -> None:
        # Nothing is ever sent here. A receiver hears of the end of a process at once.
        try:
            dist.recv(torch.empty(1), src=peer, group=self._connections)
        except RuntimeError as error:
            # Rank 0 may have ended in order, and this rank may be about to.
            time.sleep(LOOK_S)
            if not self._is_ending:
                self.end(f"Rank {peer} has ended.", _first_line(error))

    def _watch(self) -> None:
        watched = self._peers()
        silent_s = dict.fromkeys(watched, 0.0)
        seen = dict.fromkeys(watched, 0)
        # The silence is counted look by look: a machine that slept does not blame the others.
        while True:
            time.sleep(LOOK_S)
            try:
                self._count_a_second()
                counts = {rank: self._store.add(f"{rank}", 0) for rank in watched}
            except RuntimeError as error:
                self.end(f"Rank {self.rank} lost the others.", _first_line(error))
            self._looks += 1
            for rank, count in counts.items():
                silent_s[rank] += LOOK_S
                if count != seen[rank]:
                    seen[rank], silent_s[rank] = count, 0.0
                if silent_s[rank] >= SILENT_S:
                    why = f"It gave no sign of life for {SILENT_S:g} s."
                    what = f"Rank {rank} hangs, or its machine cannot be reached."
                    self.end(what, why, launcher=True)

    def _watch_store(self) -> None:
        silent_s, seen = 0.0, 0
        while silent_s < SILENT_S:
            time.sleep(LOOK_S)
            if self._launcher is not None and os.getppid() != self._launcher:
                # Linux ends this process by itself (`die_with_parent`)
                self.end(f"Rank {self.rank} lost torchrun.", "Its parent process has ended.")
            silent_s += LOOK_S
            if self._looks != seen:
                seen, silent_s = self._looks, 0.0
        # a look at a store whose machine cannot be reached does not return (torch 2.13)
        what = f"Rank {self.rank} cannot reach the first machine, or its torchrun hangs."
        self.end(what, f"The ranks' store gave no answer for {SILENT_S:g} s.", launcher=True)


def _group(within_s: float) -> dist.ProcessGroup:
    """All ranks once more, for what lies in main memory."""
    found = dist.new_group(timeout=timedelta(seconds=within_s), backend="gloo")
    assert isinstance(found, dist.ProcessGroup)  # noqa: S101 - this rank is in it
    return found


def _meet(place: environ.Torchrun, card: Card, within_s: float) -> Store:
    """The store of all ranks, once each has laid its card there and all are alike."""
    deadline = timedelta(seconds=within_s)
    try:
        store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage] - its documented name
            place.address,
            place.port,
            is_master=place.rank == 0 and not place.has_store,
            timeout=deadline,
            wait_for_workers=False,
        )
    except RuntimeError as error:
        raise _lost(f"{place.address}:{place.port}", error) from error
    store = PrefixStore("halteres", store)
    keys = [f"card/{rank}" for rank in range(place.size)]
    try:
        store.set(keys[place.rank], msgspec.json.encode(card).decode())
        store.wait(keys, deadline)
    except RuntimeError as error:
        with suppress(RuntimeError):
            missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            raise ProcessFailed(
                f"Not all {place.size} ranks came within {within_s:g} s.",
                f"Missing: {', '.join(missing)}.",
                "See the logs of the machines that should have started them.",
            ) from error
        raise _lost(f"{place.address}:{place.port}", error) from error
    try:
        check_alike([msgspec.json.decode(store.get(key), type=Card) for key in keys])
        # A card is read by all before the first of them may go.
        store.set(f"read/{place.rank}", "")
        store.wait([f"read/{rank}" for rank in range(place.size)], deadline)
    except RuntimeError as error:
        raise _lost(f"{place.address}:{place.port}", error) from error
    return store


def check_alike(cards: Sequence[Card]) -> None:
    """InvalidConfig where ranks are not alike, with the first difference, or not as many as were
    asked for.
    """
    names = {
        "ranks": "values of --ranks",
        "version": "versions",
        "model": "models",
        "dtype": "types",
        "shard": "values of --shard",
    }
    for rank, card in enumerate(cards):
        for field, value in msgspec.structs.asdict(cards[0]).items():
            own: Any = getattr(card, field)
            if own != value:
                raise InvalidConfig(
                    f"The ranks have different {names[field]}.",
                    f"Rank 0 has {value}, rank {rank} has {own}.",
                    "Start every machine with the same command and the same files.",
                )
    if cards[0].ranks != len(cards):
        raise InvalidConfig(
            f"{cards[0].ranks} ranks were asked for, and {len(cards)} are there.",
            next="Give every machine the same --ranks, and torchrun as many processes in all.",
        )


def _lost(where: str, error: RuntimeError) -> ProcessFailed:
    return ProcessFailed(
        f"The ranks could not meet at {where}.",
        _first_line(error),
        "See that the address is the first machine's, that the port is free there, and that a "
        "firewall lets the machines through.",
    )


def _first_line(error: RuntimeError) -> str:
    """What gloo says, without its file and its advice."""
    text = str(error).strip() or type(error).__name__
    said = re.sub(r"^\[[^]]*\] ", "", text.splitlines()[0])
    return said.partition(". ")[0].removesuffix(".") + "."


def _bytes(frame: bytes) -> Tensor:
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8)


CLOSE = "close"


class Leader:
    """Rank 0: the service's calls, one after the other, also to the other ranks."""

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        self._execute, self._ranks = executed_by(engine), ranks
        self._turn = asyncio.Lock()  # first come, first served
        self._is_closed = False

    async def execute(self, call: Call) -> msgspec.Raw:
        """See `connection.Execute`. A call of rank 0 alone takes its turn, too, and then runs
        beside the next ones: the engine keeps the order of what concerns one adapter.
        """
        if call.operation in AT_ONCE:
            return await self._execute(call)
        if call.operation == CLOSE:
            await self.close()
            return NOTHING
        async with self._turn:
            if call.operation in EVERYWHERE:
                return await self._everywhere(call)
            running = asyncio.create_task(self._run(call), name=f"rank 0 {call.operation}")
            await asyncio.sleep(0)  # its task has begun, and so has its place in the engine's order
        return await running

    async def close(self) -> None:
        """Let the other ranks end in order. Safe to repeat."""
        async with self._turn:
            if not self._is_closed:
                self._is_closed = True
                self._ranks.close()
                await asyncio.to_thread(self._ranks.send, encode(Call(0, CLOSE, NOTHING)))

    async def _run(self, call: Call) -> msgspec.Raw:
        return await self._execute(call)

    async def _everywhere(self, call: Call) -> msgspec.Raw:
        await asyncio.to_thread(self._ranks.send, encode(call))
        result, failure = await outcome_of(call, self._execute)
        await asyncio.to_thread(self._ranks.confirm, call, result, failure)
        if failure is not None:
            raise unpacked(failure)
        return result


async def follow(engine: Engine, ranks: Ranks) -> None:
    """Every other rank: execute what rank 0 sends, until it closes."""
    execute = executed_by(engine)
    while True:
        call = decode(await asyncio.to_thread(ranks.receive), type=Call)
        if call.operation == CLOSE:
            ranks.close()
            return
        result, failure = await outcome_of(call, execute)
        await asyncio.to_thread(ranks.confirm, call, result, failure)
