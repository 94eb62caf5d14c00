"""An answer to a test that fits into its budget.

Owns: what is left out first, and that the answer says where it is.
Never: leaves out a figure, a model or the verdict.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from halteres.agent.shortening import shortened
from halteres.redaction import Redactor

BUDGET = 900 * 4  # characters of compact JSON: spec/agent-tools.md 4.8
Body = dict[str, Any]


def brief(body: Body) -> Body:
    """The answer, cut as far as it must be: words first, then scores, then steps, then samples."""
    told = copy.deepcopy(Redactor.of_this_process().json(body))  # half of a secret would not be known as one
    for cutting in (_long_texts, _verdicts, _scores, _texts, _steps, _short_texts, _samples, _printed, _paths):
        if _fits(told):
            break
        cutting(told)
    return told


def _fits(body: Body) -> bool:
    return len(json.dumps(body, separators=(",", ":"), ensure_ascii=False)) <= BUDGET


def _long_texts(body: Body) -> None:
    _shorten(body, 240, shortened)


def _texts(body: Body) -> None:
    _shorten(body, 120, shortened)


def _short_texts(body: Body) -> None:
    _shorten(body, 40, _cut)


def _shorten(body: Body, length: int, by: Callable[[str, int], str]) -> None:
    """Cut what models and environments said; of what was printed the end counts."""
    for one in (*body.get("samples", ()), *body.get("responses", ())):
        one.update({name: by(text, length) for name, text in one.items() if isinstance(text, str)})
    for one in body["models_tested"]:
        one.update({name: one[name][-length:] for name in ("stdout", "stderr") if name in one})
        one.update({name: _cut(one[name], 2 * length) for name in ("why", "verdict") if name in one})


def _verdicts(body: Body) -> None:
    """The summary has the one that counts."""
    for one in body["models_tested"]:
        one.pop("verdict", None)


def _scores(body: Body) -> None:
    for step in (step for model in body["models_tested"] for step in model["steps"]):
        step.pop("scores", None)
    _note(body, "scores")


def _steps(body: Body) -> None:
    for one in body["models_tested"]:
        one["steps"] = []
    _note(body, "steps")


def _samples(body: Body) -> None:
    """As few as must be, and one at least."""
    for name in ("samples", "responses"):
        while len(body.get(name, ())) > 1 and not _fits(body):
            body[name].pop()
            _note(body, name)


def _printed(body: Body) -> None:
    """The log file has it."""
    for one in body["models_tested"]:
        one.pop("stdout", None)
        one.pop("stderr", None)


def _paths(body: Body) -> None:
    """The summary names their folder; what is told of an error lies there too."""
    for one in body["models_tested"]:
        one["output_file"] = one["output_file"].rpartition("/")[2]
        one.pop("log_file", None)
        one.pop("why", None)


def _note(body: Body, what: str) -> None:
    noted = [*body.get("left_out", {}).get("what", ()), what]
    body["left_out"] = {"what": list(dict.fromkeys(noted)), "where": "each model's output_file"}


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
