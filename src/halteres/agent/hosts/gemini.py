"""Gemini CLI.

Owns: its places and its form: `mcpServers` in `.gemini/settings.json` of the project or the home; skills in
`.agents/skills`, which it reads beside its own folder and prefers to it, so that Codex and Gemini share one copy.
Never: sets `trust`, which would let every tool run unasked; sets a time-out: its own is ten minutes.
"""

from __future__ import annotations

from pathlib import Path

from halteres.agent.hosts.host import Host, Place
from halteres.agent.hosts.json_text import JsonText
from halteres.agent.hosts.registration import ServerEntry


def _place(project: Path | None) -> Place:
    root = project or Path.home()
    return Place(settings=root / ".gemini" / "settings.json", skills=root / ".agents" / "skills", within=root)


def _then(project: Path | None) -> str:
    return f"{'start Gemini CLI in this folder' if project else 'restart Gemini CLI'}; /mcp shows the server."


GEMINI = Host(
    name="gemini",
    title="Gemini CLI",
    form=JsonText(),
    registration=ServerEntry(among=("mcpServers",), longest_wait_s=540),
    place=_place,
    then=_then,
)
