"""Hermes Agent.

Owns: its places and its form: config.yaml in HERMES_HOME (default ~/.hermes), there `mcp_servers:`, or `plugins:
enabled:` for the plugin that comes with this package; skills in HERMES_HOME/skills.
Never: both at once: the agent would have every tool twice. Sets no time-out: its own are 60 s to connect, and for a
call more than our longest wait.

Over MCP the tools are called mcp__halteres__rl_*; the plugin gives them their own names, brings the skills itself, and
loads only where Hermes and Halteres share an environment.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from halteres.agent.hosts.host import CannotEdit, Drop, Edit, Host, Keys, Place, Put, Registration, Server, Settings
from halteres.agent.hosts.registration import NAME, ServerEntry, value_at
from halteres.agent.hosts.yaml_text import YamlText
from halteres.config import environ
from halteres.errors import UserError

MODULE: Final = "hermes_cli"
"""Hermes, where it is installed."""

_ENABLED: Final[Keys] = ("plugins", "enabled")


@dataclass(frozen=True, slots=True)
class PluginEntry:
    """The plugin's name among those that Hermes loads. A name in `plugins: disabled:` wins over it."""

    def enter(self, settings: Settings, server: Server) -> Sequence[Edit]:
        """With the name; the plugin runs in Hermes itself, so there is no server to start."""
        if not isinstance(value_at(settings, _ENABLED), list | None):
            raise CannotEdit("'plugins.enabled' is no list")
        names = _enabled(settings)
        return [] if NAME in names else [Put(_ENABLED, [NAME, *names])]

    def leave(self, settings: Settings) -> Sequence[Edit]:
        """Without the name."""
        names = _enabled(settings)
        if NAME not in names:
            return []
        rest = [name for name in names if name != NAME]
        return [Put(_ENABLED, rest) if rest else Drop(_ENABLED)]

    def carried(self, settings: Settings) -> Sequence[Edit]:
        """The list as it stands."""
        return [Put(_ENABLED, names)] if NAME in (names := _enabled(settings)) else []


@dataclass(frozen=True, slots=True)
class OneOf:
    """One registration instead of another."""

    chosen: Registration
    other: Registration

    def enter(self, settings: Settings, server: Server) -> Sequence[Edit]:
        """With the chosen one, without the other."""
        return [*self.other.leave(settings), *self.chosen.enter(settings, server)]

    def leave(self, settings: Settings) -> Sequence[Edit]:
        """Without either."""
        return [*self.other.leave(settings), *self.chosen.leave(settings)]

    def carried(self, settings: Settings) -> Sequence[Edit]:
        """Whichever stands there."""
        return [*self.other.carried(settings), *self.chosen.carried(settings)]


def _enabled(settings: Settings) -> list[str]:
    names = value_at(settings, _ENABLED)
    return names if isinstance(names, list) else []


def _place(project: Path | None) -> Place:
    if project:
        raise UserError(
            "Hermes has no settings of a project.", "It reads its config.yaml alone.", "Leave --project out."
        )
    home = environ.hermes_home() or Path.home() / ".hermes"
    return Place(settings=home / "config.yaml", skills=home / "skills", within=home.parent)


def _plugin_place(project: Path | None) -> Place:
    place = _place(project)
    if importlib.util.find_spec(MODULE) is None:
        raise UserError(
            "The plugin cannot be loaded.",
            f"Hermes is not installed in {sys.prefix}, where Halteres is.",
            "Install Halteres there, or leave --plugin out: the tools then come over MCP.",
        )
    return Place(settings=place.settings, skills=None, within=place.within)


def _then(project: Path | None) -> str:
    return "restart Hermes, or say /reload-mcp."


_SERVER: Final = ServerEntry(among=("mcp_servers",))

HERMES = Host(
    name="hermes",
    title="Hermes Agent",
    form=YamlText(),
    registration=OneOf(_SERVER, PluginEntry()),
    place=_place,
    then=_then,
)

HERMES_PLUGIN = Host(
    name="hermes",
    title="Hermes Agent (plugin)",
    form=YamlText(),
    registration=OneOf(PluginEntry(), _SERVER),
    place=_plugin_place,
    then=lambda project: "restart Hermes.",
)
