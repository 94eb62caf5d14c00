"""Somebody's program, run once for an episode: what it is given, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
import time
from pathlib import Path

import pytest

from halteres.environments.program import TASK_FILE, Programs, check_program
from halteres.environments.scratch_folders import make_folder
from halteres.errors import EnvironmentFailed, InvalidConfig

TASK = {"name": "sum", "numbers": [1, 2]}


def programs(
    folder: Path, code: str, *arguments: str, within_s: float = 60.0, workspace: Path | None = None
) -> Programs:
    """Python that runs this code."""
    command = (sys.executable, "-c", code, *arguments)
    return Programs(command, workspace, within_s, folder / "private")


async def test_it_has_its_task_its_variables_and_none_of_our_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-the-operators")
    monkeypatch.setenv("HALTERES_TRAJECTORY_TOKEN", "of-the-run")
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    given = {"OPENAI_API_KEY": "hs-session"}
    async with programs(tmp_path, code).play(TASK, given) as played:
        found = json.loads(played.output)
        task = json.loads(Path(found[TASK_FILE]).read_text(encoding="utf-8"))
    assert played.exit_code == 0
    assert found["OPENAI_API_KEY"] == "hs-session"
    assert task == TASK
    text = json.dumps(found)
    assert "tml-the-operators" not in text
    assert "of-the-run" not in text


async def test_fields_of_the_task_stand_in_its_arguments(tmp_path: Path) -> None:
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    made = programs(tmp_path, code, "--name={name}", "{numbers}", "{else}", "{}")
    async with made.play(TASK, {}) as played:
        assert json.loads(played.output) == ["--name=sum", "[1, 2]", "{else}", "{}"]


async def test_it_works_in_a_copy_that_is_removed_with_the_episode(tmp_path: Path) -> None:
    workspace = tmp_path / "given"
    workspace.mkdir()
    (workspace / "a.txt").write_text("before", encoding="utf-8")
    code = "open('a.txt', 'w').write('after')"
    made = programs(tmp_path, code, workspace=workspace)
    async with made.play(TASK, {}) as played:
        assert (played.folder / "a.txt").read_text(encoding="utf-8") == "after"
    assert (workspace / "a.txt").read_text(encoding="utf-8") == "before"
    assert not played.folder.exists()


LEAVES_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open("child", "w").write(str(child.pid))
time.sleep(60)
"""


async def until_gone(pid: int) -> None:
    """A killed process may be a zombie for a moment."""
    async with asyncio.timeout(10):
        while Path(f"/proc/{pid}").exists():
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2]
            if state.split()[0] == "Z":
                return
            await asyncio.sleep(0.05)


async def test_at_its_time_limit_it_ends_with_all_that_it_started(tmp_path: Path) -> None:
    made = programs(tmp_path, LEAVES_A_CHILD, within_s=2.0)
    async with made.play(TASK, {}) as played:
        child = int((played.folder / "child").read_text(encoding="utf-8"))
    assert played.exit_code is None
    await until_gone(child)


async def test_whoever_stops_waiting_ends_it(tmp_path: Path) -> None:
    made = programs(tmp_path, LEAVES_A_CHILD)

    async def play() -> None:
        async with made.play(TASK, {}):
            pass

    playing = asyncio.create_task(play())
    file = made.scratch / "episode-1" / "work" / "child"
    ends = time.monotonic() + 30
    while not (file.exists() and file.read_text(encoding="utf-8")):
        assert time.monotonic() < ends
        await asyncio.sleep(0.05)
    child = int(file.read_text(encoding="utf-8"))
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    await until_gone(child)


async def test_hundreds_wait_side_by_side(tmp_path: Path) -> None:
    """They have threads of their own: those of the event loop are a few."""
    gate = tmp_path / "gate"
    code = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(.05)"
    made = programs(tmp_path, code)
    count = 4 * (os.cpu_count() or 1) + 8

    async def play() -> int | None:
        async with made.play(TASK, {}) as played:
            return played.exit_code

    playing = [asyncio.create_task(play()) for _ in range(count)]
    ends = time.monotonic() + 60
    while len(list(made.scratch.glob("episode-*/task.json"))) < count:
        assert time.monotonic() < ends
        await asyncio.sleep(0.05)
    gate.touch()
    assert await asyncio.gather(*playing) == [0] * count


async def test_what_it_wrote_until_its_time_limit_is_kept(tmp_path: Path) -> None:
    code = "import time; print('so far', flush=True); time.sleep(60)"
    async with programs(tmp_path, code, within_s=3.0).play(TASK, {}) as played:
        pass
    assert (played.exit_code, played.output) == (None, "so far\n")


async def test_hidden_fields_reach_neither_the_file_nor_the_arguments(tmp_path: Path) -> None:
    code = "import os, sys; print(open(os.environ['HALTERES_TASK_FILE']).read(), sys.argv[1:])"
    command = (sys.executable, "-c", code, "{answer}")
    made = Programs(command, None, 60.0, tmp_path / "private", hidden=("answer",))
    async with made.play({"question": "6 * 7", "answer": "42"}, {}) as played:
        assert "6 * 7" in played.output
        assert "42" not in played.output


def test_an_argument_that_names_no_field_is_refused_with_those_there_are() -> None:
    tasks = [{"question": "6 * 7", "answer": "42"}]

    def check(argument: str) -> None:
        check_program((sys.executable, argument), None, tasks, ("answer",))

    check("{question}")
    check("--json={}")
    with pytest.raises(InvalidConfig, match="fields are question"):
        check("{quest}")
    with pytest.raises(InvalidConfig, match=r"env\.hidden"):
        check("{answer}")


async def test_folders_a_thousand_deep_are_removed_with_the_others(tmp_path: Path) -> None:
    code = "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')"
    async with programs(tmp_path, code).play(TASK, {}) as played:
        assert played.exit_code == 0


async def test_an_argument_that_no_program_can_have_is_the_environments_failure(
    tmp_path: Path,
) -> None:
    made = programs(tmp_path, "pass", "{name}")
    with pytest.raises(EnvironmentFailed, match="cannot be run"):
        async with made.play({"name": "a\0b"}, {}):
            pass


@pytest.mark.parametrize(
    ("command", "workspace", "words"),
    [
        ((), None, "no program"),
        (("surely-no-such-program",), None, "not found"),
        ((sys.executable,), Path("/no/such/folder"), "no folder"),
    ],
)
def test_what_cannot_be_played_is_refused_before_the_first_episode(
    command: tuple[str, ...], workspace: Path | None, words: str
) -> None:
    with pytest.raises(InvalidConfig, match=words):
        check_program(command, workspace, [TASK])


def test_a_program_by_a_relative_path_is_looked_for_in_the_folder_it_is_started_in(
    tmp_path: Path,
) -> None:
    program = tmp_path / "agent.sh"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    check_program(("./agent.sh",), None, [TASK], folder=tmp_path)
    with pytest.raises(InvalidConfig, match="one with a slash from"):
        check_program(("./agent.sh",), None, [TASK])


async def test_no_other_user_reads_an_episodes_folder(tmp_path: Path) -> None:
    """As root, whose cages have workers of another user, too."""
    private = Path(make_folder())
    made = Programs((sys.executable, "-c", "pass"), None, 60.0, private)
    async with made.play(TASK, {}) as played:
        assert private in played.folder.parents
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
    made.close()
    assert not private.exists()
