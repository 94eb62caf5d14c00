"""Find out what is wrong with an environment, mend it, show that it can be trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.agent import evidence
from benchmarks.agent.task import Answer, Check, Place
from halteres.agent.trial.folder import latest_test
from halteres.models import TINY

NAME = "repair"
RISE, STEPS, SHARE = 0.1, 8, 0.45
TEXT = """\
I wrote an environment, "sums" (environments/sums.py in your workspace), for the built-in model halteres/tiny. Training
on it gets nowhere. Find out why and mend the file: every right answer in a box must be paid, nothing else, and whatever
a model answers must be scored. The problems and their prompts stay as they are. Then show, after your last change to
the file, that it can be trained on: test it, and make a short run of it (8 to 20 steps) whose reward rises.

When you are done, end with one line of JSON: {"cause": "...", "run_id": "..."}
cause is one sentence on what was wrong, run_id the run that shows it is mended."""
FILES = ("sums.py",)
RIGHT = (
    "WORK So the answer is \\boxed{RIGHT}.",
    "I think the answer is \\boxed{RIGHT}.",
    "\\boxed{RIGHT}",
)
WRONG = (
    "WORK So the answer is \\boxed{WRONG}.",
    "\\boxed{WRONG}",
    "\\boxed{1RIGHT}",
    "WORK The answer is RIGHT.",
    "WORK \\boxed{}",
    "\\boxed{?}",
    "",
)


def prepare(place: Place) -> dict[str, Any]:
    """The file in the workspace is all."""
    return {}


def judge(place: Place, answer: Answer) -> Iterator[Check]:
    """The scorer is tried out, the test and the run are newer than the file, the weights have
    learnt.
    """
    file = place.workspace / FILES[0]
    yield Check("the file is there", file.is_file())
    yield Check(
        "a cause is told", isinstance(answer.get("cause"), str) and len(answer["cause"]) > 10
    )
    run = evidence.run_of(answer.get("run_id"))
    yield from evidence.genuine(run, place, file)
    assert run is not None
    yield Check(
        "the run began after the last change", run.state().created_at > file.stat().st_mtime
    )
    yield from evidence.honest(file, RIGHT, WRONG)
    test = latest_test(str(file), TINY)  # an older one than the file is none
    yield Check(
        "a test of the file as it is says trainable", test is not None and bool(test.trainable)
    )
    steps, rose = len(evidence.rewards(run)), evidence.rise(run)
    yield Check(f"the run has {STEPS} steps", steps >= STEPS, steps)
    yield Check(f"its reward rose by {RISE}", rose >= RISE, round(rose, 4))
    share = evidence.truth(run)
    yield Check(f"its weights get {SHARE:.0%} right", share >= SHARE, round(share, 4))
