"""The tool that starts training: rl_start_training.

Owns: the settings that a call means, from a draft or from a run that is gone on from: selected and edited first, where
that is asked for. With `dry_run` it starts nothing: every check, the estimate and what was changed are told.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, Field

from halteres.agent.drafting.configuring import mended_call, mending
from halteres.agent.drafting.drafts import choose, current, editing, load_draft, save_draft, sifted
from halteres.agent.drafting.fields import brief, diff
from halteres.agent.starting.estimates import Estimate, estimate
from halteres.agent.tool import Caller, Changes, Draft, Hints, Result, tool
from halteres.agent.trial.folder import TestOutcome, latest_test
from halteres.agent.watching.look import look_at
from halteres.agent.watching.next_steps import next_call
from halteres.config import environ
from halteres.config.discovery import EnvironmentNotFound
from halteres.config.files import Resolved, resolve_settings
from halteres.config.settings import Settings
from halteres.errors import HalteresError, InvalidConfig, UserError
from halteres.next_step import NextStep, worded
from halteres.runs.directory import RunDirectory, find_run
from halteres.runs.starting.preflight import Check, Examined, Plan, examine
from halteres.runs.starting.start import ROLES, Start, begin_run, plan_of, run_of_key, sources_of
from halteres.runs.state import RunState

TOOL = "rl_start_training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The arguments that matter here."""

    caller: Caller
    environment: str | None
    changes: Mapping[str, Any]
    name: str | None
    resume_from: str | None
    draft: str | None

    @property
    def handle(self) -> str:
        """The draft that is meant."""
        return self.draft or self.caller.draft

    @property
    def elsewhere(self) -> str | None:
        """The draft that the next call must name; None where that is the caller's own."""
        return self.draft if self.draft != self.caller.draft else None

    def again(self, **arguments: Any) -> str:
        """The call that starts the same, once selecting and editing are done."""
        changes = self.changes if self.resume_from and self.changes else None
        own = {"resume_from": self.resume_from, "changes": changes, "name": self.name, "draft": self.elsewhere}
        return worded(TOOL, **arguments, **own)

    def mended(self, refused: HalteresError) -> HalteresError:
        """A refusal to go on from a run, with the call that would not be refused."""
        if self.resume_from and not isinstance(refused.next, NextStep):
            again = mended_call(refused, TOOL, self.changes, resume_from=self.resume_from, name=self.name)
            refused.next = again or refused.next
        return refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A run that is wanted."""

    resolved: Resolved
    before: Resolved  # what the changes are counted from: the environment's defaults, or the old run
    old: RunDirectory | None = None
    discarded: Mapping[str, Any] | None = None  # edits that the draft had for another environment, or can have no more

    @property
    def plan(self) -> Plan:
        """For checks and estimates."""
        return plan_of(self.resolved.settings, service_url=environ.service_url(), resume=self.old)

    @property
    def going_on(self) -> str | None:
        """Of a run that goes on from a checkpoint: from which step, what is done again, and whose settings hold."""
        checkpoint = self.old.newest_checkpoint() if self.old else None
        if self.old is None or checkpoint is None:
            return None
        step, reached = checkpoint["step"], look_at(self.old).step
        redone = f"Steps {step + 1} to {reached} are" if reached > step + 1 else f"Step {reached} is"
        again = f" {redone} done again: no checkpoint has what was learnt there." if reached > step else ""
        changed = ", ".join(f"{name} {before} -> {now}" for name, (before, now) in self.changed.items())
        settings = f"that run's{f', but {changed}' if changed else ''}; your draft plays no part"
        goes_on = f"Training goes on after step {step} of run {self.old.run_id}, as a new run."
        return f"{goes_on}{again} Its settings are {settings}."

    @property
    def changed(self) -> dict[str, list[Any]]:
        """name -> [before, now]."""
        return {name: pair for name, pair in diff(self.before, self.resolved).items() if name not in _TOLD_ELSEWHERE}


_TOLD_ELSEWHERE = ("name", "run.name", "environment", "run.environment")


def intent_of(call: Call) -> Intent:
    """Find out; with an environment or changes, the draft is changed.

    Raises:
        UserError: no environment, settings that cannot be used, no such run; the draft is as it was.
    """
    arguments = {"environment": call.environment, "resume_from": call.resume_from, "draft": call.draft}
    with mending(TOOL, call.changes, **arguments):
        found = _resumed(call) if call.resume_from else _drafted(call)
    return _named(found, call.name)


def _drafted(call: Call) -> Intent:
    discarded: Mapping[str, Any] | None = None
    if call.environment is not None:
        chosen = choose(call.caller, call.draft, call.environment, call.changes)
        resolved, discarded = chosen.resolved, chosen.discarded
    elif call.changes:
        with editing(call.caller, call.draft) as before:
            before.check_selected()
            kept = sifted(before)
            after, resolved = kept.draft.edited(call.changes)
            save_draft(after)
        discarded = kept.discarded
    else:
        resolved, discarded = _kept(call)
    defaults = resolve_settings(resolved.settings.run.environment, None, ())
    return Intent(resolved=resolved, before=defaults, discarded=discarded)


def _kept(call: Call) -> tuple[Resolved, Mapping[str, Any]]:
    """The draft as it is, and what it can have no more."""
    draft = load_draft(call.caller, call.draft)
    draft.check_selected()
    try:
        kept = current(call.caller, call.draft)
        return kept.draft.resolve(), kept.discarded
    except EnvironmentNotFound as error:
        what = f"Environment file not found for '{draft.selected}'."
        raise EnvironmentNotFound(what, error.sentence, error.next, **error.details) from error


def _resumed(call: Call) -> Intent:
    if call.environment is not None:
        raise UserError(
            "A run that goes on keeps its environment.",
            f"environment={call.environment!r} was given beside resume_from.",
            worded(TOOL, resume_from=call.resume_from, changes=call.changes or None),
            field="environment",
        )
    old = find_run(call.resume_from or "")
    before = old.resolved()
    resolved = resolve_settings(None, None, (), base=before.settings, changes=call.changes)
    return Intent(resolved=resolved, before=before, old=old)


def _named(found: Intent, asked: str | None) -> Intent:
    """With the name asked for, or one that was edited; else with none: two runs of one name cannot be told apart."""
    resolved = found.resolved
    edited = resolved.settings.run.name if "run.name" in resolved.sources else None
    run = resolved.settings.run.model_copy(update={"name": asked or edited})
    settings = resolved.settings.model_copy(update={"run": run})
    sources = {**resolved.sources, "run.name": "edit"} if asked else resolved.sources
    return replace(found, resolved=replace(resolved, settings=settings, sources=sources))


REWARD = "reward varies"
UNTESTED = "not tested yet"


def rehearse(call: Call, intent: Intent) -> dict[str, Any]:
    """Look at everything and estimate; takes up to twenty seconds where nothing was measured before."""
    plan = intent.plan
    examined = examine(plan)
    # What a test of the draft has seen says nothing of a run that goes on.
    reward = None if call.resume_from else reward_check(plan.settings, call.handle)
    checks = [*examined.checks, *([reward] if reward else [])]
    told: dict[str, Any] = {
        "dry_run": True,
        "ok": not any(check.failure for check in checks),
        "checks": [check.facts for check in checks],
        "config": brief(intent.resolved),
        "config_diff": intent.changed,
    }
    if going_on := intent.going_on:
        told["message"] = going_on
    if intent.discarded:
        told["discarded_edits"] = dict(intent.discarded)
    if examined.ground and (found := estimate(plan, examined.ground, may_measure=True)):
        told["estimate"] = found.facts
    return {**told, "next": _next(call, examined, reward)}


def reward_check(settings: Settings, draft: str) -> Check:
    """Whether a test has seen groups whose scores differ: others teach nothing. Advice: no run is refused for it."""
    outcome = latest_test(settings.run.environment, settings.inference.model, draft)
    if outcome is None or outcome.groups_with_variance is None:
        return Check(name=REWARD, found=UNTESTED, remedy="rl_test_inference()")
    figures = {"groups_with_variance": outcome.groups_with_variance, "from": f"rl_test_inference {_ago(outcome)} ago"}
    if outcome.groups_with_variance > 0:
        return Check(name=REWARD, figures=figures)
    remedy = "another difficulty, a larger group_size or a higher temperature: groups of equal scores teach nothing"
    return Check(name=REWARD, ok=False, figures=figures, remedy=remedy)


def reward_warnings(settings: Settings, draft: str) -> list[str]:
    """The same for a run that starts: what there is to say against it."""
    check = reward_check(settings, draft)
    if check.ok:
        return []
    return [f"no group of the last test had rewards that vary ({check.figures['from']}): {check.remedy}"]


def _ago(outcome: TestOutcome) -> str:
    minutes = max(0.0, time.time() - outcome.finished_at) / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"


def _next(call: Call, examined: Examined, reward: Check | None) -> str:
    failure = next((check.failure for check in examined.checks if check.failure), None)
    if failure is not None:
        return next_call(TOOL, call.mended(failure))
    test, start = worded("rl_test_inference", draft=call.elsewhere), call.again()
    if reward is None or (reward.ok and reward.found != UNTESTED):
        return start
    return f"{test} then {start}" if reward.ok else test


WAIT_S = 45
BEFORE_FIRST_S = 10.0
"""Of a wait: processes begin, a model is loaded."""


class CheckResult(BaseModel):
    """One thing that must be true; more keys tell the figures."""

    model_config = {"extra": "allow"}

    check: str
    ok: bool


class Started(Result):
    """A run that was started (seed keys), or, for a dry run: dry_run, ok, checks, config, config_diff, estimate."""

    run_id: str = ""
    status: str = ""
    environment: str = ""
    config: dict[str, Any] = {}
    wandb_project: str = ""
    wandb_run_name: str = ""
    config_path: str = ""
    logs: dict[str, str] = {}
    message: str = ""
    dry_run: bool = False
    ok: bool = True
    checks: list[CheckResult] = []
    estimate: dict[str, Any] | None = None  # step_s, total_min: [low, high]; basis; peak_gb
    config_diff: dict[str, list[Any]] = {}
    warnings: list[str] = []  # what a run is not refused for


@tool(title="Start training", hints=Hints())
def rl_start_training(
    caller: Caller,
    environment: Annotated[
        str | None, Field(description="select this one first, as rl_select_environment does")
    ] = None,
    changes: Changes = None,
    dry_run: Annotated[bool, Field(description="only check, and estimate memory and time on this machine")] = False,
    name: Annotated[str | None, Field(description="readable name of the run", max_length=80)] = None,
    resume_from: Annotated[str | None, Field(description="run to go on from, at its newest checkpoint")] = None,
    idempotency_key: Annotated[
        str | None, Field(description="a repeated key answers with the first run", max_length=200)
    ] = None,
    draft: Draft = None,
) -> Started:
    """Start a training run with your draft's settings. It goes on by itself, whatever becomes of you.

    Test first with rl_test_inference and dry_run=true. Then watch with rl_check_status.
    """
    if not dry_run and (first := run_of_key(idempotency_key)) is not None:
        return _again(first)
    call = Call(
        caller=caller,
        environment=environment,
        changes=changes or {},
        name=name,
        resume_from=resume_from,
        draft=draft,
    )
    intent = intent_of(call)
    if dry_run:
        return Started(**rehearse(call, intent))
    try:
        return _start(intent, idempotency_key, reward_warnings(intent.plan.settings, call.handle))
    except InvalidConfig as error:
        raise call.mended(error) from error.__cause__


def _start(intent: Intent, key: str | None, warnings: list[str]) -> Started:
    plan = intent.plan
    examined = examine(plan)
    start = Start(plan=plan, ground=examined.demand(), sources=intent.resolved.sources, idempotency_key=key)
    expected = estimate(plan, start.ground, may_measure=False)
    run = begin_run(start)
    if run.run_id != start.run_id:
        return _again(run)
    state = run.state()
    told = _facts(run, state, intent.resolved)
    if going_on := intent.going_on:
        told["message"] = going_on
    if intent.discarded:
        told["discarded_edits"] = dict(intent.discarded)
    if expected is not None:
        told["estimate"] = expected.facts
    if warnings := [*examined.warnings, *warnings]:
        told["warnings"] = warnings
    return Started(**told, next=worded("rl_check_status", run.run_id, wait_s=WAIT_S, until=_until(state, expected)))


def _again(run: RunDirectory) -> Started:
    """The answer to a key that was used before: the first run, as it is now."""
    state = run.state()
    told = _facts(run, state, replace(run.resolved(), sources=sources_of(run.path)))
    told["message"] = "This idempotency_key has started this run already; nothing new was started."
    told["status"] = "starting" if state.status == "pending" else state.status
    if state.terminal:
        return Started(**{k: v for k, v in told.items() if k != "phase"}, next=worded("rl_get_results", run.run_id))
    return Started(**told, next=worded("rl_check_status", run.run_id, wait_s=WAIT_S, until="change"))


def _facts(run: RunDirectory, state: RunState, resolved: Resolved) -> dict[str, Any]:
    told: dict[str, Any] = {
        "run_id": run.run_id,
        "status": "starting",
        "phase": state.phase or "api",
        "environment": state.environment,
        "config": brief(resolved),
        "wandb_project": resolved.settings.run.project,
        "wandb_run_name": state.default_name,
        **({"wandb": "starting"} if "wandb" in resolved.settings.sinks else {}),
        "config_path": str(run.path / "config.yaml"),
        "logs": {role: str(run.log(role)) for role in ROLES},
        "message": "Training starting. Use rl_check_status(run_id) to monitor.",
    }
    if state.resumed_from is not None:
        step = int((state.resume_point or {}).get("step", 0))
        told |= {"resumed_from": state.resumed_from, "step": step}
        told["message"] = f"Training goes on after step {step} of run {state.resumed_from}, as a new run."
    return told


def _until(state: RunState, expected: Estimate | None) -> str:
    """What can be reached within one wait."""
    if expected is None:
        return "running"
    steps = state.step + max(1, int((WAIT_S - BEFORE_FIRST_S) / expected.step_s.high))
    return "terminal" if steps >= state.total_steps else f"step>={steps}"
