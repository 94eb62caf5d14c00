"""What the value of a setting reaches beyond the run: code, files, servers, keys, or nothing.

A setting of ours that can hold a text declares its kind (`reaches`, in its JSON Schema). Settings
of other people's environments declare none; their texts are judged by what they look like
(`agent/open_access`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from halteres.logins import ADDRESS_FORM, is_place, is_web_address

Reach = Literal["code", "path", "address", "key", "environment", "model", "id", "name", "nothing"]
"""code: a program, module or function that is run, or its arguments; path: a file or folder;
address: a server; key: a secret that is spent; environment, model: one by its name, or by its path;
id: of an environment in another package's registry, or MODULE:ID, whose module is imported; name:
of a data set or a task, or its path; nothing: words."""

REACHES: Final = "reaches"  # the key in a field's JSON Schema


def declared(reach: Reach | None, extra: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """What a field adds to its JSON Schema; None where it adds nothing."""
    found = {**(extra or {}), **({REACHES: reach} if reach else {})}
    return found or None


def _address(text: str) -> str:
    if not is_web_address(text):
        raise PydanticCustomError("address", ADDRESS_FORM)
    return text


def _places(text: str) -> str:
    if not all(is_place(place.strip()) for place in text.split(",")):
        raise PydanticCustomError("address", f"a server's {ADDRESS_FORM}")
    return text


WebAddress = Annotated[str, AfterValidator(_address), Field(json_schema_extra=declared("address"))]
"""The address of a server. What an HTTP client would read in another way than we do is refused:
nothing would strike the login out of it."""

Places = Annotated[str, AfterValidator(_places), Field(json_schema_extra=declared("path"))]
"""A folder or a server's address, or several by commas."""
