"""The process that makes and scores reasoning-gym's tasks; its arguments are a task's name and settings (JSON).

Owns: the data set, limits of this process's memory; one line of JSON for each line of JSON (`WorkerProcess`).
Never: tells an answer that a task expects.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

MOST_MEMORY = 8 << 30
"""Bytes of address space."""

LONGEST_ERROR = 2000
"""Characters of an exception's text."""


def main() -> None:
    """Say that the data set is there, or why not; then answer until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer

    def send(make: Callable[[], Mapping[str, Any]]) -> None:
        try:
            reply = make()
        except Exception as error:  # noqa: BLE001 - whatever a task raises reaches the parent
            reply = {"error": f"{type(error).__name__}: {error}"[:LONGEST_ERROR]}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()

    task: list[Task] = []
    send(lambda: task.append(Task(sys.argv[1], json.loads(sys.argv[2]))) or {})
    for line in sys.stdin:
        asked = json.loads(line)
        send(lambda asked=asked: task[0].answer(asked))


class Task:
    """A data set of the package. ImportError where there is no package, ValueError where there is no such task."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self._data = importlib.import_module("reasoning_gym").create_dataset(name, **settings)
        self._entries: dict[int, Any] = {}  # some take seconds to make, and every answer to one asks for it

    def answer(self, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        """An item's question; where an answer is given, its score."""
        index = asked["index"]
        if index not in self._entries:
            self._entries[index] = self._data[index]
        entry = self._entries[index]
        if "answer" not in asked:
            return {"question": entry["question"]}
        return {"score": float(self._data.score_answer(asked["answer"], entry))}


if __name__ == "__main__":
    main()
