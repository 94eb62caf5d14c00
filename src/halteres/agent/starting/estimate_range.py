"""A figure that is known to lie between two bounds.

Owns: the noun, its arithmetic, how it is told.
Never: claims more than both bounds.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Low and high, both included.

    >>> (Span(1, 2) + Span(10, 20)) * 3
    Span(low=33, high=66)
    """

    low: float
    high: float

    def __add__(self, other: Span) -> Span:
        return Span(self.low + other.low, self.high + other.high)

    def __mul__(self, factor: float) -> Span:
        return Span(self.low * factor, self.high * factor)

    def wider(self, low: float, high: float) -> Span:
        """Each bound times its factor."""
        return Span(self.low * low, self.high * high)

    def within(self, least: float, most: float) -> Span:
        """Both bounds brought between these."""
        return Span(min(max(self.low, least), most), min(max(self.high, least), most))

    @property
    def told(self) -> list[float]:
        """Three significant digits."""
        return [float(f"{self.low:.3g}"), float(f"{self.high:.3g}")]


def quantiles(values: list[float], low: float, high: float) -> Span:
    """The bounds between which that part of the values lies. There must be some.

    >>> quantiles([3.0, 1.0, 2.0], 0.0, 0.5)
    Span(low=1.0, high=2.0)
    """
    ordered = sorted(values)
    last = len(ordered) - 1
    return Span(ordered[round(low * last)], ordered[round(high * last)])
