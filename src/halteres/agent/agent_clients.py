"""Which agent clients there are: where each keeps its settings and skills, and how our server stands there.

No time-out is set where the client's own is long enough, and nothing that would let tools run unasked.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from halteres.config import environ
from halteres.errors import UserError

Format = Literal["json", "toml", "yaml"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a client looks, for one user or within one project."""

    settings: Path | None  # None: it has no such file, or none that we know of
    skills: Path | None  # None: it gets its skills in another way
    within: Path  # what lies above, or is this, is never removed, however empty


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentClient:
    """One agent client."""

    name: str  # as --client has it
    title: str
    format: Format = "json"
    servers: str = "mcpServers"  # the table of its settings that lists MCP servers
    once: Mapping[str, Any] = field(default_factory=dict)  # said when the entry is made; whoever changes it later, may
    longest_wait_s: int | None = None  # a little less than the client gives a call, if that is known; said once, too
    plugin: bool = False  # the tools come by the name in `plugins: enabled:`, not over MCP
    place: Callable[[Path | None], Place]  # of a project's folder, or of the user. Raises UserError
    then: str  # what a person does next
    then_in_project: str = ""  # the same for a project, where it is something else


def _below(settings: str | None, skills: str) -> Callable[[Path | None], Place]:
    """The same two places in a project and in the home."""

    def place(project: Path | None) -> Place:
        root = project or Path.home()
        return Place(settings=root / settings if settings else None, skills=root / skills, within=root)

    return place


def _claude(project: Path | None) -> Place:
    """`~/.claude.json` is Claude Code's memory, too."""
    if project:
        return Place(settings=project / ".mcp.json", skills=project / ".claude" / "skills", within=project)
    home, own = Path.home(), environ.claude_config_dir()
    return Place(
        settings=(own or home) / ".claude.json", skills=(own or home / ".claude") / "skills", within=own or home
    )


def _codex(project: Path | None) -> Place:
    """`$CODEX_HOME/skills` is read still, and deprecated (codex-rs, core-skills/src/loader.rs)."""
    home = Path.home()
    return Place(
        settings=(project / ".codex" if project else environ.codex_home()) / "config.toml",
        skills=(project or home) / ".agents" / "skills",
        within=project or home,
    )


def _hermes(project: Path | None) -> Place:
    if project:
        raise UserError(
            "Hermes has no settings of a project.", "It reads its config.yaml alone.", "Leave --project out."
        )
    home = environ.hermes_home() or Path.home() / ".hermes"
    return Place(settings=home / "config.yaml", skills=home / "skills", within=home.parent)


def _hermes_plugin(project: Path | None) -> Place:
    """The plugin brings the skills itself, and gives the tools their own names instead of mcp__halteres__rl_*."""
    place = _hermes(project)
    if importlib.util.find_spec("hermes_cli") is None:
        raise UserError(
            "The plugin cannot be loaded.",
            f"Hermes is not installed in {sys.prefix}, where Halteres is.",
            "Install Halteres there, or leave --plugin out: the tools then come over MCP.",
        )
    return replace(place, skills=None)


CLAUDE: Final = AgentClient(
    name="claude",
    title="Claude Code",
    once={"type": "stdio"},
    place=_claude,
    then="restart Claude Code; /mcp shows the server.",
    then_in_project="start Claude Code in this folder and approve the server `halteres` when it asks; /mcp shows it.",
)
CODEX: Final = AgentClient(
    name="codex",
    title="Codex",
    format="toml",
    servers="mcp_servers",
    # By itself it gives a server 10 s to start and a call 60 s: a loaded machine needs more for the first, and a call
    # that waits for a run is better long.
    once={"startup_timeout_sec": 30, "tool_timeout_sec": 300},
    longest_wait_s=280,
    place=_codex,
    then="restart Codex; /mcp shows the server.",
    then_in_project="start Codex in this folder and trust it when it asks; /mcp shows the server.",
)
CURSOR: Final = AgentClient(
    name="cursor",
    title="Cursor",
    place=_below(".cursor/mcp.json", ".cursor/skills"),  # `.agents/skills` only newer versions read
    then="open Cursor's settings, Tools & MCP, and switch `halteres` on if it is off.",
)
GEMINI: Final = AgentClient(
    name="gemini",
    title="Gemini CLI",
    longest_wait_s=540,  # its own time-out is ten minutes
    place=_below(".gemini/settings.json", ".agents/skills"),  # which it prefers to its own; Codex shares the copy
    then="restart Gemini CLI; /mcp shows the server.",
    then_in_project="start Gemini CLI in this folder; /mcp shows the server.",
)
HERMES: Final = AgentClient(
    name="hermes",
    title="Hermes Agent",
    format="yaml",
    servers="mcp_servers",
    place=_hermes,
    then="restart Hermes, or say /reload-mcp.",
)
HERMES_PLUGIN: Final = replace(
    HERMES, title="Hermes Agent (plugin)", plugin=True, place=_hermes_plugin, then="restart Hermes."
)
GENERIC: Final = AgentClient(
    name="generic",
    title="Any MCP host",
    place=_below(None, ".agents/skills"),  # the place that the Agent Skills format names; settings are pasted
    then="put this block into your host's settings, and restart it.",
)
_ALL = (CLAUDE, CODEX, CURSOR, GEMINI, HERMES, GENERIC)
CLIENTS: Final[Mapping[str, AgentClient]] = {client.name: client for client in _ALL}
