"""What a call to start training means: settings, from a draft or from a run that is gone on from.

Owns: selecting and editing first, where that is asked for; the seeds' sentence for an environment that is gone.
Never: starts anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from halteres.agent.caller import Caller
from halteres.agent.drafting.configuring import mended_call, mending
from halteres.agent.drafting.drafts import choose, current, editing, load_draft, save_draft, sifted
from halteres.agent.drafting.fields import diff
from halteres.agent.watching.look import look_at
from halteres.agent.wording import worded
from halteres.config import environ
from halteres.config.discovery import EnvironmentNotFound
from halteres.config.files import Resolved, resolve_settings
from halteres.errors import HalteresError, UserError
from halteres.runs.directory import RunDirectory, find_run
from halteres.runs.starting.preflight import Plan
from halteres.runs.starting.start import plan_of

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
        if self.resume_from and not refused.next.startswith("rl_"):
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
