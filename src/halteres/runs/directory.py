"""The run directory: the interface of a run, for every process that looks at it.

Owns: where runs live, their ids, reading their files, finding them; telling a lost supervisor from a living one, and
what is then true of its run.
Never: starts or stops anything; writes, except the verdict over a run whose supervisor is gone.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml
from pydantic import ValidationError

from halteres.config import environ
from halteres.config.files import Resolved, resolve_settings
from halteres.config.projection import NOTHING_GIVEN
from halteres.config.settings import Settings
from halteres.errors import Conflict, NotFound, boundary, nearest
from halteres.files import NOT_JSON, read_regular, tail
from halteres.observe.metrics import Row, read_rows
from halteres.runs import identity, lock
from halteres.runs.roster import Entry, roster
from halteres.runs.state import RESERVE, Failure, RunState, RunUnreadable, read_state, unreadable, write_state

__all__ = [
    "RunAmbiguous",
    "RunDirectory",
    "RunNotFound",
    "RunState",
    "RunUnreadable",
    "active_runs",
    "find_run",
    "known_runs",
    "list_runs",
    "new_run_id",
    "runs_home",
]

ID_LENGTH = 8
"""Hex digits of a run id."""

NAME_LENGTH, SHOWN = 80, 8
"""Characters of a run's name; how many runs an error lists."""

ANOTHER_LOOK_S, LOOKS = 0.005, 10
"""A reader that writes its verdict holds the lock for an instant; who holds it for ten looks is the supervisor."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """One run's files. Reading is safe at any time, from any process."""

    path: Path

    @property
    def run_id(self) -> str:
        """Eight hex digits; the folder's name."""
        return self.path.name

    def state(self) -> RunState:
        """What the run is doing. A run whose supervisor is gone has failed, and is told so from then on."""
        state = read_state(self.path / "run.json")
        if state.terminal or self.supervised:
            return state
        return self._lost()

    @property
    def supervised(self) -> bool:
        """Whether a supervisor holds the lock. A pid unknown here says nothing: it may be another container's."""
        for look in range(LOOKS):
            if not lock.held(self.path / "lock"):
                return False
            if identity.alive(read_state(self.path / "run.json").supervisor):
                return True
            time.sleep(ANOTHER_LOOK_S if look < LOOKS - 1 else 0)  # it may be a reader that writes its verdict
        return True

    def settings(self, edits: Sequence[str] = ()) -> Settings:
        """The run's settings, with edits."""
        return self.resolved(edits).settings

    def resolved(self, edits: Sequence[str] = ()) -> Resolved:
        """The run's settings, with edits, and which of them are edits."""
        settings = self._settings()
        if not edits:
            return Resolved(settings=settings, sources=NOTHING_GIVEN)
        return resolve_settings(None, None, edits, base=settings)

    def config(self) -> dict[str, Any]:
        """config.yaml: what the environment ran with. A key may be in it."""
        file = self.path / "config.yaml"
        try:
            config = yaml.safe_load(read_regular(file))
        except FileNotFoundError as error:
            raise NotFound(f"There is no file {file}.") from error
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise unreadable(file, " ".join(str(error).split())) from error
        if not isinstance(config, dict):
            raise unreadable(file, "it holds no settings")
        return config

    def environment_config(self) -> dict[str, Any]:
        """The environment's own settings as they held in the run."""
        env = self.config().get("env") or {}
        if not isinstance(env, dict):
            raise unreadable(self.path / "config.yaml", "it holds no settings")
        return dict(env)

    @property
    def success_threshold(self) -> float:
        """A score above it counts as success; 0 where the run's settings cannot be read."""
        try:
            return self._settings().run.success_threshold
        except RunUnreadable:
            return 0.0

    def metrics(self) -> list[Row]:
        """Rows of metrics.jsonl, as written (`observe.metrics.merge_by_step` joins them)."""
        return read_rows(self.path / "metrics.jsonl")

    def events(self) -> list[Row]:
        """What happened, oldest first. `seq` is the place of an event, from 1: a line written is there for good."""
        return [{**row, "seq": seq} for seq, row in enumerate(read_rows(self.path / "events.jsonl"), 1)]

    def checkpoints(self) -> list[Row]:
        """Checkpoints, oldest first: {name, step, state_path, sampler_path, final, t}. What is none is left out."""
        return [row for row in read_rows(self.path / "checkpoints.jsonl") if _is_checkpoint(row)]

    def newest_checkpoint(self) -> Row | None:
        """The last checkpoint that training can go on from; one of step 0 is no better than a start."""
        resumable = [row for row in self.checkpoints() if row.get("state_path") and row["step"] > 0]
        return max(reversed(resumable), key=lambda row: row["step"], default=None)

    def log(self, role: str) -> Path:
        """A role's log file: service, api, trainer, env, eval, supervisor."""
        return self.path / "logs" / f"{role}.log"

    def log_tail(self, role: str, lines: int = 8) -> list[str]:
        """The last lines of a role's log; none where it has written nothing."""
        return tail(self.log(role), lines)

    def results(self) -> dict[str, Any] | None:
        """The final answer, once the run has ended."""
        try:
            return json.loads(read_regular(self.path / "results.json"))
        except (OSError, *NOT_JSON):
            return None

    def _settings(self) -> Settings:
        file = self.path / "settings.json"
        try:
            return Settings.model_validate_json(read_regular(file))
        except OSError as error:
            raise unreadable(file, error.strerror or str(error)) from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the whole of it"
            raise unreadable(file, f"{where}: {first['msg']}") from error

    def _verdict_over(self, state: RunState) -> RunState:
        steps = [row["step"] for row in self.metrics() if isinstance(row.get("step"), int)]
        try:
            last_alive = (self.path / "heartbeat").stat().st_mtime
        except OSError:
            last_alive = time.time()
        return verdict_over(state, self.newest_checkpoint(), max(steps, default=0), last_alive)

    def _lost(self) -> RunState:
        """The verdict over a run whose supervisor is gone, written if nobody else is just doing so."""
        try:
            with lock.taken(self.path / "lock"):
                state = read_state(self.path / "run.json")
                if not state.terminal:
                    state = self._verdict_over(state)
                    (self.path / RESERVE).unlink(missing_ok=True)
                    write_state(self.path / "run.json", state)
                return state
        except (Conflict, OSError):
            state = read_state(self.path / "run.json")
            return state if state.terminal else self._verdict_over(state)


