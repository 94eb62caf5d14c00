"""Codex.

Owns: its places and its form: `[mcp_servers.halteres]` in CODEX_HOME/config.toml (default ~/.codex), or in a project's
`.codex/config.toml`, which it reads once the project is trusted; skills in `.agents/skills` of the project or the home.
Never: relies on its own time-outs.

Time-outs: by itself it gives a server 10 s to start and a call 60 s; a loaded machine needs more for the first, and a
call that waits for a run is better long. `$CODEX_HOME/skills` is read still, and deprecated (codex-rs,
core-skills/src/loader.rs).
"""

from __future__ import annotations

from pathlib import Path

from halteres.agent.hosts.host import Host, Place
from halteres.agent.hosts.registration import ServerEntry
from halteres.agent.hosts.toml_text import TomlText
from halteres.config import environ


def _place(project: Path | None) -> Place:
    home = Path.home()
    return Place(
        settings=(project / ".codex" if project else environ.codex_home()) / "config.toml",
        skills=(project or home) / ".agents" / "skills",
        within=project or home,
    )


def _then(project: Path | None) -> str:
    if project:
        return "start Codex in this folder and trust it when it asks; /mcp shows the server."
    return "restart Codex; /mcp shows the server."


CODEX = Host(
    name="codex",
    title="Codex",
    form=TomlText(),
    registration=ServerEntry(
        among=("mcp_servers",), once={"startup_timeout_sec": 30, "tool_timeout_sec": 300}, longest_wait_s=280
    ),
    place=_place,
    then=_then,
)
