"""The tools that choose an environment and its settings: rl_list_environments,
rl_select_environment, rl_get_current_config, rl_edit_config.

An answer warns of what an edit brings with it that its maker may not have meant; an error names the
call that mends a refused edit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from halteres.agent import drafts
from halteres.agent.answer_text import echoed, nonempty
from halteres.agent.next_call import LIST_ENVIRONMENTS, mend
from halteres.agent.tool import (
    READS,
    UNSET,
    Caller,
    Changes,
    Draft,
    Facts,
    Hints,
    Result,
    Sentence,
    tool,
)
from halteres.config import environ
from halteres.config.discovery import EnvironmentFile, discover
from halteres.config.edits import Edit, nearest_setting
from halteres.config.operator_policy import DEFAULT, how_to_unlock, load_policy, policy_lock
from halteres.config.problem import Problem, UnknownSetting, refusal
from halteres.config.program import last_failure
from halteres.config.resolution import STEPS, Resolved
from halteres.config.settings import Settings, TrainerSettings, by_key
from halteres.errors import InvalidConfig, UserError
from halteres.models import model_folder
from halteres.next_step import Advice, NextStep, Placeholder, then
from halteres.runs.directory import RunDirectory, find_run
from halteres.runs.planning import resources
from halteres.runs.planning.known_models import KnownModel, known_models, proposed
from halteres.short_texts import rounded, shortened

CHARACTERS_PER_10 = 1600
"""Of ten environments in an answer, all told: descriptions are cut so that it holds; a `query`
shows them whole.
"""

OVERHEAD, LEAST_DESCRIPTION = 240, 14
"""Characters of an answer besides its environments; of a description, however long the paths
are.
"""

FEW_VARIANTS = 1  # of a family, unless a query asks for its variants


class FoundEnvironment(Facts):
    """One environment, or a family of them: each of its variants is one, named FAMILY:VARIANT."""

    name: str
    class_name: str
    file_path: str
    description: str
    variants: list[str] = []  # of a family: a few names, or all of those that a query asks for
    num_variants: int = 0  # of a family: how many there are
    all_variants: Sentence = ""  # of a family, where not all are listed: the call that lists them


class BrokenFile(Facts):
    """A file that cannot be read, or that could not say what it is."""

    file_path: str
    why: str


class Environments(Result):
    """All environments."""

    environments: list[FoundEnvironment]
    count: int
    tips: list[Sentence]
    broken: list[BrokenFile] = []


class Selected(Result):
    """A draft's environment."""

    message: str
    environment: str
    file_path: str
    draft: str
    config: dict[str, Any]  # brief: headline settings
    discarded_edits: dict[str, Any]
    # where the same environment was selected again: the call that sets the discarded edits again
    restore: Sentence = ""
    warnings: list[str] = []
    coerced: dict[str, Any] = {}  # changes that were taken for another type, as they hold now
    # of `settings_of`: what holds otherwise than in that run: name -> [there, here]
    differs: dict[str, list[Any]] = {}


WITHOUT_DEFAULTS = "agent"
"""The environment that is of no use without tasks and a program of its user's: proposed last."""


@tool(title="List environments", hints=READS)
def rl_list_environments(
    caller: Caller,
    query: Annotated[
        str | None,
        Field(
            description=(
                "words to look for in names and descriptions; `FAMILY:` tells all its variants"
            )
        ),
    ] = None,
    refresh: Annotated[
        bool, Field(description="read all files again, whatever their times say")
    ] = False,
) -> Environments:
    """List the environments a model can be trained on: name, file, what it teaches.

    Files that cannot be read are told with the reason. To make an environment, copy one of the
    files.
    """
    found = discover(afresh=refresh)
    matches = {
        one: variants
        for one in found.environments
        if (variants := _matching(one, query)) is not None
    }
    names = [variants[0] if variants else one.name for one, variants in matches.items()]
    names.sort(key=WITHOUT_DEFAULTS.__eq__)
    first = next(iter(names), None)
    none_found = LIST_ENVIRONMENTS
    if not query:
        none_found = NextStep.of("rl_list_environments", refresh=True)
    # Files that cannot be read, and those that could not say what they are when they were last
    # asked.
    failed = [(one.file_path, last_failure(Path(one.file_path))) for one in found.environments]
    broken = [(one.file_path, one.why) for one in found.broken] + [
        (path, why) for path, why in failed if why
    ]
    return Environments(
        environments=_listed(matches),
        count=len(matches),
        tips=[
            (NextStep.of("rl_select_environment", Placeholder("name")), " selects one"),
            "read file_path to see how it scores",
            "copy a file to make your own",
        ],
        **nonempty(broken=[BrokenFile(file_path=path, why=why) for path, why in broken]),
        next=NextStep.of("rl_select_environment", name=first) if first else none_found,
    )


