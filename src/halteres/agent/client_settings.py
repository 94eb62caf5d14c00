"""One settings file of an agent client: the change that registers our server there, and the one that takes it out.

A file is read and written by a library that keeps comments and order (tomlkit, ruamel.yaml); spaces may change. A file
that said before us what it says without us becomes what it was, to the byte.
"""

from __future__ import annotations

import io
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from halteres.agent.agent_clients import AgentClient, Format
from halteres.errors import Conflict, InvalidConfig, ServerError
from halteres.files import replacing

BACKUP: Final = ".halteres.bak"
"""What a backup's name ends with."""


class NotWritable(ServerError):
    """A file of a client's cannot be read or written."""

    code = "not_writable"

    @classmethod
    def of(cls, file: Path, error: OSError) -> NotWritable:
        """With the system's own words."""
        return cls(f"{file} cannot be used.", f"{error.strerror or error}.", "See to its permissions.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a file is to hold instead of what it holds. It is made whole or not at all, over links, with the file's own
    permissions."""

    file: Path
    before: bytes | None  # None: there is none
    after: bytes | None  # None: it goes
    keeps: bool = False  # whether a backup is to be made, where there is none yet
    within: Path | None = None  # folders below this one go where nothing is left in them

    @property
    def is_nothing(self) -> bool:
        """Whether all is as it is to be."""
        return self.before == self.after

    def make(self) -> None:
        """Make it.

        Raises:
            Conflict: the file is no longer what it was when this was planned.
            NotWritable: the file system refuses.
        """
        if self.is_nothing:
            return
        if content(self.file) != self.before:
            raise Conflict(f"{self.file} was changed just now by somebody else.", "Nothing was written.", "Try again.")
        try:
            self._remove() if self.after is None else self._write(self.after)
        except OSError as error:
            raise NotWritable.of(self.file, error) from error

    def _write(self, after: bytes) -> None:
        target = Path(os.path.realpath(self.file))  # a link to a file elsewhere stays one
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        backup = backup_of(self.file)
        if self.keeps and self.before is not None and not backup.exists():
            _put(backup, self.before, mode)
        _put(target, after, mode)

    def _remove(self) -> None:
        self.file.unlink()
        folder = self.file.parent
        while self.within and self.within in folder.parents and not any(folder.iterdir()):
            folder.rmdir()
            folder = folder.parent


def _put(file: Path, held: bytes, mode: int | None) -> None:
    """Whoever may not read the file may not read it while it is written either: a client's settings can hold keys."""
    with replacing(file) as beside:
        beside.touch(mode=0o666 if mode is None else 0o600)
        beside.write_bytes(held)
        if mode is not None:
            beside.chmod(mode)


def content(file: Path) -> bytes | None:
    """What a file holds; None where there is none.

    Raises:
        NotWritable: it cannot be read.
    """
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NotWritable.of(file, error) from error


def backup_of(file: Path) -> Path:
    """Where a file's backup is."""
    return file.with_name(file.name + BACKUP)


NAME: Final = "halteres"
HOME, ENVIRONMENTS, WAIT = "HALTERES_HOME", "HALTERES_ENVIRONMENTS", "HALTERES_LONGEST_WAIT_S"

_BOM = "\ufeff"

Document = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """How a client starts our server; never with a key in it."""

    command: str  # absolute
    args: tuple[str, ...]
    env: Mapping[str, str]  # HALTERES_HOME, HALTERES_ENVIRONMENTS, where they are not the default


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFile:
    """A file in which a client looks for its servers."""

    file: Path
    client: AgentClient
    within: Path

    def registration(self, server: Server) -> Change:
        """The change after which the client starts this server.

        Raises:
            InvalidConfig: the file is not of its format; file and line are named.
            Conflict: it is, and cannot be edited without harm.
        """
        before = content(self.file)
        text = self._text(before)
        document = self._parsed(text)
        old, others = _values(document), _values(document)
        is_first = not _take_out(others, self.client)
        self._register(document, server)
        new, others_then = _values(document), _values(document)
        _take_out(others_then, self.client)
        if _values(others) != _values(others_then):
            raise self._unsafe("what belongs there is an alias of something else")
        after = before if new == old else self._written(text, document).encode()
        return Change(file=self.file, before=before, after=after, keeps=is_first, within=self.within)

    def removal(self) -> tuple[Change, ...]:
        """The changes after which nothing of us is left: in the file, and of its backup once it says no more than it.

        Raises:
            InvalidConfig, Conflict: as in `registration`.
        """
        before = content(self.file)
        text = self._text(before)
        document = self._parsed(text)
        if not _take_out(document, self.client):
            return ()
        backup = content(backup_of(self.file))
        if backup is not None and self._is_same(backup, document, text):
            return (
                Change(file=self.file, before=before, after=backup, within=self.within),
                Change(file=backup_of(self.file), before=backup, after=None),
            )
        is_ours = backup is None and not _values(document) and "#" not in text  # and nobody has added anything
        after = None if is_ours else self._written(text, document).encode()
        return (Change(file=self.file, before=before, after=after, within=self.within),)

    def shown(self, server: Server) -> str:
        """What is written, as it would stand in a file of its own."""
        document = self._parsed("")
        self._register(document, server)
        return _dumped(document, self.client.format, "")

    def _register(self, document: Document, server: Server) -> None:
        """The client knows us as we are now; whatever else somebody wrote into our entry stays."""
        if self.client.plugin:
            _take_out(document, self.client, plugin=False)
            plugins = self._table(document, "plugins")
            enabled = plugins.get("enabled")
            if not isinstance(enabled, list | None):
                raise self._unsafe("'plugins.enabled' is no list")
            if not enabled:
                plugins["enabled"] = []
            if NAME not in plugins["enabled"]:
                plugins["enabled"].insert(0, NAME)
            return
        _take_out(document, self.client, server=False)
        servers = self._table(document, self.client.servers)
        entry = servers.get(NAME)
        if entry is None:
            wait = {WAIT: str(self.client.longest_wait_s)} if self.client.longest_wait_s else {}
            env = {"env": {**server.env, **wait}} if server.env or wait else {}
            entry = {"command": server.command, "args": list(server.args), **self.client.once, **env}
            if servers and self.client.format == "yaml":
                # Comments belong to what stands above them: the last server has those of the next section.
                servers.insert(0, NAME, entry)  # pyright: ignore[reportAttributeAccessIssue] - ruamel's mapping
            else:
                servers[NAME] = entry
            return
        if not isinstance(entry, MutableMapping) or "command" not in entry:
            raise self._unsafe(f"It has a server '{NAME}' that is not started by a command, so not one of ours")
        for name, value in (("command", server.command), ("args", list(server.args))):
            if entry.get(name) != value:
                entry[name] = value
        env = self._table(entry, "env")
        for name in (HOME, ENVIRONMENTS):
            value = server.env.get(name)
            if value is None:
                env.pop(name, None)
            elif env.get(name) != value:
                env[name] = value
        if not env:
            del entry["env"]

    def _table(self, inside: Document, name: str) -> Document:
        """The table of this name, made where there is none."""
        if inside.get(name) is None:
            inside[name] = {}
        if not isinstance(inside[name], MutableMapping):
            raise self._unsafe(f"'{name}' is no table")
        return inside[name]

    def _text(self, held: bytes | None) -> str:
        try:
            return (held or b"").decode()
        except UnicodeDecodeError as error:
            line = (held or b"")[: error.start].count(b"\n") + 1
            raise self._broken(line, "it is no UTF-8") from error

    def _parsed(self, text: str) -> Document:
        try:
            return _parsed(text.removeprefix(_BOM).replace("\r\n", "\n"), self.client.format)
        except _Misread as error:
            raise self._broken(error.line, error.why) from error

    def _is_same(self, backup: bytes, document: Document, text: str) -> bool:
        """Whether a backup says what the document does, which the text holds besides us."""
        try:
            held = self._text(backup)
            return _values(self._parsed(held)) == _values(document) and _comments(held) == _comments(text)
        except InvalidConfig:
            return False

    def _written(self, text: str, document: Document) -> str:
        """The document in the manner of the text; it holds what the document does, and has lost no comment."""
        mark = _BOM if text.startswith(_BOM) else ""
        plain = text.removeprefix(mark).replace("\r\n", "\n")
        why = ""
        for new in _writings(plain, document, self.client):
            try:
                is_whole = _values(_parsed(new, self.client.format)) == _values(document)
            except _Misread as error:
                why = f" ({error.why})"
                continue
            if is_whole and not _comments(plain) - _comments(new):
                return mark + (new.replace("\n", "\r\n") if "\r\n" in text else new)
        raise self._unsafe(f"editing it would change more than was to be changed{why}")

    def _unsafe(self, why: str) -> Conflict:
        how = "Edit it by hand; --print shows what belongs there."
        return Conflict(f"{self.file} was left as it is: {why}.", "", how)

    def _broken(self, line: int, why: str) -> InvalidConfig:
        what = f"{self.file}:{line} cannot be read: {why}."
        return InvalidConfig(what, "Nothing was changed.", "Mend the file, then try again.")


def _take_out(document: Document, client: AgentClient, *, server: bool = True, plugin: bool = True) -> bool:
    """Without our server, without our plugin. Returns whether one of them was there."""
    servers, plugins = document.get(client.servers), document.get("plugins")
    enabled = plugins.get("enabled") if isinstance(plugins, Mapping) else None
    found = False
    if server and isinstance(servers, MutableMapping) and NAME in servers:
        found = True
        del servers[NAME]
        if not servers:
            del document[client.servers]
    if plugin and isinstance(enabled, list) and NAME in enabled:
        found = True
        enabled.remove(NAME)
    return found


class _Misread(ValueError):
    def __init__(self, line: int, why: str) -> None:
        super().__init__(why)
        self.line, self.why = line, why


def _parsed(text: str, form: Format) -> Document:
    """What the text says, to be changed and written again; an empty one says nothing. Raises _Misread."""
    if form == "json":
        try:
            document = json.loads(text) if text.strip() else {}
        except json.JSONDecodeError as error:
            is_comment = text[error.pos : error.pos + 2] in ("//", "/*")
            why = "it holds a comment, which JSON has not" if is_comment else error.msg
            raise _Misread(error.lineno, why) from error
        if not isinstance(document, dict):
            raise _Misread(1, "it is no object")
        return document
    if form == "toml":
        import tomlkit
        from tomlkit.exceptions import ParseError

        try:
            return tomlkit.parse(text)
        except ParseError as error:
            raise _Misread(error.line, str(error).partition(" at line")[0]) from error
    from ruamel.yaml.comments import CommentedMap
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        document = _yaml().load(text)
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise _Misread(line, error.problem or "it is no YAML") from error
    except YAMLError as error:
        raise _Misread(1, str(error)) from error
    if not isinstance(document, CommentedMap | None):
        raise _Misread(1, "it is no mapping")
    return CommentedMap() if document is None else document


def _dumped(document: Document, form: Format, text: str) -> str:
    """The document as a text, indented as this one is."""
    if form == "json":
        found = re.search(r"^([ \t]+)\S", text, re.MULTILINE)
        return json.dumps(document, indent=found[1] if found else "  ", ensure_ascii=False) + "\n"
    if form == "toml":
        import tomlkit

        return tomlkit.dumps(document)
    out = io.StringIO()
    _yaml().dump(document, out)
    return out.getvalue()


def _yaml() -> Any:
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 2**20  # lines are not broken anew
    return yaml


def _writings(text: str, document: Document, client: AgentClient) -> Iterator[str]:
    """Ways to write the document, the best first: which of them are right depends on how the file is written.

    tomlkit counts the comment above somebody's next table as part of the table before it, and moves or drops it: so our
    table comes as the last one, and goes as lines.
    """
    if client.format == "toml":
        import tomlkit

        entry = document.get(client.servers, {}).get(NAME)
        if entry is None:
            yield _without_table(text, client.servers)
        elif NAME not in tomlkit.parse(text).get(client.servers, {}):
            apart = "\n\n" if text and not text.endswith("\n") else "\n" if text else ""
            yield text + apart + tomlkit.dumps({client.servers: {NAME: entry}})
    yield _dumped(document, client.format, text)


def _without_table(text: str, servers: str) -> str:
    """Without our table's lines up to its last value: comments below that may be somebody's."""
    ours = re.compile(rf"\s*\[{servers}\.{NAME}[.\]]")
    kept: list[str] = []
    is_ours, idle = False, 0  # how many of the last lines that are kept say nothing
    for line in text.splitlines(keepends=True):
        says = bool(line.strip()) and not line.lstrip().startswith("#")
        if line.lstrip().startswith("["):
            is_ours, idle = bool(ours.match(line)), 0 if not is_ours or not kept or kept[-1].strip() else 1
        if is_ours and says:
            del kept[len(kept) - idle :]
        else:
            kept.append(line)
        idle = 0 if says else idle + 1
    return "".join(kept)


def _values(value: Any) -> Any:
    """What a document says, without order and comments: a section without anything in it says nothing."""
    if isinstance(value, Mapping):
        found = {str(name): _values(inner) for name, inner in value.items()}
        return {name: inner for name, inner in found.items() if inner not in ({}, [], None)}
    return [_values(inner) for inner in value] if isinstance(value, list) else value


def _comments(text: str) -> Counter[str]:
    return Counter(line.partition("#")[2].strip() for line in text.splitlines() if "#" in line)
