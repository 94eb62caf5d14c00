"""A user's home, a project, and stand-ins of agent clients' commands; `halteres` as a person runs
it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from halteres.cli import main as program

from .transports import home_of

VARIABLES = ("CLAUDE_CONFIG_DIR", "HERMES_HOME")

COMMAND = """#!{python}
import json, pathlib, sys
with open({calls!r}, "a", encoding="utf-8") as file:
    print(json.dumps([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]), file=file)
"""
"""A client's command: it notes how it was called."""


@dataclass(frozen=True)
class Ended:
    """What a command came to."""

    code: int
    out: str
    err: str

    def done(self, verb: str, file: Path | str) -> bool:
        """Whether it says this of that."""
        return any(line.split() == [*verb.split(), str(file)] for line in self.out.splitlines())


@dataclass(frozen=True)
class UserHome:
    """Where everything is."""

    home: Path
    project: Path
    commands_folder: Path
    run: Callable[..., Ended]

    def commands(self) -> list[list[str]]:
        """How clients' commands were called, in order."""
        calls = self.commands_folder / "calls.jsonl"
        if not calls.exists():
            return []
        return [json.loads(line) for line in calls.read_text(encoding="utf-8").splitlines()]

    def install(self, client: str, *more: str) -> Ended:
        ended = self.run("install-agent", "--client", client, *more)
        assert ended.code == 0, ended.err
        return ended

    def files(self) -> dict[str, bytes]:
        """Every file of home and project, by its path from their parent."""
        root = self.home.parent
        return {
            str(file.relative_to(root)): file.read_bytes()
            for folder in (self.home, self.project)
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }


def land(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> UserHome:
    """An empty home and an empty project, which is the working directory."""
    home_of(tmp_path / "nowhere", monkeypatch)
    monkeypatch.delenv("HALTERES_HOME")
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(project)
    commands_folder = tmp_path / "commands"
    commands_folder.mkdir()
    for name in ("claude", "codex", "gemini"):
        calls = str(commands_folder / "calls.jsonl")
        (commands_folder / name).write_text(
            COMMAND.format(python=sys.executable, calls=calls), encoding="utf-8"
        )
        (commands_folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands_folder}{os.pathsep}{os.environ['PATH']}")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def run(*words: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["halteres", *words])
        with pytest.raises(SystemExit) as ended:
            program.main()
        told = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, told.out, told.err)

    return UserHome(home, project, commands_folder, run)
