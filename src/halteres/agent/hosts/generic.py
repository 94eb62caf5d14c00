"""Any other host.

Owns: the block that most hosts understand, for people to paste; skills in `.agents/skills` of the project or the home,
the place that the Agent Skills format names for hosts in general.
Never: guesses where an unknown host keeps its settings.
"""

from __future__ import annotations

from pathlib import Path

from halteres.agent.hosts.host import Host, Place
from halteres.agent.hosts.json_text import JsonText
from halteres.agent.hosts.registration import ServerEntry


def _place(project: Path | None) -> Place:
    root = project or Path.home()
    return Place(settings=None, skills=root / ".agents" / "skills", within=root)


def _then(project: Path | None) -> str:
    return "put this block into your host's settings, and restart it."


GENERIC = Host(
    name="generic",
    title="Any MCP host",
    form=JsonText(),
    registration=ServerEntry(among=("mcpServers",)),
    place=_place,
    then=_then,
)
