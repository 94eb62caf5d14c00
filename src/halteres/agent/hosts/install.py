"""Putting us into a host, and taking us out of it again: the settings and the skills.

Owns: copying skills there, bringing our copies up to date, taking them away; the marker in each that says which hosts
it is for and what we wrote.
Never: overwrites or removes a skill that somebody else wrote or edited: that is told."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from halteres.agent.hosts.changes import Change, Plan, Step, content
from halteres.agent.hosts.hosts import Host, Place
from halteres.agent.hosts.settings import ENVIRONMENTS, HOME, NAME, Server, SettingsFile
from halteres.agent.skills import Skill, skills
from halteres.config import environ

MARKER: Final = ".halteres.json"

_YOURS: Final = "edited since it was installed"


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """What the marker holds."""

    clients: tuple[str, ...]  # whom the copy is for: several hosts read the same folder
    files: dict[str, str]  # path within the folder -> SHA-256 of what we wrote


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillCopy:
    """A skill's place in a host's folder, whether it is there or not."""

    skill: Skill
    folder: Path
    within: Path

    def arriving(self, client: str) -> Step:
        """Put it there, or bring it up to date."""
        marker = self._marker()
        if marker is None and self.folder.exists():
            return self._kept("there is another one of this name")
        if marker is not None and self._is_edited(marker):
            return self._kept(_YOURS)
        new = {str(file.relative_to(self.skill.folder)): file.read_bytes() for file in _files(self.skill.folder)}
        clients = tuple(sorted({*(marker.clients if marker else ()), client}))
        named = Marker(clients=clients, files={name: _hash(held) for name, held in new.items()})
        stale = {name: None for name in (marker.files if marker else {}) if name not in new}
        changes = [self._change(name, held) for name, held in {**new, **stale}.items()]
        return self._step(changes, self._change(MARKER, _encoded(named)))

    def leaving(self, client: str) -> Step | None:
        """Take it away, unless another host needs it; None where it is not one of ours."""
        marker = self._marker()
        if marker is None or client not in marker.clients:
            return None
        others = tuple(name for name in marker.clients if name != client)
        if others:
            left = Marker(clients=others, files=marker.files)
            return self._kept(f"it is for {', '.join(others)} too", self._change(MARKER, _encoded(left)))
        if self._is_edited(marker):
            return self._kept(_YOURS, self._change(MARKER, None))
        return self._step([self._change(name, None) for name in marker.files], self._change(MARKER, None))

    def _marker(self) -> Marker | None:
        try:
            return msgspec.json.decode(content(self.folder / MARKER) or b"", type=Marker)
        except msgspec.DecodeError:
            return None

    def _is_edited(self, marker: Marker) -> bool:
        held = {name: content(self.folder / name) for name in marker.files}
        return any(found is not None and _hash(found) != marker.files[name] for name, found in held.items())

    def _change(self, name: str, after: bytes | None) -> Change:
        file = self.folder / name
        return Change(file=file, before=content(file), after=after, within=self.within)

    def _step(self, changes: list[Change], marker: Change) -> Step:
        return Step(what=str(self.folder), changes=tuple(changes), beside=(marker,))

    def _kept(self, why: str, *marker: Change) -> Step:
        return Step(what=str(self.folder), changes=(), beside=marker, kept=why)


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)


def _hash(held: bytes) -> str:
    return hashlib.sha256(held).hexdigest()


def _encoded(marker: Marker) -> bytes:
    return msgspec.json.format(msgspec.json.encode(marker), indent=1) + b"\n"


@dataclass(frozen=True, slots=True)
class Installation:
    """Us in a host: of a project (its folder, absolute), or of the user.

    Raises, in every method:
        UserError: the host has no such place; its settings are broken, or cannot be edited without harm.
    """

    host: Host
    project: Path | None = None

    def adding(self) -> Plan:
        """Skills first: the settings are what switches us on."""
        place = self.host.place(self.project)
        steps = [copy.arriving(self.host.name) for copy in _copies(place)]
        if file := self._settings(place):
            steps.append(Step(what=str(file.file), changes=(file.entering(this_server(self.project)),)))
        return Plan(tuple(steps))

    def removing(self) -> Plan:
        """What is ours and nothing else; no step where nothing is."""
        place = self.host.place(self.project)
        file = self._settings(place)
        changes = file.leaving() if file else ()
        steps = [Step(what=str(file.file), changes=changes)] if file and changes else []
        gone = (copy.leaving(self.host.name) for copy in _copies(place))
        return Plan((*steps, *(step for step in gone if step)))

    def shown(self) -> str:
        """What is written into the host's settings, in their format."""
        return SettingsFile(file=Path(), host=self.host, within=Path()).shown(this_server(self.project))

    def _settings(self, place: Place) -> SettingsFile | None:
        return SettingsFile(file=place.settings, host=self.host, within=place.within) if place.settings else None


def this_server(project: Path | None) -> Server:
    """The server of this installation. A project's agents find the environments in its folder `environments`."""
    command, *args = _program()
    return Server(command=command, args=(*args, "mcp"), env=dict(_variables(project)))


def _program() -> tuple[str, ...]:
    script = Path(sysconfig.get_path("scripts"), NAME)
    if script.is_file() and os.access(script, os.X_OK):
        return (str(script),)
    return (sys.executable, "-m", NAME)


def _variables(project: Path | None) -> Iterator[tuple[str, str]]:
    """Hosts start their servers with few variables of the user's: what was set by hand must be handed on."""
    if environ.is_set(HOME):
        yield HOME, str(environ.home())
    *folders, _ = environ.environment_folders()  # the last one follows from the home
    own = [project / "environments"] if project else []
    if folders := list(dict.fromkeys(map(str, [*own, *folders]))):
        yield ENVIRONMENTS, os.pathsep.join(folders)


def _copies(place: Place) -> Iterator[SkillCopy]:
    if place.skills:
        for skill in skills():
            yield SkillCopy(skill=skill, folder=place.skills / skill.name, within=place.within)
