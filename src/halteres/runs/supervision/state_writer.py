"""What a supervisor writes of its run: run.json, events.jsonl and the heartbeat.

The state is in memory and disk follows every change of it; no text in it holds a secret. It decides no change. A log
that grows without end loses its beginning, and ends no child.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from halteres.observe.metrics import WriteFailed, append_row
from halteres.redaction import Redactor
from halteres.runs.diagnosis import HEARTBEAT_S
from halteres.runs.directory import RunDirectory
from halteres.runs.state import RunState, read_state, write_state

_log = logging.getLogger(__name__)


class StateWriter:
    """The one writer of a run's state."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._redactor = Redactor.of_this_process()
        self.state: RunState = read_state(run.path / "run.json")

    def update(self, **changes: Any) -> None:
        """Change the state, and say so where status or phase changed."""
        before = self.state
        self.state = msgspec.structs.replace(before, **self.without_secrets(changes))
        if self.state == before:
            return
        try:
            write_state(self.run.path / "run.json", self.state)
        except OSError as error:  # a full disk must not keep us from stopping the processes; the end is tried again
            _log.error("run.json could not be written: %s", error)
        if (before.status, before.phase) != (self.state.status, self.state.phase):
            self.event("status", status=self.state.status, phase=self.state.phase)

    def without_secrets(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Changes as the state will have them: of what it has in words, secrets are struck out."""
        clean = dict(changes)
        for name in {"failure", "error", "note"} & changes.keys():
            value = changes[name]  # a text, None, or a Failure
            clean[name] = msgspec.convert(self._redactor.json(msgspec.to_builtins(value)), type(value))
        return clean

    def process(self, role: str, **facts: Any) -> None:
        """Change what is known of one process."""
        known = {**self.state.processes.get(role, {}), **facts}
        self.update(processes={**self.state.processes, role: known})

    def event(self, kind: str, **facts: Any) -> None:
        """Append an event."""
        try:
            append_row(self.run.path / "events.jsonl", {"t": time.time(), "type": kind, **self._redactor.json(facts)})
        except WriteFailed as error:
            _log.error("%s", error.sentence)

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Show that the supervisor lives, as long as the block runs."""

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


LOG_BYTES, KEPT_BYTES = 64 * 1024 * 1024, 16 * 1024 * 1024
"""What a log may grow to, and what is then kept of it: the newest."""


def cut_logs(folder: Path) -> None:
    """Of every log in this folder that has grown too large, keep the end. Whoever writes it appends, and goes on; what
    comes in between the reading and the cutting is lost."""
    for log in folder.glob("*.log"):
        with suppress(OSError):  # a disk that takes nothing: the next look tries again
            if log.stat().st_size <= LOG_BYTES:
                continue
            with log.open("rb+") as stream:
                size = stream.seek(-KEPT_BYTES, os.SEEK_END) + KEPT_BYTES
                kept = stream.read().partition(b"\n")[2]  # whole lines
                stream.truncate(0)
            with log.open("ab", buffering=0) as appending:
                appending.write(b"[%d bytes of this log were cut away]\n" % (size - len(kept)) + kept)