def _matching(environment: EnvironmentFile, query: str | None) -> Sequence[str] | None:
    """Names of the variants that a query asks for; none where it asks for the environment; None
    where for neither.
    """
    text = f"{environment.name} {environment.class_name} {environment.description}".casefold()
    words = (query or "").casefold().split()
    asks_variants = bool(environment.variants) and any(":" in word for word in words)
    if all(word in text for word in words) and not asks_variants:
        return ()
    return [
        one
        for one in environment.members
        if all(word in f"{one.casefold()} {text}" for word in words)
    ] or None


def _listed(matches: Mapping[EnvironmentFile, Sequence[str]]) -> list[FoundEnvironment]:
    """With descriptions as long as there is room for, beside the variants that were asked for."""
    if not matches:
        return []
    whole = [_row(one, ()).model_dump_json(exclude_unset=True) for one in matches]
    rest = sum(map(len, whole)) + len(whole) - sum(len(one.description) for one in matches)
    tens = -(-len(matches) // 10)
    room = max(LEAST_DESCRIPTION, (CHARACTERS_PER_10 * tens - OVERHEAD - rest) // len(whole))
    rows = [_row(one, variants) for one, variants in matches.items()]
    for row in rows:
        if len(row.description) > room:
            row.description = f"{row.description[: room - 3].rstrip()}..."
    return rows


def _row(environment: EnvironmentFile, variants: Sequence[str]) -> FoundEnvironment:
    """One environment; a family with the variants asked for, or a few."""
    family: dict[str, Any] = {}
    if members := environment.members:
        family = {
            "variants": list(variants or members[:FEW_VARIANTS]),
            "num_variants": len(members),
        }
        if not variants and len(members) > FEW_VARIANTS:
            family["all_variants"] = NextStep.of(
                "rl_list_environments", query=f"{environment.name}:"
            )
    return FoundEnvironment(
        name=environment.name,
        class_name=environment.class_name,
        file_path=environment.file_path,
        description=environment.description,
        **family,
    )


@tool(title="Select an environment", hints=Hints(idempotent=True))
def rl_select_environment(
    caller: Caller,
    name: Annotated[
        str, Field(description="name from rl_list_environments, FAMILY:VARIANT, or a file's path")
    ],
    changes: Changes = None,
    settings_of: Annotated[
        str | None,
        Field(description="run whose settings to begin with, in place of the defaults"),
    ] = None,
    draft: Draft = None,
) -> Selected:
    """Select an environment into your draft, with its own default settings; nothing runs yet.

    Earlier edits are discarded and told, with the call that restores them. With `changes`, settings
    are edited in the same call.
    """
    other_draft = None
    if draft != caller.draft:
        other_draft = draft
    before = drafts.load_draft(caller, draft).environment
    like = None
    if settings_of:
        like = _run_with_environment(settings_of)
    try:
        resolved = drafts.choose(caller, draft, name, changes or {}, like)
    except InvalidConfig as error:
        mend(
            error,
            "rl_select_environment",
            changes or {},
            name=name,
            settings_of=settings_of,
            draft=other_draft,
        )
        raise
    run = resolved.settings.run
    test = NextStep.of("rl_test_inference", draft=other_draft)
    message, restore = f"Selected environment: {run.environment_name}", None
    differs: dict[str, list[Any]] = {}
    if like is not None:
        message += f", with the settings of run {like.run_id}"
        differs = drafts.differences(like, resolved)
    elif before == drafts.load_draft(caller, draft).environment and resolved.discarded:
        message += ". Its own default settings hold again: your earlier edits were discarded."
        restore = _restoring(resolved, changes or {}, other_draft)
    return Selected(
        message=message,
        environment=run.environment_name,
        file_path=str(resolved.environment.path),
        draft=draft or caller.draft,
        config=drafts.brief(resolved.settings, resolved.sources),
        discarded_edits=dict(resolved.discarded),
        **nonempty(
            coerced=dict(resolved.coerced),
            restore=restore,
            differs=differs,
            warnings=[*_capped_steps(resolved), *_unusable_model(resolved)],
        ),
        next=then(test, NextStep.of("rl_start_training", dry_run=True, draft=other_draft)),
    )


def _run_with_environment(run_id: str) -> RunDirectory:
    """The run of this id. UserError where it trains on a file, and has no such settings."""
    run = find_run(run_id)
    kind = run.state().kind
    if kind == "rl":
        return run
    raise UserError(
        f"Run {run.run_id} has no settings for an environment.",
        f"It trains on a file, by {kind}.",
        NextStep("rl_list_runs"),
        field="settings_of",
    )


def _restoring(
    resolved: Resolved, changes: Mapping[str, Any], draft: str | None
) -> NextStep | None:
    """The call that sets the discarded edits again, without those that the call changed otherwise
    and those that the file, as it is now, has no field for; None where none is left.
    """
    newer = {Edit(name=name, value=value).key for name, value in changes.items()}
    known = {f"env.{name}" for name in resolved.description.fields}
    kept = {
        key: value
        for key, value in resolved.discarded.items()
        if key not in newer and (key in known or not key.startswith("env."))
    }
    if not kept:
        return None
    return NextStep.of("rl_edit_config", changes=kept, draft=draft)


LONGEST_MESSAGE = 400  # characters

TIP: Advice = (
    *("Use ", NextStep.of("rl_edit_config", Placeholder("field"), Placeholder("value"))),
    " to change any configurable field.",
)
ABSENT = (
    "One that is not present: `halteres models add NAME`, or set model to the path of its folder."
)


class ModelRow(Facts):
    """A base model, and whether a run with these settings fits into this machine with it."""

    name: str
    present: bool
    need_gb: float
    fits: str
    note: str = ""


class Configuration(Result):
    """A draft's settings: headline and changed ones in brief; all, or one that is asked for, in
    full.
    """

    longest: ClassVar[int] = 28_000  # all settings with their descriptions: brief is what is short

    environment: str
    configurable_fields: list[drafts.SettingRow]
    locked_fields: list[drafts.SettingRow]
    tip: Sentence
    draft: str
    warnings: list[str] = []
    policy: str = ""  # whose locks these are, where they are not the default ones
    discarded_edits: dict[str, Any] = {}  # earlier ones that can be no more; once
    models: list[ModelRow] = []  # for field="model"
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
        Field(description="brief: headline and changed fields; full: every field, 5,000 tokens"),
    ] = "brief",
    field: Annotated[
        str | None, Field(description="one field, in full; `model` lists base models that fit")
    ] = None,
    draft: Draft = None,
) -> Configuration:
    """Show your draft's settings: those you can change with rl_edit_config, and those that are
    locked.
    """
    resolved = drafts.current(caller, draft)
    settings = drafts.settings_of(resolved)
    is_full = detail == "full"
    if field:
        key = Edit(name=field, value=None).key
        shown = [one for one in settings if one.name == field] or [
            one for one in settings if one.key == key
        ]
        if not shown:
            names = tuple(one.name for one in settings)
            guess = nearest_setting(field, list(names))
            raise refusal(
                [UnknownSetting(field=field, got=None, did_you_mean=guess, available=names)]
            )
        shown = shown[:1]
    else:
        shown = [one for one in settings if is_full or one.is_headline]
    rows = [(one, one.full if is_full or field else one.brief) for one in shown]
    tip = TIP
    if not (field or is_full):
        tip = (TIP, f' All {len(settings)}: detail="full"; one in full: field="NAME".')
    if field and shown[0].key == MODEL:
        models, first = _models(resolved)
    else:
        models, first = ([], "")
    policy = load_policy().name
    return Configuration(
        environment=resolved.settings.run.environment_name,
        configurable_fields=[row for one, row in rows if one.lock is None],
        locked_fields=[row for one, row in rows if one.lock is not None],
        tip=ABSENT if models else tip,
        draft=draft or caller.draft,
        **nonempty(
            policy=policy if policy != DEFAULT.name else "",
            discarded_edits=dict(resolved.discarded),
            warnings=_capped_steps(resolved),
            models=models,
            proposed=first,
        ),
        next=NextStep.of("rl_test_inference", draft=draft if draft != caller.draft else None),
    )


