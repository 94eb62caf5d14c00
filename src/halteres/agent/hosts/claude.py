"""Claude Code.

Owns: its places and its form: `.mcp.json` of a project, `mcpServers` of `~/.claude.json` for the user (within
CLAUDE_CONFIG_DIR, where that is set); skills in `.claude/skills`.
Never: touches anything else of `~/.claude.json`, which is also Claude Code's memory.
"""

from __future__ import annotations

from pathlib import Path

from halteres.agent.hosts.host import Host, Place
from halteres.agent.hosts.json_text import JsonText
from halteres.agent.hosts.registration import ServerEntry
from halteres.config import environ


def _place(project: Path | None) -> Place:
    if project:
        return Place(settings=project / ".mcp.json", skills=project / ".claude" / "skills", within=project)
    home, own = Path.home(), environ.claude_config_dir()
    return Place(
        settings=(own or home) / ".claude.json", skills=(own or home / ".claude") / "skills", within=own or home
    )


def _then(project: Path | None) -> str:
    if project:
        return "start Claude Code in this folder and approve the server `halteres` when it asks; /mcp shows it."
    return "restart Claude Code; /mcp shows the server."


CLAUDE = Host(
    name="claude",
    title="Claude Code",
    form=JsonText(),
    registration=ServerEntry(among=("mcpServers",), once={"type": "stdio"}),
    place=_place,
    then=_then,
)
