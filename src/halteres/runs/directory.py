"""The run directory, the interface of a run: its files, read and written; listing and finding runs;
asking one to stop.

The supervisor writes by `StateWriter`; a reader writes nothing but a request to stop, and the
verdict over a run whose supervisor is gone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from pydantic import ValidationError

from halteres.config import environ
from halteres.config.environ import Mode, write_stop_request
from halteres.config.settings import STORED, Settings, default_name
from halteres.documents import DocumentError, decoded, parse_yaml
from halteres.errors import Conflict, HalteresError, NotFound, boundary, nearest
from halteres.files import NOT_JSON, read_regular, tail
from halteres.logins import STRUCK, restored
from halteres.observe.metrics import Row, WriteFailed, append_row, read_rows
from halteres.process import alive
from halteres.redaction import Redactor
from halteres.runs.state import (
    MOST_STATE_BYTES,
    RESERVE,
    TERMINAL,
    Failure,
    RunState,
    RunUnreadable,
    Status,
    Time,
    is_locked,
    lock_taken,
    read_state,
    unreadable,
    write_state,
)

SETTINGS = "settings.json"  # without secrets
CONFIG = "config.yaml"  # what the environment runs with, secrets too: for the owner alone

# tasks that the environment does not draw again; it writes them (`environments.quarantine`)
QUARANTINE = "quarantine.jsonl"
# folder of the critic's states: the newest, and one for each checkpoint
CRITIC = "critic"

WAKE = signal.SIGUSR1  # asks a supervisor to look at its `control` folder
ID_LENGTH = 8  # hex digits of a run id
NAME_LENGTH, SHOWN = 80, 8  # characters of a run's name; how many runs an error lists

ANOTHER_LOOK_S, LOOKS = 0.005, 10
"""A reader that writes its verdict holds the lock for an instant; who holds it for ten looks is the
supervisor.
"""

HEARTBEAT_S = 5.0  # how often a supervisor shows that it lives, and looks for stalls
LOG_BYTES, KEPT_BYTES = 64 * 1024 * 1024, 16 * 1024 * 1024
"""What a log may grow to, and what is then left of it: the newest."""

_ITS_OWN = ("run.environment", "run.name")
"""The environment is an argument next to `changes`, and refused among them; two runs of one name
cannot be told apart.
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """One run's files. Reading is safe at any time, from any process."""

    path: Path

    @property
    def run_id(self) -> str:
        """Eight hex digits; the folder's name."""
        return self.path.name

    def state(self) -> RunState:
        """What the run is doing. A run whose supervisor is gone has failed, and its run.json says
        so from then on.
        """
        state = read_state(self.path / "run.json")
        if state.terminal or self.supervised:
            return state
        # unless another process is just doing so
        with suppress(Conflict, OSError), lock_taken(self.path / "lock"):
            state = self._with_verdict()
            (self.path / RESERVE).unlink(missing_ok=True)
            write_state(self.path / "run.json", state)
            return state
        return self._with_verdict()

    @property
    def supervised(self) -> bool:
        """Whether a supervisor holds the lock. A pid unknown here says nothing: it may be another
        container's.
        """
        for look in range(LOOKS):
            if not is_locked(self.path / "lock"):
                return False
            if alive(read_state(self.path / "run.json").supervisor):
                return True
            # it may be a reader that writes its verdict
            time.sleep(ANOTHER_LOOK_S if look < LOOKS - 1 else 0)
        return True

    def settings(self) -> Settings:
        """The run's settings. Their secrets come from config.yaml; where we may not read that, they
        stay struck out.
        """
        file = self.path / SETTINGS
        try:
            content = read_regular(file)
            settings = Settings.model_validate_json(content, context=STORED)
        except OSError as error:
            raise unreadable(file, error.strerror or str(error)) from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the whole of it"
            raise unreadable(file, f"{where}: {first['msg']}") from error
        if STRUCK.encode() in content:
            with suppress(HalteresError):
                whole = restored(settings.env, self.environment_config())
                settings = settings.model_copy(update={"env": whole})
        return settings

    def config(self) -> dict[str, Any]:
        """config.yaml: what the environment ran with. A key may be in it."""
        file = self.path / CONFIG
        try:
            config = parse_yaml(decoded(read_regular(file)))
        except FileNotFoundError as error:
            raise NotFound(f"There is no file {file}.") from error
        except (OSError, DocumentError) as error:
            raise unreadable(file, " ".join(str(error).split())) from error
        if not isinstance(config, dict) or not isinstance(config.get("env") or {}, dict):
            raise unreadable(file, "it holds no settings")
        return config

    def environment_config(self) -> dict[str, Any]:
        """The environment's own settings as they held in the run."""
        return dict(self.config().get("env") or {})

    def own_settings(self, *, inherited: bool = False) -> dict[str, Any]:
        """What the run was started with: section.field -> value; nothing where the file that tells
        cannot be read. `inherited`: also what it keeps of the run that it goes on from.
        """
        sources = ["file", "edit", "draft"]
        if inherited:
            sources.append("resume")
        try:
            settings = json.loads(read_regular(self.path / "config.resolved.json"))
        except (OSError, *NOT_JSON):
            return {}
        rows = ()
        if isinstance(settings, dict):
            rows = settings.items()
        return {
            name: row.get("value")
            for name, row in rows
            if isinstance(row, dict) and row.get("source") in sources and name not in _ITS_OWN
        }

    @property
    def success_threshold(self) -> float:
        """A score above it counts as success; 0 where the run's settings cannot be read."""
        try:
            return self.settings().run.success_threshold
        except RunUnreadable:
            return 0.0

    def metrics(self) -> list[Row]:
        """Rows of metrics.jsonl, as written (`observe.metrics.merge_by_step` joins them)."""
        return read_rows(self.path / "metrics.jsonl")

    def events(self) -> list[Row]:
        """What happened, oldest first. `seq` is the place of an event, from 1: a line written is
        there for good.
        """
        return [
            {**row, "seq": seq} for seq, row in enumerate(read_rows(self.path / "events.jsonl"), 1)
        ]

    def checkpoints(self) -> list[Row]:
        """Checkpoints, oldest first: {name, step, state_path, sampler_path, final, t}. Other rows
        are left out.
        """
        return [
            row
            for row in read_rows(self.path / "checkpoints.jsonl")
            if isinstance(row.get("step"), int)
            and all(
                isinstance(row.get(path), str | None) for path in ("state_path", "sampler_path")
            )
        ]

    def resumable_checkpoints(self) -> list[Row]:
        """Those that training can go on from, oldest first; one of step 0 is no better than a
        start.
        """
        return [row for row in self.checkpoints() if row.get("state_path") and row["step"] > 0]

    def newest_checkpoint(self) -> Row | None:
        """The last checkpoint that training can go on from."""
        resumable = self.resumable_checkpoints()
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

    def _with_verdict(self) -> RunState:
        """The state of a run whose supervisor is gone."""
        state = read_state(self.path / "run.json")
        if state.terminal:
            return state

        def ended(facts: Mapping[str, Any]) -> dict[str, Any]:
            """A process ended too, or is just about to, and it was not seen how."""
            if facts.get("exit") is not None or not facts.get("pid"):
                return dict(facts)
            return {
                **facts,
                "exit": "unknown",
                "state": "ending" if alive(facts) else "ended with the supervisor",
            }

        newest, what = (
            self.newest_checkpoint(),
            "The run's supervisor is gone; its processes ended with it.",
        )
        go_on = "It has no checkpoint yet: start it again."
        if newest:
            go_on = str(state.resume(f"Go on from step {newest['step']}"))
        try:
            ended_at = (self.path / "heartbeat").stat().st_mtime
        except OSError:
            ended_at = time.time()
        return msgspec.structs.replace(
            state,
            status="failed",
            code="supervisor_lost",
            error=f"{what} {go_on}",
            failure=Failure(what=what),
            exit={"process": "supervisor", "code": None},
            resumable=newest is not None,
            last_checkpoint=newest,
            step=max(
                [
                    state.step,
                    *(row["step"] for row in self.metrics() if isinstance(row.get("step"), int)),
                ]
            ),
            ended_at=ended_at,
            processes={role: ended(facts) for role, facts in state.processes.items()},
        )


