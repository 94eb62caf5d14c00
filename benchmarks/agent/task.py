"""What a task of the agent benchmark is.

Owns: the nouns `Task`, `Place`, `Check`, `Verdict`; preparing a place and judging what was made of
it. Never: knows an agent; believes what one says without looking.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from halteres.errors import HalteresError, UserError

ENVIRONMENTS = Path(__file__).with_name("environments")
NOT_OURS = ("HALTERES_SESSION", "TINKER_BASE_URL")
"""Variables that would lead a task's runs elsewhere."""

Answer = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one attempt at a task is made: a project's folder, as `halteres install-agent
    --project` takes it.
    """

    folder: Path  # absolute

    @property
    def home(self) -> Path:
        """HALTERES_HOME of the attempt."""
        return self.folder / "home"

    @property
    def workspace(self) -> Path:
        """The environments that the agent may edit; tools find them there."""
        return self.folder / "environments"

    @property
    def facts(self) -> dict[str, Any]:
        """What the judge must remember of the preparation."""
        return json.loads((self.folder / "task.json").read_text(encoding="utf-8"))

    def variables(self) -> dict[str, str]:
        """This process's environment, for tools that work in this place."""
        ours = {"HALTERES_HOME": str(self.home), "HALTERES_ENVIRONMENTS": str(self.workspace)}
        return {name: value for name, value in os.environ.items() if name not in NOT_OURS} | ours

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, this process's tools and runs are those of the place."""
        before = dict(os.environ)
        inside = self.variables()
        try:
            _set(inside)
            yield
        finally:
            _set(before)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must be true of a solved task."""

    what: str
    ok: bool
    found: Any = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judge found: checks up to the first that does not hold."""

    checks: tuple[Check, ...]

    @property
    def solved(self) -> bool:
        """Whether all hold."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    @property
    def why(self) -> str:
        """The check that does not hold; empty where all do."""
        return next((f"{check.what}: {check.found}" for check in self.checks if not check.ok), "")


class Task(Protocol):
    """A task; each is a module of `tasks`."""

    @property
    def NAME(self) -> str: ...

    @property
    def TEXT(self) -> str:
        """What a user says."""
        ...

    @property
    def FILES(self) -> tuple[str, ...]:
        """Of `environments`: what the agent finds in its workspace."""
        ...

    def prepare(self, place: Place) -> dict[str, Any]:
        """Set up what the task begins with; what the judge must remember."""
        ...

    def judge(self, place: Place, answer: Answer) -> Iterator[Check]:
        """What must be true, cheap checks first."""
        ...


def prepare(task: Task, folder: Path) -> Place:
    """A place in a new folder, ready for an agent."""
    place = Place(folder.absolute())
    if place.folder.exists() and any(place.folder.iterdir()):
        raise UserError(f"{place.folder} is not empty.", "", "Name a new folder.")
    place.workspace.mkdir(parents=True)
    for name in task.FILES:
        shutil.copyfile(ENVIRONMENTS / name, place.workspace / name)
    with place.entered():
        facts = task.prepare(place)
    (place.folder / "task.json").write_text(
        json.dumps({"task": task.NAME, "prepared_at": time.time(), **facts}), encoding="utf-8"
    )
    return place


def judge(task: Task, place: Place, answer: Answer | None) -> Verdict:
    """Look at the place and the answer."""
    if answer is None:
        return Verdict((Check("the answer is a JSON object", False, "there is none"),))
    checks: list[Check] = []
    with place.entered():
        try:
            for check in task.judge(place, answer):
                checks.append(check)
                if not check.ok:
                    break
        except HalteresError as error:
            checks.append(Check("everything can be looked at", False, error.sentence))
    return Verdict(tuple(checks))


def stop_everything(place: Place) -> None:
    """End what still runs there."""
    from halteres.runs.directory import active_runs, stop_run

    with place.entered():
        for run in active_runs():
            stop_run(run)


def answer_in(text: str) -> dict[str, Any] | None:
    """The last JSON object in a text."""
    found, start, decoder = None, 0, json.JSONDecoder()
    while (start := text.find("{", start)) >= 0:
        try:
            value, start = decoder.raw_decode(text, start)
        except ValueError:
            start += 1
            continue
        found = value
    return found


def _set(variables: Mapping[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
