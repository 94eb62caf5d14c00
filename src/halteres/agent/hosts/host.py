"""What a host is.

Owns: the nouns: a host, its places, the form of its settings, one edit of them.
Never: reads or writes a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Keys = tuple[str, ...]
"""A way into settings: ("mcpServers", "halteres")."""

Settings = dict[str, Any]


class Misread(ValueError):
    """A settings file that is not of its form."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(why)
        self.line, self.why = line, why


class CannotEdit(ValueError):
    """Settings that are well formed, and written in a way that cannot be edited without harm; the text says which."""


class Form(Protocol):
    """How settings are written. An edit changes the text where it must, and leaves the rest of it to the byte."""

    def read(self, text: str) -> Settings:
        """What the text says; an empty one says nothing. Raises Misread."""
        ...

    def put(self, text: str, keys: Keys, value: Any) -> str:
        """The text with this value there, whether one was there or not. Raises CannotEdit."""
        ...

    def drop(self, text: str, keys: Keys) -> str:
        """The text without what is there, and without sections that are empty for want of it. Raises CannotEdit."""
        ...


@dataclass(frozen=True, slots=True)
class Put:
    """One edit: this value there."""

    keys: Keys
    value: Any


@dataclass(frozen=True, slots=True)
class Drop:
    """One edit: nothing there."""

    keys: Keys


Edit = Put | Drop


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """How a host starts our server; never with a key in it."""

    command: str  # absolute
    args: tuple[str, ...]
    env: Mapping[str, str]  # HALTERES_HOME, HALTERES_ENVIRONMENTS, where they are not the default


class Registration(Protocol):
    """How a host's settings name us."""

    def enter(self, settings: Settings, server: Server) -> Sequence[Edit]:
        """The edits after which the host knows us as we are now; none where it does. Raises CannotEdit."""
        ...

    def leave(self, settings: Settings) -> Sequence[Edit]:
        """The edits after which nothing of us is left; none where nothing is."""
        ...

    def carried(self, settings: Settings) -> Sequence[Edit]:
        """The edits that put what stands here of us into settings without us."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a host looks, for one user or within one project."""

    settings: Path | None  # None: it has no such file, or none that we know of
    skills: Path | None  # None: it gets its skills in another way
    within: Path  # what lies above, or is this, is never removed, however empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One host."""

    name: str  # as --client has it
    title: str
    form: Form
    registration: Registration
    place: Callable[[Path | None], Place]  # of a project's folder, or of the user. Raises UserError
    then: Callable[[Path | None], str]  # what a person does next