def _is_checkpoint(row: Row) -> bool:
    paths = (row.get("state_path"), row.get("sampler_path"))
    return isinstance(row.get("step"), int) and all(isinstance(path, str | None) for path in paths)


def runs_home() -> Path:
    """The folder of all runs: HALTERES_HOME/runs."""
    return environ.home() / "runs"


def new_run_id() -> str:
    """Eight hex digits that no run has yet."""
    while (runs_home() / (run_id := secrets.token_hex(4))).exists():
        pass
    return run_id


def list_runs() -> list[RunDirectory]:
    """Every run that can be read, newest first."""
    return [RunDirectory(entry.path) for entry in roster(runs_home()) if not entry.unreadable]


def known_runs() -> list[Entry]:
    """Every run, newest first, as it truly is: of one that was lost, run.json alone does not tell."""
    return [known for entry in roster(runs_home()) if (known := entry if entry.ended else _as_it_is(entry))]


def active_runs() -> list[RunDirectory]:
    """The runs that have not ended, newest first."""
    return _active(known_runs())


def _active(entries: Sequence[Entry]) -> list[RunDirectory]:
    return [RunDirectory(entry.path) for entry in entries if not entry.ended]


def _as_it_is(entry: Entry) -> Entry | None:
    try:
        with boundary(RunUnreadable, f"Reading run {entry.run_id}"):  # whatever is wrong with one run, the others stay
            return entry.with_state(RunDirectory(entry.path).state())
    except RunUnreadable as error:
        return entry.damaged(error.what)
    except NotFound:  # removed while we looked
        return None


