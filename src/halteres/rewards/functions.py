"""Reward functions: Python of the user's, with TRL's signature.

Owns: finding a function by name, what it is called with, what it may give back.
Never: catches what it raises (the reward list does), calls it on the event loop unless it is `async def`.

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

Prompts and completions are lists of messages, one list per rollout, as TRL has them for conversational data; columns
are the fields of the task, one value per rollout. None: the function does not apply to this rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from halteres.errors import InvalidConfig, ScorerFailed
from halteres.text import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One rollout, to be scored."""

    prompt: Sequence[Message]  # before the policy's first answer
    completion: Sequence[Message]  # from that answer on
    answers: tuple[int, ...] = (0,)  # where in the completion the policy's answers are, one per turn
    tokens: tuple[int, ...] = ()  # that the policy sampled
    score: float = 0.0  # the environment's own
    earlier: tuple[Sample, ...] = ()  # chats of the same rollout that this one does not go on with

    @property
    def states(self) -> list[Sample]:
        """The same rollout as it was after each of the policy's answers."""
        before = [state for chat in self.earlier for state in chat.states]
        return [*before, *(dataclasses.replace(self, completion=self.completion[: end + 1]) for end in self.answers)]


class RewardFunction:
    """A function by name. `digest`: SHA-256 of its file."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._function, file = _found(name)
        self.digest = hashlib.sha256(file.read_bytes() if file else name.encode()).hexdigest()

    async def __call__(self, item: Any, samples: Sequence[Sample]) -> list[float | None]:
        """One value per sample.

        Raises:
            ScorerFailed: it asks for what nobody has; it gave no list, one of another length, or what is no finite
                number.
        """
        arguments = _accepted(self._name, self._function, _arguments(item, samples))
        if inspect.iscoroutinefunction(self._function):
            given = await self._function(**arguments)
        else:
            given = await _in_thread(lambda: self._function(**arguments))
        return self._checked(given, len(samples))

    def _checked(self, given: Any, length: int) -> list[float | None]:
        if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != length:
            raise ScorerFailed(f"{self._name} gave {_shown(given)} for {length} completions.", "One value for each.")
        texts = [number for number, value in enumerate(given) if isinstance(value, str)]
        if texts:
            raise ScorerFailed(
                f"{self._name} gave completion {texts[0]} the text {given[texts[0]]!r}.", "A number is due."
            )
        values = [None if value is None else float(value) for value in given]
        wrong = [number for number, value in enumerate(values) if value is not None and not math.isfinite(value)]
        if wrong:
            raise ScorerFailed(f"{self._name} gave completion {wrong[0]} the value {given[wrong[0]]}.")
        return values


async def _in_thread(call: Callable[[], Any]) -> Any:
    """The result of a call in a thread of its own, which a process that ends does not wait for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 - it is raised where the result is awaited
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="reward function", daemon=True).start()
    return await future


def columns_of(item: Any) -> dict[str, Any]:
    """The fields of a task: a mapping's, a dataclass's; of anything else one, `item`."""
    if isinstance(item, Mapping):
        return {str(name): value for name, value in item.items()}
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {one.name: getattr(item, one.name) for one in dataclasses.fields(item)}
    return {"item": item}


def _arguments(item: Any, samples: Sequence[Sample]) -> dict[str, list[Any]]:
    columns = {name: [value] * len(samples) for name, value in columns_of(item).items()}
    return {
        **columns,
        "prompts": [[dict(message) for message in sample.prompt] for sample in samples],
        "completions": [[dict(message) for message in sample.completion] for sample in samples],
        "completion_ids": [list(sample.tokens) for sample in samples],
    }


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _accepted(name: str, function: Callable[..., Any], arguments: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Those that the function names; all where it takes any."""
    parameters = inspect.signature(function).parameters
    required = [one.name for one in parameters.values() if one.default is one.empty and one.kind not in _VARIADIC]
    if missing := [one for one in required if one not in arguments]:
        raise ScorerFailed(
            f"{name} takes {', '.join(missing)}, which this task does not have.",
            f"It is called with {', '.join(arguments)}, by these names; each is a list with one value per completion.",
            "Its task has to have them as fields; `halteres reward check` takes them as --column NAME=VALUE.",
        )
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _found(name: str) -> tuple[Callable[..., Any], Path | None]:
    """The function of `module:name` or `file.py:name`, and its file.

    Raises:
        InvalidConfig: no such module, file or function; the module raises.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon or not place or not attribute:
        raise InvalidConfig(f"'{name}' names no function.", next="Write module:name or /path/to/file.py:name.")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise InvalidConfig(
            f"The reward function '{name}' cannot be loaded.", f"{type(error).__name__}: {error}."
        ) from error
    function = vars(module).get(attribute)
    if not callable(function):
        raise InvalidConfig(f"There is no function '{attribute}' in {place}.")
    return function, Path(module.__file__) if module.__file__ else None


def _from_file(file: Path) -> Any:
    path = file.expanduser().absolute()
    name = f"halteres_rewards_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    spec.loader.exec_module(module)
    return module


def _shown(given: Any) -> str:
    return f"{len(given)} values" if isinstance(given, list | tuple) else f"{type(given).__name__}"
