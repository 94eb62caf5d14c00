"""The process in which another package's environment runs: its Python may have none of Halteres, so
nothing of it is imported here, and its limits and its death are its parent's (`worker_process`).

    python gym_worker.py reasoning TASK SETTINGS            a task of reasoning-gym: its questions
                                                            and scores
    python gym_worker.py text MODULE:FUNCTION ID OPTIONS    the environment that MODULE.FUNCTION(ID,
                                                            **OPTIONS) makes

One line of JSON answers each line of JSON. It holds one environment: packages that draw from their
process's own generators would disturb each other. What a task expects as its answer is never said.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

PR_SET_DUMPABLE = 4

LONGEST_ERROR = 2000
"""Characters of an exception's text."""

UNREADABLE: Mapping[str, tuple[type[Exception], ...]] = {
    "boxnet": (AttributeError, IndexError, TypeError),  # JSON that is no list of plans
    "coin_flip": (OverflowError,),  # a number that no float holds
    "game_of_life": (KeyError,),  # JSON that is no grid
    "prime_factorization": (ValueError,),  # no whole numbers
}
"""What scorers of reasoning-gym 0.1.25 raise at a text that they cannot read; the other scorers
read any text.
"""

Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def main() -> None:
    """Answer questions about the environment that the arguments name."""
    kind, *arguments = sys.argv[1:]
    start = {"reasoning": reasoning_task, "text": text_environment}[kind]
    serve(lambda opening: start(*arguments))


def serve(start: Callable[[Callable[[], Mapping[str, Any]]], Answer]) -> None:
    """Say that what `start` makes is there, or why not; then answer with it until the questions
    end: a child's side of `worker_process`. (`python_worker`, a file by itself, has a loop of its
    own.) `start` may read the line that the parent sends before questions, its opening.

    Meanwhile standard output is standard error, and standard input is empty; and no program that
    an answer starts reads this process's memory or takes its connections (on Linux).
    """
    if sys.platform == "linux":
        # here, since a program that begins (exec) is open to its user's others again
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    questions = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    made: list[Answer] = []
    send(answers, reply(lambda: made.append(start(lambda: json.loads(questions.readline()))) or {}))
    for line in questions:
        question = json.loads(line)
        number = question.pop("id", None)
        send(answers, reply(lambda question=question: made[0](question), number))


def send(answers: int, line: bytes) -> None:
    """Write all of it, and before that what was printed meanwhile."""
    with contextlib.suppress(Exception):  # it may have been closed, or replaced by anything
        sys.stdout.flush()
    while line:
        line = line[os.write(answers, line) :]


def reply(make: Callable[[], Mapping[str, Any]], number: str | None = None) -> bytes:
    """The line that answers, or says what became of the answer."""
    said: Mapping[str, Any]
    try:
        said = make()
    except MemoryError:
        said = {"error": "MemoryError", "code": "scorer_memory"}
    except SystemExit as error:
        said = {"error": f"SystemExit: {error}", "code": "scorer_exited"}
    except OSError as error:
        said = failure(error)
        # more than a file, or the scratch folder, may hold
        if error.errno in (errno.EFBIG, errno.ENOSPC, errno.EDQUOT):
            said = {**said, "code": "scorer_output"}
    except BaseException as error:  # noqa: BLE001 - whatever the package raises reaches the parent
        said = failure(error)
    try:
        line = json.dumps({**said, "id": number}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        said = {**failure(error), "code": "scorer_output"}
        line = json.dumps({**said, "id": number})
    return line.encode() + b"\n"


def failure(error: BaseException) -> dict[str, str]:
    """An exception as the parent is told of it, with the last note that was added to it."""
    text = f"{type(error).__name__}: {error}"[:LONGEST_ERROR]
    notes: list[str] = vars(error).get("__notes__", [])
    return {"error": " ".join([text, *(note[:LONGEST_ERROR] for note in notes[-1:])])}


def reasoning_task(name: str, settings: str) -> Answer:
    """A data set of reasoning-gym. ImportError where there is no package, ValueError where there is
    no such task.
    """
    given = json.loads(settings)
    if name == "composite":
        spec = importlib.import_module("reasoning_gym.composite").DatasetSpec
        given["datasets"] = [
            spec(**{"weight": 1.0, "config": {}, **one}) for one in given.get("datasets", ())
        ]
    data = importlib.import_module("reasoning_gym").create_dataset(name, **given)
    entries: dict[int, Any] = {}  # some take seconds to make, and every answer to one asks for it

    def answer(question: Mapping[str, Any]) -> Mapping[str, Any]:
        index = question["index"]
        if index not in entries:
            entries[index] = data[index]
        entry = entries[index]
        task = entry["metadata"].get("source_dataset", name)
        if "answer" not in question:
            return {"question": entry["question"], "task": task}
        return {"score": score(data, task, question["answer"], entry)}

    return answer


def score(data: Any, task: str, answer: str | None, entry: Mapping[str, Any]) -> float:
    """What the task pays for an answer; what it pays for none where it cannot read it."""
    try:
        return float(data.score_answer(answer, entry))
    except UNREADABLE.get(task, ()):
        # Is it the text? Then the same scorer reads another one for the same item: the stored
        # answer or, of boxnet, which stores none, an empty plan.
        readable = entry["answer"]
        if readable is None:
            readable = "[]"
        data.score_answer(readable, entry)
        return float(data.score_answer(None, entry))


def text_environment(entry: str, id: str, options: str) -> Answer:
    """An environment with GEM's or Gymnasium's interface. TypeError where it does not speak in
    texts.
    """
    module, _, function = entry.partition(":")
    env: Any = getattr(importlib.import_module(module), function)(id, **json.loads(options))

    def answer(question: Mapping[str, Any]) -> Mapping[str, Any]:
        played: dict[str, Any] = {}
        if "seed" in question:
            observation, info = env.reset(seed=question["seed"])
        else:
            observation, reward, terminated, truncated, info = env.step(question["action"])
            played = {
                "reward": float(reward),
                "terminated": bool(terminated),
                "truncated": bool(truncated),
            }
        if not isinstance(observation, str):
            raise TypeError(f"its observation is of type {type(observation).__name__}, not a text")
        # What is shown in front of and behind an observation, as GEM says it.
        beside = {
            name: str(info.get(name, "")) if isinstance(info, Mapping) else ""
            for name in ("prefix", "suffix")
        }
        return {"observation": observation, **played, **beside}

    return answer


if __name__ == "__main__":
    main()
