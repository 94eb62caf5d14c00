"""The process that forwards a run's metrics to W&B, trackio and TensorBoard (`halteres.observe.sinks`).

Owns: starting it, giving it time to finish, saying so where it could not be started or died.
Never: fails or stops a run, or tells how a single sink is: the process does.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress

from halteres.config.settings import SinkName
from halteres.observe.sinks import FLUSH_WITHIN_S, Reports, SinkReport, read_reports
from halteres.process import Lifeline
from halteres.runs.directory import RunDirectory
from halteres.runs.supervision.children import Child, spawn

COMMAND = (sys.executable, "-m", "halteres.observe.sinks")

ENDS_WITHIN_S = FLUSH_WITHIN_S + 3
"""How long it may take to end, once all has been written to metrics.jsonl; then it is killed."""

OPENED_WITHIN_S = 5.0

KEYS = ("WANDB_API_KEY",)


class Forwarding:
    """At most one process, beside the roles: no run depends on it."""

    def __init__(self, run: RunDirectory, sinks: Sequence[SinkName], lifeline: Lifeline) -> None:
        self._run, self._sinks, self._lifeline = run, sinks, lifeline
        self._reports = Reports(run.path)
        self._child: Child | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start it, where there is a sink."""
        if not self._sinks:
            return
        for name in self._sinks:
            self._reports.put(name, SinkReport(state="starting"))
        command = (*COMMAND, str(self._run.path))
        log = self._run.log("sinks")
        try:
            self._child = await spawn(command, log=log, folder=self._run.path, lifeline=self._lifeline, keys=KEYS)
        except OSError as error:
            self._failed(f"The process that forwards metrics could not be started: {error.strerror or error}.")
        else:
            self._watch = asyncio.create_task(self._until_exit(self._child), name="sinks")

    async def end(self) -> None:
        """Let it finish, for a while."""
        if self._child and self._watch:
            await self._until_opened(self._watch)
            await self._child.end(ENDS_WITHIN_S)
            await self._watch

    async def _until_opened(self, watch: asyncio.Task[None]) -> None:
        """Give a run that ended early time for its sinks: a process that is still importing dies of the signal."""
        with suppress(TimeoutError):
            async with asyncio.timeout(OPENED_WITHIN_S):
                while not watch.done() and self._is_starting():  # noqa: ASYNC110 - another process tells it in a file
                    await asyncio.sleep(0.1)

    def _is_starting(self) -> bool:
        return any(report.state == "starting" for report in read_reports(self._run.path).values())

    async def _until_exit(self, child: Child) -> None:
        if code := await asyncio.shield(child.exited):
            how = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
            self._failed(f"The process that forwards metrics {how}. Its log is {self._run.log('sinks')}.")

    def _failed(self, why: str) -> None:
        for name, report in read_reports(self._run.path).items():
            if name in self._sinks and report.state != "failed" and not report.is_complete:
                self._reports.failed(name, why)
