"""How often do the rules `reward_hacking` and `reward_flat` speak where they should, and where they
should not?

Simulated runs go through the rules themselves, row by row. Tasks have the same chance of being
answered (`equal`), or most are nearly always or nearly never (`spread`: Beta(.5, .5), scaled to the
mean). `reward_hacking`: 20 evaluations with 4 samples of each held-out task, compared task by task
(`paired`) or by their standard errors (`apart`). `reward_flat`: 100 steps, whose batches are of
groups of 16.

    .venv/bin/python benchmarks/alerts.py [--runs 1000] [--seed 0] [--out FILE]

Written: benchmarks/results/alerts.json. Exit code 1 where a bound is not kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from machine import machine

from halteres.config.settings import TrainerSettings
from halteres.runs.diagnosis import rules
from halteres.runs.diagnosis.rules import reward_flat, reward_hacking
from halteres.runs.diagnosis.run_facts import Debounce, History, Rule, RunFacts
from halteres.runs.reading.evaluations import (
    CORRECT,
    Difference,
    Evaluation,
    Pair,
    differences,
    paired,
)

RESULTS = Path(__file__).parent / "results" / "alerts.json"
CASE = RunFacts(run_id="simulated", environment="e", trainer=TrainerSettings())
GROUP, SAMPLES, EVERY, EXAMS, STEPS = 16, 4, 5, 20, 100

Row = dict[str, Any]
Course = Callable[[float], float]
"""Share of the run that is over -> mean chance of a right answer."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Runs of one kind, and in what share of them the rule may or must speak."""

    name: str
    reward: Course
    held_out: Course | None = None  # None: a matter of `reward_flat`
    at_most: float = 1.0
    at_least: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Figure:
    """What came of one kind of run in one setting."""

    rule: str
    run: str
    size: int  # held-out tasks, or rollouts of a step
    tasks: str  # equal or spread
    compared: str  # paired or apart
    told: float  # share of the runs
    median: float | None  # step of the alert
    at_most: float
    at_least: float

    @property
    def kept(self) -> bool:
        """Whether the rule speaks neither too often nor too seldom."""
        return self.at_least <= self.told <= self.at_most


def line(first: float, last: float) -> Course:
    return lambda over: first + (last - first) * over


def peak(over: float) -> float:
    """From .4 to .6 in five evaluations, to .4 in the next five, and no further."""
    return 0.4 + 0.2 * max(0.0, 1 - abs(over * (EXAMS - 1) - 5) / 5)


CLIMBS = line(0.3, 0.7)
HACKING = (
    Kind(name="held-out .5 throughout", reward=CLIMBS, held_out=line(0.5, 0.5), at_most=0.01),
    Kind(name="held-out .1 throughout", reward=CLIMBS, held_out=line(0.1, 0.1), at_most=0.01),
    Kind(
        name="held-out .2 to .5, reward .2 to .9",
        reward=line(0.2, 0.9),
        held_out=line(0.2, 0.5),
        at_most=0.01,
    ),
    Kind(name="held-out .6 to .4", reward=CLIMBS, held_out=peak, at_least=0.95),
    Kind(
        name="held-out .03, reward .05 to .95",
        reward=line(0.05, 0.95),
        held_out=line(0.03, 0.03),
        at_least=0.95,
    ),
)
RISES = Kind(name="rises .1 to .5 in 100 steps", reward=line(0.1, 0.5), at_most=0.02)
FLAT = Kind(name="stays at .34", reward=line(0.34, 0.34))
FLAT_IS_TOLD = 0.95  # of the runs, with 256 rollouts a step and equal tasks


def scaled(luck: np.ndarray, mean: float) -> np.ndarray:
    """Chances of tasks whose luck has a mean of .5, brought to another mean."""
    return luck * 2 * mean if mean <= 0.5 else 1 - (1 - luck) * 2 * (1 - mean)


def drawn(rng: np.random.Generator, count: int, tasks: str) -> np.ndarray:
    return rng.beta(0.5, 0.5, count) if tasks == "spread" else np.full(count, 0.5)


def trained(step: int, mean: float) -> Row:
    return {"step": step, "reward/mean": mean, "reward/min": 0.0, "reward/max": 1.0}