class StateWriter:
    """What a supervisor writes of its run: run.json, events.jsonl, the heartbeat.

    The state is in memory and disk follows every change of it; no text in it holds a secret. It
    decides no change.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.state: RunState = read_state(run.path / "run.json")

    def update(self, **changes: Any) -> None:
        """Change the state, and say so where status or phase changed."""
        before = self.state
        self.state = msgspec.structs.replace(before, **self.without_secrets(changes))
        if self.state == before:
            return
        try:
            write_state(self.run.path / "run.json", self.state)
        except OSError as error:
            # a full disk must not keep us from stopping the processes; the end is tried again
            _log.error("run.json could not be written: %s", error)
        if (before.status, before.phase) != (self.state.status, self.state.phase):
            self.event("status", status=self.state.status, phase=self.state.phase)

    def without_secrets(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Changes as the state will have them: of what it has in words, secrets are struck out."""
        clean = dict(changes)
        for name in {"failure", "error", "note"} & changes.keys():
            value = changes[name]  # a text, None, or a Failure
            words = Redactor.of_this_process().json(msgspec.to_builtins(value))
            clean[name] = msgspec.convert(words, type(value))
        return clean

    def process(self, role: str, **facts: Any) -> None:
        """Change what is known of one process."""
        known = {**self.state.processes.get(role, {}), **facts}
        self.update(processes={**self.state.processes, role: known})

    def event(self, kind: str, **facts: Any) -> None:
        """Append an event."""
        try:
            row = {"t": time.time(), "type": kind, **Redactor.of_this_process().json(facts)}
            append_row(self.run.path / "events.jsonl", row)
        except WriteFailed as error:
            _log.error("%s", error.sentence)

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Show that the supervisor lives, as long as the block runs; meanwhile no log grows without
        end.
        """

        async def beat() -> None:
            while True:
                try:
                    os.utime(self.run.path / "heartbeat")
                except OSError as error:
                    _log.error("No heartbeat: %s", error)
                await asyncio.to_thread(cut_logs, self.run.path / "logs")
                await asyncio.sleep(HEARTBEAT_S)

        heart = asyncio.create_task(beat(), name="heartbeat")
        try:
            yield
        finally:
            heart.cancel()
            await asyncio.gather(heart, return_exceptions=True)


def cut_logs(folder: Path) -> None:
    """Of every log in this folder that has grown too large, leave the end. Whoever writes it
    appends, and goes on; what comes in between the reading and the cutting is lost.
    """
    for log in folder.glob("*.log"):
        with suppress(OSError):  # a disk that takes nothing: the next look tries again
            if log.stat().st_size <= LOG_BYTES:
                continue
            with log.open("rb+") as stream:
                size = stream.seek(-KEPT_BYTES, os.SEEK_END) + KEPT_BYTES
                rest = stream.read().partition(b"\n")[2]  # whole lines
                stream.truncate(0)
            with log.open("ab", buffering=0) as appending:
                appending.write(
                    b"[%d bytes of this log were cut away]\n" % (size - len(rest)) + rest
                )


def runs_home() -> Path:
    """The folder of all runs: HALTERES_HOME/runs."""
    return environ.home() / "runs"


def new_run_id() -> str:
    """Eight hex digits that no run has yet."""
    while (runs_home() / (run_id := secrets.token_hex(4))).exists():
        pass
    return run_id


UNREADABLE: Literal["unreadable"] = "unreadable"
"""The status of a run whose run.json is damaged: what became of it is not known, and it must not
seem gone.
"""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The few fields of a run.json by which a run is found and listed; two hundred are read in a
    few milliseconds.
    """

    name: str
    environment: str
    status: Status | Literal["unreadable"]
    created_at: Time
    total_steps: int
    step: int = 0
    ended_at: Time | None = None
    resumed_from: str | None = None


