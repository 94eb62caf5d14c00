"""Is the gain real? What a panel that is never trained on says of a gain in the trained reward.

    share = (panel's gain / its standard deviation) / (proxy's gain / its standard deviation)

The proxy is the training reward on held-out answers. Both standard deviations are those of the base
evaluation, so of n answers the error of panel - proxy / 2 is sqrt(2 / n * (1 + 1 / 4)), were all
answers independent. These figures audit what has been learnt; they do not warn before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from halteres.rewards.components import SHARE, TOTAL

PROXY, PANEL = f"reward/{TOTAL}", "panel/"  # names of an evaluation's metrics, without `eval/`
# of the proxy, in its standard deviations: below it there is no gain to speak of, and no share of
# one
LEAST_GAIN = 0.5
LEAST_SHARE = 0.5  # of the gain that should show in the panel
# standard errors by which a share must be below that: few held-out answers raise no alarm by chance
ERRORS = 2.0
LEAST_MOVE = 0.05  # of a mean grade, 0 to 1: a smaller rise or fall is none

Row = Mapping[str, Any]  # an evaluation's row: metric -> value


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """How far a gain of the proxy shows in one member of the panel."""

    member: str
    proxy: float  # gain, in standard deviations of the base evaluation
    panel: float  # likewise
    share: float | None  # panel / proxy; None: the proxy has not gained enough to say
    # standard error of panel - LEAST_SHARE * proxy; 0: the number of answers is not known
    error: float = 0.0

    @property
    def is_low(self) -> bool:
        """Whether surely less than half of the gain transfers."""
        return (
            self.share is not None and self.panel + ERRORS * self.error < LEAST_SHARE * self.proxy
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Grades for what is there rise, grades for what is right fall."""

    component: str
    presence: float  # rise of the mean grade
    correctness: float  # likewise, below 0


def transfers(base: Row, later: Row) -> list[Transfer]:
    """One for each member of the panel that both evaluations have.

    What a member's value is made of, `panel/NAME/PART` (a rubric's criteria, an ensemble's
    disagreement), is no member.

    >>> base = {"eval/reward/total": 0.0, "eval/reward/total_std": 1.0}
    >>> base |= {"eval/panel/rm": 1.0, "eval/panel/rm_std": 2.0}
    >>> transfers(base, {"eval/reward/total": 2.0, "eval/panel/rm": 2.0})[0].share
    0.25
    """
    proxy, error = _gain(base, later, PROXY), _error(later, 1 + LEAST_SHARE**2)
    found: list[Transfer] = []
    for name in base:
        member = name.removeprefix(f"eval/{PANEL}")
        if member in (name, SHARE) or "/" in member:
            continue
        panel = _gain(base, later, f"{PANEL}{member}")
        if proxy is not None and panel is not None:
            share = None
            if proxy >= LEAST_GAIN:
                share = panel / proxy
            found.append(
                Transfer(member=member, proxy=proxy, panel=panel, share=share, error=error)
            )
    return found


def shares(base: Row, later: Row) -> dict[str, float]:
    """Metrics of the later evaluation: each member's share of the gain, and the lowest; none before
    there is a gain.
    """
    by_member = {
        found.member: found.share for found in transfers(base, later) if found.share is not None
    }
    if not by_member:
        return {}
    each = {f"eval/{PANEL}{member}/{SHARE}": share for member, share in by_member.items()}
    return {**each, f"eval/{PANEL}{SHARE}": min(by_member.values())}


def divergences(base: Row, later: Row) -> Iterator[Divergence]:
    """Components whose criteria of presence surely rise while those of correctness surely fall."""
    error = ERRORS * _error(later)
    for name in base:
        component = name.removeprefix("eval/reward/").removesuffix("/presence")
        if name != f"eval/reward/{component}/presence":
            continue
        grades = [f"reward/{component}/{aspect}" for aspect in ("presence", "correctness")]
        presence, correctness = (_rise(base, later, grade) for grade in grades)
        least, most = (
            LEAST_MOVE + error * (base.get(f"eval/{grade}_std") or 0.0) for grade in grades
        )
        if (
            presence is not None
            and correctness is not None
            and presence >= least
            and correctness <= -most
        ):
            yield Divergence(component=component, presence=presence, correctness=correctness)


def _error(later: Row, variances: float = 1.0) -> float:
    """Standard error of a change of means, in standard deviations; 0: the number of answers is not
    known.
    """
    num_answers = math.prod(later.get(f"eval/{name}") or 0 for name in ("num_tasks", "num_samples"))
    if num_answers > 0:
        return math.sqrt(2 * variances / num_answers)
    return 0.0


def _gain(base: Row, later: Row, name: str) -> float | None:
    """In standard deviations of the base evaluation; None: not measured, or the base's answers all
    score the same.
    """
    rise, spread = _rise(base, later, name), base.get(f"eval/{name}_std")
    if rise is not None and isinstance(spread, int | float) and spread > 0:
        return rise / spread
    return None


def _rise(base: Row, later: Row, name: str) -> float | None:
    before, after = base.get(f"eval/{name}"), later.get(f"eval/{name}")
    if isinstance(before, int | float) and isinstance(after, int | float):
        return after - before
    return None
