"""A tool that runs the Python a policy wrote: in a cage, within limits, each use from nothing.

Owns: what a use may take, and what is shown of it. Never: runs code outside of a cage; keeps
anything from one use to the next. Guarantees: whatever the code does is a result, which names the
limit that ended it; only a cage that cannot be started, or that the machine has no memory for, is a
failure.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from halteres.environments.cage import WORKER_LOOP, WorkerLimits, WorkerPool, cage_missing
from halteres.environments.worker_process import WorkerLost, WorkerSaidTooMuch, WorkerTimedOut
from halteres.errors import EnvironmentFailed, InvalidConfig
from halteres.tool_calls import ToolCall

PYTHON_WORKER = Path(__file__).with_name("python_worker.py")

LONGEST_CODE = 100_000
"""Bytes of UTF-8; Linux hands a program no longer argument than 131,072."""

START_S = 60.0
"""How long a cage, and Python in it, may take to start; none of it is the code's time."""

LONGEST_MARK = 100
"""Characters of the worker's mark for what it left out; fewer in truth."""

SPARE_S = 0.4
"""What the worker, which counts the code's time, is given to answer; then it is ended."""


class ToolFailed(EnvironmentFailed):
    """The tool was not used, through no fault of the policy's."""

    code = "tool_error"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonResult:
    """What one use came to."""

    output: str  # what was printed, cut
    errors: str  # standard error, cut, or what ended the code
    failure: str | None  # the reason in one line; None: the code ended without an error

    @property
    def shown(self) -> str:
        """The output, then the errors or what ended the code, for the policy."""
        texts = (self.output.rstrip("\n"), self.errors or self.failure)
        return "\n".join(filter(None, texts)) or "(It printed nothing.)"


class PythonTool:
    """Python for a policy, as a function that it calls or by `run`.

    The code is a script of its own in a new cage: no network, no file but Python's own, an empty
    folder to write in. Nothing is left of it afterwards.

    Args:
        timeout_s: from the code's start to its end.
        memory_bytes: of address space, of each process.
        most_shown: characters of the output, and of the errors; a longer text keeps its beginning
            and its end.
        python: path of the Python whose packages the code may import; None: this one.
        usual_imports: run code that fails for an undefined name once more, with GEM's imports.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 5.0,
        memory_bytes: int = 1 << 30,
        most_shown: int = 4_000,
        python: str | None = None,
        usual_imports: bool = False,
    ) -> None:
        self.timeout_s, self.memory_bytes, self.most_shown = timeout_s, memory_bytes, most_shown
        self.python, self.usual_imports = python or sys.executable, usual_imports

    @property
    def function(self) -> Mapping[str, Any]:
        """The tool in OpenAI's form, with its limits in the description."""
        described = (
            f"Run a Python script and return what it prints, at most {self.most_shown} characters. "
            f"It ends after {self.timeout_s:g} seconds, has {self.memory_bytes >> 20} MiB of "
            "memory and no network, and keeps nothing for the next call."
        )
        code = {"type": "string", "description": "the whole script, with its imports"}
        parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        function = {"name": "python", "description": described, "parameters": parameters}
        return {"type": "function", "function": function}

    def check(self) -> None:
        """See that this machine has cages: InvalidConfig says what it lacks."""
        missing = cage_missing()
        if missing is not None:
            raise InvalidConfig("Python that a model wrote cannot be run here.", missing)

    async def answer(self, call: ToolCall) -> dict[str, Any]:
        """The message that answers a call of `function`: what the code printed, or what is wrong
        with the call.

        Raises:
            ToolFailed: the code was not run, through no fault of its own.
        """
        if call.error is not None:
            return call.result(call.error)
        code = (call.arguments or {}).get("code")
        if call.name != "python" or not isinstance(code, str):
            return call.result("There is one tool, `python`, and `code` is its one argument.")
        return call.result((await self.run(code)).shown)

    async def run(self, code: str) -> PythonResult:
        """Run a script to its end, or to the limit that it meets first.

        Raises:
            ToolFailed: it was not run, through no fault of its own.
            InvalidConfig: this machine has no cages.
        """
        await asyncio.to_thread(self.check)
        unreadable = _unreadable(code)
        if unreadable is not None:
            return PythonResult(output="", errors=unreadable, failure=unreadable)
        question = {
            "code": code,
            "within_s": self.timeout_s,
            "most_shown": self.most_shown,
            "usual_imports": self.usual_imports,
        }
        pool = self._cage()
        try:
            answer = await pool.ask(question, self.timeout_s + SPARE_S)
        except WorkerLost as error:
            raise ToolFailed("The Python tool could not be used.", error.sentence) from error
        except EnvironmentFailed as error:
            return self._ended(error)
        finally:
            pool.close()
        return self._result(answer)

    def run_and_wait(self, code: str) -> PythonResult:
        """`run`, where nothing can be awaited; an event loop of this thread stands still
        meanwhile.
        """
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self.run(code)).result()

    def _cage(self) -> WorkerPool:
        """A cage for one use."""
        limits = WorkerLimits(
            memory_bytes=self.memory_bytes,
            # of each process; the clock ends those that share the work
            cpu_s=math.ceil(self.timeout_s) + 1,
            open_files=256,
            processes=64,
            calls=1,
        )
        return WorkerPool(
            (self.python, str(PYTHON_WORKER)),
            size=1,
            limits=limits,
            caged=True,
            readable=(PYTHON_WORKER, WORKER_LOOP),
            start_within_s=START_S,
        )

    def _result(self, answer: Mapping[str, Any]) -> PythonResult:
        code, output, errors = (answer.get(name) for name in ("exit_code", "output", "errors"))
        is_code = code is None or type(code) is int
        # the code may have written the line in the worker's place
        if not (is_code and self._is_cut(output) and self._is_cut(errors)):
            return self._ended(WorkerSaidTooMuch("What it said is no answer."))
        if code is None:
            late = f"Execution timed out after {self.timeout_s:g} seconds."
            return PythonResult(output="", errors=late, failure=late)
        failure = None
        if code < 0:
            failure = f"Execution was ended by signal {-code}."
            errors = "\n".join(filter(None, (errors, failure)))
        elif code > 0:
            failure = errors.rpartition("\n")[2] or f"Execution ended with exit code {code}."
        return PythonResult(output=output, errors=errors, failure=failure)

    def _is_cut(self, text: Any) -> TypeGuard[str]:
        """Whether it is a text as the worker sends it."""
        return isinstance(text, str) and len(text) <= self.most_shown + LONGEST_MARK

    def _ended(self, error: EnvironmentFailed) -> PythonResult:
        """The result of code that ended, or held up, the process which ran it."""
        if isinstance(error, WorkerTimedOut):
            why = f"Execution timed out after {self.timeout_s:g} seconds."
        else:
            why = f"Execution was ended, and the process that ran it: {error.sentence}"
        return PythonResult(output="", errors=why, failure=why)


def _unreadable(code: str) -> str | None:
    """Why Python could not so much as read the code; None: it can."""
    if "\0" in code:
        return "SyntaxError: source code cannot contain null bytes"
    try:
        size = len(code.encode())
    except UnicodeEncodeError:
        return "SyntaxError: source code cannot contain half a character"
    if size > LONGEST_CODE:
        return f"The code has {size} bytes; at most {LONGEST_CODE} are run."
    return None
