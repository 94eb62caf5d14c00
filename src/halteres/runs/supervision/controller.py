"""The supervisor's event loop: what follows from exits, stop requests, caps and alerts, until the
run has an outcome.

A run has completed only with all steps (or its time limit, or its held-out goal) and final weights.
One loop takes what happens from an inbox, in order.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import ValidationError

from halteres.config.environ import Mode, read_stop_request, write_stop_request
from halteres.config.operator_policy import Policy
from halteres.errors import HalteresError, InvalidConfig
from halteres.files import read_regular
from halteres.observe.metrics import Row, Tail, WriteFailed, append_row
from halteres.process import GRACE_S, CpuShare, Lifeline, alive, peak_memory_bytes
from halteres.runs.diagnosis.alerts import Calls, Diagnosis
from halteres.runs.diagnosis.rules import DRIFT
from halteres.runs.diagnosis.run_facts import RunFacts, number
from halteres.runs.directory import HEARTBEAT_S, RunDirectory, StateWriter
from halteres.runs.reading import failures
from halteres.runs.reading.alerts import Alert
from halteres.runs.reading.evaluations import CORRECT
from halteres.runs.reading.status_figures import ENGINE_SHARE
from halteres.runs.state import Phase, RunState, Status
from halteres.runs.supervision.evaluation import Evaluator, Snapshot
from halteres.runs.supervision.hang_watch import LOOK_S
from halteres.runs.supervision.roles import Role, RolesOf, RunContext, get_json
from halteres.runs.supervision.run_processes import (
    EngineBack,
    EngineGone,
    Exited,
    Forwarding,
    Ready,
    RunProcesses,
    TooSlow,
    engine_of,
    engines,
)

_log = logging.getLogger(__name__)

# grace of the others once the service is gone: no checkpoint can be written any more
WITHOUT_SERVICE_S = 1.0
# with less room on its disk a run is ended, while its end can still be written
LEAST_FREE_BYTES = 4 * 1024 * 1024
POLL_S = 0.2  # how often the files that the roles write are looked at
POLICY = "policy.json"
ENGINE_PEAK = "engine/peak_memory_gb"
"""Metric of the engine's process: 10^9 bytes of the machine's memory, the most so far."""

CAP_GRACE_S, MOST_GRACE_S, GRACE_STEPS = 300.0, 3600.0, 3
"""How long the trainer may take to end, with a checkpoint, once a cap was reached; then it is
ended. As long as so many steps, within these limits: the one under way, and what must be written
after it.
"""

Cap = Literal["max_steps", "max_tokens", "max_hours"]


class Budget:
    """What one run may use by the operator's caps, and has used.

    Steps and tokens count over the whole curve: what a resumed run was carried over counts in it,
    so that resuming renews no budget. Hours are those of the run itself, from its supervisor's
    start, by a clock that nobody sets and that stands still while the machine sleeps.
    """

    def __init__(
        self, policy: Policy, state: RunState, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._policy, self._clock = policy, clock
        self._total_steps, self._began = state.total_steps, clock()
        self._steps = 0
        self._tokens = self._last_tokens = 0.0
        self._seconds = deque[float](maxlen=8)  # of the last steps

    @classmethod
    def of(cls, run: RunDirectory, state: RunState) -> Budget:
        """By the policy that held when the run was started; without one there are no caps.

        Raises:
            InvalidConfig: the file is no policy. A run must not go on because its caps cannot be
                read.
        """
        try:
            policy = Policy.model_validate_json(read_regular(run.path / POLICY))
        except FileNotFoundError:
            policy = Policy()
        except (OSError, ValidationError) as error:
            why = " ".join(str(error).split()).partition(" For further information")[0]
            raise InvalidConfig(
                f"{run.path / POLICY} cannot be read.", f"{why}.", "Start the run again."
            ) from error
        return cls(policy, state)

    def remember(self, rows: Iterable[Row]) -> None:
        """Rows that were carried over."""
        for row in rows:
            self.see(row)

    def see(self, row: Row) -> None:
        """One row of metrics.jsonl; a trainer's counts."""
        step, seconds = row.get("step"), row.get("time/step")
        # sampled for training; on a file what is trained on
        tokens = row.get("tokens/action", row.get("tokens/trained"))
        if row.get("src") != "trainer" or not isinstance(step, int):
            return
        self._steps = max(self._steps, step)
        if isinstance(tokens, int | float):
            self._last_tokens = float(tokens)
            self._tokens += self._last_tokens
        if isinstance(seconds, int | float):
            self._seconds.append(float(seconds))

    @property
    def grace_s(self) -> float:
        """How long the trainer may take to end at a cap, by how long its last steps took."""
        step_s = 0.0
        if self._seconds:
            step_s = median(self._seconds)
        return max(CAP_GRACE_S, min(MOST_GRACE_S, GRACE_STEPS * step_s))

    def used_up(self) -> Cap | None:
        """The first cap that leaves no room for a step after the one under way."""
        caps = self._policy.caps
        if caps.max_steps is not None and self._total_steps > caps.max_steps <= self._steps + 1:
            return "max_steps"
        if (
            caps.max_tokens is not None
            and self._steps
            and self._tokens + self._last_tokens >= caps.max_tokens
        ):
            return "max_tokens"
        if caps.max_hours is not None and (self._clock() - self._began) / 3600 >= caps.max_hours:
            return "max_hours"
        return None

    def note(self, cap: Cap, checkpoint_step: int | None) -> str:
        """Why a run that was ended for this cap has ended, what is left of it, and what can be
        done.
        """
        learnt = "No checkpoint was written: nothing that it learnt is kept."
        if checkpoint_step is not None:
            learnt = f"What was learnt up to step {checkpoint_step} is kept."
        return f"{self.why(cap)} {learnt} The operator can raise caps.{cap} in policy.yaml."

    def why(self, cap: Cap) -> str:
        """What of this cap is used."""
        hours = (self._clock() - self._began) / 3600
        used = {"max_steps": self._steps, "max_tokens": self._tokens, "max_hours": hours}[cap]
        limit, unit = getattr(self._policy.caps, cap), cap.removeprefix("max_")
        return (
            f"Ended by the operator's policy '{self._policy.name}': {cap} is {limit:,g}; "
            f"{used:,.4g} {unit} are used."
        )


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Somebody wants the run to end."""

    mode: Mode
    by: str  # who


class Occasion(Enum):
    """What happens without further facts."""

    LOOK = "it is time to read what the roles have written"
    DISK_FULL = (
        "nothing more can be written: not every process notices, and some would wait for ever"
    )
    GRACE_OVER = "the trainer was asked to end early, and has not"


# whatever happens to a run
Message = Occasion | StopRequest | EngineGone | EngineBack | Ready | TooSlow | Exited


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How the run ends."""

    status: Status
    error: HalteresError | None = None
    # of a run that has not failed, where one speaks of it; an error has its own
    code: str | None = None
    note: str | None = None