_decoder = msgspec.json.Decoder(Facts)


@dataclass(frozen=True, slots=True)
class Entry:
    """One run in a list."""

    path: Path  # of its folder
    facts: Facts
    why: str = ""  # it is unreadable

    @property
    def run_id(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def default_name(self) -> str:
        """As `RunState.default_name`."""
        return default_name(self.facts.environment, self.run_id)

    @property
    def own_name(self) -> str | None:
        """The name that it was given."""
        if self.facts.name != self.default_name:
            return self.facts.name
        return None

    @property
    def ended(self) -> bool:
        """Whether run.json says so; of a lost run it does not say so yet. An unreadable one is not
        waited for.
        """
        return self.facts.status in TERMINAL or self.unreadable

    @property
    def unreadable(self) -> bool:
        """Whether its run.json is damaged."""
        return self.facts.status == UNREADABLE

    @property
    def error(self) -> str:
        """Of an unreadable run: what is damaged."""
        return self.why or f"{self.path / 'run.json'} is damaged."


def roster(home: Path) -> list[Entry]:
    """Every run below `home` as its run.json has it, newest first; what has no run.json is no
    run.
    """
    entries = list[Entry]()
    for folder in home.glob("[!.]*"):
        try:
            entries.append(
                Entry(folder, _decoder.decode(read_regular(folder / "run.json", MOST_STATE_BYTES)))
            )
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, *NOT_JSON):
            if not re.fullmatch(r"[0-9a-f]{8}", folder.name):
                continue
            with suppress(OSError):  # it was removed while we looked
                since, name = folder.stat().st_mtime, folder.name
                facts = Facts(
                    name=name,
                    environment="unknown",
                    status=UNREADABLE,
                    created_at=since,
                    total_steps=0,
                )
                entries.append(Entry(folder, facts))
    return sorted(entries, key=lambda entry: entry.facts.created_at, reverse=True)


def list_runs() -> list[RunDirectory]:
    """Every run that can be read, newest first."""
    return [RunDirectory(entry.path) for entry in roster(runs_home()) if not entry.unreadable]


