"""Which of two learning rates is better? Both must be tried."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.agent import evidence
from benchmarks.agent.task import Answer, Check, Place
from halteres.runs.directory import RunDirectory

NAME = "choose"
RATES = (0.0015, 0.000001)
STEPS, LEAD = 8, 0.1
TEXT = """\
We are to train the built-in model halteres/tiny on the environment "arithmetic". I would take a learning rate of
0.0015; a colleague says 0.000001 is the safe choice. Try both, everything else equal (10 steps each are enough), and
tell me which one is better on held-out problems, with the evidence.

When you are done, end with one line of JSON:
{"better": 0.0015, "evidence": [{"learning_rate": 0.0015, "run_id": "...", "share_correct": 0.00}, {"learning_rate": \
0.000001, "run_id": "...", "share_correct": 0.00}]}
better is the better one of the two, share_correct what each run gets right of the held-out problems in the end."""
FILES: tuple[str, ...] = ()


def prepare(place: Place) -> dict[str, Any]:
    """Nothing: a fresh home."""
    return {}


def judge(place: Place, answer: Answer) -> Iterator[Check]:
    """Both runs are there and differ in nothing else; which weights are better is measured
    again.
    """
    told = answer.get("evidence")
    rows = [row for row in told if isinstance(row, dict)] if isinstance(told, list) else []
    rates = [row.get("learning_rate") for row in rows]
    yield Check("both rates are told of", sorted(rates, key=str) == sorted(RATES, key=str), rates)
    runs = {row["learning_rate"]: evidence.run_of(row.get("run_id")) for row in rows}
    for run in runs.values():
        yield from evidence.genuine(run, place, evidence.ARITHMETIC)
    known = {rate: run for rate, run in runs.items() if run is not None}
    held = {rate: run.settings().trainer.learning_rate for rate, run in known.items()}
    yield Check(
        "the runs had these rates", all(rate == value for rate, value in held.items()), held
    )
    first, second = (_others(run) for run in known.values())
    yield Check(
        "nothing else differs",
        first == second,
        sorted(k for k in first if first[k] != second.get(k)),
    )
    steps = [len(evidence.rewards(run)) for run in known.values()]
    yield Check(
        f"both have the same {STEPS} steps or more", min(steps) == max(steps) >= STEPS, steps
    )
    for row in rows:
        recorded = evidence.last_evaluated(known[row["learning_rate"]])
        yield Check(
            "share_correct is what was evaluated",
            evidence.near(row.get("share_correct"), recorded),
            recorded,
        )
    shares = {rate: evidence.truth(run) for rate, run in known.items()}
    best = max(shares, key=lambda rate: shares[rate])
    yield Check(
        "one is clearly better", max(shares.values()) - min(shares.values()) >= LEAD, shares
    )
    yield Check("it is the one that was named", answer.get("better") == best, answer.get("better"))


def _others(run: RunDirectory) -> dict[str, Any]:
    """All settings but the learning rate and the run's own name."""
    settings = run.settings().model_dump(mode="json")
    flat = {
        f"{section}.{name}": value
        for section, fields in settings.items()
        for name, value in fields.items()
    }
    return {
        name: value
        for name, value in flat.items()
        if name not in ("trainer.learning_rate", "run.name")
    }