def _models(resolved: Resolved) -> tuple[list[ModelRow], str]:
    """Base models that are here, or would fit if they were, and the one that is set; and the one
    that is proposed.
    """
    models = _known_models(resolved.settings)
    rows = [
        ModelRow(
            name=one.name,
            present=one.present,
            need_gb=rounded(one.need_gb, 3),
            fits=one.fits,
            # of one that is absent `ABSENT` says it
            **nonempty(note=one.note if one.present else ""),
        )
        for one in models
        if one.present or one.fits != "no" or one.name == resolved.settings.inference.model
    ]
    return rows, proposed(models).name


def _known_models(settings: Settings) -> tuple[KnownModel, ...]:
    """With whether a run with these settings fits where its engine computes."""
    return known_models(
        resources.workload_of(settings), resources.this_machine(settings.inference.device)
    )


@tool(title="Edit settings", hints=Hints(idempotent=True))
def rl_edit_config(
    caller: Caller,
    field: Annotated[str | None, Field(description="one field's name; with `value`")] = None,
    value: Annotated[
        Any, Field(description="its new value; null is one where the type allows it")
    ] = UNSET,
    changes: Changes = None,
    draft: Draft = None,
) -> Edited:
    """Change settings of your draft: one (`field`, `value`) or several at once (`changes`, all or
    none).

    Values are checked before anything is changed; the answer tells what was, and what is now.
    """
    other_draft = None
    if draft != caller.draft:
        other_draft = draft
    with drafts.editing(caller, draft) as stored:
        _ = stored.selected
        edits = _edits(field, value, changes)
        try:
            now = drafts.edited(caller, stored, edits)
            _check_locks(edits, now)
        except InvalidConfig as error:
            mend(error, "rl_edit_config", edits, draft=other_draft)
            raise
        was = _before(stored, now.discarded)
        drafts.save_draft(stored.with_edits_of(now))
    values = by_key(now.settings)
    new = {
        name: echoed(values.get(Edit(name=name, value=given).key, given))
        for name, given in edits.items()
    }
    listed = ", ".join(f"{name} = {holds}" for name, holds in new.items())
    return Edited(
        message=shortened(f"Updated {listed}", LONGEST_MESSAGE),
        config=drafts.brief(now.settings, now.sources),
        diff=drafts.diff(by_key(was.settings), now.settings),
        draft=stored.handle,
        **({"field": field, "value": new[field]} if field is not None else {}),
        **nonempty(
            warnings=_warnings(was, now),
            coerced=dict(now.coerced),
            discarded_edits=dict(now.discarded),
        ),
        next=NextStep.of("rl_start_training", dry_run=True, draft=other_draft),
    )


