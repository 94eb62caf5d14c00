"""Limits: what one tenant may have, so that none takes from the others.

Owns: the figures and their defaults, the sentence for each that is reached.
Never: counts anything (`meter` counts requests and bodies, `holdings` what is kept); reads them (`limits_file` does).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from halteres.errors import HalteresError, UserError
from halteres.service.tenancy.tenants import Tenant
from halteres.service.wire.codec import MAX_BODY_BYTES

MAX_RETRY_AFTER_S = 60
"""The SDK obeys no longer Retry-After."""

SHOWN = 5
"""Checkpoints that a full storage names."""


class Overloaded(HalteresError):
    """More at once than a tenant may ask; the same request succeeds later."""

    code, status = "overloaded", 429


class TooLarge(UserError):
    """A body that is larger than any client sends."""

    code, status = "too_large", 413


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
    waiting_bytes: int = (
        2**30
    )  # bodies of accepted requests that are not settled; twice as much of those that others wait for
    sessions: int = 1024  # that are alive
    samplers: int = 65536  # sampling sessions of sessions that are alive, those of published weights too
    models: int = 256  # training runs of sessions that are alive
    rank: int = 512  # of an adapter
    checkpoint_bytes: int = 2**40  # of named weights on disk

    def check_samples(self, under_way: int) -> None:
        """Raise Overloaded if no further sampling request can be taken beside those under way."""
        if under_way >= self.samples:
            raise Overloaded(
                f"{under_way} sampling requests are under way.",
                f"{self.samples} is the limit.",
                "Wait a second and send it again.",
            )

    def check_waiting(self, size: int, *, is_next: bool = False) -> None:
        """Raise Overloaded if no further request can be taken beside those that wait for their turn.

        Args:
            size: bytes of those that wait.
            is_next: others wait for this one. It is let in up to twice the limit: what is above the limit is being
                executed, so it is let in some time.
        """
        most = 2 * max(self.waiting_bytes, MAX_BODY_BYTES) if is_next else self.waiting_bytes
        if size >= most:
            why = f"{size_text(most)} are the limit."
            raise overloaded(f"{size_text(size)} of your requests wait for their turn.", why, 1)

    def check_samplers(self, alive: int) -> None:
        """Raise LimitReached if no further sampling session can be made beside those alive."""
        if alive >= self.samplers:
            raise LimitReached(
                f"{alive} sampling sessions of yours are alive.",
                f"{self.samplers} is the limit.",
                "Use one again: the same weights need no second one; close clients that are done"
                " (ServiceClient.close()).",
            )

    def check_sessions(self, alive: int) -> None:
        """Raise LimitReached if no further session can begin beside those alive."""
        if alive >= self.sessions:
            raise LimitReached(
                f"{alive} sessions of yours are alive.",
                f"{self.sessions} is the limit.",
                "Close clients that are done (ServiceClient.close()); silent ones count no more after a while.",
            )

    def check_models(self, alive: int) -> None:
        """Raise LimitReached if no further training run can begin beside those alive."""
        if alive >= self.models:
            raise LimitReached(
                f"{alive} training runs of yours are alive.",
                f"{self.models} is the limit.",
                "Close clients that are done (ServiceClient.close()), or ask the operator for more.",
            )

    def check_rank(self, rank: int) -> None:
        """Raise LimitReached for an adapter larger than a tenant may have."""
        if rank > self.rank:
            raise LimitReached(f"The rank {rank} is out of range.", f"{self.rank} is the limit.", "Use a lower one.")

    def check_storage(self, used: int, more: int, sizes: Mapping[str, int] | None = None) -> None:
        """Refuse a save that storage has no room for.

        Args:
            used: bytes of the tenant's checkpoints.
            more: bytes of what is to be saved.
            sizes: the tenant's checkpoints and their bytes; the message names the largest.

        Raises:
            LimitReached: they are more than `checkpoint_bytes` together.
        """
        if used + more <= self.checkpoint_bytes:
            return
        largest = sorted((sizes or {}).items(), key=lambda one: -one[1])[:SHOWN]
        named = ", ".join(f"{path} ({size_text(size)})" for path, size in largest)
        raise LimitReached(
            f"There is no room for {size_text(more)} more of checkpoints.",
            f"{size_text(used)} of {size_text(self.checkpoint_bytes)} are taken.",
            "Delete what is not needed (RestClient.delete_checkpoint_from_tinker_path)"
            + (f"; the largest: {named}." if named else "."),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowances:
    """The limits of every tenant."""

    default: Limits = Limits()
    tenants: Mapping[Tenant, Limits] = field(default_factory=dict[Tenant, Limits])

    def of(self, tenant: Tenant) -> Limits:
        """Those of one."""
        return self.tenants.get(tenant, self.default)


def overloaded(what: str, why: str, wait_s: float) -> Overloaded:
    """The same request will be taken in `wait_s`; told in whole seconds, as HTTP wants it."""
    after_s = min(MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s)))
    return Overloaded(what, why, f"Send it again in {after_s} s.", retry_after_s=after_s)


def size_text(size: float) -> str:
    """Bytes as people read them.

    >>> size_text(3 * 2**30)
    '3.0 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
