"""Skills in a host's folder.

Owns: copying them there, bringing our copies up to date, taking them away; the marker in each that says which hosts it
is for and what we wrote.
Never: overwrites or removes what somebody else wrote or edited: that is told.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from halteres.agent.hosts.changes import Change, Step, content
from halteres.agent.skills import Skill

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
