"""All runs at a glance: the few fields of each run.json by which a run is found and listed.

Owns: the noun `Entry`, reading many run.json cheaply: two hundred take a few milliseconds.
Never: judges whether a run still lives (`directory.known_runs`), or reads anything else of it.

A run whose run.json is damaged is told as `unreadable`: what became of it is not known, and it must not seem gone.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from halteres.config.settings import default_name
from halteres.files import NOT_JSON, read_regular
from halteres.runs.state import MOST_STATE_BYTES, TERMINAL, RunState, Status, Time

UNREADABLE: Literal["unreadable"] = "unreadable"
UNKNOWN = "unknown"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a run.json; the rest of it is passed over."""

    name: str
    environment: str
    status: Status | Literal["unreadable"]
    created_at: Time
    total_steps: int
    step: int = 0
    ended_at: Time | None = None
    resumed_from: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One run, as its run.json has it."""

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
        return self.facts.name if self.facts.name != self.default_name else None

    @property
    def ended(self) -> bool:
        """Whether run.json says so; of a lost run it does not say so yet. An unreadable one is not waited for."""
        return self.facts.status in TERMINAL or self.unreadable

    @property
    def unreadable(self) -> bool:
        """Whether its run.json is damaged."""
        return self.facts.status == UNREADABLE

    @property
    def described(self) -> str:
        """In a sentence: 3fa9c1d2 (gsm8k, running)."""
        return f"{self.run_id} ({self.facts.environment}, {self.facts.status})"

    def with_state(self, state: RunState) -> Entry:
        """The same run, as a closer look has found it."""
        facts = msgspec.structs.replace(self.facts, status=state.status, step=state.step, ended_at=state.ended_at)
        return Entry(self.path, facts)

    def damaged(self, why: str) -> Entry:
        """The same run, where a closer look has found that it cannot be read."""
        return Entry(self.path, msgspec.structs.replace(self.facts, status=UNREADABLE), why)

    @property
    def error(self) -> str:
        """Of an unreadable run: what is damaged."""
        return self.why or f"{self.path / 'run.json'} is damaged."


def roster(home: Path) -> list[Entry]:
    """Every run below `home`, newest first; what has no run.json is no run."""
    try:
        with os.scandir(home) as folders:
            names = [folder.name for folder in folders if not folder.name.startswith(".")]
    except OSError:
        return []
    found = [Entry(home / name, facts) for name in names if (facts := _facts(f"{home}/{name}/run.json")) is not None]
    return sorted(found, key=lambda entry: entry.facts.created_at, reverse=True)


def _facts(file: str) -> Facts | None:
    try:
        return _decoder.decode(read_regular(Path(file), MOST_STATE_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, *NOT_JSON):
        return _unreadable(file)


def _unreadable(file: str) -> Facts | None:
    """What can be told of a run without its run.json; None of a folder that is none, or was removed while we looked."""
    folder = os.path.dirname(file)
    if not _RUN_ID.fullmatch(os.path.basename(folder)):
        return None
    try:
        since = os.stat(folder).st_mtime
    except OSError:
        return None
    return Facts(name=os.path.basename(folder), environment=UNKNOWN, status=UNREADABLE, created_at=since, total_steps=0)


_RUN_ID = re.compile(r"[0-9a-f]{8}")

_decoder = msgspec.json.Decoder(Facts)
