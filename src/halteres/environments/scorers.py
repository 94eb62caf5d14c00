"""Where an environment's scorers and its reward functions run: in this process, or in workers that
are killed when they fail, in a cage where the machine has one (`env.cage`).

Owns: who goes into a worker, what a worker is given, what its answers may be.
Never: sends a judge or a reward model there: they ask servers.
Guarantees: pickles go in and JSON comes out. What a scorer reads of its environment is what the
environment has now, or the scorer fails and says what to name in `scorer_state`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel

import halteres
from halteres.environments.cage import START_S, WorkerLimits, WorkerPool, cage_missing
from halteres.environments.config import APIServerConfig, BaseEnvConfig
from halteres.environments.scored import finite
from halteres.environments.worker_process import WorkerSaidTooMuch
from halteres.errors import EnvironmentFailed, InvalidConfig, boundary
from halteres.logins import without_logins
from halteres.process import usable_cores
from halteres.redaction import is_secret_setting

START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])['path']; "
    "from halteres.environments.scorer_worker import main; main()"
)
"""What a worker's Python begins with: it finds modules where this process does."""

MEASURE = "measure"
"""The method that gives further figures of an answer."""

MOST_WORKERS = 8
"""Of one file; fewer where there are fewer cores."""

CLEARED = (
    "rollout_server_url",
    "run_dir",
    "spool_dir",
    "data_dir_to_save_evals",
    "data_path_to_save_groups",
    "rewards",
    "reward_model_path",
    "panel",
    "eval_best_of",
)
"""Settings that a worker's environment has at their defaults: addresses with their logins, folders
that are written, components that this process asks.
"""

OURS = tuple(
    f"halteres.environments.{name}" for name in ("base", "single_turn", "episodes", "multi_turn")
)
"""Modules whose methods are no author's."""

SEPARATE = (
    "Derive from SingleTurnEnv and write `score`, or from MultiTurnEnv and write `score_episode`; "
    "or set env.cage to off, where what the model writes is never run."
)

WITHOUT_CAGE = (
    "Run it on a machine that has them; env.cage=auto limits what scorers use and cannot keep them "
    "from files and network."
)

INSTALLED = ("site-packages", "dist-packages")
"""Names of folders that packages are installed in."""


class ScoredEnv(Protocol):
    """What is looked at here of an environment (`base.BaseEnv`)."""

    name: ClassVar[str | None]
    unsafe_scorer: ClassVar[bool]
    scores_in_worker: ClassVar[bool]

    def scorer_state(self) -> Mapping[str, Any]:
        """Attributes that scorers read."""
        ...


def inseparable(kind: type[ScoredEnv], config: BaseEnvConfig) -> str | None:
    """Why what `env.cage` asks for cannot be, and what to do; None: it can, or nothing is asked
    for.
    """
    if not _takes(config, kind.unsafe_scorer):
        return None
    if "." in kind.__qualname__ and not kind.scores_in_worker:
        return (
            f"{kind.__qualname__} is defined within a class or a function, where the process of "
            "its scorers does not find it. Define it at the top level of its file."
        )
    for name in ("collect_trajectory", "collect_trajectories"):
        if getattr(kind, name).__module__ not in OURS:
            return (
                f"{kind.__name__} scores in its own `{name}`, which cannot be separated from the "
                f"process that samples. {SEPARATE}"
            )
    if kind.scores_in_worker:
        return None
    evaluate = getattr(kind, "evaluate", None)
    if evaluate is not None and evaluate.__module__ not in OURS:
        return (
            f"{kind.__name__} has an `evaluate` of its own, and what that scores would be scored "
            "in this process. Write `eval_items` in its place; or set env.cage to off, where what "
            "the model writes is never run."
        )
    score_episode = getattr(kind, "score_episode", None)
    if score_episode is not None and score_episode.__module__ in OURS:
        return (
            f"{kind.__name__} scores in its `step`, which cannot be separated from the process "
            "that samples. Write `score_episode`, and score there; or set env.cage to off, where "
            "what the model writes is never run."
        )
    return None


def _takes(config: BaseEnvConfig, is_unsafe: bool) -> bool:
    """Whether a scorer goes into a worker."""
    return config.cage == "on" or (config.cage == "auto" and is_unsafe)


