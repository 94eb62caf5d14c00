"""Reward functions: Python of the user's, with TRL's signature.

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

Prompts and completions are lists of messages, one list per rollout, as TRL has them for
conversational data; columns are the fields of the task, one value per rollout. None: the function
does not apply to this rollout.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import importlib
import inspect
import json
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from halteres.errors import HalteresError, InvalidConfig, ScorerFailed, contained_exit, nearest
from halteres.files import read_json
from halteres.tokenizer import Message

CHAT_COLUMNS = ("prompts", "completions", "completion_ids")
"""What every function may take beside the fields of its task."""

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One rollout, to be scored."""

    prompt: Sequence[Message]  # before the policy's first answer
    completion: Sequence[Message]  # from that answer on
    # where in the completion the policy's answers are, one per turn
    answers: tuple[int, ...] = (0,)
    tokens: tuple[int, ...] = ()  # that the policy sampled
    score: float = 0.0  # the environment's own
    earlier: tuple[Sample, ...] = ()  # chats of the same rollout that this one does not go on with

    @property
    def states(self) -> list[Sample]:
        """The same rollout as it was after each of the policy's answers."""
        before = [state for chat in self.earlier for state in chat.states]
        return [
            *before,
            *(
                dataclasses.replace(self, completion=self.completion[: end + 1])
                for end in self.answers
            ),
        ]


class FunctionElsewhere(Protocol):
    """A function that is called in processes of its own."""

    async def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """What it gives for these keyword arguments."""
        ...

    def close(self) -> None:
        """End the processes."""
        ...


Elsewhere = Callable[[ModuleType, str, float], FunctionElsewhere | None]
"""(module, name, seconds) -> the function of that name in processes of its own, where one call may
take so long; None: it is called in this one.
"""


class RewardFunction:
    """A function by name, `module:name` or `file.py:name`; `digest`: SHA-256 of its file. Else
    InvalidConfig.
    """

    def __init__(
        self, name: str, *, elsewhere: Elsewhere | None = None, within_s: float = 120.0
    ) -> None:
        """`within_s`: how long one call may take in a process of its own."""
        place, colon, attribute = name.rpartition(":")
        if not colon or not place or not attribute:
            raise InvalidConfig(
                f"'{name}' names no function.", next="Write module:name or /path/to/file.py:name."
            )
        try:
            if place.endswith(".py"):
                module = _module_of(Path(place))
            else:
                module = importlib.import_module(place)
        except Exception as error:
            what = f"The reward function '{name}' cannot be loaded."
            why = f"{type(error).__name__}: {error}."
            raise InvalidConfig(what, why, "Mend it, or name another.") from error
        function = vars(module).get(attribute)
        if not callable(function):
            raise _no_function(attribute, place, module)
        self._name, self._function = name, function
        self._elsewhere: FunctionElsewhere | None = None
        if elsewhere is not None:
            self._elsewhere = elsewhere(module, attribute, within_s)
        if module.__file__:
            code = Path(module.__file__).read_bytes()
        else:
            code = name.encode()
        self.digest = hashlib.sha256(code).hexdigest()

    @property
    def has_own_clock(self) -> bool:
        """Whether it is called in a process that is killed when a call takes too long."""
        return self._elsewhere is not None

    def close(self) -> None:
        """End its processes, where it has any."""
        if self._elsewhere is not None:
            self._elsewhere.close()

    async def __call__(self, item: Any, samples: Sequence[Sample]) -> list[float | None]:
        """One value per sample. ScorerFailed: it asks for what nobody has, or gave something
        else.
        """
        arguments = self._arguments(item, samples)
        if self._elsewhere is not None:
            given = await self._elsewhere(arguments)
        elif inspect.iscoroutinefunction(self._function):
            with contained_exit(ScorerFailed, self._name):
                given = await self._function(**arguments)
        else:
            given = await _in_thread(lambda: self._function(**arguments))
        if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != len(samples):
            if isinstance(given, list | tuple):
                shown = f"{len(given)} values"
            else:
                shown = type(given).__name__
            raise ScorerFailed(
                f"{self._name} gave {shown} for {len(samples)} completions.", "One value for each."
            )
        for number, one in enumerate(given):
            if isinstance(one, str):
                raise ScorerFailed(
                    f"{self._name} gave completion {number} the text {one!r}.", "A number is due."
                )
            if one is not None and not _is_finite(one):
                raise ScorerFailed(f"{self._name} gave completion {number} the value {one}.")
        return [None if one is None else float(one) for one in given]

    def check_arguments(self, names: Sequence[str]) -> None:
        """ScorerFailed where it takes what is not among the names that it is called with."""
        missing = [
            one.name
            for one in inspect.signature(self._function).parameters.values()
            if one.default is one.empty and one.kind not in VARIADIC and one.name not in names
        ]
        if missing:
            what = f"{self._name} takes {', '.join(missing)}, which this task does not have."
            why = f"It is called with {', '.join(names)}: lists with one value per completion."
            fix = (
                "Its task has to have them as fields; `halteres reward check` takes them as "
                "--column NAME=VALUE."
            )
            raise ScorerFailed(what, why, fix)

    def _arguments(self, item: Any, samples: Sequence[Sample]) -> dict[str, list[Any]]:
        """What TRL gives a function, as far as it names it; all where it takes any."""
        arguments: dict[str, list[Any]] = {
            **{name: [value] * len(samples) for name, value in columns_of(item).items()},
            "prompts": [[dict(message) for message in sample.prompt] for sample in samples],
            "completions": [[dict(message) for message in sample.completion] for sample in samples],
            "completion_ids": [list(sample.tokens) for sample in samples],
        }
        self.check_arguments(list(arguments))
        parameters = inspect.signature(self._function).parameters
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        return {name: value for name, value in arguments.items() if takes_any or name in parameters}


