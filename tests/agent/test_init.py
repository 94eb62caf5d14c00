"""`halteres init`: what a workspace holds, that nothing is overwritten, that its commands are ones
that there are.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from halteres.agent.skills import WORKSPACE, example_environment
from halteres.agent.transports.command_line import tools_app
from halteres.cli import main as program
from halteres.config.discovery import discover

from .user_home import UserHome, land

NAMES = ("AGENTS.md", "environments/example.py", ".gitignore")


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> UserHome:
    return land(tmp_path, monkeypatch, capsys)


def test_a_folder_becomes_a_workspace(here: UserHome) -> None:
    folder = here.project / "new" / "one"
    told = here.run("init", str(folder))
    assert told.code == 0
    for name in NAMES:
        assert told.done("wrote", folder / name)
    assert (folder / "environments" / "example.py").read_text() == example_environment()
    assert f"cd {folder} && halteres install-agent --project --client claude" in told.out
    assert f"export HALTERES_ENVIRONMENTS={folder}/environments" in told.out
    assert here.files().keys() == {f"project/new/one/{name}" for name in NAMES}


def test_once_more_it_changes_nothing(here: UserHome) -> None:
    here.run("init")
    before = here.files()
    told = here.run("init")
    assert told.code == 0 and here.files() == before
    assert all(told.done("already there", here.project / name) for name in NAMES)


def test_what_is_there_is_never_overwritten(here: UserHome) -> None:
    for name in NAMES:
        file = here.project / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("mine")
    told = here.run("init")
    assert told.code == 0
    assert all(told.done("left alone", here.project / name) for name in NAMES)
    assert {*here.files().values()} == {b"mine"}


def test_where_no_folder_can_be_one_sentence_says_so(here: UserHome) -> None:
    (here.project / "taken").write_text("a file")
    told = here.run("init", "taken")
    assert told.code == 1 and told.err.startswith(
        f"error: {here.project}/taken/AGENTS.md cannot be written. "
    )


def test_its_environment_is_found_as_the_last_line_says(
    here: UserHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = here.run("init")
    exported = re.search(r"export HALTERES_ENVIRONMENTS=(\S+);", told.out)
    assert exported is not None
    monkeypatch.setenv("HALTERES_ENVIRONMENTS", exported[1])
    found = {one.name: one.file_path for one in discover().environments}
    assert found["sums"] == str(here.project / "environments" / "example.py")


def test_agents_md_is_short_and_every_command_in_it_is_there() -> None:
    text = (WORKSPACE / "AGENTS.md").read_text()
    assert len(text.splitlines()) <= 80
    commands = re.findall(r"^(?:`|)(halteres [^`#\n]+)|`(halteres [^`]+)`", text, re.MULTILINE)
    given = [shlex.split(one or other)[1:] for one, other in commands]
    assert len(given) > 8
    for words in given:
        assert _is_command(words), words


def _is_command(words: list[str]) -> bool:
    """Whether the words lead to a command that takes these options."""
    app = tools_app() if words[0] == "rl" else program.app
    command = typer.main.get_command(app)
    words = words[1:] if words[0] == "rl" else words
    while words and isinstance(command, typer.core.TyperGroup) and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    known = {flag for parameter in command.params for flag in parameter.opts} | {"--help"}
    return {word for word in words if word.startswith("--")} <= known and bool(
        words or command.name
    )