class Scorers:
    """Who scores the answers of one environment. Nothing is started before the first answer."""

    def __init__(
        self,
        kind: type[ScoredEnv],
        config: BaseEnvConfig,
        tokenizer: Path,
        note_missing: Callable[[str], None],
    ) -> None:
        """Decide who goes into a worker.

        Args:
            tokenizer: its folder.
            note_missing: called once, with what this machine lacks, where scorers that ask for a
                cage have none.

        Raises:
            InvalidConfig: `env.cage` asks for what this machine, or this class, does not have.
        """
        self._config, self._tokenizer, self._note_missing = config, tokenizer, note_missing
        self._is_noted = False
        # None: its methods are called in this process
        self.of_environment: EnvironmentScorers | None = None
        why = inseparable(kind, config)
        if why is not None:
            raise InvalidConfig(f"env.cage cannot be {config.cage}.", why)
        if config.cage == "on":
            self._has_cage()
        if _takes(config, kind.unsafe_scorer) and not kind.scores_in_worker:
            module = sys.modules.get(kind.__module__)
            opening = {"settings": made_with(config, tokenizer)}
            workers = self._open(module, kind.__qualname__, opening)
            self.of_environment = EnvironmentScorers(workers, kind, config.scorer_timeout_s)

    def function(
        self, module: ModuleType, name: str, within_s: float, readable: Sequence[Path] = ()
    ) -> FunctionScorer | None:
        """A reward function in workers, which may read these files and folders, where a call may
        take so many seconds; None: it is called in this process.
        """
        if not _takes(self._config, _is_of_unsafe_file(module, name)):
            return None
        workers = self._open(module, name, readable=readable)
        return FunctionScorer(workers, name, within_s)

    def close(self) -> None:
        """End the environment's workers; a function's are ended with its list of rewards."""
        if self.of_environment is not None:
            self.of_environment.close()

    def _open(
        self,
        module: ModuleType | None,
        name: str,
        opening: Mapping[str, Any] | None = None,
        readable: Sequence[Path] = (),
    ) -> Workers:
        if module is None or not module.__file__ or "." in name:
            raise InvalidConfig(
                f"'{name}' cannot be called in a process of its own.",
                "It is not defined at the top level of a file.",
            )
        place = {
            "file": str(Path(module.__file__).absolute()),
            "module": module.__name__,
            "name": name,
            "path": [str(Path(folder).absolute()) for folder in sys.path],
            "is_opened": opening is not None,
        }
        return Workers(
            (sys.executable, "-c", START, json.dumps(place)),
            opening=opening,
            limits=WorkerLimits(
                memory_bytes=self._config.scorer_memory_mb << 20, calls=self._config.scorer_calls
            ),
            caged=self._has_cage(),
            readable=[self._tokenizer, *readable],
        )

    def _has_cage(self) -> bool:
        missing = cage_missing()
        if missing is None:
            return True
        if self._config.cage == "on":
            raise InvalidConfig(
                "env.cage is on, and this machine has no cages for scorers.", missing, WITHOUT_CAGE
            )
        if not self._is_noted:
            self._is_noted = True
            self._note_missing(missing)
        return False


def _is_of_unsafe_file(module: ModuleType, name: str) -> bool:
    """Whether a function's file names itself unsafe: the one that it is called by, or the one that
    it was written in.
    """
    function: Any = vars(module).get(name)
    modules = [module]
    while function is not None:
        modules += [sys.modules.get(str(getattr(function, "__module__", "")), module)]
        # of a decorated one, and of a `functools.partial`
        function = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
    return any(vars(one).get("unsafe_scorer") for one in modules)


class Workers:
    """The workers that have one file's scorers: started with the first question."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        opening: Mapping[str, Any] | None,
        limits: WorkerLimits,
        caged: bool,
        readable: Sequence[Path],
    ) -> None:
        self._command, self._opening, self._limits = command, opening, limits
        self._caged, self._readable = caged, readable
        self._pool: WorkerPool | None = None

    async def ask(self, question: Mapping[str, Any], within_s: float) -> Mapping[str, Any]:
        """A worker's answer. Raises as `WorkerPool.ask`."""
        if self._pool is None:
            self._pool = WorkerPool(
                self._command,
                size=min(usable_cores(), MOST_WORKERS),
                limits=self._limits,
                caged=self._caged,
                readable=[*self._readable, *imported_files()],
                start_within_s=START_S,
                opening=self._opening,
            )
        return await self._pool.ask(question, within_s)

    def close(self) -> None:
        """End them."""
        if self._pool is not None:
            self._pool.close()


