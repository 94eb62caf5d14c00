"""Which sizes of groups add up to exactly so many sequences.

A set of totals is an integer: bit i says that i sequences can be made. Adding groups of a size shifts it, and n groups
are log2(n) shifts, so an answer costs O(distinct sizes * total) bits, however many groups there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence


def can_add_up(num_by_size: Mapping[int, int], total: int) -> bool:
    """Whether some of these groups have exactly `total` sequences together."""
    useful = {size: num for size, num in num_by_size.items() if num > 0 and 0 < size <= total}
    if total <= 0 or sum(size * num for size, num in useful.items()) < total:
        return total == 0
    unit = math.gcd(*useful)
    if total % unit:
        return False
    rest = total
    for size in sorted(useful, reverse=True):  # the simplest choice: it nearly always is exact, without long integers
        rest -= min(useful[size], rest // size) * size
    if rest == 0:
        return True
    total //= unit
    reach, mask = 1, (1 << total + 1) - 1
    for size, num in useful.items():
        reach = _with(reach, size // unit, num, mask)
    return bool(reach >> total & 1)


def can_ever_add_up(sizes: Iterable[int], total: int) -> bool:
    """Whether groups of these sizes, as many as one likes, can make `total` sequences."""
    return can_add_up({size: total // size for size in sizes if 0 < size <= total}, total)


def can_add_up_with_each(num_by_size: Mapping[int, int], owners: Sequence[Mapping[int, int]], total: int) -> bool:
    """Whether some of these groups make `total` together with at least one group of each owner, whose own they are.

    Args:
        num_by_size: groups per size that are nobody's, or of those that need not give.
        owners: groups per size of each that must give.
        total: sequences.
    """
    owned = sum(size * num for own in owners for size, num in own.items())
    if total < 0 or sum(size * num for size, num in num_by_size.items()) + owned < total:
        return False
    reach, mask = 1, (1 << total + 1) - 1
    for size, num in num_by_size.items():
        reach = _with(reach, size, num, mask)
    for own in owners:  # the totals that can be made with one group of its own or more
        given = 0
        for size, num in own.items():
            first = reach << size & mask if num > 0 and size < mask.bit_length() else 0
            given = _with(given, size, num, mask) | _with(first, size, num - 1, mask)
        reach = given
    return bool(reach >> total & 1)


class Room:
    """What a batch still lacks, and how many groups per size may still be taken.

    Once a group of a size cannot be taken, none of that size can any more, because what is missing only shrinks.
    """

    def __init__(self, num_by_size: Mapping[int, int], total: int) -> None:
        self.missing = total  # sequences
        self.open = dict(num_by_size)

    def take(self, size: int) -> bool:
        """Take a group if the rest can still be completed exactly; otherwise close its size."""
        if self.open.get(size, 0) == 0:
            return False
        self.open[size] -= 1
        if not can_add_up(self.open, self.missing - size):
            del self.open[size]
            return False
        self.missing -= size
        return True


def _with(reach: int, size: int, num: int, mask: int) -> int:
    """The totals that can be made with up to `num` groups of a size more."""
    left, step = min(num, mask.bit_length() // size), 1
    while left > 0:
        part = min(step, left)
        reach |= reach << part * size & mask
        left, step = left - part, step * 2
    return reach
