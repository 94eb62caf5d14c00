"""The tools for OpenAI's chat format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halteres.agent.table import BY_NAME, TOOLS
from halteres.agent.transports import openai
from halteres.agent.transports.mcp.server import tool_definition
from halteres.cli.main import app

from .transports import home_of, standing_in


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return home_of(tmp_path, monkeypatch)


def test_every_tool_is_a_function_definition() -> None:
    assert len(openai.definitions()) == len(TOOLS)
    for definition, tool in zip(openai.definitions(), TOOLS, strict=True):
        assert definition == {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema(),
            },
        }
        assert definition["function"]["parameters"]["type"] == "object"


def asked(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "call_7", "type": "function", "function": {"name": name, "arguments": arguments}}


async def test_a_tool_call_is_answered_with_a_tool_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def lists(caller: Any, **given: Any) -> Any:
        return BY_NAME["rl_list_runs"].result(runs=[], count=1, given=given, next="x")

    standing_in(monkeypatch, "rl_list_runs", lists)
    for arguments, given in (
        ('{"limit": 3}', '{"limit":3}'),
        ("", "{}"),
        (None, "{}"),
        ({"limit": 3}, '{"limit":3}'),
    ):
        assert await openai.answer(asked("rl_list_runs", arguments)) == {
            "role": "tool",
            "tool_call_id": "call_7",
            "content": f'{{"runs":[],"count":1,"given":{given},"next":"x"}}',
        }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"limit": 3', "arguments that are no JSON"),
        ('{"limit": 3, "limit": 4}', "column 14: the key 'limit' is given twice"),
        ("[3]", "takes a JSON object of arguments, not [3]"),
        ('{"limits": 3}', "there is no such argument"),
    ],
)
async def test_arguments_that_cannot_be_used_are_an_answer(arguments: str, words: str) -> None:
    told = json.loads((await openai.answer(asked("rl_list_runs", arguments)))["content"])
    assert words in told["error"]
    assert told["code"] == "invalid_arguments"
    assert told["next"]


async def test_a_message_that_is_no_tool_call_is_answered_too() -> None:
    told = await openai.answer({"id": None})
    assert told["tool_call_id"] is None
    assert "There is no tool ''" in json.loads(told["content"])["error"]


def test_the_program_prints_the_table() -> None:
    def printed(*arguments: str) -> str:
        return CliRunner().invoke(app, ["tools", *arguments], catch_exceptions=False).output

    assert printed().split() == [tool.name for tool in TOOLS]
    assert json.loads(printed("--format", "openai")) == openai.definitions()
    assert json.loads(printed("--format", "mcp")) == {
        "tools": [tool_definition(tool) for tool in TOOLS]
    }