def _no_function(name: str, place: str, module: ModuleType) -> InvalidConfig:
    """The error of a name that is none of a module's functions."""
    defined = [
        own
        for own, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    why = f"It defines {', '.join(defined) or 'none'}."
    guess = nearest(name, defined)
    fix = "Name one that is there."
    if guess is not None:
        fix = f"Did you mean '{guess}'?"
    return InvalidConfig(f"There is no function '{name}' in {place}.", why, fix)


def _is_finite(value: Any) -> bool:
    """Also of a whole number that no float holds."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def columns_of(item: Any) -> dict[str, Any]:
    """The fields of a task: a mapping's, a dataclass's; of anything else one, `item`."""
    if isinstance(item, Mapping):
        return {str(name): value for name, value in item.items()}
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {one.name: getattr(item, one.name) for one in dataclasses.fields(item)}
    return {"item": item}


async def _in_thread(call: Callable[[], Any]) -> Any:
    """The result of a call in a thread of its own, which a process that ends does not wait for."""
    future = Future[Any]()
    future.set_running_or_notify_cancel()  # whoever stops waiting does not take its result away

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - it is raised where the result is awaited
            future.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - raised there, it would end the event loop
            text = f"{type(error).__name__}: {error}"
            future.set_exception(ScorerFailed("A reward function ended its thread.", f"{text}."))

    threading.Thread(target=run, name="reward function", daemon=True).start()
    return await asyncio.wrap_future(future)


def _module_of(file: Path) -> Any:
    path = file.expanduser().absolute()
    name = f"halteres_rewards_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Load a reward function and check its arguments, in a process of its own: what is imported is
    the user's code.

    Its arguments are two files of JSON: the function's name and the columns that it is called with;
    and the result: {} where that can be, else what, why and next. The result has a file because the
    user's code may print until the process ends.
    """
    given, result = map(Path, sys.argv[1:])
    asked = read_json(given, dict[str, Any])
    found = dict[str, str]()
    try:
        RewardFunction(asked["name"]).check_arguments([*asked["columns"], *CHAT_COLUMNS])
    except HalteresError as error:
        found = {"what": error.what, "why": error.why, "next": str(error.next)}
    result.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
