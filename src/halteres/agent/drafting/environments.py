"""The tools that find and choose an environment: rl_list_environments, rl_select_environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from halteres.agent.drafting.configuring import held_model, lowered, mending
from halteres.agent.drafting.drafts import choose
from halteres.agent.drafting.fields import brief
from halteres.agent.tool import READS, Caller, Changes, Draft, Hints, Result, tool
from halteres.config.discovery import (
    BrokenFile,
    Discovery,
    EnvironmentFile,
    discover,
)
from halteres.config.program import last_failure
from halteres.next_step import worded

TIPS = (
    "rl_select_environment(name) selects one",
    "read file_path to see how it scores",
    "copy a file to make your own",
)

CHARACTERS_PER_10 = 1600
"""Of ten environments in an answer, all told: descriptions are cut so that it holds; a `query` shows them whole."""

OVERHEAD, LEAST_DESCRIPTION = 240, 14
"""Characters of an answer besides its environments; of a description, however long the paths are."""

FEW_VARIANTS = 1
"""Of a family, unless a query asks for its variants."""


class FoundEnvironment(BaseModel):
    """One environment, or a family of them: each of its variants is one, named FAMILY:VARIANT."""

    name: str
    class_name: str
    file_path: str
    description: str
    variants: list[str] = []  # of a family: a few names, or all of those that a query asks for
    num_variants: int = 0  # of a family: how many there are
    all_variants: str = ""  # of a family, where not all are told: the call that tells them


class Environments(Result):
    """All environments."""

    environments: list[FoundEnvironment]
    count: int
    tips: list[str]
    broken: list[dict[str, str]] = []  # file_path, why; told where there are some


class Selected(Result):
    """A draft's environment."""

    message: str
    environment: str
    file_path: str
    draft: str
    config: dict[str, Any]  # brief: headline settings
    discarded_edits: dict[str, Any]
    warnings: list[str] = []
    coerced: dict[str, Any] = {}  # changes that were taken for another type, as they hold now


@tool(title="List environments", hints=READS)
def rl_list_environments(
    caller: Caller,
    query: Annotated[
        str | None, Field(description="words to look for in names and descriptions; `FAMILY:` tells all its variants")
    ] = None,
    refresh: Annotated[bool, Field(description="read all files again, whatever their times say")] = False,
) -> Environments:
    """List the environments a model can be trained on: name, file, what it teaches.

    Files that cannot be read are told with the reason. To make an environment, copy one of the files.
    """
    found = discover(afresh=refresh)
    fitting = {one: members for one in found.environments if (members := _fitting(one, query)) is not None}
    first = next((members[0] if members else one.name for one, members in fitting.items()), None)
    told = Environments(
        environments=_told(fitting),
        count=len(fitting),
        tips=list(TIPS),
        next=worded("rl_select_environment", name=first) if first else _none_found(query),
    )
    broken = _broken(found)
    if broken:
        told.broken = [{"file_path": one.file_path, "why": one.why} for one in broken]
    return told


@tool(title="Select an environment", hints=Hints(idempotent=True))
def rl_select_environment(
    caller: Caller,
    name: Annotated[str, Field(description="name from rl_list_environments, FAMILY:VARIANT, or a file's path")],
    changes: Changes = None,
    draft: Draft = None,
) -> Selected:
    """Select an environment into your draft, with its own default settings; nothing runs yet.

    Earlier edits are discarded and told. With `changes`, settings are edited in the same call.
    """
    here = draft if draft != caller.draft else None
    with mending("rl_select_environment", changes or {}, name=name, draft=here):
        chosen = choose(caller, draft, name, changes or {})
    run = chosen.resolved.settings.run
    test, start = worded("rl_test_inference", draft=here), worded("rl_start_training", dry_run=True, draft=here)
    told = Selected(
        message=f"Selected environment: {run.environment_name}",
        environment=run.environment_name,
        file_path=chosen.file_path,
        draft=chosen.draft.handle,
        config=brief(chosen.resolved),
        discarded_edits=chosen.discarded,
        next=f"{test} then {start}",
    )
    if chosen.resolved.coerced:
        told.coerced = dict(chosen.resolved.coerced)
    if warnings := [*lowered(chosen.resolved), *held_model(chosen.resolved)]:
        told.warnings = warnings
    return told


def _fitting(environment: EnvironmentFile, query: str | None) -> Sequence[str] | None:
    """Names of the variants that a query asks for; none where it asks for the environment; None where for neither."""
    text = f"{environment.name} {environment.class_name} {environment.description}".casefold()
    words = (query or "").casefold().split()
    asks_variants = bool(environment.variants) and any(":" in word for word in words)
    if all(word in text for word in words) and not asks_variants:
        return ()
    return [one for one in environment.members if all(word in f"{one.casefold()} {text}" for word in words)] or None


def _told(environments: Mapping[EnvironmentFile, Sequence[str]]) -> list[FoundEnvironment]:
    """With descriptions as long as there is room for, beside the variants that were asked for."""
    if not environments:
        return []
    tens = -(-len(environments) // 10)
    whole = [_whole(one, ()).model_dump_json(exclude_unset=True) for one in environments]
    rest = sum(map(len, whole)) + len(whole) - sum(len(one.description) for one in environments)
    room = max(LEAST_DESCRIPTION, (CHARACTERS_PER_10 * tens - OVERHEAD - rest) // len(whole))
    rows = [_whole(one, asked) for one, asked in environments.items()]
    return [row.model_copy(update={"description": _cut(row.description, room)}) for row in rows]


def _whole(environment: EnvironmentFile, asked: Sequence[str]) -> FoundEnvironment:
    """One row; of a family with the variants asked for, or a few."""
    family: dict[str, Any] = {}
    if members := environment.members:
        family = {"variants": list(asked or members[:FEW_VARIANTS]), "num_variants": len(members)}
        if not asked and len(members) > FEW_VARIANTS:
            family["all_variants"] = worded("rl_list_environments", query=f"{environment.name}:")
    return FoundEnvironment(
        name=environment.name,
        class_name=environment.class_name,
        file_path=environment.file_path,
        description=environment.description,
        **family,
    )


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 3].rstrip()}..."


def _none_found(query: str | None) -> str:
    return "rl_list_environments()" if query else "rl_list_environments(refresh=true)"


def _broken(found: Discovery) -> list[BrokenFile]:
    """Files that cannot be read, and those that could not say what they are when they were last asked."""
    failed = [(one.file_path, last_failure(Path(one.file_path))) for one in found.environments]
    return [*found.broken, *(BrokenFile(file_path=path, why=why) for path, why in failed if why)]
