"""The Python tool: what code printed, what ended it, and nothing of it afterwards."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import pytest
from deadlines import until

from halteres.environments import python_tool
from halteres.environments.game import GameEnv
from halteres.environments.multi_turn import Reply
from halteres.environments.python_tool import PythonResult, PythonTool, ToolFailed
from halteres.errors import InvalidConfig
from halteres.tool_calls import ToolCall

from .hostile_answers import Place, hostile_answers, listening, until_none_runs

pytestmark = pytest.mark.usefixtures("cages")


async def test_what_is_printed_is_shown_and_errors_are_python_s_own() -> None:
    tool = PythonTool()
    good = await tool.run("import sys\nprint('é', 6 * 7)\nprint('aside', file=sys.stderr)")
    assert good == PythonResult(output="é 42\n", errors="aside", failure=None)
    bad = await tool.run("print(1)\n[][2]")
    assert (bad.output, bad.failure) == ("1\n", "IndexError: list index out of range")
    assert bad.errors.startswith('Traceback (most recent call last):\n  File "<string>", line 2')
    assert bad.shown == f"1\n{bad.errors}"
    assert (await tool.run("")).shown == "(It printed nothing.)"


async def test_every_use_begins_with_nothing() -> None:
    tool = PythonTool()
    code = "import os; print(os.listdir('.')); open('kept', 'w').write('x'); kept = 1"
    assert [(await tool.run(code)).output for _ in range(2)] == ["[]\n", "[]\n"]
    assert (await tool.run("kept")).failure == "NameError: name 'kept' is not defined"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("while True: pass", "Execution timed out after 0.5 seconds."),
        ("import time; print('x', flush=True); time.sleep(60)", "timed out after 0.5 seconds."),
        ("x = bytearray(1 << 31)", "MemoryError"),
        ("raise SystemExit(3)", "ended with exit code 3"),
        ("import os; os.abort()", "ended by signal 6"),
        ("import os; os.kill(os.getppid(), 9)", "ended, and the process that ran it"),
        ("open('big', 'wb').write(b'x' * (1 << 25))", "OSError"),
        ("a\0b", "null bytes"),
        ("'\ud800'", "half a character"),
        ("1" * 200_000, "200000 bytes"),
        ("input()", "EOFError"),
    ],
)
async def test_the_limit_that_ended_it_is_shown(code: str, says: str) -> None:
    # the others need their time on a busy machine
    timeout_s = 0.5 if "timed out" in says else 30.0
    result = await PythonTool(timeout_s=timeout_s).run(code)
    assert result.failure is not None
    assert says in result.failure
    assert says in result.shown


async def test_a_long_output_keeps_its_beginning_and_its_end() -> None:
    result = await PythonTool(most_shown=20).run("print('a' * 500 + 'b' * 499)")
    assert result.output == f"{'a' * 10}\n[... 980 bytes left out ...]\n{'b' * 9}\n"


async def test_names_are_lent_to_code_that_lacks_them_alone() -> None:
    tool = PythonTool(usual_imports=True)
    assert (await tool.run("print(gcd(12, 18), Counter('aab')['a'])")).output == "6 2\n"
    assert (await tool.run("print(nothing)")).failure == "NameError: name 'nothing' is not defined"
    assert (await PythonTool().run("print(gcd(12, 18))")).failure is not None


async def test_a_call_is_answered_by_a_message_that_says_what_is_wrong_with_it() -> None:
    tool = PythonTool()
    assert tool.function["function"]["parameters"]["required"] == ["code"]

    async def answered(name: str, arguments: dict[str, object] | None, error: str | None) -> str:
        call = ToolCall(index=0, name=name, arguments=arguments, error=error)
        message = await tool.answer(call)
        assert (message["role"], message["tool_call_id"]) == ("tool", call.id)
        return str(message["content"])

    assert await answered("python", {"code": "print(3)"}, None) == "3"
    assert "`code`" in await answered("python", {"script": "1"}, None)
    assert "`python`" in await answered("shell", {"code": "1"}, None)
    assert await answered("", None, "The call cannot be read.") == "The call cannot be read."


async def test_code_that_was_not_run_through_no_fault_of_its_own_is_a_failure() -> None:
    with pytest.raises(ToolFailed) as failure:
        await PythonTool(python="/nowhere/python").run("print(1)")
    assert failure.value.code == "tool_error"


FORGES = """
import json
print("{}", flush=True)
print(json.dumps({"id": json.loads(input())["id"], **FORGED}), flush=True)
input()
"""


@pytest.mark.parametrize(
    "forged",
    [
        {},
        {"output": 1, "errors": "", "exit_code": 0},
        {"output": "", "errors": None, "exit_code": 0},
        {"output": "", "errors": "", "exit_code": "0"},
        {"output": "", "errors": "", "exit_code": True},
        {"output": "x" * 9_000, "errors": "", "exit_code": 0},
    ],
)
async def test_an_answer_that_no_worker_gives_is_an_ended_use(
    forged: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code may take over the process that runs it, and write in its place."""
    worker = tmp_path / "worker.py"
    worker.write_text(FORGES.replace("FORGED", repr(forged)))
    monkeypatch.setattr(python_tool, "PYTHON_WORKER", worker)
    result = await PythonTool(timeout_s=30).run("print(1)")
    assert result.failure is not None and "is no answer" in result.failure
    assert (result.output, result.errors) == ("", result.failure)


