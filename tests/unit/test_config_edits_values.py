"""What a text typed for a setting means: its type decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halteres.config.edits import Word, value_of
from halteres.config.resolution import resolve_settings
from halteres.documents import DocumentError
from halteres.errors import InvalidConfig

TEXT: dict[str, Any] = {"type": "string"}
NULLABLE: dict[str, Any] = {"anyOf": [TEXT, {"type": "null"}]}
INTEGER: dict[str, Any] = {"type": "integer"}
NUMBER: dict[str, Any] = {"type": "number"}
TEXTS: dict[str, Any] = {"type": "array", "items": TEXT}
NUMBERS: dict[str, Any] = {"type": "object", "additionalProperties": NUMBER}
REFERRED: dict[str, Any] = {"$ref": "#/$defs/Kind", "$defs": {"Kind": {"enum": ["on", "off"]}}}

TYPED = (
    "run #3",
    "0123",
    "1:30",
    "a: b",
    "yes",
    "null",
    "~",
    "1e5",
    "2026-01-02",
    "[x]",
    "{a: b}",
    "- x",
    "# x",
    "*x",
    "&x y",
    "!x y",
    "%x",
    "@x",
    "`x`",
    "|",
    "--- x",
    "x\ty",
    " x ",
    '"Yes" or "No"',
    "it's",
    '"',
    "größer € 你好",
)


@pytest.mark.parametrize("typed", TYPED)
def test_a_text_setting_takes_the_text(typed: str) -> None:
    assert value_of(Word(typed), TEXT) == typed
    assert value_of(typed, TEXT) == typed


@pytest.mark.parametrize("typed", [one for one in TYPED if one != "null"])
def test_a_text_setting_that_may_be_null_takes_the_text_too(typed: str) -> None:
    assert value_of(Word(typed), NULLABLE) == typed


@pytest.mark.parametrize(
    ("typed", "schema", "value"),
    [
        ("null", NULLABLE, None),
        ("", NULLABLE, None),
        ("", TEXT, ""),
        ('"null"', NULLABLE, "null"),
        ('" a"', TEXT, " a"),
        ("'it''s'", TEXT, "it's"),
        ('"\\n"', TEXT, "\n"),
        ("off", REFERRED, "off"),
        ("0123", INTEGER, 123),
        ("-010", INTEGER, -10),
        ("1_000", INTEGER, 1000),
        ("1e3", INTEGER, 1000.0),
        ("1e-3", NUMBER, 0.001),
        ("yes", {"type": "boolean"}, True),
        ("[a, 0123, yes, 1:30, null, 'b, c']", TEXTS, ["a", "0123", "yes", "1:30", "null", "b, c"]),
        ('["\\ud83d\\ude00"]', TEXTS, ["\U0001f600"]),
        ("[a]", {"anyOf": [TEXT, TEXTS]}, ["a"]),
        ("a, b", {"anyOf": [TEXT, TEXTS]}, "a, b"),
        ("{a: 1e-3, b: 010}", NUMBERS, {"a": 0.001, "b": 10}),
        ("run #3", {}, "run #3"),
        ("a: b", {}, "a: b"),
        ("012", {}, 12),
        ("[1, x]", {}, [1, "x"]),
    ],
)
def test_other_settings_take_what_the_text_says(
    typed: str, schema: dict[str, Any], value: object
) -> None:
    found = value_of(Word(typed), schema)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("typed", ["1:30", "0x10", "0b1", "0o17", "ten", "9" * 5000, "1 # one"])
def test_what_is_no_decimal_number_is_left_for_the_setting_to_refuse(typed: str) -> None:
    assert value_of(Word(typed), INTEGER) == typed


@pytest.mark.parametrize("typed", ["{a: 1, a: 2}", "[[" * 100, "&a [*a]", "[a #b]"])
def test_a_list_or_an_object_that_cannot_be_read_is_refused(typed: str) -> None:
    for schema in (TEXTS, NUMBERS):
        with pytest.raises(DocumentError):
            value_of(Word(typed), schema)


def test_a_typed_text_is_read_where_no_text_may_be() -> None:
    assert value_of("[1, 2]", {"type": "array", "items": INTEGER}) == [1, 2]
    assert value_of("0123", INTEGER) == 123
    assert value_of("null", NULLABLE) == "null"  # a value of JSON says null itself


ENVIRONMENT = """
from halteres.environments.base import BaseEnv
from halteres.environments.config import BaseEnvConfig

class Config(BaseEnvConfig):
    system: str = "x"
    note: str | None = None
    stop: str | list[str] = "x"
    most: int = 1
    words: list[str] = []

class Env(BaseEnv):
    env_config_cls = Config

    @classmethod
    def config_init(cls):
        return Config(), []

if __name__ == "__main__":
    Env.cli()
"""


def test_the_environments_settings_follow_the_same_rule(tmp_path: Path) -> None:
    """The file is asked which types its settings have."""
    file = tmp_path / "texts.py"
    file.write_text(ENVIRONMENT, encoding="utf-8")
    edits = [
        "system=0123",
        "note=a: b #c",
        "stop=[a, 1:30]",
        "most=010",
        "words=[no, 007]",
        "run.seed=0123",
    ]
    asked = resolve_settings(str(file), None, edits)
    env = asked.settings.env
    assert [env[name] for name in ("system", "note", "stop", "most", "words")] == [
        "0123",
        "a: b #c",
        ["a", "1:30"],
        10,
        ["no", "007"],
    ]
    assert asked.settings.run.seed == 123 and not asked.coerced
    typed = resolve_settings(
        str(file), None, (), changes={"system": "0123", "words": '["no"]', "most": "010"}
    )
    assert (typed.settings.env["system"], typed.settings.env["words"]) == ("0123", ["no"])
    assert typed.coerced == {"words": ["no"], "most": 10}


@pytest.mark.parametrize(
    "edit", ["run.name=half \udcff", "env.system=\ud800", "run.tags=[a, a: {b: 1, b: 2}]"]
)
def test_a_text_that_no_file_can_hold_is_a_problem_of_its_setting(
    tmp_path: Path, edit: str
) -> None:
    file = tmp_path / "texts.py"
    file.write_text(ENVIRONMENT, encoding="utf-8")
    with pytest.raises(InvalidConfig) as refused:
        resolve_settings(str(file), None, [edit])
    (problem,) = refused.value.details["problems"]
    assert problem["field"] == edit.partition("=")[0]
