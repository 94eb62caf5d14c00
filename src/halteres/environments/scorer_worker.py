"""The process in which an author's scorers run, or a reward function: it imports the file, makes
the environment once, without `setup`, and answers its parent (`scorers`).

    python -c START PLACE        START: `scorers.START`

One line of JSON answers each line of JSON (`worker_loop.serve`). What an environment is made with
comes first, in a line: other users could read arguments. What comes in holds pickles, from a parent
that is trusted; what goes out is JSON alone, since a model's text may have taken this process over.
Its limits and its death are its parent's (`cage`, `worker_process`).
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import importlib.util
import inspect
import json
import math
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from halteres.environments.worker_loop import Answer, serve

ALIAS = "halteres_scored_file"
"""Name of the module that a file becomes which the parent runs as `__main__`: under that name it
would begin to serve.
"""

LONGEST_SHOWN = 200
"""Characters of what was given in place of a number."""

ABSENT = ("server", "records", "rewards", "scorer_workers")
"""Attributes of an environment that reach beyond this process: it has none of them."""


class NotSent(RuntimeError):
    """A scorer reads an attribute that was not sent; no AttributeError, for which there may be a
    default.
    """


def main() -> None:
    """Answer questions about the scorers that the arguments name."""
    serve(lambda opening: start(sys.argv[1], opening))


def start(place: str, opening: Callable[[], Mapping[str, Any]]) -> Answer:
    """Import the file; make the environment where its settings come.

    Args:
        place: JSON: `file`; `module`, its name in the parent; `name`, of a class or a function in
            it; `path`, the parent's `sys.path`, which is set already; `is_opened`: settings come.
        opening: reads the line that comes before questions: `settings`, a pickle in base64: the
            environment's config, and its server's.
    """
    given = json.loads(place)
    module = imported(given["file"], given["module"])
    found = vars(module)[given["name"]]
    if not given["is_opened"]:
        return Scorers(given["file"], {given["name"]: found}).answer
    config, server = _unpickled(opening()["settings"])
    env = found(config, [server])
    for name in ABSENT:
        vars(env).pop(name, None)
    return Scorers(given["file"], {}, env).answer


def imported(file: str, name: str) -> ModuleType:
    """The module of a file, under the name by which the parent's pickles call it."""
    own_name = name
    if name == "__main__":
        own_name = ALIAS
    spec = None
    if name != "__main__":
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
    if spec is not None and spec.origin == file:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(own_name, file)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(file)
    module = importlib.util.module_from_spec(spec)
    # where dataclasses and pickle look for the classes of a module
    sys.modules[own_name] = sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Scorers:
    """The methods of one environment, or one function, and the attributes that the environment has
    for the next question.
    """

    def __init__(self, file: str, functions: Mapping[str, Any], env: Any = None) -> None:
        self._file, self._functions, self._env = file, functions, env
        self._made: dict[str, Any] = {}  # attributes as the environment was made with
        self._not_sent = set[
            str
        ]()  # attributes that the parent's environment alone has as they are
        self._missed: NotSent | None = None  # of the first of them that the present call has read
        if env is not None:
            self._made = dict(vars(env))
            self._watch(type(env))
        self._state_id: str | None = None
        # one for all questions: what a coroutine leaves in a loop is there for the next
        self._runner = asyncio.Runner()

    def answer(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the method named in the question returns; {"lacks_state": true} where the parent
        has to send the state along.
        """
        if self._env is not None and question["state_id"] != self._state_id:
            if "state" not in question:
                return {"lacks_state": True}
            self._set_state(question["state_id"], _unpickled(question["state"]))
        arguments, keywords = _unpickled(question["arguments"])
        call = self._call(question["method"], arguments, keywords)
        return {"value": plain(self._runner.run(call))}

    def _set_state(self, state_id: str, state: tuple[Mapping[str, Any], Sequence[str]]) -> None:
        given, absent = state
        attributes = vars(self._env)
        attributes.clear()
        attributes.update(self._made)
        for name in absent:
            attributes.pop(name, None)
        attributes.update(given)
        # what is computed where it is read is computed here, too
        self._not_sent = {
            name
            for name in absent
            if not isinstance(inspect.getattr_static(self._env, name, None), cached_property)
        }
        self._state_id = state_id

    def _watch(self, kind: Any) -> None:
        """Refuse to read what was not sent, also where the class has a value of that name, and
        `getattr` a default.
        """
        usual = kind.__getattribute__

        def look_up(env: Any, name: str) -> Any:
            if env is self._env and name in self._not_sent and name not in usual(env, "__dict__"):
                missed = NotSent(not_sent(name))
                self._missed = self._missed or missed
                raise missed
            return usual(env, name)

        kind.__getattribute__ = look_up

    async def _call(self, name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        self._missed = None
        try:
            method = self._functions.get(name)
            if method is None:
                method = getattr(self._env, name)
            value = method(*arguments, **keywords)
            if inspect.isawaitable(value):
                value = await value
            # a scorer that goes on without it would give another score
            if self._missed is not None:
                raise self._missed
        except Exception as error:
            error.add_note(self._advice(name, error))
            raise
        return value

    def _advice(self, method: str, error: Exception) -> str:
        """Which method raised, at which line of the file; and of an attribute that the parent alone
        has, how to send it.
        """
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == self._file
        ]
        place = method
        if lines:
            place = f"{method}, {Path(self._file).name}:{lines[-1]}"
        if self._env is None or not isinstance(error, AttributeError):
            return f"({place})"
        if error.obj is not self._env:
            return f"({place})"
        if error.name in ABSENT:
            return f"({place}) A scorer's process has no `self.{error.name}`."
        return f"({place}) {not_sent(str(error.name))}"


def not_sent(name: str) -> str:
    """What to do about an attribute that the parent's environment alone has as it is."""
    return (
        f"The process of the scorers does not have `self.{name}` as it is now: "
        "name it in scorer_state()."
    )


def plain(value: Any) -> Any:
    """What a scorer returned, as JSON: finite numbers of any package as Python's; of what is no
    JSON, how it looks.
    """
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, Sequence):
        return [plain(one) for one in value]
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isfinite(number):
        return number
    return {"shown": repr(value)[:LONGEST_SHOWN]}


def _unpickled(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))  # noqa: S301 - of the parent
