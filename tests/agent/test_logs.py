"""rl_get_logs: the end of one log, whatever is in it, and of no other file."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from halteres.agent.logs import clean_line, line_filter
from halteres.runs.directory import RunDirectory

from .run_fixtures import RUN, make_run, replied, supervised, tokens, told

BUDGET = 1500


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))


@pytest.fixture
def run() -> RunDirectory:
    run = make_run(steps=3)
    for role in ("trainer", "env", "api", "supervisor"):
        run.log(role).write_text("".join(f"{role} line {number}\n" for number in range(100)))
    return run


async def lines(**arguments: Any) -> list[str]:
    return (await told("rl_get_logs", run_id=RUN, **arguments))["lines"]


async def test_the_last_lines_are_told_oldest_first(run: RunDirectory) -> None:
    answer = await told("rl_get_logs", run_id=RUN, role="env", lines=3)
    assert answer["lines"] == ["env line 97", "env line 98", "env line 99"]
    assert (answer["run_id"], answer["role"], answer["file"]) == (RUN, "env", str(run.log("env")))
    assert answer["roles"] == ["api", "env", "supervisor", "trainer"]
    assert "matched" not in answer
    assert len(await lines(role="env")) == 20


async def test_the_role_is_the_trainer_unless_somebody_failed(run: RunDirectory) -> None:
    assert (await told("rl_get_logs", run_id=RUN))["role"] == "trainer"
    with supervised(make_run("00000001"), status="starting") as young:
        young.log("supervisor").write_text("begins\n")
        # the only active run; its trainer has said nothing
        assert (await told("rl_get_logs"))["role"] == "supervisor"


@pytest.mark.parametrize(
    ("failed", "role"),
    [
        ({"exit": {"process": "env", "code": 3}}, "env"),
        # the service has written nothing
        ({"exit": {"process": "service", "code": -9}}, "trainer"),
        (
            {"code": "supervisor_lost", "exit": {"process": "supervisor", "code": None}},
            "supervisor",
        ),
        ({"phase": "environment"}, "env"),
        ({}, "trainer"),
    ],
)
async def test_whoever_failed_is_read_first(failed: dict[str, Any], role: str) -> None:
    run = make_run(status="failed", **failed)
    for name in ("trainer", "env", "supervisor"):
        run.log(name).write_text("x\n")
    assert (await told("rl_get_logs", run_id=RUN))["role"] == role


async def test_lines_are_found_by_one_text_or_another(run: RunDirectory) -> None:
    answer = await told("rl_get_logs", run_id=RUN, role="env", grep="LINE 9")
    assert answer["matched"] == 11
    assert answer["lines"][0] == "env line 9"
    assert await lines(role="env", grep="LINE 17|line 28|") == ["env line 17", "env line 28"]
    assert await lines(role="env", grep="nothing like it") == []


async def test_what_looks_like_a_pattern_is_a_text(run: RunDirectory) -> None:
    run.log("env").write_text("a [x\n(a+)+b\nb\n7|8\n")
    assert await lines(role="env", grep="[x") == ["a [x"]
    assert await lines(role="env", grep="(a+)+b") == ["(a+)+b"]
    assert await lines(role="env", grep="|") == ["7|8"]


@pytest.mark.parametrize("evil", ["(a+)+$", "((a+))+$", ".*.*.*.*=", "(a*)*b", "(?:a{1,9}){1,9}c"])
def test_no_text_searches_for_ever(evil: str) -> None:
    assert not line_filter(evil)("a" * 2000 + "!")
    assert line_filter(evil)(f"what {evil} is")


async def test_what_is_looked_for_is_short(run: RunDirectory) -> None:
    reply = await replied("rl_get_logs", run_id=RUN, grep="a|" * 101)
    assert (reply.failed, reply.body["code"]) == (True, "invalid_arguments")


async def test_any_log_of_forty_lines_stays_within_the_budget(run: RunDirectory) -> None:
    run.log("trainer").write_text("".join(f"{number:04} {'x' * 5000}\n" for number in range(50)))
    answer = await told("rl_get_logs", run_id=RUN, lines=40)
    assert tokens(answer) <= BUDGET
    assert answer["lines"][-1].startswith("0049 x") and answer["lines"][-1].endswith("...")
    run.log("trainer").write_text("".join(f"{number:04} {'y' * 90}\n" for number in range(50)))
    answer = await told("rl_get_logs", run_id=RUN, lines=40)
    assert len(answer["lines"]) == 40
    assert tokens(answer) <= BUDGET


async def test_any_bytes_are_told_as_text(run: RunDirectory) -> None:
    run.log("trainer").write_bytes(os.urandom(100_000) + b"\n\xff\xfe\x00 half a li")
    assert (await lines())[-1].endswith("half a li")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", "".join(await lines(lines=40)))


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("10%\r50%\r100%\n", "100%"),
        ("\x1b[1;31mError\x1b[0m: no", "Error: no"),
        ("\x1b]0;title\x07text", "text"),
        ("a\tb\x00c", "a\tb?c"),
        ("windows\r\n", "windows"),
        ("", ""),
    ],
)
def test_a_line_has_no_colours_no_controls_and_of_a_progress_bar_the_last_state(
    line: str, left: str
) -> None:
    assert clean_line(line) == left


@pytest.mark.parametrize(
    "role", ["../run", "../../x", "/etc/passwd", "nobody", "trainer.log", "*", "."]
)
async def test_no_role_is_a_path(run: RunDirectory, role: str) -> None:
    reply = await replied("rl_get_logs", run_id=RUN, role=role)
    assert (reply.failed, reply.body["code"]) == (True, "invalid_arguments")
    assert reply.body["allowed"] == ["api", "env", "supervisor", "trainer"]


async def test_a_link_out_of_the_run_is_no_log(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("not yours\n")
    run.log("engine").symlink_to(tmp_path / "secret.txt")
    run.log("gone").symlink_to(tmp_path / "nowhere")
    (run.path / "service").mkdir()
    (run.path / "service" / "engine.log").write_text("ours\n")
    run.log("inside").symlink_to(Path("..", "service", "engine.log"))
    answer = await told("rl_get_logs", run_id=RUN, role="inside")
    assert answer["lines"] == ["ours"]
    assert answer["roles"] == ["api", "env", "inside", "supervisor", "trainer"]


async def test_a_log_of_many_megabytes_is_read_from_its_end(run: RunDirectory) -> None:
    with run.log("trainer").open("w") as stream:
        stream.write("needle\n")
        stream.writelines(f"{'x' * 98}\n" for _ in range(50_000))
        stream.write("last\n")
    assert (await lines(lines=2))[-1] == "last"
    assert await lines(grep="needle") == []
    assert all(len(line) == 98 for line in await lines(grep="xx", lines=10))


async def test_a_secret_is_struck_out_also_where_its_line_is_cut(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "sk-" + "0123456789" * 5
    monkeypatch.setenv("OPENROUTER_API_KEY", secret)
    run.log("trainer").write_text(
        f"{'x' * 370} {secret} and on\n{'y' * 380} {secret} {'z' * 900}\n"
    )
    told_lines = await lines()
    assert told_lines[0] == f"{'x' * 370} *** and on"
    assert "sk-" not in "".join(told_lines)


async def test_a_run_without_logs_says_so() -> None:
    make_run()
    reply = await replied("rl_get_logs", run_id=RUN)
    assert reply.failed and "There is no log 'trainer'" in reply.body["error"]
    assert reply.body["next"] == f'rl_check_status("{RUN}")'
