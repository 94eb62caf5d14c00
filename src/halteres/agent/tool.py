"""What a tool is.

Owns: the nouns `Tool`, `Hints`, `Result`, `Image`; the argument model and the schemas, read off a function's signature.
Never: runs a tool (`call`), knows a face.

A tool is one typed function; every face is derived from its signature:

    @tool(title="Stop a run", hints=Hints(destructive=True, idempotent=True))
    def rl_stop_training(caller: Caller, run_id: RunId = None, mode: Literal["now", "after_step"] = "now") -> Stopped:
        \"\"\"Stop a run. Safe to repeat: a stopped run answers with its final state.\"\"\"
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, get_type_hints

from pydantic import BaseModel, ConfigDict, PrivateAttr, create_model
from pydantic.json_schema import GenerateJsonSchema

from halteres.agent.fitting import LONGEST


class Unset:
    """The default of an argument for which null is a value too."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What a host may conclude before it calls (MCP's tool annotations); all four are always told."""

    read_only: bool = False
    idempotent: bool = False
    destructive: bool = False
    open_world: bool = False


LONGEST_TEXT = 500
"""Characters of a text among the arguments."""

LONGEST_PROMPT = 32_000

READS = Hints(read_only=True, idempotent=True)


class Result(BaseModel):
    """A tool's answer. Only fields that were given are told; more than the declared ones may be.

    `next` is one line: the call, or the calls, that make sense now.
    """

    model_config = ConfigDict(extra="allow")

    longest: ClassVar[int] = LONGEST  # characters; what is beyond is cut

    next: str
    _images: tuple[Path, ...] = PrivateAttr(default=())

    def showing(self, *images: Path) -> Any:
        """The same answer with PNG files to look at; faces that cannot show one give its path."""
        self._images = images
        return self

    @property
    def images(self) -> tuple[Path, ...]:
        """PNG files that belong to the answer."""
        return self._images


class Arguments(BaseModel):
    """Base of every tool's argument model: types are strict, unknown names are refused, and so is a text that is longer
    than any name or path."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, str_max_length=LONGEST_TEXT)


class LongArguments(Arguments):
    """Base of those of a tool that is given prompts: its other texts say themselves how long they may be."""

    model_config = ConfigDict(str_max_length=LONGEST_PROMPT)


class _Schema(GenerateJsonSchema):
    """A default that JSON has no word for (UNSET) is simply not told."""

    ignored_warning_kinds = {"non-serializable-default", "skipped-choice"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool, as every face sees it."""

    name: str
    title: str
    description: str  # for a model: what it does, when to use it; the function's docstring
    hints: Hints
    arguments: type[Arguments]
    result: type[Result]
    function: Callable[..., Any]  # (caller, **arguments) -> Result, or an awaitable of one where it waits

    def input_schema(self) -> dict[str, Any]:
        """JSON Schema of the arguments. Null stands for "not given" and is not told: it doubles the length."""
        schema = self.arguments.model_json_schema(schema_generator=_Schema)
        fields = {name: _brief(field) for name, field in schema.get("properties", {}).items()}
        return {"type": "object", "properties": fields, "required": schema.get("required", [])} | _CLOSED

    def output_schema(self) -> dict[str, Any]:
        """JSON Schema of a success: the keys that are always there. An error is exempt from it."""
        schema = self.result.model_json_schema(schema_generator=_Schema)
        fields = {
            name: {k: v for k, v in field.items() if k != "title"} for name, field in schema["properties"].items()
        }
        kept = {name: schema[name] for name in ("$defs", "required") if name in schema}
        return {"type": "object", "properties": fields, **kept, "additionalProperties": True}


_CLOSED = {"additionalProperties": False}


def _brief(field: dict[str, Any]) -> dict[str, Any]:
    """A field's schema without its title, and without the null that an argument left out stands for."""
    kept = {name: value for name, value in field.items() if name != "title" and (name, value) != ("default", None)}
    options = [option for option in kept.get("anyOf", ()) if option != {"type": "null"}]
    if len(options) == 1 and "default" in field:
        kept.pop("anyOf")
        return {**options[0], **kept}
    return kept


def tool(*, title: str, hints: Hints, arguments: type[Arguments] = Arguments) -> Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function whose first parameter is the caller; its argument model is derived from `arguments`."""

    def make(function: Callable[..., Any]) -> Tool:
        types = get_type_hints(function, include_extras=True)
        parameters = list(inspect.signature(function).parameters.values())[1:]
        fields: dict[str, Any] = {
            parameter.name: (
                types[parameter.name],
                ... if parameter.default is inspect.Parameter.empty else parameter.default,
            )
            for parameter in parameters
        }
        return Tool(
            name=function.__name__,
            title=title,
            description=inspect.getdoc(function) or "",
            hints=hints,
            arguments=create_model(f"{function.__name__}_arguments", __base__=arguments, **fields),
            result=types["return"],
            function=function,
        )

    return make
