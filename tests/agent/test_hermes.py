"""The Hermes plugin, against stand-ins that are as strict as the host's own contract."""

from __future__ import annotations

import asyncio
import base64
import importlib
import inspect
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import halteres
from halteres.agent.table import BY_NAME, TOOLS
from halteres.agent.transports import hermes

from .transports import home_of, standing_in


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return home_of(tmp_path, monkeypatch)


class Host:
    """What plugin contexts and registries of all generations have in common, checked.

    A schema is a dict with parameters that are one; a handler takes the arguments and whatever else
    the host knows, and answers a text of JSON or the multimodal envelope; anything else the model
    sees as an error.
    """

    def __init__(self) -> None:
        self.tools: dict[str, Callable[..., Any]] = {}
        self.skills: dict[str, Path] = {}

    def register_tool(
        self,
        name: str,
        toolset: str,
        schema: dict[str, Any],
        handler: Callable[..., Any],
        check_fn: Callable[[], bool] | None = None,
        requires_env: list[str] | None = None,
        is_async: bool = False,
        description: str = "",
        emoji: str = "",
        override: bool = False,
    ) -> None:
        assert toolset == "rl" and emoji == "🧪" and not override
        assert set(schema) == {"name", "description", "parameters"} and schema["name"] == name
        assert schema["description"] and schema["parameters"]["type"] == "object"
        json.dumps(schema, allow_nan=False)
        assert requires_env == []
        assert is_async and inspect.iscoroutinefunction(handler)
        assert check_fn is not None and check_fn() is True
        assert name not in self.tools
        self.tools[name] = handler

    register = register_tool

    def register_skill(self, name: str, path: Path, description: str = "") -> None:
        assert path.name == "SKILL.md" and path.is_file()
        assert name == path.parent.name and description
        self.skills[name] = path

    def dispatch(self, name: str, args: dict[str, Any]) -> str | dict[str, Any]:
        """As the host does: in an event loop of its own, with what it knows of the conversation."""
        answer = asyncio.run(self.tools[name](args, task_id="t", user_task="teach it sums"))
        envelope = (
            isinstance(answer, dict)
            and answer["_multimodal"] is True
            and isinstance(answer["content"], list)
        )
        assert isinstance(answer, str) or envelope
        return answer


@pytest.mark.parametrize("register", ["register", "register_with"])
def test_every_tool_is_registered_by_either_contract(register: str) -> None:
    host = Host()
    getattr(hermes, register)(host)
    assert list(host.tools) == [tool.name for tool in TOOLS]


def test_the_entry_point_names_the_module_that_registers() -> None:
    project = tomllib.loads((Path(halteres.__file__).parents[2] / "pyproject.toml").read_text())
    named = project["project"]["entry-points"]["hermes_agent.plugins"]["halteres"]
    assert ":" not in named  # the host wants the module, and calls its `register` itself
    assert importlib.import_module(named).register is hermes.register


def test_a_handler_answers_json_and_takes_an_empty_text_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lists(caller: Any, **given: Any) -> Any:
        return BY_NAME["rl_list_runs"].result(runs=[], count=1, given=given, next="x")

    standing_in(monkeypatch, "rl_list_runs", lists)
    host = Host()
    hermes.register(host)
    told = host.dispatch("rl_list_runs", {"status": "", "limit": 5})
    assert isinstance(told, str)
    assert json.loads(told) == {"runs": [], "count": 1, "given": {"limit": 5}, "next": "x"}


def test_an_error_is_json_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(caller: Any) -> Any:
        raise ZeroDivisionError

    standing_in(monkeypatch, "rl_list_runs", broken)
    host = Host()
    hermes.register(host)
    for arguments, code in (({}, "internal"), ({"limits": 1}, "invalid_arguments")):
        told = host.dispatch("rl_list_runs", arguments)
        assert isinstance(told, str)
        assert json.loads(told)["code"] == code
        assert len(json.loads(told)["error"]) <= 2048


def test_a_picture_comes_in_the_multimodal_envelope(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "plot.png").write_bytes(b"png")
    answer = BY_NAME["rl_compare_runs"].result(runs=[], settings_that_differ={}, next="x")
    answer.showing(tmp_path / "plot.png", tmp_path / "gone.png")
    standing_in(monkeypatch, "rl_compare_runs", lambda caller, run_ids: answer)
    host = Host()
    hermes.register(host)
    told = host.dispatch("rl_compare_runs", {"run_ids": ["a"]})
    assert isinstance(told, dict)
    text, picture = told["content"]
    assert json.loads(text["text"]) == {"runs": [], "settings_that_differ": {}, "next": "x"}
    assert picture["type"] == "image_url"
    assert (
        base64.b64decode(picture["image_url"]["url"].removeprefix("data:image/png;base64,"))
        == b"png"
    )
    assert told["text_summary"] == text["text"]


def test_skills_that_come_with_the_package_are_registered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("train-with-rl", "debug-a-run"):
        (tmp_path / name).mkdir()
        front = f"---\nname: {name}\ndescription: Use it to --- {name}\n---\n# Text\n"
        (tmp_path / name / "SKILL.md").write_text(front)
    monkeypatch.setattr("halteres.agent.skills.FOLDER", tmp_path)
    host = Host()
    hermes.register(host)
    assert list(host.skills) == ["debug-a-run", "train-with-rl"]
    monkeypatch.undo()
    hermes.register(host := Host())
    assert list(host.skills) == ["debug-a-run", "train-with-rl", "write-an-environment"]
