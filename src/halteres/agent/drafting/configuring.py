"""The tools that look at and edit a draft's settings: rl_get_current_config, rl_edit_config.

An answer warns of what an edit brings with it that its maker may not have meant; an error names the call that mends
a refused edit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from halteres.agent.drafting import drafts
from halteres.agent.drafting.drafts import current, sifted
from halteres.agent.drafting.fields import Setting, brief, by_key, diff, find_setting, settings_of
from halteres.agent.fitting import echoed, shortened, significant
from halteres.agent.tool import READS, UNSET, Caller, Changes, Draft, Hints, Result, tool
from halteres.config import environ
from halteres.config.edits import Edit, nearest_setting
from halteres.config.files import Resolved
from halteres.config.gathering import STEPS
from halteres.config.policies import DEFAULT, how_to_unlock, load_policy, policy_lock
from halteres.config.problem import UnknownSetting, refusal
from halteres.config.settings import TrainerSettings
from halteres.errors import HalteresError, InvalidConfig, UserError
from halteres.models import model_folder
from halteres.next_step import NextStep, worded

LONGEST_CALL = 600
"""Characters of a call that is worth telling."""


@contextmanager
def mending(tool: str, changes: Mapping[str, Any], **arguments: Any) -> Iterator[None]:
    """An edit of a draft is tried inside: a refusal leaves with the call that would not be refused, and says that
    nothing was changed."""
    try:
        yield
    except InvalidConfig as error:
        if error.details.get("problems") and error.details.get("field"):
            error.why = " ".join(part for part in (error.why, "Nothing was changed.") if part)
            error.next = mended_call(error, tool, changes, **arguments) or error.next
        raise


def mended_call(error: HalteresError, tool: str, changes: Mapping[str, Any], **arguments: Any) -> NextStep | None:
    """The call that would not be refused, where every problem has a suggestion."""
    mended = _mended({**changes, **error.details.get("coerced", {})}, error.details.get("problems") or [])
    if not mended:
        return None
    step = NextStep(tool, {**arguments, "changes": mended})
    return step if len(step.call) <= LONGEST_CALL else None


def _mended(changes: Mapping[str, Any], problems: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The changes with every suggestion followed; None where a problem has none."""
    mended = dict(changes)
    for problem in problems:
        name = next((one for one in changes if problem["field"] in (one, Edit(name=one, value=None).key)), None)
        meant, suggested = problem.get("did_you_mean"), problem.get("suggest")
        if meant and name:
            mended[meant] = mended.pop(name)
        elif suggested:
            mended[name or problem["field"].removeprefix("env.")] = suggested[0]
        else:
            return None
    return mended


MODEL = "inference.model"

NOTABLY_SLOWER = 1.3
"""Times as many tokens in a step."""

NO_EFFECT = ("thinking_mode", "reasoning_effort", "max_reasoning_tokens", "custom_thinking_prompt")
"""Of the environment's settings: accepted for compatibility (environments/config.py)."""


def cautions(before: Resolved, after: Resolved) -> list[str]:
    """Sentences about what changed from one to the other."""
    env, trainer = after.settings.env, after.settings.trainer
    found = [_cost(before.settings.env, env)]
    if _changed(before, after, "temperature") and env["temperature"] != 1:
        found.append(f"temperature {env['temperature']:g}: training learns from samples of the policy itself, at 1")
    if trainer != before.settings.trainer or _changed(before, after, "max_token_length"):
        found.append(_too_long(env.get("max_token_length"), trainer.max_token_trainer_length))
    if _changed(before, after, "max_token_length") or _changed(before, after, "max_new_tokens"):
        found.append(_no_room(env.get("max_token_length"), env.get("max_new_tokens")))
    if after.settings.run.stop_when is not None and trainer.eval_every == 0 and after.settings != before.settings:
        found.append("stop_when is looked at where the run is evaluated, and eval_every 0 leaves only its two ends")
    if after.settings.inference.engine == "scripted" != before.settings.inference.engine:
        found.append("engine scripted: it has no weights and learns nothing")
    if after.settings.inference.model != before.settings.inference.model:
        found.append(_absent(after.settings.inference.model))
    found += [f"{name} has no effect here" for name in NO_EFFECT if _changed(before, after, name) and env[name]]
    return [sentence for sentence in found if sentence]


