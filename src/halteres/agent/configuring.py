"""The tools that look at and edit a draft's settings: rl_get_current_config, rl_edit_config."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from halteres.agent.arguments import Changes, Draft
from halteres.agent.caller import Caller
from halteres.agent.tool import READS, UNSET, Hints, Result, tool


class Configuration(Result):
    """A draft's settings. A field is {name, current_value}, in full also type, default, description, and what is
    allowed; a locked one has locked_value."""

    environment: str
    configurable_fields: list[dict[str, Any]]
    locked_fields: list[dict[str, Any]]
    tip: str
    draft: str


class Edited(Result):
    """What an edit changed."""

    message: str
    field: str | None
    value: Any
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
    raise NotImplementedError


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
    raise NotImplementedError
