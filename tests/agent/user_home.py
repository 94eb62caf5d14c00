"""A user's home and a project, and what hosts keep there; `halteres` as a person runs it."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from halteres.cli import main as program

from .transports import home_of

VARIABLES = ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "HERMES_HOME")


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
    run: Callable[..., Ended]

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


def land(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> UserHome:
    """An empty home and an empty project, which is the working directory."""
    home_of(tmp_path / "nowhere", monkeypatch)
    monkeypatch.delenv("HALTERES_HOME")
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(project)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def run(*words: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["halteres", *words])
        with pytest.raises(SystemExit) as ended:
            program.main()
        told = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, told.out, told.err)

    return UserHome(home, project, run)


@dataclass(frozen=True)
class Written:
    """Where a host's settings are, and how they look with a server in them before us."""

    client: str
    file: str  # from the parent of home and project
    skills: str
    full: str

    @property
    def scope(self) -> tuple[str, ...]:
        return ("--project",) if self.file.startswith("project") else ()

    def servers(self, text: str) -> Any:
        """The servers in such a file."""
        if self.file.endswith(".toml"):
            return tomllib.loads(text)["mcp_servers"]
        return yaml.safe_load(text)["mcp_servers"] if self.file.endswith(".yaml") else json.loads(text)["mcpServers"]

    def with_mine(self, text: str) -> str:
        """As somebody adds a server and a comment, where comments are known."""
        if self.file.endswith(".toml"):
            above = text.replace("# the end", "# the end, or not\n[mcp_servers.mine]\ncommand = 'm'\n")
            return f"{above}\n# of the next table\n[history]\npersistence = 'none'\n"
        if self.file.endswith(".yaml"):
            return text.replace("  time:\n", "  mine: {command: m}  # my own\n  time:\n")
        return text.replace('"time":', '"mine": {"command": "m"}, "time":')


CLAUDE = """{
    "numStartups": 12,
    "oauthAccount": {"emailAddress": "é@example.com"},
    "mcpServers": {
        "time": {"command": "uvx", "args": ["mcp-server-time"],
                 "env": {}}
    },
    "projects": {"/p": {"history": [ ]}}
}
"""
MCP_JSON = '{"mcpServers": {"time": {"command": "uvx", "args": ["mcp-server-time"]}}}'
GEMINI = '{\r\n\t"theme": "x",\r\n\t"mcpServers": {\r\n\t\t"time": {"command": "uvx"}\r\n\t}\r\n}\r\n'
CODEX = """# my settings
model = "gpt-5"   # the large one

[mcp_servers.time]
command = "uvx"  # of uv
args = [
  "mcp-server-time",   # no more
]

[mcp_servers.time.env]
TZ = 'Europe/Athens'

# how I like it
[tui]
notifications = true
# the end"""
HERMES = """# my settings
model:
  default: 'hermes-4'   # quoted on purpose

mcp_servers:
  # the clock
  time:
    command: "uvx"
    args: ["mcp-server-time"]

# plugins of mine
plugins:
    enabled:
        - disk-cleanup  # daily
        # - another
    disabled: []
toolsets: [hermes-cli]
"""

HOSTS: Mapping[str, Written] = {
    "claude": Written("claude", "home/.claude.json", "home/.claude/skills", CLAUDE),
    "claude, project": Written("claude", "project/.mcp.json", "project/.claude/skills", MCP_JSON),
    "codex": Written("codex", "home/.codex/config.toml", "home/.agents/skills", CODEX),
    "codex, project": Written("codex", "project/.codex/config.toml", "project/.agents/skills", CODEX),
    "cursor": Written("cursor", "home/.cursor/mcp.json", "home/.cursor/skills", MCP_JSON),
    "cursor, project": Written("cursor", "project/.cursor/mcp.json", "project/.cursor/skills", MCP_JSON),
    "gemini": Written("gemini", "home/.gemini/settings.json", "home/.agents/skills", GEMINI),
    "gemini, project": Written("gemini", "project/.gemini/settings.json", "project/.agents/skills", GEMINI),
    "hermes": Written("hermes", "home/.hermes/config.yaml", "home/.hermes/skills", HERMES),
}
