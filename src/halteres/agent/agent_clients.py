"""Agent clients: which there are, where each keeps its settings and skills; putting us into one, and taking us out.

Every client is written to in the same way, by its settings file: the commands that some have for it (`claude mcp add`)
could not be shown beforehand, nor say how long a call may take. No time-out is set where the client's own is long
enough, and nothing that would let tools run unasked. A marker in each copy of a skill says which clients it is for and
what we wrote: one that somebody else wrote or edited is neither overwritten nor removed, and that is said.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import msgspec

from halteres.agent.client_settings import (
    ENVIRONMENTS,
    HOME,
    NAME,
    Change,
    ClientFormat,
    Server,
    SettingsFile,
    backup_of,
    content,
)
from halteres.agent.skills import Skill, skills
from halteres.config import environ
from halteres.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a client looks, for one user or within one project."""

    settings: Path | None  # None: it has no such file, or none that we know of
    skills: Path | None  # None: it gets its skills in another way
    within: Path  # what lies above, or is this, is never removed, however empty


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentClient(ClientFormat):
    """One agent client."""

    name: str  # as --client has it
    title: str
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
    user_home, own = Path.home(), environ.claude_config_dir()
    return Place(
        settings=(own or user_home) / ".claude.json",
        skills=(own or user_home / ".claude") / "skills",
        within=own or user_home,
    )


def _codex(project: Path | None) -> Place:
    """`$CODEX_HOME/skills` is read still, and deprecated (codex-rs, core-skills/src/loader.rs)."""
    user_home = Path.home()
    return Place(
        settings=(project / ".codex" if project else environ.codex_home()) / "config.toml",
        skills=(project or user_home) / ".agents" / "skills",
        within=project or user_home,
    )


def _hermes(project: Path | None) -> Place:
    if project:
        raise UserError(
            "Hermes has no settings of a project.", "It reads its config.yaml alone.", "Leave --project out."
        )
    user_home = environ.hermes_home() or Path.home() / ".hermes"
    return Place(settings=user_home / "config.yaml", skills=user_home / "skills", within=user_home.parent)


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


MARKER: Final = ".halteres.json"

