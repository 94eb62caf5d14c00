"""One settings file of an agent client: the change that registers our server there, and the one that takes it out.

A file is read and written by a library that keeps comments and order (tomlkit, ruamel.yaml); spaces may change. A file
that said before us what it says without us becomes what it was, to the byte.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from halteres.errors import Conflict, InvalidConfig, ServerError
from halteres.files import replacing

BACKUP: Final = ".halteres.bak"  # what a backup's name ends with


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
            if self.after is None:
                self.file.unlink()
                folder = self.file.parent
                while self.within and self.within in folder.parents and not any(folder.iterdir()):
                    folder.rmdir()
                    folder = folder.parent
                return
            target = Path(os.path.realpath(self.file))  # a link to a file elsewhere stays one
            target.parent.mkdir(parents=True, exist_ok=True)
            mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
            backup = backup_of(self.file)
            if self.keeps and self.before is not None and not backup.exists():
                _put(backup, self.before, mode)
            _put(target, self.after, mode)
        except OSError as error:
            raise NotWritable.of(self.file, error) from error


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

_BOM = "\ufeff".encode()

Document = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFormat:
    """How a client's settings list its servers."""

    format: Literal["json", "toml", "yaml"] = "json"
    servers: str = "mcpServers"  # the table that lists MCP servers
    once: Mapping[str, Any] = field(default_factory=dict)  # said when the entry is made; whoever changes it later, may
    longest_wait_s: int | None = None  # a little less than the client gives a call, if that is known; said once, too
    plugin: bool = False  # the tools come by the name in `plugins: enabled:`, not over MCP


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """How a client starts our server; never with a key in it."""

    command: str  # absolute
    args: tuple[str, ...]
    env: Mapping[str, str]  # HALTERES_HOME, HALTERES_ENVIRONMENTS, where they are not the default


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFile:
    """A file in which a client looks for its servers.

    Raises, in every method:
        InvalidConfig: the file is not of its format; file and line are named.
        Conflict: it is, and cannot be edited without harm.
    """

    file: Path
    client: ClientFormat
    within: Path

    def registration(self, server: Server) -> Change:
        """The change after which the client starts this server."""
        before = content(self.file)
        document = self._parsed(before)
        old, others = _values(document), _values(document)
        is_first = not _take_out(others, self.client)
        self._register(document, server)
        new, others_then = _values(document), _values(document)
        _take_out(others_then, self.client)
        if _values(others) != _values(others_then):
            raise self._unsafe("what belongs there is an alias of something else")
        after = before if new == old else self._written(before, document)
        return Change(file=self.file, before=before, after=after, keeps=is_first, within=self.within)

    def removal(self) -> tuple[Change, ...]:
        """The changes after which nothing of us is left: in the file, and of its backup once both say the same."""
        before = content(self.file)
        document = self._parsed(before)
        if not _take_out(document, self.client):
            return ()
        backup = content(backup_of(self.file))
        if backup is not None:
            with contextlib.suppress(InvalidConfig):
                if _values(self._parsed(backup)) == _values(document) and _comments(backup) == _comments(before):
                    return (
                        Change(file=self.file, before=before, after=backup, within=self.within),
                        Change(file=backup_of(self.file), before=backup, after=None),
                    )
        is_ours = backup is None and not _values(document) and b"#" not in (before or b"")  # nobody has added anything
        after = None if is_ours else self._written(before, document)
        return (Change(file=self.file, before=before, after=after, within=self.within),)

    def shown(self, server: Server) -> str:
        """What is written, as it would stand in a file of its own."""
        document = self._parsed(None)
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

    def _parsed(self, held: bytes | None) -> Document:
        try:
            return _parsed(_plain(held), self.client.format)
        except UnicodeDecodeError as error:
            line, why = error.object[: error.start].count(b"\n") + 1, "it is no UTF-8"
        except _Misread as error:
            line, why = error.line, error.why
        what = f"{self.file}:{line} cannot be read: {why}."
        raise InvalidConfig(what, "Nothing was changed.", "Mend the file, then try again.")

    def _written(self, before: bytes | None, document: Document) -> bytes:
        """The document in the manner of the file: it holds what the document does, and has lost no comment."""
        plain, why = _plain(before), ""
        for new in _writings(plain, document, self.client):
            try:
                is_whole = _values(_parsed(new, self.client.format)) == _values(document)
            except _Misread as error:
                why = f" ({error.why})"
                continue
            if is_whole and not _comments(plain.encode()) - _comments(new.encode()):
                mark = _BOM if before and before.startswith(_BOM) else b""
                return mark + (new.replace("\n", "\r\n") if before and b"\r\n" in before else new).encode()
        raise self._unsafe(f"editing it would change more than was to be changed{why}")

    def _unsafe(self, why: str) -> Conflict:
        how = "Edit it by hand; --print shows what belongs there."
        return Conflict(f"{self.file} was left as it is: {why}.", "", how)


def _plain(held: bytes | None) -> str:
    """A file's text, without what only its manner needs."""
    return (held or b"").decode().removeprefix(_BOM.decode()).replace("\r\n", "\n")


def _take_out(document: Document, client: ClientFormat, *, server: bool = True, plugin: bool = True) -> bool:
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


def _parsed(text: str, form: str) -> Document:
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


def _dumped(document: Document, form: str, text: str) -> str:
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


def _writings(text: str, document: Document, client: ClientFormat) -> Iterator[str]:
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
    others: list[str] = []
    is_ours, idle = False, 0  # how many of the last lines of others say nothing
    for line in text.splitlines(keepends=True):
        says = bool(line.strip()) and not line.lstrip().startswith("#")
        if line.lstrip().startswith("["):
            is_ours, idle = bool(ours.match(line)), 0 if not is_ours or not others or others[-1].strip() else 1
        if is_ours and says:
            del others[len(others) - idle :]
        else:
            others.append(line)
        idle = 0 if says else idle + 1
    return "".join(others)


def _values(value: Any) -> Any:
    """What a document says, without order and comments: a section without anything in it says nothing."""
    if isinstance(value, Mapping):
        found = {str(name): _values(inner) for name, inner in value.items()}
        return {name: inner for name, inner in found.items() if inner not in ({}, [], None)}
    return [_values(inner) for inner in value] if isinstance(value, list) else value


def _comments(held: bytes | None) -> Counter[bytes]:
    return Counter(line.partition(b"#")[2].strip() for line in (held or b"").splitlines() if b"#" in line)