def known_runs() -> list[Entry]:
    """Every run, newest first, as it truly is: of one that was lost, run.json alone does not
    tell.
    """
    known = list[Entry]()
    for entry in roster(runs_home()):
        if entry.ended:
            known.append(entry)
            continue
        try:
            # whatever is wrong with it, the others stay
            with boundary(RunUnreadable, f"Reading run {entry.run_id}"):
                now = RunDirectory(entry.path).state()
        except RunUnreadable as error:
            known.append(
                Entry(
                    entry.path, msgspec.structs.replace(entry.facts, status=UNREADABLE), error.what
                )
            )
        except NotFound:  # removed while we looked
            pass
        else:
            facts = msgspec.structs.replace(
                entry.facts, status=now.status, step=now.step, ended_at=now.ended_at
            )
            known.append(Entry(entry.path, facts))
    return known


def active_runs() -> list[RunDirectory]:
    """The runs that have not ended, newest first."""
    return [RunDirectory(entry.path) for entry in known_runs() if not entry.ended]


class RunNotFound(NotFound):
    """No run of this id or name."""

    code = "run_not_found"


class RunAmbiguous(RunNotFound):
    """More than one run fits."""

    code = "run_ambiguous"


def find_run(prefix_or_name: str) -> RunDirectory:
    """The run of this id, unique beginning of an id, or name; of a run and those that go on from
    it under its name, the newest. RunNotFound offers the nearest, or all that fit.
    """
    word = prefix_or_name
    if len(word) == ID_LENGTH and word.isalnum() and (runs_home() / word / "run.json").exists():
        return RunDirectory(runs_home() / word)
    entries = known_runs()
    matches = (
        [entry for entry in entries if entry.run_id == word]
        or [entry for entry in entries if word and entry.run_id.startswith(word)]
        or _newest_of_each([entry for entry in entries if entry.facts.name == word])
    )
    if len(matches) == 1:
        return RunDirectory(matches[0].path)
    shown = word
    if not (len(word) <= NAME_LENGTH):
        shown = f"{word[:NAME_LENGTH]}..."
    active = [entry.run_id for entry in matches or entries if not entry.ended]
    if matches:
        listed = ", ".join(f"{entry.run_id} ({entry.facts.name})" for entry in matches[:SHOWN])
        raise RunAmbiguous(
            f"'{shown}' fits {len(matches)} runs.",
            f"They are {listed}{', ...' if len(matches) > SHOWN else ''}.",
            "Write more of the id.",
            allowed=[entry.run_id for entry in matches[:SHOWN]],
            active_runs=active,
        )
    by_word = {
        known: entry for entry in reversed(entries) for known in (entry.facts.name, entry.run_id)
    }
    guess = by_word.get(nearest(word[:NAME_LENGTH], by_word) or "")
    hint = f"There are {len(entries)} runs."
    if guess:
        hint = f"Did you mean {guess.run_id} ({guess.facts.environment}, {guess.facts.status})?"
    raise RunNotFound(
        f"Run '{shown}' not found.",
        hint,
        "halteres runs list shows all.",
        did_you_mean=guess.run_id if guess else None,
        active_runs=active,
    )


def _newest_of_each(entries: Sequence[Entry]) -> list[Entry]:
    """Those that no other of them goes on from: a resumed run has its parent's name."""
    by_id = {entry.run_id: entry for entry in entries}
    parents = set[str]()
    for entry in entries:
        parent = entry.facts.resumed_from
        while parent in by_id and parent not in parents:
            parents.add(parent)
            parent = by_id[parent].facts.resumed_from
    return [entry for entry in entries if entry.run_id not in parents]


def stop_run(run: RunDirectory, mode: Mode = "now", deadline_s: float = 45) -> RunState:
    """Ask the run to stop and wait for it, no longer than `deadline_s` (0: only ask): the state
    then.

    Safe to repeat: a run that has ended answers with its final state. `now` interrupts the step in
    progress, `after_step` lets it end; both write a checkpoint first.
    """
    state = run.state()
    if state.terminal:
        return state
    wake: signal.Signals = WAKE
    try:
        write_stop_request(run.path / "control" / "stop.json", mode)
    except OSError:  # a full disk: SIGTERM means the same as mode `now`
        wake = signal.SIGTERM
    # read after the request is written: who has no pid here yet will find it
    supervisor = run.state().supervisor
    if supervisor and alive(supervisor):
        with suppress(ProcessLookupError):
            os.kill(supervisor["pid"], wake)
    ends = time.monotonic() + deadline_s
    while not (state := run.state()).terminal and time.monotonic() < ends:
        time.sleep(0.1)
    return state
