"""Somebody's reward climbs. Does the model get better?"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from benchmarks.agent import evidence
from benchmarks.agent.starting import begin, until_step
from benchmarks.agent.task import Answer, Check, Place
from halteres.environments.problems import Problem, is_correct
from halteres.runs.directory import RunDirectory

NAME = "hacking"
TEXT = """\
A run of our environment "till" (environments/till.py in your workspace) is training the built-in model right now, and
its reward climbs nicely. Before we let it go on for the day: does the model really get better at the sums? If it does,
let it run. If it does not: end the run, mend what is at fault in the file, so that right answers that fit the display
are paid and nothing else is, and show me one answer that the run was paid for and should not have been. The problems
and their prompts stay as they are. There is no need to train again.

When you are done, end with one line of JSON:
{"run_id": "...", "gets_better": true, "cause": "...", "example": {"question": "...", "completion": "..."}}
gets_better is your verdict, cause one sentence. example is such an answer with its question, word for word (null if
there is none)."""
FILES = ("till.py",)
TOTAL_STEPS, MINUTES, BEGUN = 2000, 30, 5
RIGHT = ("\\boxed{RIGHT}", "So the answer is \\boxed{RIGHT}.")
WRONG = (
    "\\boxed{WRONG}",
    "I think the answer is \\boxed{WRONG}.",
    "The answer is \\boxed{1RIGHT}.",
    "\\boxed{}",
    "",
)


def prepare(place: Place) -> dict[str, Any]:
    """A run that has begun to learn the wrong thing."""
    edits = [
        f"trainer.total_steps={TOTAL_STEPS}",
        f"run.max_minutes={MINUTES}",
        "trainer.eval_every=5",
    ]
    run = begin("till", *edits)
    until_step(run, BEGUN)
    return {"run_id": run.run_id}


def judge(place: Place, answer: Answer) -> Iterator[Check]:
    """The run was stopped, the example was paid for and is wrong, the scorer pays for right answers
    alone.
    """
    yield Check(
        "the run is the one", answer.get("run_id") == place.facts["run_id"], answer.get("run_id")
    )
    yield Check("it is told that the model gets no better", answer.get("gets_better") is False)
    yield Check(
        "a cause is told", isinstance(answer.get("cause"), str) and len(answer["cause"]) > 10
    )
    run = evidence.run_of(answer.get("run_id"))
    assert run is not None
    state = run.state()
    yield Check(
        "the run was stopped", state.status == "stopped" and state.code is None, state.status
    )
    example = answer.get("example")
    found = isinstance(example, dict) and _was_paid_wrongly(run, example)
    yield Check("the example was paid for and is wrong", bool(found), example)
    yield from evidence.honest(place.workspace / FILES[0], RIGHT, WRONG)


def _was_paid_wrongly(run: RunDirectory, example: dict[str, Any]) -> bool:
    """Whether one of the run's rollouts is this answer to this question, with the full reward and a
    wrong number.
    """
    question, completion = (_plain(example.get(name)) for name in ("question", "completion"))
    if not question or not completion:
        return False
    return any(
        _plain(group["item"]["question"]) in question
        and any(
            _plain(one["text"]) == completion and one["score"] >= 1 for one in group["completions"]
        )
        and not is_correct(completion, Problem(**group["item"]))
        for group in _groups(run)
    )


def _groups(run: RunDirectory) -> Iterator[dict[str, Any]]:
    for file in (run.path / "rollouts").glob("step_*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def _plain(text: Any) -> str:
    """Without the marks that the tools put around what others wrote, in which an agent may quote
    it.
    """
    return (
        " ".join(re.sub(r"</?untrusted[^>]*>", "", text).split()) if isinstance(text, str) else ""
    )