async def test_a_cage_that_is_not_there_in_time_is_no_time_out_of_the_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(python_tool, "START_S", 0.0)
    with pytest.raises(ToolFailed, match="not ready in time"):
        await PythonTool().run("print(1)")


async def test_without_cages_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_tool, "cage_missing", lambda: "This kernel has no namespaces.")
    with pytest.raises(InvalidConfig, match="has no namespaces"):
        await PythonTool().run("print(1)")


async def test_a_game_that_uses_the_tool_holds_up_no_other_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, servers = GameEnv.config_init()
    env = GameEnv(made.model_copy(update={"env_wrappers": "python_tool,concat"}), servers)
    used, goes_on = threading.Event(), threading.Event()

    async def waits(tool: PythonTool, code: str) -> PythonResult:
        used.set()
        # for what is done meanwhile on the environment's event loop
        assert goes_on.wait(20)
        return PythonResult(output=code, errors="", failure=None)

    monkeypatch.setattr(PythonTool, "run", waits)
    await env.reset({"task": f"game:{env.config.variant}", "seed": 3})
    reply = Reply(text="<python>42</python>", turn=0, stop_reason="stop")
    step = asyncio.create_task(env.step(reply))
    await until(used.is_set)
    assert not step.done()
    goes_on.set()
    assert "Code execution result: 42" in str((await step).messages)
    await env.server.close()


async def played(answers: list[str], place: Place, listener: socket.socket) -> list[PythonResult]:
    """The results of these scripts, two at once; nothing of them is left, outside or running."""
    tool, free = PythonTool(timeout_s=1), asyncio.Semaphore(2)

    async def use(code: str) -> PythonResult:
        async with free:
            # by the remark its processes are found, and whatever it forks
            return await tool.run(f"{code}  # {place.word}")

    results = await asyncio.gather(*map(use, answers))
    assert not place.marker.exists()
    assert place.secret.read_text() not in "".join(result.shown for result in results)
    with pytest.raises(BlockingIOError):
        listener.accept()
    await until_none_runs(place.word)
    assert (await tool.run("print('still there')")).output == "still there\n"
    return results


async def test_hostile_scripts_are_results_and_leave_nothing(tmp_path: Path) -> None:
    with listening(tmp_path) as (place, listener):
        results = await played(hostile_answers(place)[:130:9], place, listener)
    assert sum(result.failure is not None for result in results) >= 5


@pytest.mark.hostile
@pytest.mark.timeout(900)
async def test_two_hundred_hostile_scripts_are_results_and_leave_nothing(tmp_path: Path) -> None:
    with listening(tmp_path) as (place, listener):
        answers = hostile_answers(place)
        results = await played(answers, place, listener)
    assert len(results) == len(answers) == 200
