"""What one tenant may have, so that none takes from the others: limits, and the fair queue of
places and threads.

halteres serve --limit requests_per_s=50 --limit checkpoint_bytes=200G

STATE/limits.yaml:
    default: {requests_per_s: 50}
    tenants:
      alice: {models: 8, checkpoint_bytes: 20G}

In the queue, a tenant that holds no place gets one before anything that another has waiting, and at
once as long as one other tenant alone is busy, whatever that one does with its places.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from halteres.documents import read_optional_document
from halteres.errors import HalteresError, InvalidConfig, UserError, size_text, unknown
from halteres.service.keys import Tenant
from halteres.service.wire.bodies import MAX_BODY_BYTES

T = TypeVar("T")


MAX_RETRY_AFTER_S = 60  # the SDK obeys no longer Retry-After
SHOWN = 5  # checkpoints that a full storage names


class Overloaded(HalteresError):
    """More at once than a tenant may ask; the same request succeeds later."""

    code, status = "overloaded", 429


class LimitReached(UserError):
    """A tenant has as much as it may have; waiting does not help."""

    code = "limit_reached"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one tenant may have. The defaults hold off accidents; they are no rations."""

    requests_per_s: float = 2000.0  # of any kind; five seconds' worth may come at once
    samples: int = 2048  # sampling requests under way; one client of the SDK sends up to 2000
    body_bytes: int = 256 * 2**20  # of one request
    incoming_bytes: int = 2**30  # bodies that are being received at a time
    # bodies of accepted requests, not settled; twice that of those that others wait for
    waiting_bytes: int = 2**30
    sessions: int = 1024  # that are alive
    # sampling sessions of sessions that are alive, those of published weights too
    samplers: int = 65536
    models: int = 256  # training runs of sessions that are alive
    rank: int = 512  # of an adapter
    checkpoint_bytes: int = 2**40  # of named weights on disk
    # of samples that an engine which is not exact has drawn, in the journal
    result_bytes: int = 4 * 2**30
    gateway_sessions: int = 1024  # that are open
    # sampled sequences of one gateway session; calls, where more of them failed
    gateway_calls: int = 4096
    # of one gateway session: bodies of its calls and what was sampled
    gateway_bytes: int = 512 * 2**20

    def check_samples(self, under_way: int) -> None:
        """Raise Overloaded if no further sampling request can be taken beside those under way."""
        if under_way >= self.samples:
            what, why = (
                f"{under_way} sampling requests are under way.",
                f"{self.samples} is the limit.",
            )
            raise Overloaded(what, why, "Wait a second and send it again.")

    def check_waiting(self, size: int, *, is_next: bool = False) -> None:
        """Raise Overloaded if no further request can be taken beside those that wait, of `size`
        bytes. One that others wait for is let in up to twice the limit: what is above the limit is
        being executed, so it is let in some time.
        """
        most = 2 * max(self.waiting_bytes, MAX_BODY_BYTES) if is_next else self.waiting_bytes
        if size >= most:
            why = f"{size_text(most)} are the limit."
            raise overloaded(f"{size_text(size)} of your requests wait for their turn.", why, 1)

    def check_alive(
        self, kind: Literal["sessions", "samplers", "models", "gateway_sessions"], alive: int
    ) -> None:
        """Raise LimitReached if no further one can be made beside those alive."""
        if alive >= (most := getattr(self, kind)):
            what, next_step = _ALIVE[kind]
            raise LimitReached(
                f"{alive} {what} of yours are alive.", f"{most} is the limit.", next_step
            )

    def check_gateway_session(self, calls: int, num_bytes: int) -> None:
        """Raise LimitReached where a gateway session holds as much as it may."""
        if calls >= self.gateway_calls:
            what = f"This gateway session has {calls} calls."
            raise LimitReached(what, f"{self.gateway_calls} are the limit.", _POST_REWARD)
        if num_bytes >= self.gateway_bytes:
            what = f"This gateway session holds {size_text(num_bytes)}."
            raise LimitReached(
                what, f"{size_text(self.gateway_bytes)} are the limit.", _POST_REWARD
            )

    def check_rank(self, rank: int) -> None:
        """Raise LimitReached for an adapter larger than a tenant may have."""
        if rank > self.rank:
            raise LimitReached(
                f"The rank {rank} is out of range.",
                f"{self.rank} is the limit.",
                "Use a lower one.",
            )

    def check_storage(self, used: int, more: int, sizes: Mapping[str, int] | None = None) -> None:
        """Raise LimitReached for a save that storage has no room for; it names the largest of
        `sizes`, the tenant's checkpoints and their bytes.
        """
        if used + more <= self.checkpoint_bytes:
            return
        largest = sorted((sizes or {}).items(), key=lambda one: -one[1])[:SHOWN]
        shown = ", ".join(f"{path} ({size_text(size)})" for path, size in largest)
        raise LimitReached(
            f"There is no room for {size_text(more)} more of checkpoints.",
            f"{size_text(used)} of {size_text(self.checkpoint_bytes)} are taken.",
            "Delete what is not needed (RestClient.delete_checkpoint_from_tinker_path)"
            + (f"; the largest: {shown}." if shown else "."),
        )


_POST_REWARD = "Post its reward, and open another session."

