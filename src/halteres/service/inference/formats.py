"""What an answer is held to: the formats, guides and forced calls of every dialect, as one grammar.

    response_format                     OpenAI's; `text.format` of responses and `output_format` of
                                        messages name the same (`grammar_of_format`)
    structured_outputs, guided_…        vLLM's, of 0.12 on and before
    tool_choice                         a call of a tool, as `tool_calls` reads it

Source: OpenAI's and Anthropic's API references; vLLM 0.11 (`guided_…`) and 0.32
(`StructuredOutputsParams`). Whether a schema is one, and can be followed, an engine finds out,
before it samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from halteres.engine.protocol import Called, Calls, Grammar, GrammarKind
from halteres.engine.vllm.requests import Sampling
from halteres.errors import InvalidData, shortened, unknown

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

ONE_OF = "Send one of response_format, structured_outputs and guided_…, with one kind of grammar."

NO_TAGS = "Send `regex`, `grammar` or `json`, or the tools with a `tool_choice`."


class FormatFields(Sampling, kw_only=True):
    """How to sample, and what an answer is held to."""

    response_format: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def format_grammar(self) -> Grammar | None:
        """What the answer is to be that no tool is called in."""
        return grammar_of_format(self.response_format, "response_format")

    @property
    def guide(self) -> Grammar | None:
        """What the answer is to be, whatever it is."""
        found = [
            _json(self.guided_json, "guided_json"),
            _text("regex", self.guided_regex, "guided_regex"),
            _choice(self.guided_choice, "guided_choice"),
            _text("lark", self.guided_grammar, "guided_grammar"),
        ]
        if (given := self.structured_outputs) is not None:
            name = "structured_outputs"
            found += [
                _json(given.json, name),
                _text("regex", given.regex, name),
                _choice(given.choice, name),
                _text("lark", given.grammar, name),
            ]
            if given.json_object:
                found.append(_json(ANY_OBJECT, name))
            if given.structural_tag is not None:
                what = "`structural_tag` is not supported."
                raise InvalidData(what, next=NO_TAGS, param=name)
            if not any(one is not None and one.field == name for one in found):
                raise InvalidData(
                    f"`{name}` names no grammar.",
                    next="Send json, json_object, regex, choice or grammar within it.",
                    param=name,
                )
        return one_of(found)

    @property
    def grammar(self) -> Grammar | None:
        """Either."""
        return one_of([self.format_grammar, self.guide])


def grammar_of_format(given: Mapping[str, Any] | None, field: str) -> Grammar | None:
    """The grammar of a format, in OpenAI's or Anthropic's form.

        {"type": "text"}                                            None
        {"type": "json_object"}                                     any object
        {"type": "json_schema", "json_schema": {"schema": {…}}}     OpenAI's chats
        {"type": "json_schema", "schema": {…}}                      responses, Anthropic's messages

    `name`, `description` and `strict` change nothing: an answer always has its schema.

    Args:
        given: as it came; None asks for nothing.
        field: what the request calls it, for errors.

    Raises:
        InvalidData: it is not one of these.
    """
    if given is None or given.get("type") == "text":
        return None
    if given.get("type") == "json_object":
        return _json(ANY_OBJECT, field)
    if given.get("type") != "json_schema":
        raise InvalidData(
            f"`{field}` does not fit.",
            f"Its type is {shortened(repr(given.get('type')))}.",
            "Send the type text, json_object or json_schema.",
            param=field,
        )
    holder = given.get("json_schema", given)
    schema = holder.get("schema") if isinstance(holder, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidData(
            f"`{field}` has no schema.",
            "The type json_schema needs one.",
            'Send {"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}.',
            param=field,
        )
    return _json(schema, field)


def guides(json_schema: str | None, regex: str | None) -> Sequence[Grammar | None]:
    """sglang's."""
    return _json(json_schema, "json_schema"), _text("regex", regex, "regex")


def callable_tools(tools: Sequence[dict[str, Any]] | None, choice: Any) -> Sequence[dict[str, Any]]:
    """The tools that the model is told of: none where it may call none."""
    if _named(choice) == "none":
        return []
    return tools or []


