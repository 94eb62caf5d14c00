"""The tools that find and choose an environment: rl_list_environments, rl_select_environment."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from halteres.agent.arguments import Changes, Draft
from halteres.agent.caller import Caller
from halteres.agent.tool import READS, Hints, Result, tool


class FoundEnvironment(BaseModel):
    """One environment."""

    name: str
    class_name: str
    file_path: str
    description: str


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


@tool(title="List environments", hints=READS)
def rl_list_environments(
    caller: Caller,
    query: Annotated[str | None, Field(description="words to look for in names and descriptions")] = None,
    refresh: Annotated[bool, Field(description="read all files again, whatever their times say")] = False,
) -> Environments:
    """List the environments a model can be trained on: name, file, what it teaches.

    Files that cannot be read are told with the reason. To make an environment, copy one of the files.
    """
    raise NotImplementedError


@tool(title="Select an environment", hints=Hints(idempotent=True))
def rl_select_environment(
    caller: Caller,
    name: Annotated[str, Field(description="name from rl_list_environments, or the path of a file")],
    changes: Changes = None,
    draft: Draft = None,
) -> Selected:
    """Select an environment into your draft, with its own default settings; nothing runs yet.

    Earlier edits are discarded and told. With `changes`, settings are edited in the same call.
    """
    raise NotImplementedError
