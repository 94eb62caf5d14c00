"""The tool that starts training: rl_start_training.

With `dry_run` it starts nothing: every check, the estimate and what was changed are told.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, Field

from halteres.agent.arguments import Changes, Draft
from halteres.agent.caller import Caller
from halteres.agent.drafting.fields import brief
from halteres.agent.keeping import tidy
from halteres.agent.remedies import next_call
from halteres.agent.starting.estimates import Estimate, estimate
from halteres.agent.starting.intent import TOOL, Call, Intent, intent_of
from halteres.agent.tool import Hints, Result, tool
from halteres.agent.trial.tests_store import TestOutcome, latest_test
from halteres.agent.wording import worded
from halteres.config.files import Resolved
from halteres.config.settings import Settings
from halteres.errors import InvalidConfig
from halteres.runs.directory import RunDirectory
from halteres.runs.starting.check import Check
from halteres.runs.starting.preflight import Examined, examine, run_of_key
from halteres.runs.starting.start import ROLES, Start, begin_run, sources_of
from halteres.runs.state import RunState

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
    tidy()
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