@dataclass(slots=True, kw_only=True)
class Hang:
    """What is known of hangs of a role's event loop."""

    times: int = 0
    silent_s: float = 0.0  # of the last
    where: str = ""  # function, file and line of the author's that was at work
    is_last_exit: bool = False  # whether the exit that comes next is of our killing it


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyEnd:
    """Why the supervisor itself ends the run before its last step."""

    kind: Literal["policy_cap", "goal_reached", "drift"]  # of the event
    note: str  # in words
    by: str  # who asks the trainer to end
    facts: Mapping[str, Any]  # of the event
    cap: Cap | None = None


def final_checkpoint(run: RunDirectory) -> Row | None:
    """The checkpoint that its trainer called final."""
    return next((row for row in reversed(run.checkpoints()) if row.get("final")), None)


class RunController:
    """One run, from its first process to its verdict."""

    def __init__(self, writer: StateWriter, context: RunContext, roles_of: RolesOf) -> None:
        self.writer, self.run, self.context, self.settings = (
            writer,
            writer.run,
            context,
            context.settings,
        )
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.lifeline = Lifeline.open()
        self.processes = RunProcesses(writer, roles_of(context), self.lifeline, self.inbox)
        self.evaluator = Evaluator(
            writer, context.environment, self.lifeline, self.settings.trainer.eval_every
        )
        if writer.state.resume_point:
            # it is evaluated, if need be again
            only_end_is_left = writer.state.step >= writer.state.total_steps
            self.evaluator.skip_up_to(writer.state.step - only_end_is_left)
        self.budget = Budget.of(self.run, writer.state)
        self.diagnosis = Diagnosis(RunFacts.of(self.run))
        self.forwarding = Forwarding(self.run, self.settings.sinks, self.lifeline)
        self._events, self._metrics = (
            Tail(self.run.path / name) for name in ("events.jsonl", "metrics.jsonl")
        )
        self._events.fresh()
        # what a resumed run begins with counts, and nothing is said of it
        carried_over = self._metrics.fresh()
        self.diagnosis.remember(carried_over)
        self.budget.remember(carried_over)
        self._engine_peak_bytes, self._engine_share = 0, CpuShare()
        self._unmeasured_step: int | None = None
        self._evaluation: Row = {}  # the newest row of an evaluation
        self._drift: Alert | None = None  # the first alert of drift
        self.stop_request: StopRequest | None = None
        self.early_end: EarlyEnd | None = None
        self.engine_watch: asyncio.Task[None] | None = None
        self.service_lost = False
        self._hang = Hang()  # of the environment

    @property
    def _trainer_is_ready(self) -> bool:
        return "trainer" in self.processes.ready

    async def run_to_verdict(self) -> Verdict:
        """Run all processes until a verdict; they have all ended when it is returned."""
        try:
            async with self._helpers():
                try:
                    self.processes.start()
                except OSError as error:
                    return Verdict(status="failed", error=failures.not_started(self.run, error))
                self.forwarding.start()
                verdict: Verdict | None = None
                while verdict is None:
                    verdict = await self._on(await self.inbox.get())
                if verdict.status == "completed" and not self.writer.state.is_on_file:
                    verdict = await self._last_evaluation(verdict)
                elif verdict.status == "stopped":
                    self.writer.update(status="stopping", phase=None)
        finally:
            if self.engine_watch:
                self.engine_watch.cancel()
            await self.processes.end(WITHOUT_SERVICE_S if self.service_lost else GRACE_S)
            await self.forwarding.end()
            self.lifeline.close()
            await self._read_files()  # the step that was under way may have ended yet
        early = self.early_end
        if verdict.status == "stopped" and early and early.cap:
            newest = self.run.newest_checkpoint()
            note = self.budget.note(early.cap, newest["step"] if newest else None)
            return replace(verdict, code=early.kind, note=note)
        if verdict.status == "stopped" and early and early.kind == "drift":
            return replace(verdict, note=" ".join(filter(None, (early.note, verdict.note))))
        return verdict

    @asynccontextmanager
    async def _helpers(self) -> AsyncIterator[None]:
        """What goes on beside: looks, events, evaluations. They end with the block."""

        async def look_around() -> None:
            while True:
                self.look_for_stop()
                state = self.writer.state
                training = (
                    state.status in ("running", "stopping")
                    and state.phase is None
                    and self._trainer_is_ready
                )
                if alert := self.diagnosis.look(state.processes, training=training):
                    self._report(alert)
                await self._look_at_calls()
                if shutil.disk_usage(self.run.path).free < LEAST_FREE_BYTES:
                    await self.inbox.put(Occasion.DISK_FULL)
                await asyncio.sleep(HEARTBEAT_S)

        async def read_events() -> None:
            while True:
                await self.inbox.put(Occasion.LOOK)
                await asyncio.sleep(POLL_S)

        async def look_for_hangs() -> None:
            while True:
                if role := self.processes.hung():
                    await self._kill_hung(role)
                await asyncio.sleep(LOOK_S)

        async with asyncio.TaskGroup() as tasks:
            work = (look_around(), read_events(), look_for_hangs(), self.evaluator.work())
            helpers = [tasks.create_task(one, name=one.__name__) for one in work]
            try:
                yield
            finally:
                for helper in helpers:
                    helper.cancel()

    async def _kill_hung(self, role: Role) -> None:
        """Kill a role whose event loop hangs; its exit, which is reported, says what follows."""
        watch = role.hang_watch
        assert watch is not None, "it was found by it"  # noqa: S101 - for the type checker
        hang, state = self._hang, self.writer.state
        hang.times, hang.silent_s, hang.is_last_exit = hang.times + 1, watch.silent_s, True
        hang.where = failures.hung_at(self.run, role.name, state.environment_file)
        item, facts = watch.at_work_on, {}
        if item:
            facts = {name: item[name] for name in ("draw_step", "ordinal", "drawing")}
        self.writer.event(
            "stuck",
            role=role.name,
            step=state.step,
            silent_s=round(hang.silent_s, 1),
            where=hang.where,
            **facts,
        )
        self._report(self.diagnosis.hang(hang.silent_s, hang.where))
        await self.processes.kill(role.name)

    async def _look_at_calls(self) -> None:
        """Until the first step: do the servers answer what the environment asks of them?"""
        context = self.context
        if context.api is None or self.diagnosis.has_trained or "api" not in self.processes.ready:
            return
        service, api = await asyncio.gather(
            get_json(
                f"{context.inference.url}/halteres/v1/runs/{self.run.run_id}/requests",
                context.inference.key,
            ),
            get_json(f"{context.api.url}/v1/diagnostics", context.secret),
        )
        calls = [
            *([Calls.of_service(service)] if service else []),
            *([Calls.of_trajectories(api)] if api else []),
        ]
        for alert in filter(None, map(self.diagnosis.look_at_calls, calls)):
            self._report(alert)

    def look_for_stop(self) -> None:
        """Read control/stop.json; a new request goes into the inbox."""
        mode = read_stop_request(self.run.path / "control" / "stop.json")
        if mode is not None and (self.stop_request is None or self.stop_request.mode != mode):
            self.ask_to_stop(StopRequest(mode, "control/stop.json"))

    def ask_to_stop(self, request: StopRequest) -> None:
        """Somebody wants an end: a signal, or the control folder."""
        self.stop_request = request
        self.writer.event("stop_requested", mode=request.mode, by=request.by)
        self.inbox.put_nowait(request)

    async def _on(self, message: Message) -> Verdict | None:
        match message:
            # it reads the request itself
            case StopRequest(mode="after_step") if self._trainer_is_ready:
                if self.early_end is None or self.early_end.kind != "goal_reached":
                    self.writer.update(status="stopping", phase=None)
            case StopRequest():
                return Verdict(status="stopped")
            case Occasion.GRACE_OVER:
                late, early = (
                    "the trainer did not end after its step, and was ended.",
                    self.early_end,
                )
                if early and early.kind == "drift":
                    # the alert is put before it
                    return Verdict(status="stopped", note=late.capitalize())
                goal = early and early.kind == "goal_reached"
                return Verdict(
                    status="stopped", note=f"{early.note}; {late}" if early and goal else None
                )
            case Occasion.LOOK:
                await self._read_files()
                return self._end_early()
            case Ready(role):
                self.writer.event("ready", role=role.name)
                if role.name == "service":
                    self._watch_engine()
                if self.writer.state.status == "starting":
                    waiting = [
                        one for one in self.processes.roles if one.name not in self.processes.ready
                    ]
                    phase: Phase | None = None
                    if waiting:
                        phase = waiting[0].phase
                    self.writer.update(status="starting" if waiting else "running", phase=phase)
                    self.diagnosis.stalls.begin()
            case TooSlow(role):
                slow = failures.too_slow(self.run, role.name, role.title, role.ready_within_s)
                return Verdict(status="failed", error=slow)
            case EngineGone(code):  # its service starts another, and brings back what this one held
                known = code is not None
                if known:
                    facts = {"exit": code, "state": f"exited ({code})"}
                else:
                    facts = {"exit": "unknown", "state": "ended"}
                self.writer.process("engine", **facts)
                self.writer.event("process_exit", role="engine", code=code)
            case EngineBack(engine):
                self.writer.process("engine", **engine)
                self.writer.event("restart", role="engine")
            case Occasion.DISK_FULL:
                return Verdict(status="failed", error=failures.disk_full(self.run))
            case Exited():
                return await self._on_exit(message)
        return None

    def _watch_engine(self) -> None:
        engine = engine_of(self.run.path / "service")
        if engine is None:
            return
        self.writer.process("engine", **engine)
        if (self.run.path / "service" / "engine.log").exists() and not self.run.log(
            "engine"
        ).is_symlink():
            self.run.log("engine").symlink_to(Path("..", "service", "engine.log"))

        async def follow() -> None:
            async for message in engines(self.run, engine):
                if self.processes.exit_code("service") is not None:
                    return  # it took its engine along, and its own exit is reported
                await self.inbox.put(message)

        if self.engine_watch:
            self.engine_watch.cancel()
        self.engine_watch = asyncio.create_task(follow(), name="engine watch")

    async def _on_exit(self, exited: Exited) -> Verdict | None:
        await self._read_files()  # what it wrote last tells how it ended
        role, code, state = exited.role, exited.code, self.writer.state
        if role.name == "trainer" and code == 0:
            return self._trainer_ended()
        if state.status == "stopping":
            return Verdict(
                status="stopped",
                note=f"{role.title} {failures.how(code)} while the run was stopping.",
            )
        if role.name == "env" and code == 0 and self.context.api is not None:
            # It may end early where what was delivered and what waits make all the batches there
            # will be.
            queue = (
                await get_json(f"{self.context.api.url}/v1/diagnostics", self.context.secret) or {}
            )
            batch_size = self.settings.env.get("batch_size", 1)
            sequences = queue.get("step", 0) * batch_size + queue.get("queued_sequences", 0)
            if sequences >= state.total_steps * batch_size:
                return None
        engine = state.processes.get("engine")
        if role.name == "trainer" and engine is not None and not alive(engine):
            # The service has given its engine up, and the trainer could not go on.
            self.service_lost = True
            engine_code = None
            if isinstance(engine.get("exit"), int):
                engine_code = engine["exit"]
            error = failures.died(
                self.run, "service", "The engine", engine_code, step=state.step, ready=True
            )
            error.details["exit"] = {"process": "engine", "code": engine_code}
            return Verdict(status="failed", error=error)
        hung = False
        if role.hang_watch is not None:
            hung, self._hang.is_last_exit = self._hang.is_last_exit, False
        # The service of a new run that refuses its settings or its model would do so again; that of
        # a run that goes on may have found its predecessor, which was about to end.
        is_new = state.status == "starting" and state.resume_point is None
        refused = role.name == "service" and is_new and code > 0
        if role.restarts and not refused and not failures.gave_up(self.run, role.name, code):
            if self.processes.restart(role, failures.STUCK if hung else None):
                return None
            self.writer.event("restarts_used_up", role=role.name)
        if hung:
            error = failures.stuck(
                self.run, role.name, role.title, self._hang.silent_s, self._hang.where, state.step
            )
            return Verdict(status="failed", error=error)
        self.service_lost |= role.name == "service"
        error = failures.died(
            self.run, role.name, role.title, code, step=state.step, ready=exited.was_ready
        )
        return Verdict(status="failed", error=error)

    def _trainer_ended(self) -> Verdict:
        run, early, limit = self.run, self.early_end, self.settings.run.max_minutes
        final, total = final_checkpoint(run), self.writer.state.total_steps
        if final and final["step"] >= total:
            return Verdict(status="completed")
        if final and early and early.kind == "goal_reached":
            note = f"{early.note}; the run ended at step {final['step']} of {total}."
            return Verdict(status="completed", note=note)
        if self.stop_request is not None:
            return Verdict(status="stopped")
        # What the trainer said of its final weights: `reason` and `why` of an early end.
        ends = [
            event
            for event in run.events()
            if event.get("type") == "checkpoint" and event.get("final")
        ]
        ending = {}
        if ends:
            ending = ends[-1]
        if final and limit is not None and ending.get("reason") == "time_limit":
            note = (
                f"The time limit of {limit:g} minutes was reached at step {final['step']} of "
                f"{total}."
            )
            return Verdict(status="completed", note=note)
        error = failures.died(run, "trainer", "Trainer", 0, step=self.writer.state.step, ready=True)
        if ending.get("why"):  # nobody asked its run to end, but somebody asked it
            error.why = f"It ended early, with a checkpoint: {ending['why']}."
        return Verdict(status="failed", error=error)

    async def _read_files(self) -> None:
        """Read on in what the roles write: each event and each row of metrics is acted on once."""
        for event in self._events.fresh():
            kind, step = event.get("type"), event.get("step")
            if kind == "notice":
                self._report(
                    self.diagnosis.notice(event, resumable=self.run.newest_checkpoint() is not None)
                )
            elif kind == "planned" and isinstance(total := event.get("total_steps"), int):
                self.writer.update(total_steps=total)
            elif kind == "checkpoint" and isinstance(step, int):
                if event.get("state_path"):
                    self.writer.update(
                        last_checkpoint={k: event.get(k) for k in ("name", "step", "state_path")}
                    )
                is_sampled = event.get("sampler_path") and self.writer.state.kind == "rl"
                if is_sampled and self.evaluator.is_due(step, bool(event.get("final"))):
                    await self.evaluator.add(
                        Snapshot(step=step, sampler_path=event["sampler_path"])
                    )
        for row in self._metrics.fresh():
            step = row.get("step")
            if row.get("src") == "trainer" and isinstance(step, int):
                self.writer.update(step=max(step, self.writer.state.step))
                self._unmeasured_step = step
            if row.get("src") == "eval":
                self._evaluation = row
            self.budget.see(row)
            for alert in self.diagnosis.observe(row):
                self._report(alert)
            for rule in self.diagnosis.cleared:
                self.writer.event("alert_over", rule=rule, step=step)
        if self._unmeasured_step is not None:
            self._measure_engine(self._unmeasured_step)

    def _measure_engine(self, step: int) -> None:
        """Write down the most memory that an engine of this run has held up to this step."""
        engine = self.writer.state.processes.get("engine", {})
        peak = None
        if alive(engine):
            peak = peak_memory_bytes(engine["pid"])
        if peak is None:
            # it is not known yet: looked for again at the next turn
            return
        self._unmeasured_step = None
        self._engine_peak_bytes = max(self._engine_peak_bytes, peak)
        peak_gb = round(self._engine_peak_bytes / 1e9, 3)
        row = {"step": step, "t": time.time(), "src": "supervisor", ENGINE_PEAK: peak_gb}
        if (share := self._engine_share.since_last(engine["pid"])) is not None:
            row[ENGINE_SHARE] = round(share, 3)
        with suppress(WriteFailed):  # a full disk ends the run elsewhere
            append_row(self.run.path / "metrics.jsonl", row)

    def _report(self, alert: Alert) -> None:
        _log.warning("%s (step %d): %s", alert.rule, alert.step, alert.evidence)
        if any(alert.rule == rule.name for rule in DRIFT):
            self._drift = self._drift or alert
        self.writer.event("alert", **alert.facts)

    def _end_early(self) -> Verdict | None:
        """At a cap of the policy, at the held-out goal, or at drift, the trainer is asked to end
        after its step, with a checkpoint; if it has not ended within a grace, it is ended.
        """
        early = None
        if not (self.stop_request or self.early_end):
            early = self._why_early()
        if early is None or not (self._trainer_is_ready or early.cap == "max_hours"):
            return None
        self.early_end = early
        if not self._trainer_is_ready:
            return Verdict(status="stopped")
        self.writer.event(early.kind, **early.facts, note=early.note)
        with suppress(OSError):  # on a full disk the grace ends it
            write_stop_request(self.run.path / "control" / "stop.json", "after_step")
        self.ask_to_stop(StopRequest("after_step", early.by))
        asyncio.get_running_loop().call_later(
            self.budget.grace_s, self.inbox.put_nowait, Occasion.GRACE_OVER
        )
        return None

    def _why_early(self) -> EarlyEnd | None:
        run, reached, alert = self.settings.run, number(self._evaluation, CORRECT), self._drift
        if run.stop_when is not None and reached is not None and reached >= run.stop_when:
            step = self._evaluation["step"]
            note = (
                f"{CORRECT} was {reached:.4g} at step {step}: stop_when ({run.stop_when:g}) is "
                "reached"
            )
            return EarlyEnd(kind="goal_reached", note=note, by="stop_when", facts={"step": step})
        if alert is not None and run.on_drift == "stop":
            note = (
                f"The alert {alert.rule} came at step {alert.step}, and on_drift is stop. "
                f"{alert.evidence}"
            )
            facts = {"rule": alert.rule, "step": alert.step}
            return EarlyEnd(kind="drift", note=note, by=f"on_drift ({alert.rule})", facts=facts)
        if cap := self.budget.used_up():
            note, facts = self.budget.why(cap), {"cap": cap}
            return EarlyEnd(
                kind="policy_cap", note=note, by=f"the policy's {cap}", facts=facts, cap=cap
            )
        return None

    async def _last_evaluation(self, verdict: Verdict) -> Verdict:
        """Training is over: the environment may go, the service stays for what is left to
        evaluate.
        """
        self.writer.update(status="running", phase="evaluation")
        await self.processes.end_role("env")

        async def interruption() -> str:
            """Why it cannot be waited for; never returns while it can."""
            while True:
                match await self.inbox.get():
                    case StopRequest():
                        return "a stop was requested."
                    case Exited(role, code) if role.name == "service":
                        return f"the training service {failures.how(code)}."
                    case EngineGone() | EngineBack() as message:
                        await self._on(message)
                    case _:
                        pass  # of no consequence for a run that has trained

        evaluated = asyncio.create_task(self.evaluator.finished(), name="last evaluation")
        interrupted = asyncio.create_task(interruption(), name="interruption")
        try:
            await asyncio.wait((evaluated, interrupted), return_when=asyncio.FIRST_COMPLETED)
            if evaluated.done():
                return verdict
            note = (
                f"{verdict.note or ''} The last evaluation is missing: {interrupted.result()}"
            ).strip()
            return Verdict(status=verdict.status, note=note)
        finally:
            evaluated.cancel()
            interrupted.cancel()
            await asyncio.gather(evaluated, interrupted, return_exceptions=True)