def grammar_of_answer(
    fields: FormatFields, tools: Sequence[dict[str, Any]], choice: Any, *, several: bool
) -> Grammar | None:
    """What an answer is held to that may call tools.

    A forced call (`tool_choice`: required, or a tool by name) is all of the answer. Where a call is
    free and there is a format, the answer is one or the other.

    Args:
        tools: in OpenAI's form, as the model is told of them.
        choice: OpenAI's or Anthropic's `tool_choice`.
        several: whether an answer may make more than one call.
    """
    name, own = _named(choice), fields.grammar
    if name in (None, "auto", "none"):
        may_be_value = own is not None and own == fields.format_grammar
        if own is None or not tools or not may_be_value:
            return own
        otherwise = msgspec.json.decode(own.text)
        return _calls([_called(one) for one in tools], own.field, several, otherwise)
    if own is not None:
        raise InvalidData(
            f"`tool_choice` forces a call, and `{own.field}` another answer.",
            next="Send one of them.",
            param=own.field,
        )
    forced = [_called(one) for one in tools]
    if isinstance(name, ToolName):
        forced = [one for one in forced if one.name == name]
        if not forced:
            known = [_called(one).name for one in tools]
            error = unknown(InvalidData, "tool", name, known)
            raise InvalidData(error.what, error.why, error.next, param="tool_choice")
    if not forced:
        raise InvalidData(
            "`tool_choice` forces a call, and there are no tools.",
            next="Send `tools`.",
            param="tool_choice",
        )
    return _calls(forced, "tool_choice", several)


class ToolName(str):
    """Of the tool that is to be called."""

    __slots__ = ()


def _named(choice: Any) -> str | None:
    """auto, none, required, or a ToolName."""
    kind, name = choice, None
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        kind = choice.get("type")
        if isinstance(function, Mapping):
            name = function.get("name")
    if kind in ("function", "tool") and isinstance(name, str):
        return ToolName(name)
    if kind == "any":
        return "required"
    if kind is None or (isinstance(kind, str) and kind in ("auto", "none", "required")):
        return kind
    raise InvalidData(
        "`tool_choice` does not fit.",
        "It may be auto, none, required (any), or a function by its name.",
        param="tool_choice",
    )


def _called(tool: Mapping[str, Any]) -> Called:
    """A tool in OpenAI's form."""
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str):
        raise InvalidData("A tool has no function with a name.", param="tools")
    arguments = function.get("parameters")
    if not isinstance(arguments, Mapping):
        arguments = ANY_OBJECT
    return Called(name=name, arguments=dict(arguments))


def _calls(
    tools: Sequence[Called], field: str, several: bool, otherwise: Any = msgspec.UNSET
) -> Grammar:
    calls = Calls(tools=tuple(tools), several=several, otherwise=otherwise)
    return Grammar(kind="calls", text=_encoded(calls), field=field)


def one_of(given: Sequence[Grammar | None]) -> Grammar | None:
    """The one that there is; InvalidData where there are several."""
    found = [one for one in given if one is not None]
    if len(found) > 1:
        raise InvalidData(
            "The answer is asked to fit several grammars.", next=ONE_OF, param=found[-1].field
        )
    return next(iter(found), None)


def _json(schema: str | Mapping[str, Any] | None, field: str) -> Grammar | None:
    if schema is None:
        return None
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidData(
                f"`{field}` holds no schema.", f"It is not a JSON object: {error}.", param=field
            ) from error
    return Grammar(kind="json_schema", text=_encoded(schema), field=field)


def _choice(texts: Sequence[str] | None, field: str) -> Grammar | None:
    if texts is None:
        return None
    if not texts:
        raise InvalidData(f"`{field}` has nothing to choose from.", param=field)
    return Grammar(kind="choice", text=_encoded(texts), field=field)


def _text(kind: GrammarKind, text: str | None, field: str) -> Grammar | None:
    if text is None:
        return None
    return Grammar(kind=kind, text=text, field=field)


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()
