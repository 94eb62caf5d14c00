"""The tool that starts training: rl_start_training.

A call means the settings of a draft, selected and edited first where that is asked for, those of a
run that is gone on from, or those of a training on a file, which has no draft. With `dry_run`
nothing is started: the answer has every check, the estimate and what was changed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from halteres.agent import drafts
from halteres.agent.answer_text import nonempty
from halteres.agent.next_call import next_call
from halteres.agent.start_request import (
    TOOL,
    StartRequest,
    corrected,
    planned,
    settings_meant,
)
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
from halteres.config.file_training import (
    FileTraining,
    Method,
    ResolvedFile,
    effective,
    resolve_file_training,
)
from halteres.config.files import Sources
from halteres.config.resolution import Resolved
from halteres.config.settings import Settings
from halteres.errors import InvalidConfig
from halteres.next_step import Advice, NextStep, Placeholder, then
from halteres.runs.directory import RunDirectory, new_run_id
from halteres.runs.planning.checks import Check
from halteres.runs.planning.file_plan import resolve_resumed
from halteres.runs.planning.plan import (
    Effort,
    PlanChanged,
    RunPlan,
    check_unchanged,
    fingerprint,
)
from halteres.runs.planning.resume_point import (
    CheckpointMissing,
    RunGoesOn,
    find_origin,
)
from halteres.runs.reading.report import report_of
from halteres.runs.start import roles_of_kind, run_of_key, sources_of, start_run

WAIT_S = 45
BEFORE_FIRST_S = 10.0  # of a wait: processes begin, a model is loaded
REWARD = "reward varies"

Checked = Annotated[str | None, Field(description="`plan` of a dry run: starts that, or nothing")]

OF_FILES = (
    *("data.batch_size", "data.epochs", "data.hold_out", "trainer.learning_rate"),
    *("trainer.lora_rank", "trainer.total_steps", "trainer.eval_every", "inference.model"),
)
"""The settings of a training on a file that an answer has in any case."""


def _changed(resolved: Resolved | ResolvedFile, old: RunDirectory | None) -> dict[str, list[Any]]:
    """name -> [before, now], without name and environment: the answer has those elsewhere."""
    if isinstance(resolved, ResolvedFile):
        before = _defaults_of(resolved)
        if old is not None:
            before = {key: value for key, value, _ in effective(resolve_resumed(old))}
        return {
            key: [before.get(key), value]
            for key, value, source in effective(resolved)
            if source == "edit" and before.get(key) != value and key != "run.name"
        }
    elsewhere = ("name", "run.name", "environment", "run.environment")
    changed = drafts.diff(resolved.defaults, resolved.settings)
    return {name: pair for name, pair in changed.items() if name not in elsewhere}


def _resumed_facts(plan: RunPlan, changed: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Of a run that goes on from a checkpoint: from which step, what is done again, and whose
    settings hold.
    """
    if plan.resume is None:
        return {}
    old, step = plan.resume.run, plan.resume.step
    reached = report_of(old).step
    message = f"Training goes on after step {step} of run {old.run_id}, as a new run."
    if reached > step:
        lost = f"Step {reached} is"
        if reached > step + 1:
            lost = f"Steps {step + 1} to {reached} are"
        newest, why = old.newest_checkpoint(), ""
        if newest is None or newest["step"] == step:
            why = ": no checkpoint has what was learnt there"
        message += f" {lost} done again{why}."
    changes = [f"{name} {before} -> {now}" for name, (before, now) in changed.items()]
    but = ""
    if changes:
        but = f", but {', '.join(changes)}"
    return {"message": f"{message} Its settings are that run's{but}; your draft plays no part."}


def _defaults_of(resolved: ResolvedFile) -> dict[str, Any]:
    """What holds where nothing is set: section.field -> value."""
    nothing = resolve_file_training(resolved.training.method, "")
    return {key: value for key, value, _ in effective(nothing)}


