"""A step of the program: one thing an SDK user does, and which SDK versions have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from .connection import Connection

Version = tuple[int, ...]
Facts = dict[str, object]


@dataclass(frozen=True)
class Step:
    """One step; `since` is the first SDK version that has it, `until` the first that has it no
    more.

    `proves` names the requirements of tests/contract that this step shows.
    """

    name: str
    run: Callable[[Connection], Facts]
    since: Version = (0,)
    until: Version = (1_000_000,)
    proves: tuple[str, ...] = ()

    def exists_in(self, sdk: Version) -> bool:
        """Whether that SDK has what this step does."""
        return self.since <= sdk < self.until


def version_of_sdk() -> Version:
    """Of the SDK in this interpreter: (0, 38, 0)."""
    return as_version(version("tinker"))


def as_version(text: str) -> Version:
    """'0.38.0' as (0, 38, 0); what follows the numbers (rc1) is left out."""
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def close_to(seen: float, expected: float, what: str, tolerance: float = 2e-4) -> None:
    """Fail unless two numbers agree, relative to the larger of 1 and the expected."""
    allowed = tolerance * max(1.0, abs(expected))
    assert abs(seen - expected) <= allowed, (
        f"{what}: {seen!r} instead of {expected!r} (allowed: {allowed:.1e} off)"
    )


def all_close(seen: list[float], expected: list[float], what: str, tolerance: float = 2e-4) -> None:
    """Fail unless two lists agree number by number."""
    assert len(seen) == len(expected), f"{what}: {len(seen)} numbers instead of {len(expected)}"
    for at, (one, other) in enumerate(zip(seen, expected)):  # noqa: B905 - checked above
        close_to(one, other, f"{what}, number {at}", tolerance)


def differ(one: list[float], other: list[float], what: str, tolerance: float = 1e-5) -> None:
    """Fail unless some number differs."""
    far = [abs(a - b) for a, b in zip(one, other)]  # noqa: B905 - the first that both have
    assert far and max(far) > tolerance, f"{what}: nothing changed ({one[:4]} and {other[:4]})"