Verb = Literal["write", "update", "remove", "leave", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of the report: a settings file, a skill."""

    what: str  # its path
    changes: tuple[Change, ...]
    beside: tuple[Change, ...] = ()  # made too, and nobody's to know
    kept: str = ""  # why it stays though it was to change

    @property
    def verb(self) -> Verb:
        """What becomes of it. `leave`: nothing, for it is as it is to be."""
        real = [change for change in self.changes if not change.is_nothing]
        if self.kept:
            return "keep"
        if not real:
            return "leave"
        if all(change.after is None for change in real):
            return "remove"
        return "write" if all(change.before is None for change in real) else "update"

    @property
    def backup(self) -> Path | None:
        """Where what was there before us is kept, if this step changes it."""
        backups = (change for change in self.changes if change.keeps and change.before and not change.is_nothing)
        return next((backup_of(change.file) for change in backups), None)


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps, in their order: nothing is written before everything is known to be possible."""

    steps: tuple[Step, ...]

    def carry_out(self) -> None:
        """Make every change. What was made before one fails stays; the same command again does the rest.

        Raises:
            Conflict, NotWritable: of the first change that cannot be made.
        """
        for step in self.steps:
            for change in (*step.changes, *step.beside):
                change.make()


@dataclass(frozen=True, slots=True)
class Installation:
    """Us in a client: of a project (its folder, absolute), or of the user.

    Raises, in every method:
        UserError: the client has no such place; its settings are broken, or cannot be edited without harm.
    """

    client: AgentClient
    project: Path | None = None

    def adding(self) -> Plan:
        """Skills first: the settings are what switches us on."""
        place = self.client.place(self.project)
        steps = [copy.adding(self.client.name) for copy in _copies(place)]
        if file := self._settings(place):
            steps.append(Step(what=str(file.file), changes=(file.registration(this_server(self.project)),)))
        return Plan(tuple(steps))

    def removing(self) -> Plan:
        """What is ours and nothing else; no step where nothing is."""
        place = self.client.place(self.project)
        file = self._settings(place)
        changes = file.removal() if file else ()
        steps = [Step(what=str(file.file), changes=changes)] if file and changes else []
        copies = (copy.removing(self.client.name) for copy in _copies(place))
        return Plan((*steps, *(step for step in copies if step)))

    def shown(self) -> str:
        """What is written into the client's settings, in their format."""
        return SettingsFile(file=Path(), client=self.client, within=Path()).shown(this_server(self.project))

    def _settings(self, place: Place) -> SettingsFile | None:
        return SettingsFile(file=place.settings, client=self.client, within=place.within) if place.settings else None


def this_server(project: Path | None) -> Server:
    """The server of this installation. A project's agents find the environments in its folder `environments`."""
    script = Path(sysconfig.get_path("scripts"), NAME)
    is_there = script.is_file() and os.access(script, os.X_OK)
    command, *args = (str(script),) if is_there else (sys.executable, "-m", NAME)
    # Clients start their servers with few variables of the user's: what was set by hand must be handed on.
    env = {HOME: str(environ.home())} if environ.is_set(HOME) else {}
    *folders, _ = environ.environment_folders()  # the last one follows from the home
    own = [project / "environments"] if project else []
    if folders := list(dict.fromkeys(map(str, [*own, *folders]))):
        env[ENVIRONMENTS] = os.pathsep.join(folders)
    return Server(command=command, args=(*args, "mcp"), env=env)


def _copies(place: Place) -> Iterator[SkillCopy]:
    if place.skills:
        for skill in skills():
            yield SkillCopy(skill=skill, folder=place.skills / skill.name, within=place.within)


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """What the marker of a copy holds."""

    clients: tuple[str, ...]  # that read the copy: several read the same folder
    files: dict[str, str]  # path within the folder -> SHA-256 of what we wrote


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillCopy:
    """A skill's place in a client's folder, whether it is there or not."""

    skill: Skill
    folder: Path
    within: Path

    def adding(self, client: str) -> Step:
        """Put it there, or bring it up to date."""
        marker = self._marker()
        if marker is None and self.folder.exists():
            return self._left_alone("there is another one of this name")
        if marker is not None and self._is_edited(marker):
            return self._left_alone("edited since it was installed")
        found = (file for file in sorted(self.skill.folder.rglob("*")) if file.is_file())
        new = {
            str(file.relative_to(self.skill.folder)): file.read_bytes()
            for file in found
            if "__pycache__" not in file.parts
        }
        stale = dict.fromkeys(name for name in (marker.files if marker else {}) if name not in new)
        changes = [self._change(name, held) for name, held in {**new, **stale}.items()]
        clients = tuple(sorted({*(marker.clients if marker else ()), client}))
        marker_of_copy = Marker(clients=clients, files={name: _hash(held) for name, held in new.items()})
        return Step(what=str(self.folder), changes=tuple(changes), beside=(self._marked(marker_of_copy),))

    def removing(self, client: str) -> Step | None:
        """Take it away, unless another client needs it; None where it is not one of ours."""
        marker = self._marker()
        if marker is None or client not in marker.clients:
            return None
        others = tuple(name for name in marker.clients if name != client)
        if others:
            left = self._marked(Marker(clients=others, files=marker.files))
            return self._left_alone(f"it is for {', '.join(others)} too", left)
        if self._is_edited(marker):
            return self._left_alone("edited since it was installed", self._marked(None))
        changes = tuple(self._change(name, None) for name in marker.files)
        return Step(what=str(self.folder), changes=changes, beside=(self._marked(None),))

    def _marker(self) -> Marker | None:
        try:
            return msgspec.json.decode(content(self.folder / MARKER) or b"", type=Marker)
        except msgspec.DecodeError:
            return None

    def _is_edited(self, marker: Marker) -> bool:
        files = ((content(self.folder / name), written) for name, written in marker.files.items())
        return any(found is not None and _hash(found) != written for found, written in files)

    def _change(self, name: str, after: bytes | None) -> Change:
        file = self.folder / name
        return Change(file=file, before=content(file), after=after, within=self.within)

    def _marked(self, marker: Marker | None) -> Change:
        held = msgspec.json.format(msgspec.json.encode(marker), indent=1) + b"\n" if marker else None
        return self._change(MARKER, held)

    def _left_alone(self, why: str, *marker: Change) -> Step:
        return Step(what=str(self.folder), changes=(), beside=marker, kept=why)


def _hash(held: bytes) -> str:
    return hashlib.sha256(held).hexdigest()