def _brief(plan: RunPlan) -> dict[str, Any]:
    """The settings of a plan that matter most, and those that were set."""
    if plan.training is None:
        return drafts.brief(plan.settings, plan.sources)
    return _brief_of_file(plan.settings, plan.training, plan.sources)


def _brief_of_file(settings: Settings, training: FileTraining, sources: Sources) -> dict[str, Any]:
    whole = ResolvedFile(settings=settings, training=training, sources=sources)
    return {
        key: value
        for key, value, source in effective(whole)
        if key in OF_FILES or source in ("edit", "model")
    }


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
    plan: str = ""  # of a dry run that nothing refuses: for `checked`
    field: str = ""  # of a dry run: the setting for which a run would be refused
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
        str | None,
        Field(description="run to go on from, at its newest checkpoint; RUN@STEP: at that step's"),
    ] = None,
    data: Annotated[
        str | None,
        Field(
            description=(
                "train on this file in place of an environment: JSON lines with messages, or "
                "prompt and completion; for dpo with prompt, chosen, rejected"
            )
        ),
    ] = None,
    method: Annotated[
        Method | None, Field(description="with data: sft imitates answers (default), dpo prefers")
    ] = None,
    stop_first: Annotated[
        bool, Field(description="stop the run of resume_from, with a checkpoint, if it goes on")
    ] = False,
    idempotency_key: Annotated[
        str | None, Field(description="a repeated key answers with the first run", max_length=200)
    ] = None,
    checked: Checked = None,
    draft: Draft = None,
) -> Started:
    """Start a training run with your draft's settings, or on a file (`data`; then `changes` are its
    settings: model, epochs, batch_size, learning_rate). It goes on by itself, whatever becomes of
    you.

    Test first with rl_test_inference and dry_run=true. Then watch with rl_check_status.
    """
    if not dry_run and (first := run_of_key(idempotency_key)) is not None:
        return _already_started(first)
    asked = StartRequest(
        caller=caller,
        environment=environment,
        changes=changes or {},
        dry_run=dry_run,
        name=name,
        resume_from=resume_from,
        data=data,
        method=method,
        stop_first=stop_first,
        checked=checked,
        draft=draft,
    )
    asked.check()
    old, step = None, None
    if resume_from:
        old, step = find_origin(resume_from)
    named = settings_meant(asked, old, step)
    effort: Effort = "remembered"
    if dry_run:
        effort = "measured"
    plan = planned(caller, named, old, step, effort, is_rehearsal=dry_run)
    if stop_first and plan.refusal is not None:
        plan.refusal.why = f"{plan.refusal.why} The run has been stopped.".strip()
    reward = Check(name=REWARD)
    if plan.training is None:
        reward = _reward_check(named.settings, draft or caller.draft)
    changed = _changed(named, old)
    discarded = {}
    if isinstance(named, Resolved):
        discarded = dict(named.discarded)
    facts = nonempty(discarded_edits=discarded) | _resumed_facts(plan, changed)
    if dry_run:
        facts["config"] = _brief(plan)
        facts["config_diff"] = changed
        return _rehearsed(plan, asked.start, reward, facts)
    return _started(plan, asked, reward, facts, idempotency_key)


def _rehearsed(plan: RunPlan, start: NextStep, reward: Check, facts: dict[str, Any]) -> Started:
    """The plan, written out."""
    checks = [CheckResult(**check.facts) for check in plan.checks]
    following: Advice = start
    # a test of the draft says nothing of a run that goes on, or trains on a file
    if not start.args["resume_from"] and plan.training is None:
        checks.append(CheckResult(**reward.facts))
        is_tested = bool(reward.figures)
        if not is_tested:
            checks[-1].remedy = NextStep("rl_test_inference")
        if not reward.ok:
            test = NextStep.of("rl_test_inference", draft=start.args["draft"])
            if not is_tested:
                following = then(test, following)
            else:
                following = test
    refusal, plan_of, field = plan.refusal, "", None
    if refusal is not None:
        field = refusal.details.get("field")
        following = next_call(TOOL, corrected(refusal, start))
    else:
        plan_of = fingerprint(plan)
    return Started(
        dry_run=True,
        ok=refusal is None,
        checks=checks,
        **facts,
        **nonempty(
            plan=plan_of,
            field=field,
            estimate=plan.estimate.facts if plan.estimate else None,
            warnings=[plan.busy] if plan.busy else [],
        ),
        next=following,
    )