_ALIVE = {
    "gateway_sessions": (
        "gateway sessions",
        "Post the rewards of those that are done; one without a reward ends at its ttl_s.",
    ),
    "sessions": (
        "sessions",
        "Close clients that are done (ServiceClient.close()); silent ones count no more after a "
        "while.",
    ),
    "samplers": (
        "sampling sessions",
        "Use one again: the same weights need no second one; close clients that are done "
        "(ServiceClient.close()).",
    ),
    "models": (
        "training runs",
        "Close clients that are done (ServiceClient.close()), or ask the operator for more.",
    ),
}
"""What they are called, and what to do where there are too many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowances:
    """The limits of every tenant."""

    default: Limits = Limits()
    tenants: Mapping[Tenant, Limits] = field(default_factory=dict[Tenant, Limits])

    def of(self, tenant: Tenant) -> Limits:
        """Those of one."""
        return self.tenants.get(tenant, self.default)


def overloaded(what: str, why: str, wait_s: float) -> Overloaded:
    """The same request will be taken in `wait_s`; given in whole seconds, as HTTP wants it."""
    after_s = min(MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s)))
    return Overloaded(what, why, f"Send it again in {after_s} s.", retry_after_s=after_s)


FILE = "limits.yaml"

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class LimitsFile(msgspec.Struct, forbid_unknown_fields=True):
    """STATE/limits.yaml."""

    default: dict[str, Any] | None = None
    tenants: dict[str | int, dict[str, Any] | None] | None = None


def read_allowances(state: Path, options: Sequence[str] = ()) -> Allowances:
    """The limits in a state directory's file, and what the command line says of the default
    ones.
    """
    file = state / FILE
    try:
        content = read_optional_document(file, "file")
        given = msgspec.convert(content or {}, LimitsFile)
    except msgspec.ValidationError as error:
        next_step = "Give it `default:` and `tenants:`, with NAME: VALUE."
        raise InvalidConfig(f"The file {file} cannot be read.", f"{error}.", next_step) from error
    if wrong := [option for option in options if "=" not in option]:
        raise InvalidConfig(f"'{wrong[0]}' is no limit.", next="Write it as NAME=VALUE.")
    by_option = {
        name.strip(): value for name, _, value in (option.partition("=") for option in options)
    }
    default = _changed(Limits(), {**(given.default or {}), **by_option})
    tenants = {
        str(name): _changed(default, own or {}) for name, own in (given.tenants or {}).items()
    }
    return Allowances(default=default, tenants=tenants)


def _changed(limits: Limits, given: Mapping[str, Any]) -> Limits:
    known = {one.name: float if one.name == "requests_per_s" else int for one in fields(Limits)}
    numbers: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise unknown(InvalidConfig, "limit", str(name), known)
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)(?:i?b)?", str(value).strip().lower())
        number = float(found[1]) * _UNITS[found[2]] if found else 0.0
        if isinstance(value, bool) or number <= 0:
            raise InvalidConfig(
                f"The limit {name} is '{value}'.", "It is a number above 0; 20G is 20 * 2**30."
            )
        numbers[name] = known[name](number)
    return replace(limits, **numbers)


LONG = 2**15  # bytes, or as much work: a text of this length takes the tokenizer some 30 ms
# threads, and those of one tenant. More would only take Python's lock from each other
THREADS, MOST_THREADS = 4, 3


class FairQueue:
    """A number of places, of which no tenant holds more than `most`."""

    def __init__(self, places: int, most: int) -> None:
        self._free, self._most = places, most
        self._held: Counter[Tenant] = Counter()
        self._served: Counter[Tenant] = Counter()  # number of the last grant
        self._grants = 0
        self._waiting: dict[Tenant, deque[tuple[int, asyncio.Future[None]]]] = {}

    @asynccontextmanager
    async def places(self, tenant: Tenant, count: int) -> AsyncIterator[None]:
        """Hold so many places (at most those that one tenant may hold) while the block runs."""
        count = min(count, self._most)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((count, granted))
        self._grant()
        try:
            await granted
            yield
        finally:
            if not granted.cancelled():
                self._free += count
                self._held[tenant] -= count
            self._grant()  # also for one that was cancelled: somebody behind it may fit now

    def _grant(self) -> None:
        """Of those who wait and may hold more, the tenant that holds the fewest comes first; of
        several, the one that was served longest ago.
        """
        while True:
            for tenant, own in list(self._waiting.items()):
                while own and own[0][1].cancelled():
                    own.popleft()
                if not own:
                    del self._waiting[tenant]
            allowed = [
                one
                for one, own in self._waiting.items()
                if self._held[one] + own[0][0] <= self._most
            ]
            tenant = min(
                allowed, key=lambda one: (self._held[one], self._served[one]), default=None
            )
            if tenant is None or (count := self._waiting[tenant][0][0]) > self._free:
                # whoever is next waits until it fits: else the small ones would pass it for ever
                return
            _, granted = self._waiting[tenant].popleft()
            self._free -= count
            self._held[tenant] += count
            self._grants += 1
            self._served[tenant] = self._grants
            granted.set_result(None)


class Threads:
    """The threads of one service."""

    def __init__(self) -> None:
        self._queue, self._pool = (
            FairQueue(THREADS, MOST_THREADS),
            ThreadPoolExecutor(THREADS, "aside"),
        )

    async def run(self, tenant: Tenant, size: int, make: Callable[[], T]) -> T:
        """What `make` makes; of less than LONG it is made at once, of more when it is the tenant's
        turn.
        """
        if size < LONG:
            return make()
        async with self._queue.places(tenant, 1):
            working = asyncio.get_running_loop().run_in_executor(self._pool, make)
            try:
                await asyncio.wait((working,))
            except asyncio.CancelledError:
                # nobody can end a thread: its place is free when it has ended
                while not working.done():
                    with suppress(asyncio.CancelledError):  # one cancellation more
                        await asyncio.wait((working,))
                working.exception()
                raise
            return working.result()

    def close(self) -> None:
        """Nothing new begins."""
        self._pool.shutdown(wait=False, cancel_futures=True)
