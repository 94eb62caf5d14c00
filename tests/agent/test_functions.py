"""The tools as Python functions: signatures are the table's, answers are JSON, importing costs
little.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from typer.testing import CliRunner

import halteres.agent
from halteres.agent import Tools
from halteres.agent.table import BY_NAME, TOOLS
from halteres.agent.tool import Tool
from halteres.agent.transports import command_line as cli
from halteres.agent.transports import functions, hermes, openai

from .transports import home_of, standing_in


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return home_of(tmp_path, monkeypatch)


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.name)
def test_a_function_has_its_tools_signature_and_description(tool: Tool[...]) -> None:
    """The table leads: whoever changes a tool's arguments changes the function with them."""
    function = getattr(halteres.agent, tool.name)
    ours = inspect.signature(function).parameters
    _, *theirs = inspect.signature(tool.function).parameters.values()
    assert [(p.name, p.default, p.kind) for p in ours.values()] == [
        (p.name, p.default, p.kind) for p in theirs
    ]
    hints = get_type_hints(tool.function)
    assert get_type_hints(function) == {name: hints[name] for name in ours} | {"return": str}
    assert inspect.getdoc(function) == tool.description
    assert inspect.iscoroutinefunction(function)


def test_what_the_seeds_call_is_there_and_positional() -> None:
    """Seed 002: one name each for what its callers pass without naming it."""
    assert {tool.name for tool in TOOLS} <= set(halteres.agent.__all__)
    for name, first in (
        ("rl_select_environment", ["name"]),
        ("rl_edit_config", ["field", "value"]),
        ("rl_check_status", ["run_id"]),
        ("rl_stop_training", ["run_id"]),
        ("rl_get_results", ["run_id"]),
        ("rl_test_inference", ["num_steps", "group_size", "models"]),
    ):
        given = [
            p
            for p in inspect.signature(getattr(halteres.agent, name)).parameters
            if p not in ("detail",)
        ]
        assert given[: len(first)] == first


async def test_a_function_answers_json_with_what_was_given_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[dict[str, Any]] = []

    def edits(caller: Any, **given: Any) -> Any:
        heard.append(given)
        return BY_NAME["rl_edit_config"].result(
            message="é", field="f", value=None, config={}, diff={}, draft=caller.draft, next="x"
        )

    standing_in(monkeypatch, "rl_edit_config", edits)
    told = await halteres.agent.rl_edit_config("f", None)
    assert heard == [{"field": "f", "value": None}]
    assert told == json.dumps(json.loads(told), indent=2, ensure_ascii=False)
    assert json.loads(told)["draft"] == "default"
    monkeypatch.setenv("HALTERES_SESSION", "mine")
    assert json.loads(await halteres.agent.rl_edit_config("f", None))["draft"] == "mine"
    assert (await Tools().call("rl_edit_config", field="f"))["draft"] == "mine"
    assert (await Tools(draft="yours").call("rl_edit_config", field="f"))["draft"] == "yours"


async def test_what_goes_wrong_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(caller: Any) -> Any:
        raise ZeroDivisionError

    standing_in(monkeypatch, "rl_list_runs", broken)
    assert json.loads(await halteres.agent.rl_list_runs())["code"] == "internal"
    assert (await Tools().call("rl_list_runs", limits=3))["code"] == "invalid_arguments"
    assert (await Tools().call("rl_invented"))["code"] == "invalid_arguments"


DEPTH = 100_000
DEEP = "[" * DEPTH + "]" * DEPTH


async def test_arguments_nested_without_end_are_an_error_answer() -> None:
    """On every transport within a process; of those over a wire `test_http` and `test_mcp_process`
    have the answers.
    """
    nested: list[Any] = []
    for _ in range(DEPTH):
        nested = [nested]
    changes = {"changes": {"group_size": nested}}

    async def chat(arguments: Any) -> str:
        asked = {"id": "1", "function": {"name": "rl_edit_config", "arguments": arguments}}
        return (await openai.answer(asked))["content"]

    typed = ["edit-config", "group_size", DEEP, "--json"]
    answers = [
        await halteres.agent.rl_edit_config(changes=changes["changes"]),
        await halteres.agent.rl_edit_config("group_size", nested),
        await hermes.handle("rl_edit_config", changes),
        await chat(changes),
        await chat([nested]),
        await chat(f'{{"changes": {{"group_size": {DEEP}}}}}'),
        (await asyncio.to_thread(CliRunner().invoke, cli.tools_app(), typed)).stdout,
    ]
    for answer in answers:
        assert isinstance(answer, str)
        assert {"error", "code", "next"} <= json.loads(answer).keys()
        assert json.loads(answer)["code"] != "internal"
    assert (await Tools().call("rl_edit_config", **changes))["code"] == "invalid_arguments"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="rl_invented"):
        _ = halteres.agent.rl_invented  # pyright: ignore[reportAttributeAccessIssue]


def test_no_key_is_missing_unless_a_policy_asks_for_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("TINKER_API_KEY", "WANDB_API_KEY", "OPENROUTER_API_KEY"):
        monkeypatch.delenv(key, raising=False)
    assert halteres.agent.get_missing_keys() == []
    assert halteres.agent.check_rl_api_keys() is True
    (home / "policy.yaml").write_text("require_keys: {gate: [TINKER_API_KEY, WANDB_API_KEY]}\n")
    monkeypatch.setenv("WANDB_API_KEY", "something")
    assert halteres.agent.get_missing_keys() == ["TINKER_API_KEY"]
    assert halteres.agent.check_rl_api_keys() is False
    (home / "policy.yaml").write_text("hermes-compat\n")
    assert halteres.agent.get_missing_keys() == ["TINKER_API_KEY"], "the seeds' gate: no OpenRouter"
    # to start: the tools are offered
    (home / "policy.yaml").write_text("require_keys: [TINKER_API_KEY]\n")
    assert halteres.agent.get_missing_keys() == []
    # the tools themselves tell what is wrong with it
    (home / "policy.yaml").write_text("require_keys: 7\n")
    assert halteres.agent.check_rl_api_keys() is True


def test_an_older_python_is_missing_in_the_seeds_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert halteres.agent.check_rl_python_version() is True
    monkeypatch.setattr(functions.sys, "version_info", (3, 10, 4))
    assert halteres.agent.check_rl_python_version() is False
    assert halteres.agent.get_missing_keys() == ["Python >= 3.11 (current: 3.10)"]
    assert halteres.agent.check_rl_api_keys() is False


HEAVY = ("torch", "transformers", "tinker", "matplotlib", "wandb", "peft")


def loaded_by(code: str, *names: str) -> list[str]:
    """Which of these modules a fresh interpreter has after running the code."""
    ask = (
        f"{code}\nimport sys, json\nprint(json.dumps([n for n in {names!r} if "
        "sys.modules.get(n) is not None]))"
    )
    told = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(told.stdout)


def test_importing_the_package_loads_next_to_nothing() -> None:
    assert loaded_by("import halteres.agent", "pydantic", "yaml", "msgspec", "mcp", *HEAVY) == []


def test_no_transport_loads_torch_or_anything_else_that_is_slow() -> None:
    """Every module below agent/transports, and the table with all its tools."""
    everything = (
        "import halteres.agent.transports, importlib, pkgutil\n"
        "for found in pkgutil.walk_packages(halteres.agent.transports.__path__, "
        "'halteres.agent.transports.'):\n"
        "    importlib.import_module(found.name)"
    )
    assert loaded_by(everything, *HEAVY) == []
    assert loaded_by("from halteres.agent import rl_list_runs", "mcp", "uvicorn", "starlette") == []
