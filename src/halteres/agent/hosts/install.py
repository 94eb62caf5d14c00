"""Putting us into a host, and taking us out of it again: the settings and the skills."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from halteres.agent.hosts.changes import Plan, Step
from halteres.agent.hosts.hosts import Host, Place
from halteres.agent.hosts.settings import ENVIRONMENTS, HOME, NAME, Server, SettingsFile
from halteres.agent.hosts.skill_copies import SkillCopy
from halteres.agent.skills import skills
from halteres.config import environ


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