def lowered(resolved: Resolved) -> list[str]:
    """What the policy's cap has made of a number of steps that nobody gave."""
    steps, policy = resolved.settings.trainer.total_steps, load_policy()
    if resolved.sources.get(STEPS) != "policy" or STEPS in policy.lock:
        return []
    default = resolved.trainer_defaults.get("total_steps", TrainerSettings().total_steps)
    return [f"total_steps is {steps} rather than {default}: the policy '{policy.name}' allows no more (caps.max_steps)"]


def held_model(resolved: Resolved) -> list[str]:
    """That no run can start with the model that the policy holds: it is not here, or does not fit."""
    from halteres.agent.known_models import known_models
    from halteres.runs.starting.machine import workload_of

    policy, model = load_policy(), resolved.settings.inference.model
    if MODEL not in policy.lock or environ.service_url() is not None:
        return []
    found = next((one for one in known_models(workload_of(resolved.settings)) if one.name == model), None)
    wrong = [] if model_folder(model, environ.home() / "models") else ["is not on this disk"]
    if found is not None and found.fits == "no":
        wrong.append(f"does not fit here ({found.need_gb:.0f} GB are needed, {found.free_gb or 0:.1f} GB free)")
    if not wrong:
        return []
    return [f"the model '{model}' {' and '.join(wrong)}: no run can start. {how_to_unlock(MODEL, policy)}"]


def _absent(model: str) -> str | None:
    """A service of somebody else's may have what is not here."""
    if environ.service_url() is not None or model_folder(model, environ.home() / "models") is not None:
        return None
    return f"the model '{model}' is not on this disk (`halteres models add`): no run can start with it"


def _changed(before: Resolved, after: Resolved, field: str) -> bool:
    return field in after.settings.env and after.settings.env[field] != before.settings.env.get(field)


