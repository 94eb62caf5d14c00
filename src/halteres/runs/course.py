"""The course of one run: from its first process to the verdict.

Owns: what each thing that happens means: ready, exited, written, asked to stop. It starts all processes at once, gates
by readiness, restarts what loses nothing, evaluates, stops in reverse order.
Never: writes the end (`supervisor`), trains, samples, or keeps anything that a reader of the directory would miss.

Everything that happens comes through one inbox; each message may bring a verdict, and the verdict ends the run.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halteres.config.control import Mode, read_stop_request
from halteres.errors import HalteresError
from halteres.runs import failures
from halteres.runs.children import GRACE_S, Lifeline
from halteres.runs.conclusion import final_checkpoint
from halteres.runs.crew import Crew, Exited, Ready, TooSlow
from halteres.runs.engine_watch import engine_of, gone
from halteres.runs.evaluation import Evaluator, Snapshot
from halteres.runs.ledger import Ledger
from halteres.runs.readiness import get_json
from halteres.runs.roles import Casting
from halteres.runs.stage import Stage
from halteres.runs.state import Phase, Status
from halteres.runs.tail import Tail

HEARTBEAT_S = 5.0
WITHOUT_SERVICE_S = 1.0
"""Grace of the others once the service is gone: no checkpoint can be written any more."""

LEAST_FREE_BYTES = 4 * 1024 * 1024
"""With less room on its disk a run is ended, while its end can still be written."""

LOOK_EVERY_S = 0.2
"""How often the files that the trainer writes are looked at."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody wants the run to end."""

    mode: Mode
    why: str


@dataclass(frozen=True, slots=True)
class EngineGone:
    """The engine's process ended though its service had not ended it."""


@dataclass(frozen=True, slots=True)
class DiskFull:
    """Nothing more can be written: not every process notices, and some would wait for ever."""


@dataclass(frozen=True, slots=True)
class LookedAround:
    """It is time to read what the trainer has written."""


Message = StopAsked | EngineGone | DiskFull | LookedAround | Ready | TooSlow | Exited
"""Whatever happens to a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How the run ends."""

    status: Status
    error: HalteresError | None = None
    note: str | None = None


