"""The run directory: the interface of a run, for every process that looks at it.

Owns: where runs live, their ids, reading their files, finding them; telling a lost supervisor from a living one.
Never: starts or stops anything; writes, except the verdict over a run whose supervisor is gone.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from halteres.config import environ
from halteres.config.files import Resolved, resolve_settings
from halteres.config.settings import Settings
from halteres.config.sources import NOTHING_GIVEN
from halteres.errors import Conflict, NotFound, nearest
from halteres.files import tail
from halteres.observe.metrics import Row, read_rows
from halteres.runs import identity, lock
from halteres.runs.state import RESERVE, RunState, read_state, write_state

__all__ = [
    "RunAmbiguous",
    "RunDirectory",
    "RunNotFound",
    "RunState",
    "find_run",
    "list_runs",
    "new_run_id",
    "runs_home",
]

ID_LENGTH = 8
"""Hex digits of a run id."""

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
        settings = Settings.model_validate_json((self.path / "settings.json").read_bytes())
        if not edits:
            return Resolved(settings=settings, sources=NOTHING_GIVEN)
        return resolve_settings(None, None, edits, base=settings)

    def environment_config(self) -> dict[str, Any]:
        """The environment's own settings as they held in the run."""
        config = yaml.safe_load((self.path / "config.yaml").read_text())
        return dict(config.get("env") or {})

    def metrics(self) -> list[Row]:
        """Rows of metrics.jsonl, as written (`observe.metrics.merge_by_step` joins them)."""
        return read_rows(self.path / "metrics.jsonl")

    def events(self) -> list[Row]:
        """What happened, oldest first. `seq` is the place of an event, from 1: a line written is there for good."""
        return [{**row, "seq": seq} for seq, row in enumerate(read_rows(self.path / "events.jsonl"), 1)]

    def checkpoints(self) -> list[Row]:
        """Checkpoints, oldest first: {name, step, state_path, sampler_path, final, t}."""
        return read_rows(self.path / "checkpoints.jsonl")

    def newest_checkpoint(self) -> Row | None:
        """The last checkpoint that training can go on from."""
        resumable = [row for row in self.checkpoints() if row.get("state_path")]
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
            return json.loads((self.path / "results.json").read_bytes())
        except OSError:
            return None

    def _lost(self) -> RunState:
        """The verdict over a run whose supervisor is gone, written if nobody else is just doing so."""
        try:
            with lock.taken(self.path / "lock"):
                state = read_state(self.path / "run.json")
                if not state.terminal:
                    state = self._verdict(state)
                    (self.path / RESERVE).unlink(missing_ok=True)
                    write_state(self.path / "run.json", state)
                return state
        except (Conflict, OSError):
            state = read_state(self.path / "run.json")
            return state if state.terminal else self._verdict(state)

    def _verdict(self, state: RunState) -> RunState:
        newest = self.newest_checkpoint()
        how = f"halteres train --resume {self.run_id}"
        go_on = f"Go on from step {newest['step']}: {how}" if newest else "It has no checkpoint yet: start it again."
        return msgspec.structs.replace(
            state,
            status="failed",
            code="supervisor_lost",
            error=f"The run's supervisor is gone; its processes ended with it. {go_on}",
            resumable=newest is not None,
            last_checkpoint=newest,
            step=max([state.step, *(row["step"] for row in self.metrics() if isinstance(row.get("step"), int))]),
            ended_at=self._last_heartbeat(),
            processes={role: _ended(facts) for role, facts in state.processes.items()},
        )

    def _last_heartbeat(self) -> float:
        try:
            return (self.path / "heartbeat").stat().st_mtime
        except OSError:
            return time.time()


def _ended(facts: dict[str, Any]) -> dict[str, Any]:
    """A process of a run whose supervisor is gone: ended too, or just about to, and nobody saw how."""
    if facts.get("exit") is not None or not facts.get("pid"):
        return facts
    ending = identity.alive(facts)
    return {**facts, "exit": "unknown", "state": "ending" if ending else "ended with the supervisor"}


def runs_home() -> Path:
    """The folder of all runs: HALTERES_HOME/runs."""
    return environ.home() / "runs"


def new_run_id() -> str:
    """Eight hex digits that no run has yet."""
    while (runs_home() / (run_id := secrets.token_hex(4))).exists():
        pass
    return run_id


def list_runs() -> list[RunDirectory]:
    """Every run, newest first."""
    found: list[tuple[float, RunDirectory]] = []
    for file in runs_home().glob("[!.]*/run.json"):
        try:
            found.append((read_state(file).created_at, RunDirectory(file.parent)))
        except NotFound:
            continue  # removed while we looked, or not ours
    return [run for _, run in sorted(found, key=lambda item: item[0], reverse=True)]


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
    runs = list_runs()
    names = {run: read_state(run.path / "run.json").name for run in runs}
    exact = [run for run in runs if run.run_id == prefix_or_name]
    fitting = exact or [run for run in runs if prefix_or_name and run.run_id.startswith(prefix_or_name)]
    fitting = fitting or [run for run in runs if names[run] == prefix_or_name]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        ids = [run.run_id for run in fitting]
        raise RunAmbiguous(
            f"'{prefix_or_name}' fits {len(ids)} runs.",
            f"They are {', '.join(f'{run.run_id} ({names[run]})' for run in fitting[:8])}.",
            "Write more of the id.",
            allowed=ids,
        )
    guess = nearest(prefix_or_name, [run.run_id for run in runs] + sorted(set(names.values())))
    hint = f"Did you mean {guess}?" if guess else f"There are {len(runs)} runs."
    raise RunNotFound(
        f"Run '{prefix_or_name}' not found.",
        hint,
        "halteres runs list shows all.",
        did_you_mean=guess,
        active_runs=[run.run_id for run in runs if not read_state(run.path / "run.json").terminal],
    )