class RunNotFound(NotFound):
    """No run of this id or name."""

    code = "run_not_found"


class RunAmbiguous(RunNotFound):
    """More than one run fits."""

    code = "run_ambiguous"


def find_run(prefix_or_name: str) -> RunDirectory:
    """The run of this id, unique beginning of an id, or name. RunNotFound offers the nearest, or all that fit."""
    if len(prefix_or_name) == ID_LENGTH and prefix_or_name.isalnum():
        directly = runs_home() / prefix_or_name
        if (directly / "run.json").exists():
            return RunDirectory(directly)
    entries = known_runs()
    fitting = _fitting(prefix_or_name, entries)
    if len(fitting) == 1:
        return RunDirectory(fitting[0].path)
    raise _ambiguous(prefix_or_name, fitting) if fitting else _not_found(prefix_or_name, entries)


def _fitting(asked: str, entries: Sequence[Entry]) -> list[Entry]:
    """Those of this very id; else those whose id begins so; else those of this name."""
    return (
        [entry for entry in entries if entry.run_id == asked]
        or [entry for entry in entries if asked and entry.run_id.startswith(asked)]
        or [entry for entry in entries if entry.facts.name == asked]
    )


def _ambiguous(asked: str, fitting: Sequence[Entry]) -> RunAmbiguous:
    ids = [entry.run_id for entry in fitting]
    told = ", ".join(f"{entry.run_id} ({entry.facts.name})" for entry in fitting[:SHOWN])
    return RunAmbiguous(
        f"'{_shortly(asked)}' fits {len(ids)} runs.",
        f"They are {told}{', ...' if len(ids) > SHOWN else ''}.",
        "Write more of the id.",
        allowed=ids[:SHOWN],
        active_runs=[run.run_id for run in _active(fitting)],
    )


def _not_found(asked: str, entries: Sequence[Entry]) -> RunNotFound:
    by_word = {word: entry for entry in reversed(entries) for word in (entry.facts.name, entry.run_id)}
    guess = by_word.get(nearest(asked[:NAME_LENGTH], by_word) or "")
    hint = f"Did you mean {guess.described}?" if guess else f"There are {len(entries)} runs."
    return RunNotFound(
        f"Run '{_shortly(asked)}' not found.",
        hint,
        "halteres runs list shows all.",
        did_you_mean=guess.run_id if guess else None,
        active_runs=[run.run_id for run in _active(entries)],
    )


def _shortly(asked: str) -> str:
    return asked if len(asked) <= NAME_LENGTH else f"{asked[:NAME_LENGTH]}..."


def verdict_over(state: RunState, newest: Mapping[str, Any] | None, step: int, ended_at: float) -> RunState:
    """The state of a run that was in `state` when its supervisor went.

    Args:
        state: as it was last written.
        newest: checkpoint to go on from.
        step: the last that a metric tells of.
        ended_at: when the supervisor was last alive; unix seconds.
    """
    what = "The run's supervisor is gone; its processes ended with it."
    go_on = state.resume(f"Go on from step {newest['step']}") if newest else "It has no checkpoint yet: start it again."
    return msgspec.structs.replace(
        state,
        status="failed",
        code="supervisor_lost",
        error=f"{what} {go_on}",
        failure=Failure(what=what),
        exit={"process": "supervisor", "code": None},
        resumable=newest is not None,
        last_checkpoint=None if newest is None else dict(newest),
        step=max(state.step, step),
        ended_at=ended_at,
        processes={role: _ended(facts) for role, facts in state.processes.items()},
    )


def _ended(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A process of a run whose supervisor is gone: ended too, or just about to, and nobody saw how."""
    if facts.get("exit") is not None or not facts.get("pid"):
        return dict(facts)
    ending = identity.alive(facts)
    return {**facts, "exit": "unknown", "state": "ending" if ending else "ended with the supervisor"}
