"""The `next` of an error answer: calls that can be made as they stand, or a sentence where no call
helps.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from halteres.agent.call import call
from halteres.agent.next_call import next_call
from halteres.agent.table import BY_NAME, TOOLS
from halteres.agent.tool import Caller
from halteres.config.discovery import EnvironmentBroken, EnvironmentNotFound
from halteres.config.operator_policy import PolicyCap
from halteres.config.problem import LockedSetting, Problem, UnknownSetting, refusal
from halteres.config.settings import Settings
from halteres.errors import (
    Conflict,
    HalteresError,
    InvalidConfig,
    NotFound,
    NotReady,
    ServerError,
    UserError,
)
from halteres.next_step import NextStep, for_agents
from halteres.observe.metrics import append_row
from halteres.runs.directory import RunAmbiguous, RunDirectory, RunNotFound, runs_home
from halteres.runs.planning.resume_point import resume_point

from .run_fixtures import RUN, make_run, supervised
from .transports import home_of

_CALLS = re.compile(r"""rl_\w+\((?:[^()"']|"(?:[^"\\]|\\.)*")*\)""")
_JSON_NAMES = {"true": True, "false": False, "null": None}
_COMMANDS = re.compile(r"\bhalteres \w|--\w|\.\.\.")
"""Words that nobody can follow who has tools alone."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return home_of(tmp_path, monkeypatch)


def value(node: ast.expr) -> Any:
    """A JSON value; a name stands for a text that the agent has read before."""
    if isinstance(node, ast.Name):
        return _JSON_NAMES.get(node.id, node.id)
    if isinstance(node, ast.List):
        return [value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            value(key): value(item) for key, item in zip(node.keys, node.values, strict=True) if key
        }
    return ast.literal_eval(node)


def check(following: str) -> None:
    """Every call in it is one that its tool takes; what stands between the calls is one line of
    plain words.
    """
    assert following and "\n" not in following
    for text in _CALLS.findall(following):
        node = ast.parse(text, mode="eval").body
        assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        takes = BY_NAME[node.func.id].arguments
        given = dict(zip(takes.model_fields, map(value, node.args), strict=False))
        takes.model_validate(given | {word.arg: value(word.value) for word in node.keywords})
    words = _CALLS.sub("", following)
    assert "(" not in re.sub(r"\([^()]*\)", "", words), f"a call that cannot be read: {following}"
    assert not _COMMANDS.search(words), following


MISLEADING = (
    'rl_compare_runs(run_id="a")',
    "rl_stop_training(...) again",
    "rl_check(",
    "halteres runs list",
)


@pytest.mark.parametrize("following", MISLEADING)
def test_the_check_refuses_what_cannot_be_called(following: str) -> None:
    with pytest.raises((ValidationError, KeyError, AssertionError, ValueError)):
        check(following)


PROBLEM = Problem(field="group_size", got="banana", rule="must be a number")
ERRORS: list[HalteresError] = [
    UserError("It cannot be called so."),
    UserError("Something.", next=NextStep("rl_list_runs")),
    InvalidConfig("The policy cannot be read."),
    refusal([PROBLEM]),
    refusal([PROBLEM, PROBLEM]),
    refusal([UnknownSetting(field="grop", got=1, did_you_mean="group_size")]),
    refusal([LockedSetting(field="group_size", got=1, rule="held", locked_value=8)]),
    EnvironmentNotFound("None.", next="List them with: halteres env list"),
    EnvironmentNotFound("None.", did_you_mean="arithmetic"),
    EnvironmentBroken("Broken."),
    RunNotFound("None.", next="halteres runs list shows all."),
    RunNotFound("None.", did_you_mean=RUN, active_runs=[]),
    RunAmbiguous("Two.", active_runs=[RUN, "4b2e7f00"]),
    PolicyCap(
        "Too many.", next=f"Wait, or stop it: halteres runs stop {RUN}", active_runs=[RUN], limit=1
    ),
    PolicyCap("Too much.", field="trainer.total_steps", limit=500),
    PolicyCap("Too much."),
    NotFound("No Python."),
    Conflict(
        "It is still running.", next=NextStep("rl_stop_training", {"run_id": RUN}, "Stop it first")
    ),
    NotReady("Not yet.", next="Try again in a moment."),
    ServerError("A defect.", next="Report it."),
]
OF_CODE = [
    ("no_environment", {}),
    ("preflight_failed", {"field": "inference.model"}),
    ("preflight_failed", {}),
    ("missing_key", {"field": "OPENROUTER_API_KEY"}),
    ("disk_full", {}),
]


def of_code(code: str, details: dict[str, Any]) -> HalteresError:
    error = UserError("Something.", "", "", **details)
    error.code = code
    return error


@pytest.mark.parametrize("draft", [None, "mine"])
@pytest.mark.parametrize("name", [*(tool.name for tool in TOOLS), "rl_invented"])
def test_whatever_a_tool_refuses_the_next_call_can_be_made(name: str, draft: str | None) -> None:
    for error in (*ERRORS, *(of_code(*one) for one in OF_CODE)):
        check(for_agents(next_call(name, error, draft)))


@pytest.mark.parametrize(
    ("name", "following"),
    [
        ("rl_stop_training", f'rl_stop_training(run_id="{RUN}")'),
        ("rl_compare_runs", f'rl_compare_runs(run_ids=["{RUN}"])'),
        ("rl_start_training", f'rl_start_training(resume_from="{RUN}")'),
        ("rl_list_environments", "rl_list_runs()"),
    ],
)
def test_a_run_that_was_meant_goes_into_the_tools_own_argument(name: str, following: str) -> None:
    takes = BY_NAME[name].arguments.model_fields
    assert (
        for_agents(next_call(name, RunNotFound("None.", did_you_mean=RUN), takes=takes))
        == following
    )


async def test_a_refused_edit_of_another_draft_leads_to_that_draft() -> None:
    async def answered(name: str, /, **arguments: Any) -> dict[str, Any]:
        return (await call(name, arguments, Caller())).body

    await answered("rl_select_environment", name="arithmetic", draft="mine")
    refused = await answered("rl_edit_config", field="group_size", value="banana", draft="mine")
    check(refused["next"])
    assert re.fullmatch(
        r'rl_get_current_config\(field="(env\.)?group_size", draft="mine"\)', refused["next"]
    )
    assert "error" not in await answered("rl_get_current_config", field="group_size", draft="mine")


def refused_to_resume(run: RunDirectory) -> HalteresError:
    with pytest.raises(HalteresError) as raised:
        resume_point(run, Settings(), None)
    return raised.value


def test_a_run_that_cannot_be_gone_on_from_is_told_in_calls() -> None:
    bare = refused_to_resume(make_run("00000001", status="failed", step=3))
    assert (
        for_agents(next_call("rl_start_training", bare)) == 'rl_start_training(environment="gsm8k")'
    )
    with supervised(make_run("00000002"), status="running"):
        going = for_agents(
            next_call(
                "rl_start_training", refused_to_resume(RunDirectory(runs_home() / "00000002"))
            )
        )
    assert 'rl_stop_training("00000002")' in going
    check(going)


@pytest.mark.parametrize("given", [True, False])
def test_a_checkpoint_in_somebody_elses_service_is_told_without_commands(given: bool) -> None:
    run = make_run(status="failed", service_given=given, urls={"service": "http://localhost:8000"})
    append_row(
        run.path / "checkpoints.jsonl",
        {"name": "a", "step": 5, "state_path": "tinker://a/weights/a"},
    )
    settings = run.settings()
    with pytest.raises(NotFound) as raised:
        resume_point(run, settings, None if given else "http://localhost:9000")
    following = for_agents(next_call("rl_start_training", raised.value))
    assert "TINKER_BASE_URL" in following
    check(following)
