"""Arguments that several tools share.

Owns: their types and the words that describe them to a model.
Never: resolves one.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

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
    Field(description='settings to change, all or none: {"group_size": 16, "trainer.learning_rate": 0.001}'),
]
WaitSeconds = Annotated[float, Field(ge=0, le=50, description="seconds to wait; 0 answers at once")]
