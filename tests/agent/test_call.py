"""Arguments as clients send them: what is read as another type, what is refused, and that no
argument is a defect.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from halteres.agent.call import call
from halteres.agent.table import BY_NAME, TOOLS
from halteres.agent.tool import Caller

from . import control
from .transports import TRANSPORTS, home_of


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return home_of(tmp_path, monkeypatch)


async def answered(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return (await call(name, arguments, Caller())).body


@pytest.mark.parametrize(
    ("arguments", "coerced"),
    [
        ({"limit": 3}, None),
        ({"limit": "3"}, {"limit": 3}),
        ({"limit": 3.0}, {"limit": 3}),
        ({"limit": "3.0"}, {"limit": 3}),
        ({"limit": " 3 "}, {"limit": 3}),
        ({"limit": None}, {"limit": 20}),
        ({"limit": "null"}, {"limit": 20}),
        ({"limit": ""}, None),
    ],
)
async def test_an_integer_is_read_from_what_clients_send_for_one(
    arguments: dict[str, Any], coerced: dict[str, Any] | None
) -> None:
    answer = await answered("rl_list_runs", arguments)
    assert (answer.get("code"), answer.get("coerced")) == (None, coerced)


@pytest.mark.parametrize(
    "limit", ["3.5", 3.5, "three", True, "NaN", "1e400", 1e300, [3], "[3]", "0x3"]
)
async def test_what_is_no_integer_stays_refused(limit: Any) -> None:
    answer = await answered("rl_list_runs", {"limit": limit})
    assert (answer["code"], answer["field"]) == ("invalid_arguments", "limit")


async def test_json_in_a_text_is_read_for_a_list_and_for_an_object() -> None:
    await answered("rl_select_environment", {"name": "arithmetic"})
    edited = await answered("rl_edit_config", {"changes": '{"total_steps": 21}'})
    assert edited["diff"] == {"total_steps": [40, 21]}
    assert edited["coerced"] == {"changes": {"total_steps": 21}}
    compared = await answered("rl_compare_runs", {"run_ids": '["a", "b"]'})
    assert (compared["code"], compared["coerced"]) == ("run_not_found", {"run_ids": ["a", "b"]})
    rehearsed = await answered("rl_start_training", {"resume_from": "none", "dry_run": "false"})
    assert rehearsed["coerced"] == {"dry_run": False}
    for broken in ('{"total_steps": 21', "[1]", "21", "[" * 5_000):
        refused = await answered("rl_edit_config", {"changes": broken})
        assert (refused["code"], refused["field"]) == ("invalid_arguments", "changes")


@pytest.mark.parametrize(
    "written", ['{"total_steps": 21, "total_steps": 22}', '{"a": {"b": 1, "b": 1}}']
)
async def test_a_key_twice_in_json_in_a_text_is_refused_by_the_arguments_name(
    written: str,
) -> None:
    answer = await answered("rl_edit_config", {"changes": written})
    assert (answer["field"], "line 1, column" in answer["error"]) == ("changes", True)


async def test_a_text_that_a_tool_takes_as_one_stays_a_text() -> None:
    await answered("rl_select_environment", {"name": "arithmetic"})
    edited = await answered("rl_edit_config", {"field": "system_prompt", "value": '{"a": 1}'})
    assert (edited["value"], "coerced" in edited) == ('{"a": 1}', False)
    assert (await answered("rl_check_status", {"run_id": "12345678"}))["code"] == "run_not_found"


async def test_null_for_what_is_optional_is_as_if_it_was_not_given() -> None:
    await answered("rl_select_environment", {"name": "arithmetic"})
    given = {"field": None, "value": None, "changes": {"total_steps": 23}, "draft": None}
    edited = await answered("rl_edit_config", given)
    assert (edited["diff"], "coerced" in edited) == ({"total_steps": [40, 23]}, False)
    cleared = await answered("rl_edit_config", {"field": "system_prompt", "value": None})
    assert "code" not in cleared
    for name in ("rl_select_environment", "rl_score"):
        required = {
            key: None
            for key, one in BY_NAME[name].arguments.model_fields.items()
            if one.is_required()
        }
        assert (await answered(name, required))["code"] == "invalid_arguments"


async def test_a_key_twice_in_a_body_is_refused_with_its_place() -> None:
    async with control.client() as http:
        answer = await http.post("/config", content='{"changes": {"a": 1, "a": 2}}')
    assert "line 1, column 22" in answer.json()["error"]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_transport_reads_them_and_tells(transport: str) -> None:
    async with TRANSPORTS[transport]() as ask:
        answer = await ask("rl_check_status", {"run_ids": ["x"], "wait_s": 0})
        assert answer["code"] == "run_not_found"
        if transport not in ("command line",):
            assert (await ask("rl_list_runs", {"limit": 3.0})).get("coerced") == {"limit": 3}


ODD = [
    None,
    "",
    "\0",
    "a\0b",
    "../\0",
    "\ud800",
    [None],
    ["\0"],
    {},
    [],
    0,
    -1,
    True,
    {"a\0": None},
    "a\nb",
    [[]],
]


@pytest.mark.parametrize("tool", [tool.name for tool in TOOLS])
async def test_no_argument_is_a_defect(tool: str) -> None:
    """Each argument of each tool, with what clients and attackers send: an error says what is wrong
    with it.
    """
    fields = [*BY_NAME[tool].arguments.model_fields]
    for field, value in itertools.product(fields, ODD):
        waits = {"wait_s": 0} if "wait_s" in fields and field != "wait_s" else {}
        answer = await answered(tool, {field: value, **waits})
        assert answer.get("code") != "internal", (field, value, answer)


@pytest.mark.parametrize("tool", ["rl_start_training", "rl_train_reward_model"])
@pytest.mark.parametrize(
    "name",
    [
        "a\nb",
        "a\x1b[2J",
        "\x7f",
        "a\u2028b",
        "\t",
        "a\x85",
        "a\x9b2J",
        "a\u202eb",
        "a\u200bb",
        "a\ufeff",
        "a\U000e0041",
    ],
)
async def test_a_runs_name_is_on_one_line(tool: str, name: str) -> None:
    await answered("rl_select_environment", {"name": "arithmetic"})
    answer = await answered(tool, {"name": name, "dry_run": True})
    assert (answer["code"], answer["field"]) == ("invalid_arguments", "name")


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/runs/%00", "run_not_found"),
        ("GET", "/runs/a%00b/metrics", "run_not_found"),
        ("POST", "/runs/..%2f%00/stop", "run_not_found"),
        ("POST", "/environments/a%00/select", "invalid_arguments"),
        ("POST", "/environments/%2fa%00.py/select", "invalid_arguments"),
    ],
)
async def test_a_nul_in_a_path_is_the_clients_mistake(method: str, path: str, code: str) -> None:
    async with control.client() as http:
        answer = await http.request(method, path)
    assert (answer.status_code, answer.json()["code"]) == (200, code)
