"""Cursor.

Owns: its places and its form: `mcpServers` in `.cursor/mcp.json` of the project or the home; skills in
`.cursor/skills`, which every version that knows skills reads (`.agents/skills` only newer ones, and not everywhere).
Never: relies on resources or prompts: it may show tools only.
"""

from __future__ import annotations

from pathlib import Path

from halteres.agent.hosts.host import Host, Place
from halteres.agent.hosts.json_text import JsonText
from halteres.agent.hosts.registration import ServerEntry


def _place(project: Path | None) -> Place:
    root = project or Path.home()
    return Place(settings=root / ".cursor" / "mcp.json", skills=root / ".cursor" / "skills", within=root)


def _then(project: Path | None) -> str:
    return "open Cursor's settings, Tools & MCP, and switch `halteres` on if it is off."


CURSOR = Host(
    name="cursor",
    title="Cursor",
    form=JsonText(),
    registration=ServerEntry(among=("mcpServers",)),
    place=_place,
    then=_then,
)