class Course:
    """One run, from its first process to its last word."""

    def __init__(self, ledger: Ledger, stage: Stage, casting: Casting) -> None:
        self.ledger, self.run, self.stage = ledger, ledger.run, stage
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.lifeline = Lifeline.open()
        self.crew = Crew(ledger, casting(stage.scene), self.lifeline, self.inbox)
        trainer = stage.scene.settings.trainer
        self.evaluator = Evaluator(ledger, stage.scene.environment, self.lifeline, trainer.eval_every)
        if ledger.state.resume_point:
            self.evaluator.skip_up_to(ledger.state.step)
        self.news = [Tail(self.run.path / name) for name in ("events.jsonl", "metrics.jsonl")]
        for tail in self.news:
            tail.fresh()  # a resumed run carries rows over: no news
        self.stop_asked: StopAsked | None = None
        self.engine_watch: asyncio.Task[None] | None = None
        self.service_lost = False

    async def run_to_verdict(self) -> Verdict:
        """Run all processes until a verdict; they have all ended when it is returned."""
        try:
            async with self._helpers():
                try:
                    await self.crew.start()
                except OSError as error:
                    return Verdict(status="failed", error=failures.not_started(self.run, error))
                verdict = await self._until_verdict()
                if verdict.status == "completed":
                    verdict = await self._last_evaluation(verdict)
                elif verdict.status == "stopped":
                    self.ledger.update(status="stopping", phase=None)
        finally:
            if self.engine_watch:
                self.engine_watch.cancel()
            await self.crew.end(WITHOUT_SERVICE_S if self.service_lost else GRACE_S)
            self.lifeline.close()
            await self._read_fresh_rows()  # the step that was under way may have ended yet
        return verdict

    @asynccontextmanager
    async def _helpers(self) -> AsyncIterator[None]:
        """What goes on beside: heartbeat, news, evaluations. They end with the block."""
        async with asyncio.TaskGroup() as tasks:
            helpers = [
                tasks.create_task(self._beat(), name="heartbeat"),
                tasks.create_task(self._read_news(), name="news"),
                tasks.create_task(self.evaluator.work(), name="evaluations"),
            ]
            try:
                yield
            finally:
                for helper in helpers:
                    helper.cancel()

    async def _beat(self) -> None:
        while True:
            self.ledger.beat()
            self.look_for_stop()
            if shutil.disk_usage(self.run.path).free < LEAST_FREE_BYTES:
                await self.inbox.put(DiskFull())
            await asyncio.sleep(HEARTBEAT_S)

    async def _read_news(self) -> None:
        while True:
            await self.inbox.put(LookedAround())
            await asyncio.sleep(LOOK_EVERY_S)

    async def _read_fresh_rows(self) -> None:
        for tail in self.news:
            for row in tail.fresh():
                await self._on_row(row)

    def look_for_stop(self) -> None:
        """Read control/stop.json; a new request goes into the inbox."""
        mode = read_stop_request(self.run.path / "control" / "stop.json")
        if mode is None:
            return
        asked = StopAsked(mode, "control/stop.json")
        if asked != self.stop_asked:
            self.ask_to_stop(asked)

    def ask_to_stop(self, asked: StopAsked) -> None:
        """Somebody wants an end: a signal, or the control folder."""
        self.stop_asked = asked
        self.ledger.event("stop_requested", mode=asked.mode, by=asked.why)
        self.inbox.put_nowait(asked)

    async def _until_verdict(self) -> Verdict:
        while True:
            verdict = await self._on(await self.inbox.get())
            if verdict is not None:
                return verdict

    async def _on(self, message: Message) -> Verdict | None:
        match message:
            case StopAsked(mode="after_step") if "trainer" in self.crew.ready:
                self.ledger.update(status="stopping", phase=None)  # the trainer reads the request itself
            case StopAsked():
                return Verdict(status="stopped")
            case LookedAround():
                await self._read_fresh_rows()
            case Ready(role):
                self._on_ready(role.name)
            case TooSlow(role):
                slow = failures.too_slow(self.run, role.name, role.title, role.ready_within_s)
                return Verdict(status="failed", error=slow)
            case EngineGone():
                self.ledger.process("engine", exit="unknown", state="ended")
                self.service_lost = True
                return self._died("service", "The engine", None, ready=True)
            case DiskFull():
                return Verdict(status="failed", error=failures.disk_full(self.run))
            case Exited():
                return await self._on_exit(message)
        return None

    def _on_ready(self, name: str) -> None:
        self.ledger.event("ready", role=name)
        if name == "service":
            self._watch_engine()
        if self.ledger.state.status == "starting":
            waiting = [role for role in self.crew.roles if role.name not in self.crew.ready]
            phase: Phase | None = waiting[0].phase if waiting else None
            self.ledger.update(status="starting" if waiting else "running", phase=phase)

    def _watch_engine(self) -> None:
        engine = engine_of(self.run.path / "service")
        if engine is None:
            return
        self.ledger.process("engine", **engine)
        if (self.run.path / "service" / "engine.log").exists():
            self.run.log("engine").symlink_to(Path("..", "service", "engine.log"))

        async def watch() -> None:
            await gone(engine)
            await self.inbox.put(EngineGone())

        self.engine_watch = asyncio.create_task(watch(), name="engine watch")

    async def _on_row(self, row: dict[str, Any]) -> None:
        step = row.get("step")
        if row.get("src") == "trainer" and isinstance(step, int):
            self.ledger.update(step=max(step, self.ledger.state.step))
        elif row.get("type") == "checkpoint" and isinstance(step, int):
            if row.get("state_path"):
                self.ledger.update(last_checkpoint={k: row.get(k) for k in ("name", "step", "state_path")})
            if row.get("sampler_path") and self.evaluator.is_due(step, bool(row.get("final"))):
                await self.evaluator.ask(Snapshot(step=step, sampler_path=row["sampler_path"]))

    async def _on_exit(self, exited: Exited) -> Verdict | None:
        await self._read_fresh_rows()  # what it wrote last tells how it ended
        role, code = exited.role, exited.code
        self.service_lost |= role.name == "service"
        if role.name == "trainer" and code == 0:
            return self._trainer_done()
        if self.ledger.state.status == "stopping":
            return Verdict(status="stopped", note=f"{role.title} {failures.how(code)} while the run was stopping.")
        if role.name == "env" and code == 0 and await self._queue_suffices():
            return None
        if role.restarts:
            if await self.crew.restart(role):
                return None
            self.ledger.event("restarts_used_up", role=role.name)
        return self._died(role.name, role.title, code, ready=exited.was_ready)

    def _died(self, role: str, title: str, code: int | None, *, ready: bool) -> Verdict:
        step = self.ledger.state.step
        return Verdict(status="failed", error=failures.died(self.run, role, title, code, step=step, ready=ready))

    def _trainer_done(self) -> Verdict:
        """The trainer ended in order. Completed means: all steps (or the time that was given), and final weights."""
        state, final = self.ledger.state, final_checkpoint(self.run)
        if self.stop_asked:
            return Verdict(status="stopped")
        if final is None:
            return self._died("trainer", "Trainer", 0, ready=True)
        step, limit = final["step"], self.stage.scene.settings.run.max_minutes
        if step >= state.total_steps:
            return Verdict(status="completed")
        if limit is not None:
            note = f"The time limit of {limit:g} minutes was reached at step {step} of {state.total_steps}."
            return Verdict(status="completed", note=note)
        return self._died("trainer", "Trainer", 0, ready=True)

    async def _queue_suffices(self) -> bool:
        """An environment may end early where what was delivered and what waits make all the batches there will be."""
        told = await get_json(f"{self.stage.scene.api.url}/v1/diagnostics") or {}
        batch_size = self.stage.scene.settings.env.get("batch_size", 1)
        sequences = told.get("step", 0) * batch_size + told.get("queued_sequences", 0)
        return sequences >= self.ledger.state.total_steps * batch_size

    async def _last_evaluation(self, verdict: Verdict) -> Verdict:
        """Training is over: the environment may go, the service stays for what is left to evaluate."""
        self.ledger.update(status="running", phase="evaluation")
        await self.crew.end_role("env")
        evaluated = asyncio.create_task(self.evaluator.finished(), name="last evaluation")
        interrupted = asyncio.create_task(self._interruption(), name="interruption")
        try:
            await asyncio.wait((evaluated, interrupted), return_when=asyncio.FIRST_COMPLETED)
            if evaluated.done():
                return verdict
            note = f"{verdict.note or ''} The last evaluation is missing: {interrupted.result()}".strip()
            return Verdict(status=verdict.status, note=note)
        finally:
            evaluated.cancel()
            interrupted.cancel()
            await asyncio.gather(evaluated, interrupted, return_exceptions=True)

    async def _interruption(self) -> str:
        """Why a finished run's last evaluation cannot be waited for; never returns while it can."""
        while True:
            match await self.inbox.get():
                case StopAsked():
                    return "a stop was requested."
                case EngineGone():
                    return "the engine ended."
                case Exited(role, code) if role.name == "service":
                    return f"the training service {failures.how(code)}."
                case _:
                    pass  # of no consequence for a run that has trained
