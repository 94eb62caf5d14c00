"""What each tenant asks of the HTTP face just now.

Owns: the count of requests per second (a bucket that fills steadily), the bytes of bodies that are being received.
Never: knows a route; keeps a body.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from halteres.service.tenancy.limits import Allowances, Limits, TooLarge, overloaded, size_text
from halteres.service.tenancy.tenants import Tenant

BURST_S = 5.0
"""So many seconds' worth of requests may come at once."""


@dataclass(slots=True)
class Bucket:
    """Requests that may come now."""

    left: float
    filled_at: float  # s

    def take(self, per_s: float, now: float) -> float:
        """Take one; returns the seconds until there is one, 0 if it was taken."""
        full = max(1.0, per_s * BURST_S)
        self.left = min(full, self.left + (now - self.filled_at) * per_s)
        self.filled_at = now
        if self.left < 1:
            return (1 - self.left) / per_s
        self.left -= 1
        return 0.0


class Body:
    """One request's body, as it comes; it counts until the block ends that this is the context of."""

    def __init__(self, limits: Limits, receiving: Counter[Tenant], tenant: Tenant) -> None:
        self._limits, self._receiving, self._tenant = limits, receiving, tenant
        self._size = 0

    def __enter__(self) -> None:
        """Nothing has come yet."""

    def __exit__(self, *_: object) -> None:
        self._receiving[self._tenant] -= self._size

    def expect(self, size: int) -> None:
        """Raise TooLarge for a body of more bytes than it may have."""
        if size > self._limits.body_bytes:
            raise TooLarge(
                "The body is too large.", f"{size_text(self._limits.body_bytes)} are the limit.", "Send it in parts."
            )

    def add(self, size: int) -> None:
        """So many bytes more have come.

        Raises:
            TooLarge: the body has more than it may.
            Overloaded: this tenant sends more at once than it may.
        """
        self._size += size
        self._receiving[self._tenant] += size
        self.expect(self._size)
        if (receiving := self._receiving[self._tenant]) > self._limits.incoming_bytes:
            most = size_text(self._limits.incoming_bytes)
            raise overloaded(f"{size_text(receiving)} of requests are on their way.", f"{most} are the limit.", 1)


class Meter:
    """Counts for all tenants."""

    def __init__(self, allowances: Allowances, clock: Callable[[], float] = time.monotonic) -> None:
        self._allowances, self._clock = allowances, clock
        self._buckets: dict[Tenant, Bucket] = {}
        self._receiving: Counter[Tenant] = Counter()  # bytes

    def count(self, tenant: Tenant) -> None:
        """One request more.

        Raises:
            Overloaded: too many per second; the error says when to come again.
        """
        per_s, now = self._allowances.of(tenant).requests_per_s, self._clock()
        bucket = self._buckets.setdefault(tenant, Bucket(max(1.0, per_s * BURST_S), now))
        if wait_s := bucket.take(per_s, now):
            raise overloaded("Too many requests.", f"{per_s:g} a second are the limit.", wait_s)

    def body(self, tenant: Tenant, announced: int) -> Body:
        """The body of a request that begins.

        Raises:
            TooLarge: it says that it is larger than it may be.
        """
        body = Body(self._allowances.of(tenant), self._receiving, tenant)
        body.expect(announced)
        return body