class EnvironmentScorers:
    """The methods of one environment in its workers, and what they know of the environment."""

    def __init__(self, workers: Workers, kind: type[ScoredEnv], within_s: float) -> None:
        self._workers, self._title, self._within_s = workers, kind.name or kind.__name__, within_s
        # `score` is never ours: it calls the author's `score_answer`
        self._own = {"score"}
        for name in (MEASURE, "score_episode"):
            method = getattr(kind, name, None)
            if method is not None and method.__module__ not in OURS:
                self._own.add(name)
        # attributes as the environment was made with, and how long they were
        self._made: dict[str, tuple[Any, int]] | None = None
        self._state_id = ""  # of the state that was sent last

    def has(self, method: str) -> bool:
        """Whether the method is the author's."""
        return method in self._own

    def note_made(self, env: ScoredEnv) -> None:
        """Remember the attributes that a worker's environment begins with, too: what is set, or
        grows, from here on is not known there. A change in place that leaves the length as it was
        goes unseen: comparing what every container holds would cost each answer its pickling.
        """
        self._made = {name: (value, _length(value)) for name, value in vars(env).items()}

    async def score(self, env: ScoredEnv, method: str, arguments: Sequence[Any]) -> float:
        """The score that a method gives.

        Raises:
            EnvironmentFailed: by the name of what happened, or the state or the arguments cannot
                be sent.
        """
        where = f"{self._title}.{method}"
        return _number(await self._ask(env, method, arguments), where)

    async def measure(self, env: ScoredEnv, arguments: Sequence[Any]) -> dict[str, float]:
        """What `measure` gives. Raises as `score`."""
        found = await self._ask(env, MEASURE, arguments)
        where = f"{self._title}.{MEASURE}"
        if not isinstance(found, Mapping):
            raise WorkerSaidTooMuch(f"{where} gave {found!r:.200}.", "Names and numbers are due.")
        return {name: _number(value, where) for name, value in found.items()}

    async def _ask(self, env: ScoredEnv, method: str, arguments: Sequence[Any]) -> Any:
        question = _question(method, arguments, {})
        with boundary(EnvironmentFailed, f"{self._title}.scorer_state"):
            given = dict(env.scorer_state())
        state = _pickled((given, self._changed(env, given)), f"{self._title}.scorer_state()")
        question["state_id"] = hashlib.sha256(state.encode()).hexdigest()
        with_state = {**question, "state": state}
        answer: Mapping[str, Any] = {"lacks_state": True}
        if question["state_id"] == self._state_id:
            answer = await self._workers.ask(question, self._within_s)
        if "lacks_state" in answer:
            self._state_id = question["state_id"]
            answer = await self._workers.ask(with_state, self._within_s)
        return _value(answer)

    def close(self) -> None:
        """End the workers."""
        self._workers.close()

    def _changed(self, env: ScoredEnv, given: Mapping[str, Any]) -> list[str]:
        """Attributes that were set, or grew, since the environment was made, and are not in the
        state.
        """
        if self._made is None:
            return []
        nothing = (None, -2)
        changed: list[str] = []
        for name, value in vars(env).items():
            before, length = self._made.get(name, nothing)
            is_same = before is value and length == _length(value)
            if name not in given and not is_same:
                changed.append(name)
        return sorted(changed)


class FunctionScorer:
    """A reward function in its workers."""

    def __init__(self, workers: Workers, name: str, within_s: float) -> None:
        self._workers, self._name, self._within_s = workers, name, within_s

    async def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """What it gives for these keyword arguments. EnvironmentFailed: by the name of what
        happened.
        """
        question = _question(self._name, (), arguments)
        given = _value(await self._workers.ask(question, self._within_s))
        if isinstance(given, list):
            for one in given:
                if one is not None:
                    _refuse_shown(one, self._name)
        return given

    def close(self) -> None:
        """End the workers."""
        self._workers.close()