def _check_locks(edits: Mapping[str, Any], resolved: Resolved) -> None:
    """Refuse what the policy holds, also where the very value is asked for that it holds."""
    policy = load_policy()
    problems: list[Problem] = []
    for name, value in edits.items():
        key = Edit(name=name, value=value).key
        if resolved.sources.get(key) == "policy":
            problems.append(policy_lock(key, policy.lock[key], policy).refused(name, value))
    if problems:
        raise refusal(problems)


def _before(draft: drafts.Draft, discarded: Mapping[str, Any]) -> Resolved:
    """The draft's settings before an edit, without what could no longer hold then."""
    kept = {key: value for key, value in draft.changes.items() if key not in discarded}
    try:
        return draft.resolve(kept)
    except InvalidConfig:
        return draft.resolve({})


def _edits(field: str | None, value: Any, changes: dict[str, Any] | None) -> dict[str, Any]:
    """Both forms of a call as one. Some hosts send an empty or a null `value` that nobody gave."""
    if field is None and changes and value in (UNSET, "", None):
        return changes
    if field is not None and value is not UNSET and not changes:
        return {field: value}
    raise UserError(
        "rl_edit_config takes a field with its value, or changes.",
        "",
        (
            *(NextStep.of("rl_edit_config", field="group_size", value=16), " or "),
            NextStep.of("rl_edit_config", changes={"group_size": 16}),
        ),
    )


