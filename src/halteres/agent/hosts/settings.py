"""One settings file of a host: the change that registers us, and the change that takes us out again.

Owns: reading the file, the check that an edit changed what it was to change and nothing else, telling what was there
before us.
Never: writes (`change` does); reads anything but the one file and its backup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from halteres.agent.hosts.change import Change, backup_of, content
from halteres.agent.hosts.host import CannotEdit, Edit, Form, Misread, Put, Registration, Server, Settings
from halteres.agent.hosts.nesting import edited, same
from halteres.errors import Conflict, InvalidConfig, UserError

_BOM = "\ufeff"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFile:
    """A file in which a host looks for its servers."""

    file: Path
    form: Form
    registration: Registration
    within: Path

    def entering(self, server: Server) -> Change:
        """The change after which the host starts this server. Nothing where it does.

        Raises:
            InvalidConfig: the file is not of its form; file and line are told.
            Conflict: it is, and cannot be edited without harm.
        """
        before = content(self.file)
        text = self._text(before)
        settings = self._read(text)
        try:
            edits = self.registration.enter(settings, server)
        except CannotEdit as error:
            raise self._unsafe(str(error)) from error
        after = self._edited(text, settings, edits).encode() if edits else before
        is_first = not self.registration.leave(settings)
        return Change(file=self.file, before=before, after=after, keeps=is_first, within=self.within)

    def leaving(self) -> tuple[Change, ...]:
        """The changes after which nothing of us is left: in the file, and of its backup once it says no more than it.

        A file that nobody has touched since becomes what it was before us, to the byte.

        Raises:
            InvalidConfig, Conflict: as in `entering`.
        """
        before = content(self.file)
        text = self._text(before)
        settings = self._read(text)
        edits = self.registration.leave(settings)
        if before is None or not edits:
            return ()
        backup = content(backup_of(self.file))
        after: bytes | None = self._as_it_was(text, settings, backup)
        if after is None:
            after = self._edited(text, settings, edits).encode()
        if backup is None and not self._read(self._text(after)) and b"#" not in after:
            after = None  # we made it, and nobody has added anything
        change = Change(file=self.file, before=before, after=after, within=self.within)
        if backup is None or backup != after:
            return (change,)
        return change, Change(file=backup_of(self.file), before=backup, after=None)

    def shown(self, server: Server) -> str:
        """What is written, as it would stand in a file of its own."""
        text = ""
        for edit in self.registration.enter({}, server):
            if isinstance(edit, Put):
                text = self.form.put(text, edit.keys, edit.value)
        return text

    def _text(self, held: bytes | None) -> str:
        try:
            return (held or b"").decode()
        except UnicodeDecodeError as error:
            line = (held or b"")[: error.start].count(b"\n") + 1
            raise self._broken(line, "it is no UTF-8") from error

    def _read(self, text: str) -> Settings:
        try:
            return self.form.read(text.removeprefix(_BOM))
        except Misread as error:
            raise self._broken(error.line, error.why) from error

    def _edited(self, text: str, settings: Settings, edits: Sequence[Edit]) -> str:
        """The text with these edits, checked: read again it says what it said, and what was to be said."""
        mark, new = (_BOM, text.removeprefix(_BOM)) if text.startswith(_BOM) else ("", text)
        try:
            for edit in edits:
                new = self._with(new, edit)
            if same(self.form.read(new), edited(settings, edits)):
                return mark + new
        except CannotEdit as error:
            raise self._unsafe(str(error)) from error
        except Misread as error:
            raise self._unsafe(f"edited, it could not be read ({error.why})") from error
        raise self._unsafe("editing it would change more than was to be changed")

    def _with(self, text: str, edit: Edit) -> str:
        if isinstance(edit, Put):
            return self.form.put(text, edit.keys, edit.value)
        return self.form.drop(text, edit.keys)

    def _as_it_was(self, text: str, settings: Settings, backup: bytes | None) -> bytes | None:
        """The backup, where nobody has touched the file since: what stands there of us, put into it, makes the file."""
        if backup is None:
            return None
        try:
            was = self._text(backup)
            then = self._read(was)
            again = self._edited(was, then, self.registration.carried(settings))
        except UserError:
            return None
        return backup if again == text and not self.registration.leave(then) else None

    def _unsafe(self, why: str) -> Conflict:
        return Conflict(
            f"{self.file} was left as it is: {why}.", "", "Edit it by hand; --print shows what belongs there."
        )

    def _broken(self, line: int, why: str) -> InvalidConfig:
        return InvalidConfig(
            f"{self.file}:{line} cannot be read: {why}.", "Nothing was changed.", "Mend the file, then try again."
        )
