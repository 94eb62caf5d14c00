"""Evaluations of a run as its page shows them.

Owns: which held-out answers are shown, and how much of each.
Never: scores one.
"""

from __future__ import annotations

from typing import Any

from halteres.agent.fitting import shortened
from halteres.observe.metrics import merge_by_step
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.answers import before_and_after
from halteres.runs.reading.evaluations import evaluations

MOST_TASKS, PROMPT_LENGTH, ANSWER_LENGTH = 6, 1200, 2400
"""Tasks that are shown; characters of each."""


def evaluated(run: RunDirectory) -> dict[str, Any]:
    """Every evaluation's figures, and the held-out tasks that gained most, as answered before and after."""
    found = evaluations(run, merge_by_step(run.metrics()))
    tasks = before_and_after(run)[:MOST_TASKS]
    return {
        "evaluations": [{"step": one.step, **one.figures} for one in found],
        "tasks": [_brief(task.facts) for task in tasks],
    }


def _brief(facts: dict[str, Any]) -> dict[str, Any]:
    prompt = facts["prompt"]
    return {
        "prompt": shortened(prompt if isinstance(prompt, str) else _joined(prompt), PROMPT_LENGTH),
        **{
            when: {"completion": shortened(facts[when]["completion"], ANSWER_LENGTH), "score": facts[when]["score"]}
            for when in ("before", "after")
        },
    }


def _joined(messages: Any) -> str:
    """Chat messages, or whatever an environment has written in their place."""
    if not isinstance(messages, list):
        return str(messages)
    return "\n".join(str(one.get("content", one)) if isinstance(one, dict) else str(one) for one in messages)
