"""The tool that starts training: rl_start_training.

A call means the settings of a draft, selected and edited first where that is asked for, or those of
a run that is gone on from. With `dry_run` nothing is started: the answer has every check, the
estimate and what was changed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field

from halteres.agent import drafts, open_access
from halteres.agent.answer_text import nonempty
from halteres.agent.configuration import mended_call, mending
from halteres.agent.estimates import estimate
from halteres.agent.next_call import next_call
from halteres.agent.tool import (
    Caller,
    Changes,
    Draft,
    Facts,
    Hints,
    Result,
    RunName,
    Sentence,
    tool,
)
from halteres.agent.trial.folder import latest_test
from halteres.config import environ
from halteres.config.discovery import EnvironmentNotFound
from halteres.config.files import Resolved, resolve_settings
from halteres.config.settings import Settings
from halteres.errors import HalteresError, InvalidConfig, UserError
from halteres.next_step import Advice, NextStep, Placeholder, then
from halteres.rewards.components import secret_variables
from halteres.runs.directory import RunDirectory, find_run
from halteres.runs.reading.report import report_of
from halteres.runs.starting.preflight import Check, Plan, examine
from halteres.runs.starting.start import ROLES, Start, begin_run, plan_of, run_of_key, sources_of

TOOL = "rl_start_training"
WAIT_S = 45
BEFORE_FIRST_S = 10.0  # of a wait: processes begin, a model is loaded
REWARD = "reward varies"


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A run that is to be started."""

    resolved: Resolved
    # what the changes are counted from: the environment's defaults, or the old run
    before: Resolved
    # that starts the same, once selecting and editing are done
    start: NextStep = field(default=NextStep(TOOL))
    old: RunDirectory | None = None
    is_open: bool = False  # its caller has no token
    # edits that the draft can have no more
    discarded: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        """For checks and estimates."""
        url = environ.service_url()
        return plan_of(
            self.resolved.settings, service_url=url, resume=self.old, is_open=self.is_open
        )

    @property
    def changed(self) -> dict[str, list[Any]]:
        """name -> [before, now], without name and environment: the answer has those elsewhere."""
        elsewhere = ("name", "run.name", "environment", "run.environment")
        return {
            name: pair
            for name, pair in drafts.diff(self.before, self.resolved).items()
            if name not in elsewhere
        }

    def mended(self, refused: HalteresError) -> HalteresError:
        """A refusal to go on from a run, with the call that would not be refused."""
        if self.old and not isinstance(refused.next, NextStep):
            args = {name: self.start.args[name] for name in ("resume_from", "name")}
            refused.next = (
                mended_call(refused, TOOL, self.start.args["changes"] or {}, **args) or refused.next
            )
        return refused

    @property
    def facts(self) -> dict[str, Any]:
        """Of a run that goes on from a checkpoint: from which step, what is done again, and whose
        settings hold; edits that were discarded.
        """
        facts = nonempty(discarded_edits=dict(self.discarded))
        if self.old and (checkpoint := self.old.newest_checkpoint()):
            step, reached = checkpoint["step"], report_of(self.old).step
            message = f"Training goes on after step {step} of run {self.old.run_id}, as a new run."
            if reached > step:
                lost = (
                    f"Steps {step + 1} to {reached} are"
                    if reached > step + 1
                    else f"Step {reached} is"
                )
                message += f" {lost} done again: no checkpoint has what was learnt there."
            changed = ", ".join(
                f"{name} {before} -> {now}" for name, (before, now) in self.changed.items()
            )
            but = f", but {changed}" if changed else ""
            facts["message"] = (
                f"{message} Its settings are that run's{but}; your draft plays no part."
            )
        return facts


def _from_draft(
    caller: Caller, draft: str | None, environment: str | None, changes: Mapping[str, Any]
) -> Intent:
    """The run of a draft, which is changed where an environment or changes are given.

    Raises:
        UserError: no environment, or settings that cannot be used; the draft is as it was.
    """
    discarded: Mapping[str, Any]
    if environment is not None:
        chosen = drafts.choose(caller, draft, environment, changes)
        resolved, discarded = chosen.resolved, chosen.discarded
    elif changes:
        with drafts.editing(caller, draft) as stored:
            before, discarded = drafts.without_impossible_edits(stored)
            after, resolved = before.edited(caller, changes)
            drafts.save_draft(after)
    else:
        selected = drafts.load_draft(caller, draft).selected
        try:
            chosen, discarded = drafts.current(caller, draft)
            resolved = chosen.admitted(caller)
        except EnvironmentNotFound as error:
            what = f"Environment file not found for '{selected}'."
            raise EnvironmentNotFound(what, error.sentence, error.next, **error.details) from error
    defaults = resolve_settings(resolved.settings.run.environment, None, ())
    return Intent(resolved=resolved, before=defaults, discarded=discarded)