def batches(rng: np.random.Generator, kind: Kind, rollouts: int, tasks: str) -> Iterator[Row]:
    """Training steps; every group has a task of its own."""
    for step in range(1, STEPS + 1):
        luck = drawn(rng, rollouts // GROUP, tasks)
        right = rng.binomial(GROUP, scaled(luck, kind.reward(step / STEPS)))
        yield trained(step, float(right.mean()) / GROUP)


def examined(
    rng: np.random.Generator, kind: Kind, size: int, tasks: str, shares: dict[int, np.ndarray]
) -> Iterator[Row]:
    """Training steps, and after every few an evaluation on the same tasks; `shares` are filled in
    by step.
    """
    assert kind.held_out
    luck = drawn(rng, size, tasks)
    for number in range(EXAMS):
        step, over = EVERY * number, number / (EXAMS - 1)
        yield from (
            trained(at, kind.reward(over))
            for at in range(max(1, step - EVERY + 1), max(1, step) + 1)
        )
        shares[step] = found = rng.binomial(SAMPLES, scaled(luck, kind.held_out(over))) / SAMPLES
        error = float(found.std(ddof=1)) / size**0.5
        yield {"step": step, CORRECT: float(found.mean()), f"{CORRECT}_stderr": error}


def told_at(rule: Rule, rows: Iterator[Row]) -> int | None:
    """Step of the first alert."""
    history, debounce = History(), Debounce(rule.steps, rule.calm)
    for row in rows:
        history.see(row)
        if debounce.found(rule.look(CASE, history, row)):
            return row["step"]
    return None


def one_hacking(
    rng: np.random.Generator, kind: Kind, size: int, tasks: str, compared: str
) -> int | None:
    """One run; its samples are kept in memory, not in files."""
    shares: dict[int, np.ndarray] = {}

    def by_task(before: Evaluation, after: Evaluation, confidence: float) -> dict[str, Difference]:
        both = zip(shares[before.step].tolist(), shares[after.step].tolist(), strict=True)
        return {
            CORRECT: paired(
                [Pair(before=first, after=second) for first, second in both], 1.0, confidence
            )
        }

    with mock.patch.object(rules, "differences", by_task if compared == "paired" else differences):
        return told_at(reward_hacking, examined(rng, kind, size, tasks, shares))


def one_flat(rng: np.random.Generator, kind: Kind, size: int, tasks: str) -> int | None:
    return told_at(reward_flat, batches(rng, kind, size, tasks))


def figure(
    kind: Kind,
    size: int,
    tasks: str,
    compared: str,
    runs: int,
    seed: int,
    at_least: float | None = None,
) -> Figure:
    """Simulate so many runs, the same ones whatever else is simulated."""
    rng = np.random.default_rng(seed)
    if kind.held_out:
        steps = [one_hacking(rng, kind, size, tasks, compared) for _ in range(runs)]
    else:
        steps = [one_flat(rng, kind, size, tasks) for _ in range(runs)]
    told = [step for step in steps if step is not None]
    return Figure(
        rule=reward_hacking.name if kind.held_out else reward_flat.name,
        run=kind.name,
        size=size,
        tasks=tasks,
        compared=compared,
        told=len(told) / runs,
        median=statistics.median(told) if told else None,
        at_most=kind.at_most,
        at_least=kind.at_least if at_least is None else at_least,
    )


def figures(runs: int, seed: int) -> Iterator[Figure]:
    """Every kind in every setting."""
    for kind in HACKING:
        for size in (128, 512):
            for tasks in ("equal", "spread"):
                for compared in ("paired", "apart"):
                    least = kind.at_least if compared == "paired" else 0.0
                    yield figure(kind, size, tasks, compared, runs, seed, least)
    for kind in (RISES, FLAT):
        for size in (64, 128, 256):
            for tasks in ("equal", "spread"):
                least = FLAT_IS_TOLD if kind is FLAT and size == 256 and tasks == "equal" else 0.0
                yield figure(kind, size, tasks, "-", runs, seed, least)


def shown(one: Figure) -> str:
    told = f"{one.told:7.1%}  {'' if one.median is None else f'{one.median:g}':>6}"
    return (
        f"{one.rule:15}{one.run:36}{one.size:5}  "
        f"{one.tasks:7}{one.compared:7}{told}{'' if one.kept else '  !'}"
    )


def main() -> int:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    before, began = machine(), time.monotonic()
    print(f"{'rule':15}{'run':36}{'size':>5}  {'tasks':7}{'':7}{'told':>7}  {'median':>6}")
    done: list[Figure] = []
    for one in figures(options.runs, options.seed):
        done.append(one)
        print(shown(one), flush=True)
    report = {
        "machine": before,
        "load_average_after": machine()["load_average"],
        "seconds": round(time.monotonic() - began, 1),
        "runs": options.runs,
        "seed": options.seed,
        "figures": [{**asdict(one), "kept": one.kept} for one in done],
    }
    options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if all(one.kept for one in done) else 1


if __name__ == "__main__":
    raise SystemExit(main())