MODEL = "inference.model"
NOTABLY_SLOWER = 1.3  # times as many tokens in a step
NO_EFFECT = ("thinking_mode", "reasoning_effort", "max_reasoning_tokens", "custom_thinking_prompt")
"""Of the environment's settings: accepted for compatibility (environments/config.py)."""


def _warnings(before: Resolved, after: Resolved) -> list[str]:
    """What changed from one to the other that its maker may not have meant."""
    was, now = before.settings, after.settings
    env, trained, scripted = (
        now.env,
        now.trainer.max_token_trainer_length,
        now.inference.engine == "scripted",
    )
    length, answer = env.get("max_token_length"), env.get("max_new_tokens")

    def changed(*names: str) -> bool:
        return any(name in env and env[name] != was.env.get(name) for name in names)

    found: list[str] = []
    old, new = _tokens(was.env), _tokens(env)
    if old and new / old >= NOTABLY_SLOWER:
        found.append(
            f"about {new / old:.1f}x slower per step: up to {new:,.0f} tokens in one, before "
            f"{old:,.0f}"
        )
    if changed("temperature") and env["temperature"] != 1:
        found.append(
            f"temperature {env['temperature']:g}: training learns from samples of the policy "
            "itself, at 1"
        )
    if (
        (now.trainer != was.trainer or changed("max_token_length"))
        and isinstance(length, int)
        and length > trained
    ):
        found.append(
            f"max_token_trainer_length {trained} is below max_token_length {length}: longer "
            "sequences are left out"
        )
    has_room = not (isinstance(length, int) and isinstance(answer, int) and 0 < length <= answer)
    if changed("max_token_length", "max_new_tokens") and not has_room:
        why = f"max_new_tokens {answer} cannot be reached"
        found.append(f"max_token_length {length} is for prompt and answer together: {why}")
    if now.run.stop_when is not None and now.trainer.eval_every == 0 and now != was:
        found.append(
            "stop_when is looked at where the run is evaluated, and eval_every 0 leaves only its "
            "two ends"
        )
    if scripted and was.inference.engine != "scripted":
        found.append("engine scripted: it has no weights and learns nothing")
    # which may have what is not here
    model, is_served = now.inference.model, environ.service_url() is not None
    if model != was.inference.model and not is_served and not _is_here(model):
        found.append(
            f"the model '{model}' is not on this disk (`halteres models add`): no run can start "
            "with it"
        )
    return found + [
        f"{name} has no effect here" for name in NO_EFFECT if changed(name) and env[name]
    ]


def _tokens(env: Mapping[str, Any]) -> int:
    """How many are sampled and trained on in a step; 0 where the environment does not say."""
    batch, length = env.get("batch_size"), env.get("max_new_tokens") or env.get("max_token_length")
    if isinstance(batch, int) and isinstance(length, int):
        return max(0, batch) * max(0, length)
    return 0


def _is_here(model: str) -> bool:
    return model_folder(model, environ.home() / "models") is not None


def _capped_steps(resolved: Resolved) -> list[str]:
    """What the policy's cap has made of a number of steps that nobody gave."""
    steps, policy = resolved.settings.trainer.total_steps, load_policy()
    if resolved.sources.get(STEPS) != "policy" or STEPS in policy.lock:
        return []
    default = resolved.description.trainer.get("total_steps", TrainerSettings().total_steps)
    return [
        f"total_steps is {steps} rather than {default}: the policy '{policy.name}' allows no more "
        "(caps.max_steps)"
    ]


def _unusable_model(resolved: Resolved) -> list[str]:
    """That no run can start with the model that the policy holds: it is not here, or does not
    fit.
    """
    policy, model = load_policy(), resolved.settings.inference.model
    if MODEL not in policy.lock or environ.service_url() is not None:
        return []
    found = next((one for one in _known_models(resolved.settings) if one.name == model), None)
    wrong = []
    if not _is_here(model):
        wrong = ["is not on this disk"]
    if found is not None and found.fits == "no":
        wrong.append(
            f"does not fit here ({found.need_gb:.0f} GB are needed, {found.free_gb or 0:.1f} GB "
            "free)"
        )
    unusable = (
        f"the model '{model}' {' and '.join(wrong)}: no run can start. "
        f"{how_to_unlock(MODEL, policy)}"
    )
    if wrong:
        return [unusable]
    return []