def _from_run(
    caller: Caller, run_id: str, environment: str | None, changes: Mapping[str, Any]
) -> Intent:
    """A run that goes on, with its own settings. UserError: there is no such run, or it cannot go
    on so.
    """
    if environment is not None:
        raise UserError(
            "A run that goes on keeps its environment.",
            f"environment={environment!r} was given beside resume_from.",
            NextStep.of(TOOL, resume_from=run_id, changes=changes),
            field="environment",
        )
    old = find_run(run_id)
    before = old.resolved()
    open_access.check_settings(caller, before)
    open_access.check_changes(caller, before.settings.run.environment, changes)
    resolved = resolve_settings(None, None, (), base=before.settings, changes=changes)
    open_access.check_settings(caller, resolved)
    return Intent(resolved=resolved, before=before, old=old)


class CheckResult(Facts):
    """One thing that must be true; more keys have the figures."""

    check: str
    ok: bool
    found: str = ""
    problem: str = ""
    remedy: Sentence = ""


class EstimateFacts(Facts):
    """How long a run will take, each from the least to the most."""

    step_s: list[float]
    total_min: list[float]
    basis: str
    peak_gb: float | None = None


class Started(Result):
    """A run that was started (seed keys), or, for a dry run: dry_run, ok, checks, config,
    config_diff, estimate.
    """

    run_id: str = ""
    status: str = ""
    environment: str = ""
    config: dict[str, Any] = {}
    wandb_project: str = ""
    wandb_run_name: str = ""
    config_path: str = ""
    logs: dict[str, str] = {}
    message: Sentence = ""
    dry_run: bool = False
    ok: bool = True
    checks: list[CheckResult] = []
    estimate: EstimateFacts | None = None
    config_diff: dict[str, list[Any]] = {}
    warnings: list[str] = []  # what a run is not refused for


@tool(title="Start training", hints=Hints())
def rl_start_training(
    caller: Caller,
    environment: Annotated[
        str | None, Field(description="select this one first, as rl_select_environment does")
    ] = None,
    changes: Changes = None,
    dry_run: Annotated[
        bool, Field(description="only check, and estimate memory and time on this machine")
    ] = False,
    name: RunName = None,
    resume_from: Annotated[
        str | None, Field(description="run to go on from, at its newest checkpoint")
    ] = None,
    idempotency_key: Annotated[
        str | None, Field(description="a repeated key answers with the first run", max_length=200)
    ] = None,
    draft: Draft = None,
) -> Started:
    """Start a training run with your draft's settings. It goes on by itself, whatever becomes of
    you.

    Test first with rl_test_inference and dry_run=true. Then watch with rl_check_status.
    """
    if not dry_run and (first := run_of_key(idempotency_key)) is not None:
        return _already_started(first)
    changes = changes or {}
    with mending(TOOL, changes, environment=environment, resume_from=resume_from, draft=draft):
        if resume_from:
            intent = _from_run(caller, resume_from, environment, changes)
        else:
            intent = _from_draft(caller, draft, environment, changes)
    resolved = intent.resolved
    open_access.check_keys(caller, secret_variables(resolved.settings.env))
    # The name given, or one that was edited; else none: two runs of one name cannot be told apart.
    edited = resolved.settings.run.name if "run.name" in resolved.sources else None
    run = resolved.settings.run.model_copy(update={"name": name or edited})
    settings = resolved.settings.model_copy(update={"run": run})
    sources = {**resolved.sources, "run.name": "edit"} if name else resolved.sources
    own_changes, other_draft = (
        changes if resume_from else None,
        draft if draft != caller.draft else None,
    )
    start = NextStep.of(
        TOOL, resume_from=resume_from, changes=own_changes, name=name, draft=other_draft
    )
    resolved = replace(resolved, settings=settings, sources=sources)
    intent = replace(intent, resolved=resolved, start=start, is_open=caller.is_open)
    reward = _reward_check(settings, draft or caller.draft)
    if dry_run:
        return _rehearse(intent, reward)
    try:
        return _start(intent, reward, idempotency_key)
    except InvalidConfig as error:
        raise intent.mended(error) from error.__cause__


