"""A start that does not start: every check, the estimate, what was changed.

Owns: the answer to `dry_run`; the check of whether rewards vary.
Never: leaves a trace of a run; fails because a check does.
"""

from __future__ import annotations

import time
from typing import Any

from halteres.agent.drafting.headline import brief
from halteres.agent.remedies import next_call
from halteres.agent.starting.estimates import estimate
from halteres.agent.starting.intent import TOOL, Call, Intent
from halteres.agent.trial.tests_store import TestOutcome, latest_test
from halteres.agent.wording import worded
from halteres.config.settings import Settings
from halteres.runs.starting.check import Check
from halteres.runs.starting.preflight import Examined, examine

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
