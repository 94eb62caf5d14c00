"""Copies of our skills in the folders where agent clients look for skills.

A marker file in each copy names the clients that read it and the hashes of what was written. A
skill that the user wrote or edited is neither overwritten nor removed, and the report says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

import msgspec

from halteres.agent.skills import Skill, skills
from halteres.errors import ServerError
from halteres.files import replacing

MARKER: Final = ".halteres.json"

Verb = Literal["write", "update", "remove", "leave", "keep", "run", "absent"]


class NotWritable(ServerError):
    """A file of an agent client cannot be read or written."""

    code = "not_writable"

    @classmethod
    def of(cls, file: Path, error: OSError) -> NotWritable:
        """The error for what the file system refused."""
        return cls(
            f"{file} cannot be used.", f"{error.strerror}.", ("Make it writable, then try again.")
        )


class Change(Protocol):
    """One thing to be done."""

    def make(self) -> Step | None:
        """Do it; returns the line of the report where that is known only now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """A file that is written, or removed with the folders that become empty."""

    file: Path
    before: bytes | None  # None: it is not there
    after: bytes | None  # None: it is removed
    within: Path  # this folder and those above it are never removed

    @property
    def is_nothing(self) -> bool:
        """Whether the file is already as it should be."""
        return self.before == self.after

    def make(self) -> None:
        """Write or remove the file.

        Raises:
            NotWritable: the file system refuses.
        """
        if self.is_nothing:
            return
        try:
            if self.after is not None:
                # A link to a file elsewhere, as in a folder of dotfiles, stays one.
                target = self.file.resolve()
                target.parent.mkdir(parents=True, exist_ok=True)
                with replacing(target) as beside:
                    # A client's settings can contain keys: what only the user may read stays so,
                    # also while it is written.
                    beside.touch(mode=0o600)
                    beside.chmod(target.stat().st_mode & 0o777 if target.exists() else 0o644)
                    beside.write_bytes(self.after)
                return
            self.file.unlink()
            folder = self.file.parent
            while self.within in folder.parents and not any(folder.iterdir()):
                folder.rmdir()
                folder = folder.parent
        except OSError as error:
            raise NotWritable.of(self.file, error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of the report, and the changes behind it."""

    # `leave`: it is as it should be already; `keep`: it stays, for `why`; `absent`: there was
    # nothing to remove
    verb: Verb
    what: str  # a path, or a command
    why: str = ""
    changes: tuple[Change, ...] = ()


def content(file: Path) -> bytes | None:
    """What a file contains; None where it is missing.

    Raises:
        NotWritable: it cannot be read.
    """
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NotWritable.of(file, error) from error


def file_step(what: Path, *changes: FileChange) -> Step:
    """The line for these changes of one thing."""
    real = [change for change in changes if not change.is_nothing]
    verb: Verb = "update"
    if not real:
        verb = "leave"
    elif all(change.after is None for change in real):
        verb = "remove"
    elif all(change.before is None for change in real):
        verb = "write"
    return Step(verb=verb, what=str(what), changes=changes)


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """What the marker of a copy contains."""

    clients: tuple[str, ...]  # that read the copy: several read the same folder
    files: dict[str, str]  # path within the folder -> SHA-256 of what we wrote


@dataclass(frozen=True, slots=True, kw_only=True)
class SkillCopy:
    """The place of a skill in a client's folder, whether the copy exists or not."""

    skill: Skill
    folder: Path
    within: Path

    def adding(self, client: str) -> Step:
        """Write the copy, or bring it up to date."""
        marker = self._marker()
        if marker is None and self.folder.exists():
            return self._kept("there is another one of this name")
        if marker is not None and self._is_edited(marker):
            return self._kept("edited since it was installed")
        found = (file for file in sorted(self.skill.folder.rglob("*")) if file.is_file())
        new = {
            str(file.relative_to(self.skill.folder)): file.read_bytes()
            for file in found
            if "__pycache__" not in file.parts
        }
        known = marker or Marker(clients=(), files={})
        written = [self._change(name, held) for name, held in new.items()]
        stale = [self._change(name, None) for name in known.files if name not in new]
        files = {name: _hash(held) for name, held in new.items()}
        step = file_step(self.folder, *written, *stale)
        marked = self._marked(Marker(clients=tuple(sorted({*known.clients, client})), files=files))
        return Step(verb=step.verb, what=step.what, changes=(*step.changes, marked))

    def removing(self, client: str) -> Step | None:
        """Remove the copy unless another client reads it; None where there is none of ours."""
        marker = self._marker()
        if marker is None or client not in marker.clients:
            return None
        others = tuple(name for name in marker.clients if name != client)
        if others:
            left = self._marked(Marker(clients=others, files=marker.files))
            return self._kept(f"it is for {', '.join(others)} too", left)
        if self._is_edited(marker):
            return self._kept("edited since it was installed", self._marked(None))
        removed = [self._change(name, None) for name in marker.files]
        return file_step(self.folder, *removed, self._marked(None))

    def _marker(self) -> Marker | None:
        try:
            marker = msgspec.json.decode(content(self.folder / MARKER) or b"", type=Marker)
        except msgspec.DecodeError:
            return None
        # A project that was cloned may bring a marker: it names files within this folder alone.
        root = self.folder.resolve()
        if any(root not in (root / name).resolve().parents for name in marker.files):
            return None
        return marker

    def _is_edited(self, marker: Marker) -> bool:
        files = ((content(self.folder / name), written) for name, written in marker.files.items())
        return any(found is not None and _hash(found) != written for found, written in files)

    def _change(self, name: str, after: bytes | None) -> FileChange:
        file = self.folder / name
        return FileChange(file=file, before=content(file), after=after, within=self.within)

    def _marked(self, marker: Marker | None) -> FileChange:
        if marker is None:
            return self._change(MARKER, None)
        return self._change(
            MARKER, msgspec.json.format(msgspec.json.encode(marker), indent=1) + b"\n"
        )

    def _kept(self, why: str, *changes: FileChange) -> Step:
        return Step(verb="keep", what=str(self.folder), why=why, changes=changes)


def skill_copies(folder: Path, within: Path) -> Iterator[SkillCopy]:
    """Where each of our skills belongs in this folder."""
    for skill in skills():
        yield SkillCopy(skill=skill, folder=folder / skill.name, within=within)


def _hash(held: bytes) -> str:
    return hashlib.sha256(held).hexdigest()
