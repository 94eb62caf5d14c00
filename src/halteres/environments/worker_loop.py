"""A worker's side of `worker_process`: one line of JSON answers each line of JSON.

For every worker. The Python that runs one may have none of Halteres, so nothing of it is imported
here, and a cage shows this file next to the worker's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

PR_SET_DUMPABLE = 4

LONGEST_ERROR = 2000
"""Characters of an exception's text."""

Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def serve(start: Callable[[Callable[[], Mapping[str, Any]]], Answer]) -> None:
    """Say that what `start` makes is there, or why not; then answer with it until the questions
    end. `start` may read the line that the parent sends before questions, its opening.

    Meanwhile standard output is standard error, and standard input is empty; and no program that
    an answer starts reads this process's memory or takes its connections (on Linux). An answer
    whose programs run on without a parent says so (`leaves_processes`, in a cage).
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

    held = [questions.fileno(), answers]

    def let_go() -> None:
        # once: for a fork of a fork the same numbers may be other files
        while held:
            with contextlib.suppress(OSError):
                os.close(held.pop())

    # a fork that does not end would take the next question, and answer this one a second time
    os.register_at_fork(after_in_child=let_go)
    made: list[Answer] = []
    send(answers, reply(lambda: made.append(start(lambda: json.loads(questions.readline()))) or {}))
    known = orphans()

    def answer(question: Mapping[str, Any]) -> Mapping[str, Any]:
        said = made[0](question)
        if orphans() - known:
            return {**said, "leaves_processes": True}
        return said

    for line in questions:
        question = json.loads(line)
        number = question.pop("id", None)
        send(answers, reply(lambda question=question: answer(question), number))


def orphans() -> set[int]:
    """Processes in this cage whose parent is gone; none outside of a cage."""
    found: set[int] = set()
    # a cage's /proc has processes alone
    if os.path.exists("/proc/meminfo"):
        return found
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if not name.isdecimal() or int(name) in (1, os.getpid()):
                continue
            # one that has just ended is none
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if parent == b"1" and state not in (b"Z", b"X"):
                    found.add(int(name))
    return found


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
    said = ""
    # a text that raises is none
    with contextlib.suppress(Exception):
        said = str(error)[:LONGEST_ERROR]
    text = f"{type(error).__name__}: {said}"
    notes: list[str] = vars(error).get("__notes__", [])
    return {"error": " ".join([text, *(note[:LONGEST_ERROR] for note in notes[-1:])])}