def _cost(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """How much longer a step takes, by the tokens that are sampled and trained on in it."""
    old, new = _tokens(before), _tokens(after)
    if not old or not new or new / old < NOTABLY_SLOWER:
        return None
    return f"about {new / old:.1f}x slower per step: up to {new:,.0f} tokens in one, before {old:,.0f}"


def _tokens(env: dict[str, Any]) -> float | None:
    batch, length = env.get("batch_size"), env.get("max_new_tokens") or env.get("max_token_length")
    if not isinstance(batch, int) or not isinstance(length, int) or length < 1:
        return None
    return float(batch * length)


def _too_long(longest: Any, trained: int) -> str | None:
    if not isinstance(longest, int) or longest <= trained:
        return None
    return f"max_token_trainer_length {trained} is below max_token_length {longest}: longer sequences are left out"


def _no_room(longest: Any, answer: Any) -> str | None:
    if not isinstance(longest, int) or not isinstance(answer, int) or not 0 < longest <= answer:
        return None
    return f"max_token_length {longest} is for prompt and answer together: max_new_tokens {answer} cannot be reached"


LONGEST_MESSAGE = 400  # characters

TIP = "Use rl_edit_config(field, value) to change any configurable field."

MODEL_FACTS = frozenset({"name", "present", "need_gb", "fits", "note"})
ABSENT = "One that is not present: `halteres models add NAME`, or set model to the path of its folder."


class Configuration(Result):
    """A draft's settings. A field is {name, current_value}; in full, or asked for by its name, also type, default,
    description, section, what is allowed, range, why it is locked; a locked one has locked_value."""

    longest: ClassVar[int] = 24_000  # all settings with their descriptions: brief is what is short

    environment: str
    configurable_fields: list[dict[str, Any]]
    locked_fields: list[dict[str, Any]]
    tip: str
    draft: str
    warnings: list[str] = []
    policy: str = ""  # whose locks these are, where they are not the default ones
    discarded_edits: dict[str, Any] = {}  # earlier ones that can be no more; told once
    models: list[dict[str, Any]] = []  # for field="model": base models, and whether such a run fits into this machine
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
    discarded_edits: dict[str, Any] = {}  # earlier ones that can be no more: locked by now, or gone


@tool(title="Show the settings", hints=READS)
def rl_get_current_config(
    caller: Caller,
    detail: Annotated[
        Literal["brief", "full"],
        Field(description="brief: headline and changed fields; full: every field, 3,500 tokens"),
    ] = "brief",
    field: Annotated[str | None, Field(description="one field, in full; `model` lists base models that fit")] = None,
    draft: Draft = None,
) -> Configuration:
    """Show your draft's settings: those you can change with rl_edit_config, and those that are locked."""
    kept = current(caller, draft)
    chosen, resolved = kept.draft, kept.draft.resolve()
    settings = settings_of(chosen, resolved)
    is_full = detail == "full"
    shown = [_named(settings, field)] if field else [one for one in settings if is_full or one.is_headline]
    rows = [(one, one.full if is_full or field else one.brief) for one in shown]
    told = Configuration(
        environment=resolved.settings.run.environment_name,
        configurable_fields=[row for one, row in rows if one.lock is None],
        locked_fields=[row for one, row in rows if one.lock is not None],
        tip=TIP if field or is_full else f'{TIP} All {len(settings)}: detail="full"; one in full: field="NAME".',
        draft=chosen.handle,
        next=worded("rl_test_inference", draft=_told(caller, draft)),
    )
    if (policy := load_policy().name) != DEFAULT.name:
        told.policy = policy
    if kept.discarded:
        told.discarded_edits = dict(kept.discarded)
    if warnings := lowered(resolved):
        told.warnings = warnings
    if field is not None and shown[0].key == "inference.model":
        told.models, told.proposed = _models(resolved)
        told.tip = ABSENT
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
    with drafts.editing(caller, draft) as stored:
        stored.check_selected()
        kept = sifted(stored)
        before = kept.draft
        asked = _asked(field, value, changes)
        with mending("rl_edit_config", asked, draft=here):
            after, now = before.edited(asked)
            _check_held(asked, now)
        was = _as_it_was(before)
        drafts.save_draft(after)
    values = {name: echoed(_value(name, given, now)) for name, given in asked.items()}
    told = Edited(
        message=shortened(f"Updated {_listed(values)}", LONGEST_MESSAGE),
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
    if kept.discarded:
        told.discarded_edits = dict(kept.discarded)
    return told


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} = {holds}" for name, holds in values.items())


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


def _check_held(asked: Mapping[str, Any], now: Resolved) -> None:
    """Raise LockedField for what the policy holds, also where it is asked for the very value that it holds."""
    policy, sources = load_policy(), now.sources
    keys = {name: Edit(name=name, value=value).key for name, value in asked.items()}
    held = [
        policy_lock(key, policy.lock[key], policy).refused(name, asked[name])
        for name, key in keys.items()
        if sources.get(key) == "policy"
    ]
    if held:
        raise refusal(held)


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
    """Base models that are here, or would fit if they were, and the one that is set; and the one that is proposed."""
    from halteres.agent.known_models import known_models, proposed
    from halteres.runs.starting.machine import workload_of

    models, held = known_models(workload_of(resolved.settings)), resolved.settings.inference.model
    worth_it = [one for one in models if one.present or one.fits != "no" or one.name == held]
    return [_brief_facts(one.facts) for one in worth_it], proposed(models).name


def _brief_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """Without the note on a model that is not here: it is the same for all of them (`ABSENT`)."""
    wanted = MODEL_FACTS if facts["present"] else MODEL_FACTS - {"note"}
    told = {name: fact for name, fact in facts.items() if name in wanted}
    return {**told, "need_gb": significant(facts["need_gb"])}