def imported_files() -> list[Path]:
    """What a worker may read to import what this process has imported from outside its Python: each
    file alone, since the folder around it may be anybody's home; whole folders that packages are
    installed in, and our own.
    """
    bound = [Path(folder).absolute() for folder in (sys.prefix, sys.base_prefix)]
    folders = [Path(halteres.__file__).parent]
    folders += [Path(one) for one in sys.path if Path(one).name in INSTALLED]
    found = list[Path]()
    for folder in folders:
        if not _lies_in(folder, [*bound, *found]) and folder.is_dir():
            found.append(folder)
    files = {
        Path(file).absolute()
        for module in list(sys.modules.values())
        if isinstance(file := vars(module).get("__file__"), str)
    }
    found += [file for file in sorted(files) if not _lies_in(file, [*bound, *found])]
    return found


def _lies_in(place: Path, folders: Sequence[Path]) -> bool:
    return any(place.is_relative_to(folder) for folder in folders)


def made_with(config: BaseEnvConfig, tokenizer: Path) -> str:
    """What a worker's environment is made with, its config and its server's, as `scorer_worker`
    reads them: no login, no key, nothing to write.
    """
    fields = type(config).model_fields
    changes: dict[str, Any] = {
        name: BaseEnvConfig.model_fields[name].get_default(call_default_factory=True)
        for name in CLEARED
    }
    for name, field in fields.items():
        if is_secret_setting(name):
            changes[name] = field.get_default(call_default_factory=True)
        elif name not in CLEARED:
            changes[name] = without_secrets(getattr(config, name))
    changes |= {"cage": "off", "tokenizer_name": str(tokenizer.absolute())}
    made = config.model_copy(update=changes), APIServerConfig()
    return _pickled(made, "The environment's config")


def without_secrets(value: Any) -> Any:
    """A setting without the logins of its addresses, and without what is named like a secret
    within it: of JSON, and of pydantic's models.

    >>> without_secrets({"judge": {"url": "http://any:KEY@host", "api_key": "KEY", "most": 2}})
    {'judge': {'url': 'http://***@host', 'api_key': None, 'most': 2}}
    """
    if isinstance(value, str):
        return without_logins(value)
    if type(value) in (list, tuple):
        return type(value)(without_secrets(one) for one in value)
    if type(value) is dict:
        return {
            name: None if is_secret_setting(str(name)) else without_secrets(one)
            for name, one in value.items()
        }
    if isinstance(value, BaseModel):
        changes: dict[str, Any] = {}
        for name in type(value).model_fields:
            changes[name] = None
            if not is_secret_setting(name):
                changes[name] = without_secrets(getattr(value, name))
        return value.model_copy(update=changes)
    return value


def _question(method: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    given = _pickled((tuple(arguments), dict(keywords)), "What is scored")
    return {"method": method, "arguments": given}


def _pickled(value: Any, what: str) -> str:
    try:
        return base64.b64encode(pickle.dumps(value)).decode()
    except Exception as error:  # a value's own code may run
        raise EnvironmentFailed(
            f"{what} cannot be sent to the process of the scorers.",
            f"{type(error).__name__}: {error}.",
            "It must be of values that `pickle` takes, of classes at the top level of their files.",
        ) from error


def _value(answer: Mapping[str, Any]) -> Any:
    """The value of an answer, which may be anything that JSON can say."""
    if "value" not in answer:
        raise WorkerSaidTooMuch("A scorer's process gave no value.", f"It said {answer!r:.200}.")
    return answer["value"]


def _refuse_shown(value: Any, where: str) -> None:
    """Of what is no number, a worker tells how it looks."""
    if isinstance(value, Mapping):
        given = value.get("shown", value)
        raise WorkerSaidTooMuch(f"{where} gave {given!s:.200}.", "A finite number is due.")


def _number(value: Any, where: str) -> float:
    _refuse_shown(value, where)
    try:
        return finite(value, where)
    except EnvironmentFailed as error:
        raise WorkerSaidTooMuch(error.what, error.why) from error


def _length(value: Any) -> int:
    """-1 of what is no container of Python's own."""
    if isinstance(value, list | dict | set):
        return len(value)
    return -1
