"""What the value of a setting reaches: its guard reads what the setting reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from halteres.agent.open_access import TooLargeToCheck, looks_outward, texts_of
from halteres.config.edits import Word, value_of
from halteres.config.reach import Reach
from halteres.documents import TooLarge

TEXTS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
OPTIONAL: dict[str, Any] = {"anyOf": [TEXTS, {"type": "null"}]}
NAMED: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "string"}}
NESTED: dict[str, Any] = {"type": "array", "items": NAMED}


def guarded(schema: Mapping[str, Any], text: str, reach: Reach | None = None) -> set[str]:
    """The texts that a guard looks at, where this text is the value of a setting."""
    declared = {} if reach is None else {"reaches": reach}
    properties = {"files": {**schema, **declared}}
    return {one.text for one in texts_of({"properties": properties}, "files", text)}


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from texts_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)


@pytest.mark.parametrize("reach", [None, "path", "nothing"])
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (TEXTS, "[~]", ["~"]),
        (TEXTS, "[!!null /x]", ["/x"]),
        (TEXTS, "[!!int /x, !!float ~root]", ["/x", "~root"]),
        (TEXTS, "- ~\n- !!bool ../x", ["~", "../x"]),
        (OPTIONAL, "[~]", ["~"]),
        (OPTIONAL, "[!!null /x]", ["/x"]),
        (NAMED, "{a: ~, b: !!null /x}", {"a": "~", "b": "/x"}),
        (NESTED, "[{a: !!null /x}]", [{"a": "/x"}]),
    ],
)
def test_a_guard_looks_at_every_text_that_a_setting_reads_from_a_text(
    schema: dict[str, Any], text: str, value: Any, reach: Reach | None
) -> None:
    """YAML alone reads null in some of these places, where a list of texts has a path."""
    assert value_of(Word(text), schema) == value_of(text, schema) == value
    assert set(texts_in(value)) <= guarded(schema, text, reach)


def test_a_path_behind_a_tag_of_null_looks_outward() -> None:
    assert any(map(looks_outward, guarded(TEXTS, "[!!null /x]")))


DEEP = "[" * 15_000
BOMB = "- &a [x,x,x,x,x,x,x,x,x,x]\n" + "\n".join(
    f"- &{name} [{', '.join([f'*{before}'] * 10)}]"
    for before, name in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize("text", [DEEP, BOMB])
@pytest.mark.parametrize("schema", [{}, TEXTS, OPTIONAL, NESTED])
def test_what_is_too_large_to_be_read_is_too_large_to_be_checked(
    schema: dict[str, Any], text: str
) -> None:
    """Nothing of it is passed for what was not looked at."""
    with pytest.raises(TooLargeToCheck):
        guarded(schema, text)
    if schema:
        with pytest.raises(TooLarge):
            value_of(text, schema)


CODE: dict[str, Any] = {"properties": {"x": {"type": "string", "reaches": "code"}}}
WORDS: dict[str, Any] = {"properties": {"x": {"type": "string", "reaches": "nothing"}}}
UNKNOWN: dict[str, Any] = {"properties": {"x": {}}}


@pytest.mark.parametrize(
    ("alternatives", "reaches"),
    [
        ([CODE, WORDS], {"code", "nothing"}),
        ([WORDS, CODE], {"code", "nothing"}),
        ([WORDS, UNKNOWN], {"nothing", None}),
        ([UNKNOWN, WORDS], {"nothing", None}),
    ],
)
def test_a_guard_looks_at_what_every_alternative_reaches(
    alternatives: list[dict[str, Any]], reaches: set[Reach | None]
) -> None:
    """Which of them will read the value is not known; their order says nothing."""
    schema = {"properties": {"part": {"anyOf": alternatives}}}
    found = texts_of(schema, "part", {"x": "os:abort"})
    assert {one.reach for one in found if one.place == "part.x"} == reaches
