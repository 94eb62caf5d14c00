"""What a call of rl_start_training asks for: whether its arguments go together, the settings that
it means, the run that it stops first, and the call that would not be refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from halteres.agent import drafts, open_access
from halteres.agent.next_call import mend, mended_call
from halteres.agent.stop_training import WITHIN_S
from halteres.agent.tool import Caller
from halteres.config import environ
from halteres.config.discovery import EnvironmentNotFound
from halteres.config.file_training import Method, ResolvedFile, resolve_file_training
from halteres.config.resolution import Resolved, resolve_settings
from halteres.errors import HalteresError, InvalidConfig, NotReady, UserError
from halteres.next_step import NextStep, Placeholder
from halteres.rewards.components import secret_variables
from halteres.runs.directory import RunDirectory, stop_run
from halteres.runs.planning.checks import TooLarge
from halteres.runs.planning.file_plan import plan_file_run, resolve_resumed
from halteres.runs.planning.plan import Effort, PlanChanged, RunPlan, plan_run
from halteres.runs.planning.resume_point import (
    CheckpointMissing,
    RunGoesOn,
    check_settings,
    checkpoint_of,
)
from halteres.runs.servers import end_all_kept

Chosen = TypeVar("Chosen", bound=Resolved | ResolvedFile)

TOOL = "rl_start_training"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """The arguments of a call."""

    caller: Caller
    environment: str | None
    changes: Mapping[str, Any]
    dry_run: bool
    name: str | None
    resume_from: str | None
    data: str | None
    method: Method | None
    stop_first: bool
    checked: str | None
    draft: str | None

    @property
    def start(self) -> NextStep:
        """The same call, to be made again."""
        changes, draft = None, None
        if self.resume_from or self.data is not None:
            changes = self.changes
        if self.draft != self.caller.draft:
            draft = self.draft
        return NextStep.of(
            TOOL,
            resume_from=self.resume_from,
            data=self.data,
            method=self.method,
            changes=changes,
            name=self.name,
            draft=draft,
        )

    def check(self) -> None:
        """UserError where two of the arguments exclude each other."""
        self._check_resumed()
        self._check_data()
        if self.checked is not None and (self.dry_run or self.stop_first):
            other = "dry_run"
            if self.stop_first:
                other = "stop_first"
            what = f"checked and {other} exclude each other."
            raise UserError(what, "", "Leave one of them out.", field="checked")

    def _check_resumed(self) -> None:
        if self.resume_from and self.environment is not None:
            raise UserError(
                "A run that goes on keeps its environment.",
                f"environment={self.environment!r} was given with resume_from.",
                NextStep.of(TOOL, resume_from=self.resume_from, changes=self.changes),
                field="environment",
            )
        if self.stop_first and (self.dry_run or not self.resume_from):
            why = "resume_from was not given."
            if self.dry_run:
                why = "A dry run stops nothing."
            what = "stop_first stops the run of resume_from, to go on from it."
            raise UserError(what, why, field="stop_first")

    def _check_data(self) -> None:
        if self.method is not None and self.data is None:
            raise UserError(
                f"method={self.method!r} needs data.",
                "It names what a file is trained on with.",
                NextStep.of(TOOL, data=Placeholder("data"), method=self.method),
                field="method",
            )
        other = None
        if self.resume_from:
            other = ("resume_from", "A run that goes on keeps its data.")
        elif self.environment is not None:
            other = ("environment", "A run trains on an environment or on a file.")
        if self.data is not None and other is not None:
            name, why = other
            raise UserError(
                f"data and {name} exclude each other.", why, "Give one of them.", field="data"
            )


def settings_meant(
    asked: StartRequest, old: RunDirectory | None, step: int | None
) -> Resolved | ResolvedFile:
    """The settings that a call means, with the run's name; a run that is to be stopped first has
    been.

    Raises:
        HalteresError: settings that cannot be used, or a run that cannot be gone on from.
    """
    caller, changes = asked.caller, asked.changes
    resolved: Resolved | ResolvedFile
    try:
        if old is not None:
            resolved = _from_run(caller, old, changes)
        elif asked.data is not None:
            resolved = _from_file(caller, asked.data, asked.method, changes)
        else:
            resolved = _from_draft(caller, asked.draft, asked.environment, changes)
        if caller.is_open:
            open_access.check_keys(secret_variables(resolved.settings.env))
        named = _named(resolved, asked.name)
        if old is not None and asked.stop_first:
            _stop(caller, old, step, named)
    except InvalidConfig as error:
        mend(
            error,
            TOOL,
            changes,
            environment=asked.environment,
            resume_from=asked.resume_from,
            data=asked.data,
            method=asked.method,
            stop_first=asked.stop_first or None,
            draft=asked.draft,
        )
        raise
    except CheckpointMissing as error:
        start = asked.start
        raise corrected(error, replace(start, args={**start.args, "stop_first": True})) from None
    return named


def _from_draft(
    caller: Caller, draft: str | None, environment: str | None, changes: Mapping[str, Any]
) -> Resolved:
    """The settings of the draft that is started, changed where an environment or changes are given.

    Raises:
        UserError: no environment, or settings that cannot be used; the draft is as it was.
    """
    if environment is not None:
        return drafts.choose(caller, draft, environment, changes)
    if changes:
        with drafts.editing(caller, draft) as stored:
            resolved = drafts.edited(caller, stored, changes)
            drafts.save_draft(stored.with_edits_of(resolved))
        return resolved
    selected = drafts.load_draft(caller, draft).selected
    try:
        return drafts.current(caller, draft, to_run=True)
    except EnvironmentNotFound as error:
        what = f"Environment file not found for '{selected}'."
        raise EnvironmentNotFound(what, error.sentence, error.next, **error.details) from error


def _from_run(
    caller: Caller, old: RunDirectory, changes: Mapping[str, Any]
) -> Resolved | ResolvedFile:
    """The settings of a run that goes on: its own, with changes."""
    if old.state().is_on_file:
        if caller.is_open:
            open_access.check_file()
        return resolve_resumed(old, (), dict(changes))
    before = old.settings()
    if caller.is_open:
        open_access.check_settings(before)
        open_access.check_changes(before.run.environment, changes)
    resolved = resolve_settings(None, None, (), base=before, changes=changes)
    if caller.is_open:
        open_access.check_settings(resolved.settings, resolved.sources)
    return resolved


def _from_file(
    caller: Caller, data: str, method: Method | None, changes: Mapping[str, Any]
) -> ResolvedFile:
    """The settings of a training on a file: the defaults, with changes."""
    if caller.is_open:
        open_access.check_file()
    return resolve_file_training(method or "sft", data, (), changes=changes)


FREED_BY_A_STOP = ("checkpoint", "memory", "gpu memory", "runs allowed")
"""Checks of a plan that a run can fail only because the one that it goes on from still runs."""


def _stop(
    caller: Caller, old: RunDirectory, step: int | None, resolved: Resolved | ResolvedFile
) -> None:
    """Stop the run, with a checkpoint, unless it has ended.

    Raises:
        HalteresError: a run with these settings could not go on from it: it is left alone.
        NotReady: it has been asked, and has not ended yet.
    """
    state = old.state()
    if state.terminal:
        return
    if step is not None:
        checkpoint_of(old, step)
    reached = state.step
    if step is not None:
        reached = step
    plan = planned(caller, resolved, old, step, "none")
    check_settings(old.settings(), plan.settings, reached, has_completed=False)
    for check in plan.checks:
        if check.failure is not None and check.name not in FREED_BY_A_STOP:
            raise check.failure
    if not stop_run(old, "now", WITHIN_S).terminal:
        raise NotReady(
            f"Run {old.run_id} has been asked to stop, and has not ended yet.",
            "",
            "make the same call again",
        )


def _named(resolved: Chosen, name: str | None) -> Chosen:
    """With the name given, or one that was edited; else without one: each run then gets a name of
    its own.
    """
    settings, sources = resolved.settings, resolved.sources
    if name:
        sources = {**sources, "run.name": "edit"}
    elif "run.name" in sources:
        name = settings.run.name
    else:
        name = None
    run = settings.run.model_copy(update={"name": name})
    return replace(resolved, settings=settings.model_copy(update={"run": run}), sources=sources)


def planned(
    caller: Caller,
    resolved: Resolved | ResolvedFile,
    old: RunDirectory | None,
    step: int | None,
    effort: Effort,
    *,
    is_rehearsal: bool = False,
) -> RunPlan:
    """The plan of a run with these settings, in the service that TINKER_BASE_URL names.

    A start ends the services that chats left behind, whose memory it needs; a rehearsal does only
    where the run would not fit next to them.

    Args:
        caller: who starts it.
        resolved: its settings.
        old: the run that it goes on from, if any.
        step: of that run's checkpoint; None: its newest.
        effort: for an estimate.
        is_rehearsal: nothing starts.
    """
    how: dict[str, Any] = {
        "resume": old,
        "resume_step": step,
        "service_url": environ.service_url(),
        "is_open": caller.is_open,
        "effort": effort,
    }
    plan: Callable[[], RunPlan] = partial(plan_run, resolved, **how)
    if isinstance(resolved, ResolvedFile):
        plan = partial(plan_file_run, resolved, **how)
    if is_rehearsal:
        found = plan()
        if not isinstance(found.refusal, TooLarge):
            return found
    # A plan looks at the memory that is free.
    end_all_kept()
    return plan()


def corrected(refused: HalteresError, start: NextStep) -> HalteresError:
    """A refusal to go on from a run, with the call that would not be refused."""
    own = refused.next
    if isinstance(refused, RunGoesOn):
        refused.next = replace(start, args={**start.args, "stop_first": True})
    elif isinstance(refused, PlanChanged):
        refused.next = replace(start, args={**start.args, "dry_run": True})
    elif isinstance(own, NextStep):
        # It names what is wrong with the call, say the step; the rest of the call stays. A file is
        # started with anew.
        if own.tool == TOOL and "data" not in own.args:
            refused.next = replace(own, args={**start.args, **own.args})
    elif start.args["resume_from"] and isinstance(refused, InvalidConfig):
        args = {name: start.args[name] for name in ("resume_from", "name")}
        call = mended_call(refused, TOOL, start.args["changes"] or {}, **args)
        refused.next = call or own
    return refused
