"""Putting us into a host, and taking us out of it again.

Owns: what belongs to it: the settings and the skills.
Never: writes (`Plan.carry_out` does).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from halteres.agent.hosts.copies import Copy
from halteres.agent.hosts.host import Host, Place
from halteres.agent.hosts.plan import Plan, Step
from halteres.agent.hosts.registration import this_server
from halteres.agent.hosts.settings import SettingsFile
from halteres.agent.skills import skills


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
        """What is written into the host's settings, in their form."""
        place = self.host.place(self.project)
        file = self._settings(place) or self._settings_at(place, Path(self.host.name))
        return file.shown(this_server(self.project))

    def _settings(self, place: Place) -> SettingsFile | None:
        return self._settings_at(place, place.settings) if place.settings else None

    def _settings_at(self, place: Place, file: Path) -> SettingsFile:
        return SettingsFile(file=file, form=self.host.form, registration=self.host.registration, within=place.within)


def _copies(place: Place) -> Iterator[Copy]:
    if place.skills:
        for skill in skills():
            yield Copy(skill=skill, folder=place.skills / skill.name, within=place.within)