def _rehearse(intent: Intent, reward: Check) -> Started:
    """Look at everything and estimate; takes up to twenty seconds where nothing was measured
    before.
    """
    plan = intent.plan
    examined = examine(plan)
    checks = [CheckResult(**check.facts) for check in examined.checks]
    failure = next((check.failure for check in examined.checks if check.failure), None)
    following: Advice = intent.start
    if not intent.old:  # what a test of the draft has seen says nothing of a run that goes on
        checks.append(CheckResult(**reward.facts))
        if not reward.figures:  # not tested yet
            checks[-1].remedy = NextStep("rl_test_inference")
        if not reward.ok or not reward.figures:
            test = NextStep.of("rl_test_inference", draft=intent.start.args["draft"])
            following = then(test, following) if reward.ok else test
    if failure is not None:
        following = next_call(TOOL, intent.mended(failure))
    expected = estimate(plan, examined.ground, may_measure=True) if examined.ground else None
    return Started(
        dry_run=True,
        ok=failure is None,
        checks=checks,
        config=drafts.brief(intent.resolved),
        config_diff=intent.changed,
        **intent.facts,
        **nonempty(estimate=expected.facts if expected else None),
        next=following,
    )


def _reward_check(settings: Settings, draft: str) -> Check:
    """Whether a test has seen groups whose scores differ: others teach nothing. Advice: no run is
    refused for it.
    """
    outcome = latest_test(settings.run.environment, settings.inference.model, draft)
    if outcome is None or outcome.groups_with_variance is None:
        return Check(name=REWARD, found="not tested yet")
    minutes = max(0.0, time.time() - outcome.finished_at) / 60
    ago = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"
    figures = {
        "groups_with_variance": outcome.groups_with_variance,
        "from": f"rl_test_inference {ago} ago",
    }
    if outcome.groups_with_variance > 0:
        return Check(name=REWARD, figures=figures)
    advice = (
        "another difficulty, a larger group_size or a higher temperature: groups of equal "
        "scores teach nothing"
    )
    return Check(name=REWARD, ok=False, figures=figures, remedy=advice)


def _start(intent: Intent, reward: Check, key: str | None) -> Started:
    plan = intent.plan
    examined = examine(plan)
    start = Start(
        plan=plan, ground=examined.demand(), sources=intent.resolved.sources, idempotency_key=key
    )
    expected = estimate(plan, start.ground, may_measure=False)
    run = begin_run(start)
    if run.run_id != start.run_id:
        return _already_started(run)
    warnings = examined.warnings
    if not reward.ok:
        warnings.append(
            f"no group of the last test had rewards that vary ({reward.figures['from']}): "
            f"{reward.remedy}"
        )
    until, state = "running", run.state()
    if expected is not None:  # what can be reached within one wait
        steps = state.step + max(1, int((WAIT_S - BEFORE_FIRST_S) / expected.step_s.high))
        until = "terminal" if steps >= state.total_steps else f"step>={steps}"
    return Started(
        **{**_facts(run, intent.resolved), **intent.facts},
        **nonempty(estimate=expected.facts if expected else None, warnings=warnings),
        next=NextStep.of("rl_check_status", run.run_id, wait_s=WAIT_S, until=until),
    )


def _already_started(run: RunDirectory) -> Started:
    """The answer to a key that was used before: the first run, as it is now."""
    state = run.state()
    facts = _facts(run, replace(run.resolved(), sources=sources_of(run.path)))
    facts["message"] = "This idempotency_key has started this run already; nothing new was started."
    facts["status"] = "starting" if state.status == "pending" else state.status
    if not state.terminal:
        return Started(
            **facts, next=NextStep.of("rl_check_status", run.run_id, wait_s=WAIT_S, until="change")
        )
    del facts["phase"]
    return Started(**facts, next=NextStep.of("rl_get_results", run.run_id))


def _facts(run: RunDirectory, resolved: Resolved) -> dict[str, Any]:
    state = run.state()
    facts: dict[str, Any] = {
        "run_id": run.run_id,
        "status": "starting",
        "phase": state.phase or "api",
        "environment": state.environment,
        "config": drafts.brief(resolved),
        "wandb_project": resolved.settings.run.project,
        "wandb_run_name": state.default_name,
        **({"wandb": "starting"} if "wandb" in resolved.settings.sinks else {}),
        "config_path": str(run.path / "config.yaml"),
        "logs": {role: str(run.log(role)) for role in ROLES},
        "message": (
            "Training starting. Use ",
            NextStep.of("rl_check_status", Placeholder("run_id")),
            " to monitor.",
        ),
    }
    if state.resumed_from is not None:
        step = int((state.resume_point or {}).get("step", 0))
        message = f"Training goes on after step {step} of run {state.resumed_from}, as a new run."
        facts |= {"resumed_from": state.resumed_from, "step": step, "message": message}
    return facts