def _reward_check(settings: Settings, draft: str) -> Check:
    """Whether a test has seen groups whose scores differ: others teach nothing. Advice: no run is
    refused for it.
    """
    outcome = latest_test(settings.run.environment, settings.inference.model, draft)
    if outcome is None or outcome.groups_with_variance is None:
        return Check(name=REWARD, ok=False, found="not tested yet")
    minutes = max(0.0, time.time() - outcome.finished_at) / 60
    if minutes < 120:
        ago = f"{minutes:.0f} min"
    else:
        ago = f"{minutes / 60:.0f} h"
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


def _started(
    plan: RunPlan, asked: StartRequest, reward: Check, facts: dict[str, Any], key: str | None
) -> Started:
    """The run of the plan; that of the key, where another call has started one meanwhile."""
    run_id = new_run_id()
    try:
        if asked.checked is not None and plan.refusal is None:
            check_unchanged(plan, asked.checked)
        run = start_run(plan, run_id=run_id, idempotency_key=key)
    except (InvalidConfig, RunGoesOn, CheckpointMissing, PlanChanged) as error:
        raise corrected(error, asked.start) from error.__cause__
    if run.run_id != run_id:
        return _already_started(run)
    warnings = plan.warnings
    if reward.figures and not reward.ok:
        warnings.append(
            f"no group of the last test had rewards that vary ({reward.figures['from']}): "
            f"{reward.remedy}"
        )
    until, state = "running", run.state()
    if plan.estimate is not None:  # what can be reached within one wait
        within_wait = int((WAIT_S - BEFORE_FIRST_S) / plan.estimate.step_s.high)
        steps = state.step + max(1, within_wait)
        until = "terminal"
        if not (steps >= state.total_steps):
            until = f"step>={steps}"
    return Started(
        **{**_facts(run, plan.settings, _brief(plan)), **facts},
        **nonempty(estimate=plan.estimate.facts if plan.estimate else None, warnings=warnings),
        next=NextStep.of("rl_check_status", run.run_id, wait_s=WAIT_S, until=until),
    )


def _already_started(run: RunDirectory) -> Started:
    """The answer to a key that was used before: the first run, as it is now."""
    state = run.state()
    settings = run.settings()
    sources = sources_of(run.path)
    if state.is_on_file:
        config = _brief_of_file(settings, FileTraining.read(run.path), sources)
    else:
        config = drafts.brief(settings, sources)
    facts = _facts(run, settings, config)
    facts["message"] = "This idempotency_key has started this run already; nothing new was started."
    if state.status == "pending":
        facts["status"] = "starting"
    else:
        facts["status"] = state.status
    if not state.terminal:
        return Started(
            **facts, next=NextStep.of("rl_check_status", run.run_id, wait_s=WAIT_S, until="change")
        )
    del facts["phase"]
    return Started(**facts, next=NextStep.of("rl_get_results", run.run_id))


def _facts(run: RunDirectory, settings: Settings, config: dict[str, Any]) -> dict[str, Any]:
    """What an answer has of a run that was started; `config`: its settings in brief."""
    state = run.state()
    facts: dict[str, Any] = {
        "run_id": run.run_id,
        "status": "starting",
        "phase": state.phase or "api",
        "environment": state.environment,
        "config": config,
        "wandb_project": settings.run.project,
        "wandb_run_name": state.default_name,
        **({"wandb": "starting"} if "wandb" in settings.sinks else {}),
        "config_path": str(run.path / "config.yaml"),
        "logs": {role: str(run.log(role)) for role in roles_of_kind(state.kind)},
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
