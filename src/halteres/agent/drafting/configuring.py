"""The tools that look at and edit a draft's settings: rl_get_current_config, rl_edit_config."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from halteres.agent.arguments import Changes, Draft
from halteres.agent.caller import Caller
from halteres.agent.drafting import drafts
from halteres.agent.drafting.brief import brief, by_key, diff
from halteres.agent.drafting.cautions import cautions
from halteres.agent.drafting.fields import Setting, find_setting, settings_of
from halteres.agent.drafting.mending import mending
from halteres.agent.tool import READS, UNSET, Hints, Result, tool
from halteres.agent.wording import worded
from halteres.config.edits import Edit, nearest_setting
from halteres.config.files import Resolved
from halteres.config.policies import DEFAULT, load_policy
from halteres.config.problem import UnknownSetting, refusal
from halteres.errors import InvalidConfig, UserError

TIP = "Use rl_edit_config(field, value) to change any configurable field."

MODEL_FACTS = frozenset({"name", "present", "size_gb", "need_gb", "fits", "spare_gb", "note"})
ABSENT = "A model that is not present: put its folder below HALTERES_HOME/models, or set model to its path."


class Configuration(Result):
    """A draft's settings. A field is {name, current_value}, in full also type, default, description, section, and what
    is allowed; a locked one has locked_value."""

    environment: str
    configurable_fields: list[dict[str, Any]]
    locked_fields: list[dict[str, Any]]
    tip: str
    draft: str
    policy: str = ""  # whose locks these are, where they are not the default ones
    models: list[dict[str, Any]] = []  # for field="model": base models, and whether such a run fits this machine
    proposed: str = ""  # the one of them to begin with


class Edited(Result):
    """What an edit changed."""

    message: str
    field: str | None = None  # of the form (field, value); `changes` is answered by `diff`
    value: Any = None
    config: dict[str, Any]
    diff: dict[str, list[Any]]  # field -> [before, after]
    draft: str
    warnings: list[str] = []
    coerced: dict[str, Any] = {}  # values that were taken for another type, as they hold now


@tool(title="Show the settings", hints=READS)
def rl_get_current_config(
    caller: Caller,
    detail: Annotated[Literal["brief", "full"], Field(description="brief: headline and changed fields")] = "brief",
    field: Annotated[str | None, Field(description="one field, in full; `model` lists base models that fit")] = None,
    draft: Draft = None,
) -> Configuration:
    """Show your draft's settings: those you can change with rl_edit_config, and those that are locked."""
    chosen = drafts.load_draft(caller, draft)
    resolved = chosen.resolve()
    settings = settings_of(chosen, resolved)
    is_full = detail == "full" or field is not None
    shown = [_named(settings, field)] if field else [one for one in settings if is_full or one.is_headline]
    told = Configuration(
        environment=resolved.settings.run.environment_name,
        configurable_fields=[one.full if is_full else one.brief for one in shown if one.lock is None],
        locked_fields=[one.full if is_full else one.brief for one in shown if one.lock is not None],
        tip=TIP if is_full else f'{TIP} All {len(settings)}: detail="full"; one: field="{shown[0].name}".',
        draft=chosen.handle,
        next=worded("rl_test_inference", draft=_told(caller, draft)),
    )
    if (policy := load_policy().name) != DEFAULT.name:
        told.policy = policy
    if field is not None and shown[0].key == "inference.model":
        told.models, told.proposed = _models(resolved)
        told.tip = f"{TIP} {ABSENT}"
    return told


@tool(title="Edit settings", hints=Hints(idempotent=True))
def rl_edit_config(
    caller: Caller,
    field: Annotated[str | None, Field(description="one field's name; with `value`")] = None,
    value: Annotated[Any, Field(description="its new value; null is one where the type allows it")] = UNSET,
    changes: Changes = None,
    draft: Draft = None,
) -> Edited:
    """Change settings of your draft: one (`field`, `value`) or several at once (`changes`, all or none).

    Values are checked before anything is changed; the answer tells what was, and what is now.
    """
    here = _told(caller, draft)
    with drafts.editing(caller, draft) as before:
        before.check_selected()
        asked = _asked(field, value, changes)
        with mending("rl_edit_config", asked, draft=here):
            after, now = before.edited(asked)
        was = _as_it_was(before)
        drafts.save_draft(after)
    values = {name: _value(name, given, now) for name, given in asked.items()}
    told = Edited(
        message=f"Updated {', '.join(f'{name} = {holds}' for name, holds in values.items())}",
        config=brief(now),
        diff=diff(was, now),
        draft=after.handle,
        next=worded("rl_start_training", dry_run=True, draft=here),
    )
    if field is not None:
        told.field, told.value = field, values[field]
    if warnings := cautions(was, now):
        told.warnings = warnings
    if now.coerced:
        told.coerced = dict(now.coerced)
    return told


def _told(caller: Caller, draft: str | None) -> str | None:
    """The draft that the next call must name; None where that is the caller's own."""
    return draft if draft != caller.draft else None


def _asked(field: str | None, value: Any, changes: dict[str, Any] | None) -> dict[str, Any]:
    """What is asked for, in one form. Some hosts send an empty `value` that nobody gave."""
    if field is None and changes and value in (UNSET, ""):
        return changes
    if field is not None and value is not UNSET and not changes:
        return {field: value}
    raise UserError(
        "rl_edit_config takes a field with its value, or changes.",
        "",
        'rl_edit_config(field="group_size", value=16) or rl_edit_config(changes={"group_size":16})',
    )


def _as_it_was(draft: drafts.Draft) -> Resolved:
    """What held before an edit. Edits that can no longer be (the policy changed since) count as if they were not."""
    try:
        return draft.resolve()
    except InvalidConfig:
        return replace(draft, changes={}).resolve()


def _value(name: str, given: Any, now: Resolved) -> Any:
    return by_key(now.settings).get(Edit(name=name, value=given).key, given)


def _named(settings: list[Setting], field: str) -> Setting:
    found = find_setting(settings, field)
    if found is None:
        names = [one.name for one in settings]
        raise refusal(
            [UnknownSetting(field=field, got=None, did_you_mean=nearest_setting(field, names), available=tuple(names))]
        )
    return found


def _models(resolved: Resolved) -> tuple[list[dict[str, Any]], str]:
    """Base models as far as they matter to a choice, and the one that is proposed."""
    from halteres.agent.starting.models import known_models, proposed
    from halteres.runs.starting.workload import workload_of

    models = known_models(workload_of(resolved.settings))
    return [_brief_facts(model.facts) for model in models], proposed(models).name


def _brief_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """Without the note on a model that is not here: it is the same for all of them (`ABSENT`)."""
    wanted = MODEL_FACTS if facts["present"] else MODEL_FACTS - {"note"}
    return {name: fact for name, fact in facts.items() if name in wanted}
