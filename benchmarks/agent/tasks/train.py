"""Train arithmetic on the built-in model to a target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.agent import evidence
from benchmarks.agent.task import Answer, Check, Place

NAME = "train"
TARGET = 0.9
TEXT = """\
Teach the small built-in model (halteres/tiny) the environment "arithmetic". It gets about a third of the held-out
problems right now; I need at least 90 %, measured as that environment evaluates by default. Leave the model's other
settings to your judgement, but do not waste time: a few minutes of training are enough.

When you are done, end with one line of JSON: {"run_id": "...", "share_correct": 0.00}
run_id is the run whose final weights I shall use, share_correct what they get right of the held-out problems."""
FILES: tuple[str, ...] = ()


def prepare(place: Place) -> dict[str, Any]:
    """Nothing: a fresh home."""
    return {}


def judge(place: Place, answer: Answer) -> Iterator[Check]:
    """The weights themselves answer the held-out problems again."""
    run = evidence.run_of(answer.get("run_id"))
    yield from evidence.genuine(run, place, evidence.ARITHMETIC)
    assert run is not None
    share = evidence.truth(run)
    yield Check(f"its weights get {TARGET:.0%} right", share >= TARGET, round(share, 4))
    told = answer.get("share_correct")
    yield Check("share_correct is what they get right", evidence.near(told, share), told)
