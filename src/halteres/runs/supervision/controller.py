"""How one run goes, from its first process to the verdict: what follows from everything that happens to it.

A run has completed only with all steps (or the time that was given, or the held-out figure that was wanted) and final
weights. One loop takes what happens (`messages`) in order.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from halteres.config.control import read_stop_request, write_stop_request
from halteres.process import Lifeline
from halteres.runs import identity
from halteres.runs.diagnosis import HEARTBEAT_S, Diagnosis
from halteres.runs.diagnosis.case import Case
from halteres.runs.diagnosis.excursion import number
from halteres.runs.diagnosis.refused_calls import Calls
from halteres.runs.directory import RunDirectory
from halteres.runs.reading import failures
from halteres.runs.reading.evaluations import CORRECT
from halteres.runs.state import Phase, RunState
from halteres.runs.supervision import budgets
from halteres.runs.supervision.budgets import Budget, Cap
from halteres.runs.supervision.children import GRACE_S
from halteres.runs.supervision.conclusion import final_checkpoint
from halteres.runs.supervision.engine_watch import engine_of
from halteres.runs.supervision.engines import engines
from halteres.runs.supervision.evaluation import Evaluator
from halteres.runs.supervision.event_reader import EventReader
from halteres.runs.supervision.messages import (
    DiskFull,
    EngineBack,
    EngineGone,
    GraceOver,
    LookedAround,
    Message,
    StopAsked,
    Verdict,
)
from halteres.runs.supervision.process_group import Exited, ProcessGroup, Ready, TooSlow
from halteres.runs.supervision.roles import RolesOf, get_json
from halteres.runs.supervision.run_context import PreparedRun
from halteres.runs.supervision.sinks import Forwarding
from halteres.runs.supervision.state_writer import StateWriter


def trainer_ended(
    run: RunDirectory, state: RunState, max_minutes: float | None, *, stop_asked: bool, goal: str | None = None
) -> Verdict:
    """How a run ends whose trainer exited with code 0; `goal`: that its held-out figure was reached, in words."""
    final = final_checkpoint(run)
    if final and final["step"] >= state.total_steps:
        return Verdict(status="completed")
    if final and goal:
        return Verdict(
            status="completed", note=f"{goal}; the run ended at step {final['step']} of {state.total_steps}."
        )
    if stop_asked:
        return Verdict(status="stopped")
    ending = _final_event(run)
    if final and max_minutes is not None and ending.get("reason") == "time_limit":
        note = f"The time limit of {max_minutes:g} minutes was reached at step {final['step']} of {state.total_steps}."
        return Verdict(status="completed", note=note)
    error = failures.died(run, "trainer", "Trainer", 0, step=state.step, ready=True)
    if ending.get("why"):  # nobody asked its run to end, but somebody asked it
        error.why = f"It ended early, with a checkpoint: {ending['why']}."
    return Verdict(status="failed", error=error)


def _final_event(run: RunDirectory) -> Mapping[str, Any]:
    """What the trainer said of its final weights: `reason` and `why` of an early end."""
    finals = (event for event in run.events() if event.get("type") == "checkpoint" and event.get("final"))
    return next(reversed(list(finals)), {})


WITHOUT_SERVICE_S = 1.0
"""Grace of the others once the service is gone: no checkpoint can be written any more."""

LEAST_FREE_BYTES = 4 * 1024 * 1024
"""With less room on its disk a run is ended, while its end can still be written."""

LOOK_EVERY_S = 0.2
"""How often the files that the roles write are looked at."""


class RunController:
    """One run, from its first process to its last word."""

    def __init__(self, writer: StateWriter, prepared: PreparedRun, casting: RolesOf) -> None:
        self.writer, self.run, self.prepared = writer, writer.run, prepared
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.lifeline = Lifeline.open()
        self.process_group = ProcessGroup(writer, casting(prepared.context), self.lifeline, self.inbox)
        trainer = prepared.context.settings.trainer
        self.evaluator = Evaluator(writer, prepared.context.environment, self.lifeline, trainer.eval_every)
        if writer.state.resume_point:
            only_end_is_left = writer.state.step >= writer.state.total_steps  # it is evaluated, if need be again
            self.evaluator.skip_up_to(writer.state.step - only_end_is_left)
        self.budget = Budget.of(self.run, writer.state)
        self.diagnosis = Diagnosis(Case.of(self.run, writer.state.environment))
        self.events = EventReader(writer, self.evaluator, self.diagnosis, self.budget)
        self.forwarding = Forwarding(self.run, prepared.context.settings.sinks, self.lifeline)
        self.stop_asked: StopAsked | None = None
        self.cap: Cap | None = None  # of the policy, for which the run is ended
        self.goal: str | None = None  # that the held-out figure of `stop_when` is reached, in words
        self.drift: str | None = None  # the alert at which `on_drift` ends the run, in words
        self.engine_watch: asyncio.Task[None] | None = None
        self.service_lost = False

    async def run_to_verdict(self) -> Verdict:
        """Run all processes until a verdict; they have all ended when it is returned."""
        try:
            async with self._helpers():
                try:
                    await self.process_group.start()
                except OSError as error:
                    return Verdict(status="failed", error=failures.not_started(self.run, error))
                await self.forwarding.start()
                verdict = await self._until_verdict()
                if verdict.status == "completed":
                    verdict = await self._last_evaluation(verdict)
                elif verdict.status == "stopped":
                    self.writer.update(status="stopping", phase=None)
        finally:
            if self.engine_watch:
                self.engine_watch.cancel()
            await self.process_group.end(WITHOUT_SERVICE_S if self.service_lost else GRACE_S)
            await self.forwarding.end()
            self.lifeline.close()
            await self.events.read()  # the step that was under way may have ended yet
        if verdict.status == "stopped" and self.cap:
            newest = self.run.newest_checkpoint()
            note = self.budget.note(self.cap, newest["step"] if newest else None)
            return replace(verdict, code=budgets.CODE, note=note)
        if verdict.status == "stopped" and self.drift:
            return replace(verdict, note=" ".join(filter(None, (self.drift, verdict.note))))
        return verdict

    @asynccontextmanager
    async def _helpers(self) -> AsyncIterator[None]:
        """What goes on beside: looks, events, evaluations. They end with the block."""
        async with asyncio.TaskGroup() as tasks:
            helpers = [
                tasks.create_task(self._look_around(), name="look around"),
                tasks.create_task(self._read_events(), name="events"),
                tasks.create_task(self.evaluator.work(), name="evaluations"),
            ]
            try:
                yield
            finally:
                for helper in helpers:
                    helper.cancel()

    async def _look_around(self) -> None:
        while True:
            self.look_for_stop()
            self._look_for_stalls()
            await self._hear_of_calls()
            if shutil.disk_usage(self.run.path).free < LEAST_FREE_BYTES:
                await self.inbox.put(DiskFull())
            await asyncio.sleep(HEARTBEAT_S)

    async def _read_events(self) -> None:
        while True:
            await self.inbox.put(LookedAround())
            await asyncio.sleep(LOOK_EVERY_S)

    def _look_for_stalls(self) -> None:
        state = self.writer.state
        training = state.status in ("running", "stopping") and state.phase is None
        if alert := self.diagnosis.look(state.processes, training=training and "trainer" in self.process_group.ready):
            self.events.tell(alert)

    async def _hear_of_calls(self) -> None:
        """Until the first step: do the servers answer what the environment asks of them?"""
        context = self.prepared.context
        if context.api is None or self.diagnosis.has_trained or "api" not in self.process_group.ready:
            return
        service, api = await asyncio.gather(
            get_json(f"{context.inference.url}/halteres/v1/runs/{self.run.run_id}/requests", context.inference.key),
            get_json(f"{context.api.url}/v1/diagnostics", context.secret),
        )
        heard = [Calls.of_service(service)] if service else []
        heard += [Calls.of_trajectories(api)] if api else []
        for alert in filter(None, map(self.diagnosis.hear, heard)):
            self.events.tell(alert)

    def look_for_stop(self) -> None:
        """Read control/stop.json; a new request goes into the inbox."""
        mode = read_stop_request(self.run.path / "control" / "stop.json")
        if mode is None:
            return
        if self.stop_asked is None or self.stop_asked.mode != mode:
            self.ask_to_stop(StopAsked(mode, "control/stop.json"))

    def ask_to_stop(self, asked: StopAsked) -> None:
        """Somebody wants an end: a signal, or the control folder."""
        self.stop_asked = asked
        self.writer.event("stop_requested", mode=asked.mode, by=asked.why)
        self.inbox.put_nowait(asked)

    async def _until_verdict(self) -> Verdict:
        while True:
            verdict = await self._on(await self.inbox.get())
            if verdict is not None:
                return verdict

    async def _on(self, message: Message) -> Verdict | None:
        match message:
            case StopAsked(mode="after_step") if "trainer" in self.process_group.ready:
                if self.goal is None:  # the trainer reads the request itself
                    self.writer.update(status="stopping", phase=None)
            case StopAsked():
                return Verdict(status="stopped")
            case GraceOver():
                late = "the trainer did not end after its step, and was ended."
                if self.drift:
                    return Verdict(status="stopped", note=late.capitalize())  # the alert is put before it
                return Verdict(status="stopped", note=f"{self.goal}; {late}" if self.goal else None)
            case LookedAround():
                await self.events.read()
                self._mind_the_goal()
                self._mind_the_drift()
                return self._mind_the_budget()
            case Ready(role):
                self._on_ready(role.name)
            case TooSlow(role):
                slow = failures.too_slow(self.run, role.name, role.title, role.ready_within_s)
                return Verdict(status="failed", error=slow)
            case EngineGone(code):
                self._engine_died(code)
            case EngineBack(engine):
                self.writer.process("engine", **engine)
                self.writer.event("restart", role="engine")
            case DiskFull():
                return Verdict(status="failed", error=failures.disk_full(self.run))
            case Exited():
                return await self._on_exit(message)
        return None

    def _on_ready(self, name: str) -> None:
        self.writer.event("ready", role=name)
        if name == "service":
            self._watch_engine()
        if self.writer.state.status == "starting":
            waiting = [role for role in self.process_group.roles if role.name not in self.process_group.ready]
            phase: Phase | None = waiting[0].phase if waiting else None
            self.writer.update(status="starting" if waiting else "running", phase=phase)
            self.diagnosis.pulse.begin()

    def _watch_engine(self) -> None:
        engine = engine_of(self.run.path / "service")
        if engine is None:
            return
        self.writer.process("engine", **engine)
        if (self.run.path / "service" / "engine.log").exists() and not self.run.log("engine").is_symlink():
            self.run.log("engine").symlink_to(Path("..", "service", "engine.log"))
        if self.engine_watch:
            self.engine_watch.cancel()
        self.engine_watch = asyncio.create_task(self._follow_engine(engine), name="engine watch")

    async def _follow_engine(self, engine: Mapping[str, Any]) -> None:
        async for news in engines(self.run, engine):
            if self.process_group.exit_code("service") is not None:
                return  # it took its engine along, and its own exit is told
            await self.inbox.put(news)

    @property
    def _engine_is_gone(self) -> bool:
        engine = self.writer.state.processes.get("engine")
        return engine is not None and not identity.alive(engine)

    def _engine_died(self, code: int | None) -> None:
        """Its service starts another, and brings back what this one held."""
        facts = {"exit": "unknown", "state": "ended"} if code is None else {"exit": code, "state": f"exited ({code})"}
        self.writer.process("engine", **facts)
        self.writer.event("process_exit", role="engine", code=code)

    def _without_engine(self) -> Verdict:
        """The service has given its engine up, and the trainer could not go on."""
        code = (self.writer.state.processes.get("engine") or {}).get("exit")
        code = code if isinstance(code, int) else None
        self.service_lost = True
        verdict = self._died("service", "The engine", code, ready=True)
        if verdict.error:
            verdict.error.details["exit"] = {"process": "engine", "code": code}
        return verdict

    def _mind_the_budget(self) -> Verdict | None:
        """At a cap of the policy the trainer is asked to end after its step, as anybody may ask it to."""
        cap = None if self.cap or self.stop_asked else self.budget.used_up()
        if cap is None:
            return None
        if "trainer" in self.process_group.ready:
            self.cap = cap
            self.writer.event("policy_cap", cap=cap, note=self.budget.why(cap))
            self._ask_trainer_to_end(f"the policy's {cap}")
        elif cap == "max_hours":
            self.cap = cap
            return Verdict(status="stopped")
        return None

    def _mind_the_goal(self) -> None:
        """At the held-out figure that was wanted the trainer is asked to end after its step: the run has completed."""
        wanted, row = self.prepared.context.settings.run.stop_when, self.events.evaluation
        reached = number(row, CORRECT)
        if (
            wanted is None
            or self.stop_asked
            or "trainer" not in self.process_group.ready
            or reached is None
            or reached < wanted
        ):
            return
        self.goal = f"{CORRECT} was {reached:.4g} at step {row['step']}: stop_when ({wanted:g}) is reached"
        self.writer.event("goal_reached", step=row["step"], note=self.goal)
        self._ask_trainer_to_end("stop_when")

    def _mind_the_drift(self) -> None:
        """At an alert of drift the trainer is asked to end after its step, where the run's settings say so."""
        alert, action = self.events.drift, self.prepared.context.settings.run.on_drift
        if alert is None or action != "stop" or self.stop_asked or "trainer" not in self.process_group.ready:
            return
        self.drift = f"The alert {alert.rule} came at step {alert.step}, and on_drift is stop. {alert.evidence}"
        self.writer.event("drift", rule=alert.rule, step=alert.step, note=self.drift)
        self._ask_trainer_to_end(f"on_drift ({alert.rule})")

    def _ask_trainer_to_end(self, why: str) -> None:
        """After its step, with a checkpoint; if it has not ended within a grace, it is ended."""
        with suppress(OSError):  # on a full disk the grace ends it
            write_stop_request(self.run.path / "control" / "stop.json", "after_step")
        self.ask_to_stop(StopAsked("after_step", why))
        asyncio.get_running_loop().call_later(self.budget.grace_s, self.inbox.put_nowait, GraceOver())

    async def _on_exit(self, exited: Exited) -> Verdict | None:
        await self.events.read()  # what it wrote last tells how it ended
        role, code = exited.role, exited.code
        if role.name == "trainer" and code == 0:
            limit = self.prepared.context.settings.run.max_minutes
            asked = self.stop_asked is not None
            return trainer_ended(self.run, self.writer.state, limit, stop_asked=asked, goal=self.goal)
        if self.writer.state.status == "stopping":
            return Verdict(status="stopped", note=f"{role.title} {failures.how(code)} while the run was stopping.")
        if role.name == "env" and code == 0 and await self._queue_suffices():
            return None
        if role.name == "trainer" and self._engine_is_gone:
            return self._without_engine()
        if role.restarts and not failures.gave_up(self.run, role.name, code):
            if await self.process_group.restart(role):
                return None
            self.writer.event("restarts_used_up", role=role.name)
        self.service_lost |= role.name == "service"
        return self._died(role.name, role.title, code, ready=exited.was_ready)

    def _died(self, role: str, title: str, code: int | None, *, ready: bool) -> Verdict:
        step = self.writer.state.step
        return Verdict(status="failed", error=failures.died(self.run, role, title, code, step=step, ready=ready))

    async def _queue_suffices(self) -> bool:
        """An environment may end early where what was delivered and what waits make all the batches there will be."""
        context = self.prepared.context
        if context.api is None:
            return False
        told = await get_json(f"{context.api.url}/v1/diagnostics", context.secret) or {}
        batch_size = context.settings.env.get("batch_size", 1)
        sequences = told.get("step", 0) * batch_size + told.get("queued_sequences", 0)
        return sequences >= self.writer.state.total_steps * batch_size

    async def _last_evaluation(self, verdict: Verdict) -> Verdict:
        """Training is over: the environment may go, the service stays for what is left to evaluate."""
        self.writer.update(status="running", phase="evaluation")
        await self.process_group.end_role("env")
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
                case Exited(role, code) if role.name == "service":
                    return f"the training service {failures.how(code)}."
                case _:
                    pass  # of no consequence for a run that has trained
