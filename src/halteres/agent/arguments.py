"""Arguments that several tools share.

Owns: their types and the words that describe them to a model.
Never: resolves one.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from halteres.config import environ

LONGEST_NAME = 100  # characters


def _checked(names: list[str] | None) -> list[str] | None:
    if any(len(name) > LONGEST_NAME for name in names or ()):
        raise PydanticCustomError("name_too_long", "a name has {most} characters at most", {"most": LONGEST_NAME})
    return names


ShortNames = AfterValidator(_checked)

RunId = Annotated[
    str | None, Field(description="run id (a unique beginning will do) or name; default: the only active run")
]
Draft = Annotated[str | None, Field(description="handle of a draft, from an earlier answer; default: your own")]
Changes = Annotated[
    dict[str, Any] | None,
    Field(description='settings to change, all or none: {"total_steps": 60, "learning_rate": 0.001, "stop_when": 0.9}'),
]
RunIds = Annotated[
    list[str] | None, ShortNames, Field(min_length=1, max_length=8, description="several runs, instead of run_id")
]


def _within_host(wait_s: float) -> float:
    """As long as the host of these tools lets a call take: it would break off a longer one."""
    return min(wait_s, environ.longest_wait_s())


WaitSeconds = Annotated[
    float,
    Field(ge=0, le=3600, description="seconds to wait; 0 answers at once; your host's limit, mostly 50, holds"),
    AfterValidator(_within_host),
]
