"""One settings file of a host: the change that registers our server, and the change that takes it out again.

A file is read and written by a library that keeps comments and order (tomlkit, ruamel.yaml); spaces may change. A file
that said before us what it says without us becomes what it was, to the byte.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from halteres.agent.hosts.changes import Change, backup_of, content
from halteres.agent.hosts.hosts import Format, Host
from halteres.errors import Conflict, InvalidConfig

NAME: Final = "halteres"
HOME, ENVIRONMENTS, WAIT = "HALTERES_HOME", "HALTERES_ENVIRONMENTS", "HALTERES_LONGEST_WAIT_S"

_BOM = "\ufeff"
_INDENT = re.compile(r"^([ \t]+)\S", re.MULTILINE)

Document = MutableMapping[str, Any]


class _Misread(ValueError):
    def __init__(self, line: int, why: str) -> None:
        super().__init__(why)
        self.line, self.why = line, why


class _CannotEdit(ValueError):
    """The text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """How a host starts our server; never with a key in it."""

    command: str  # absolute
    args: tuple[str, ...]
    env: Mapping[str, str]  # HALTERES_HOME, HALTERES_ENVIRONMENTS, where they are not the default


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFile:
    """A file in which a host looks for its servers."""

    file: Path
    host: Host
    within: Path

    def entering(self, server: Server) -> Change:
        """The change after which the host starts this server. Nothing where it does.

        Raises:
            InvalidConfig: the file is not of its format; file and line are told.
            Conflict: it is, and cannot be edited without harm.
        """
        before = content(self.file)
        text = self._text(before)
        document = self._read(text)
        was, is_first = _said(document), not _is_registered(document, self.host)
        try:
            _register(document, self.host, server)
        except _CannotEdit as error:
            raise self._unsafe(str(error)) from error
        if self._without_us(_said(document)) != self._without_us(was):
            raise self._unsafe("what belongs there is an alias of something else")
        after = before if _said(document) == was else self._written(text, document).encode()
        return Change(file=self.file, before=before, after=after, keeps=is_first, within=self.within)

    def leaving(self) -> tuple[Change, ...]:
        """The changes after which nothing of us is left: in the file, and of its backup once it says no more than it.

        Raises:
            InvalidConfig, Conflict: as in `entering`.
        """
        before = content(self.file)
        text = self._text(before)
        document = self._read(text)
        if not _is_registered(document, self.host):
            return ()
        _unregister(document, self.host)
        backup = content(backup_of(self.file))
        if backup is not None and self._says(backup, document) and _comments(self._text(backup)) == _comments(text):
            return (
                Change(file=self.file, before=before, after=backup, within=self.within),
                Change(file=backup_of(self.file), before=backup, after=None),
            )
        if backup is None and not _said(document) and "#" not in text:
            after = None  # we made it, and nobody has added anything
        else:
            after = self._written(text, document).encode()
        return (Change(file=self.file, before=before, after=after, within=self.within),)

    def shown(self, server: Server) -> str:
        """What is written, as it would stand in a file of its own."""
        document = _parsed("", self.host.format)
        _register(document, self.host, server)
        return _dumped(document, self.host.format, "")

    def _without_us(self, said: Any) -> Any:
        _unregister(said, self.host)
        return _said(said)

    def _text(self, held: bytes | None) -> str:
        try:
            return (held or b"").decode()
        except UnicodeDecodeError as error:
            line = (held or b"")[: error.start].count(b"\n") + 1
            raise self._broken(line, "it is no UTF-8") from error

    def _read(self, text: str) -> Document:
        try:
            return _parsed(text.removeprefix(_BOM).replace("\r\n", "\n"), self.host.format)
        except _Misread as error:
            raise self._broken(error.line, error.why) from error

    def _says(self, held: bytes, document: Document) -> bool:
        """Whether a file that holds this says what the document does."""
        try:
            return _said(self._read(self._text(held))) == _said(document)
        except InvalidConfig:
            return False

    def _written(self, text: str, document: Document) -> str:
        """The document in the manner of the text, which says no more than it and has lost no comment."""
        mark = _BOM if text.startswith(_BOM) else ""
        plain = text.removeprefix(mark).replace("\r\n", "\n")
        why = ""
        for new in _writings(plain, document, self.host):
            try:
                if _said(_parsed(new, self.host.format)) == _said(document) and not _comments(plain) - _comments(new):
                    return mark + (new.replace("\n", "\r\n") if "\r\n" in text else new)
            except _Misread as error:
                why = f" ({error.why})"
        raise self._unsafe(f"editing it would change more than was to be changed{why}")

    def _unsafe(self, why: str) -> Conflict:
        return Conflict(
            f"{self.file} was left as it is: {why}.", "", "Edit it by hand; --print shows what belongs there."
        )

    def _broken(self, line: int, why: str) -> InvalidConfig:
        return InvalidConfig(
            f"{self.file}:{line} cannot be read: {why}.", "Nothing was changed.", "Mend the file, then try again."
        )


def _register(document: Document, host: Host, server: Server) -> None:
    """The host knows us as we are now; whatever else somebody wrote into our entry stays."""
    if host.plugin:
        _drop_server(document, host)
        plugins = _table(document, "plugins")
        if not isinstance(plugins.get("enabled"), list | None):
            raise _CannotEdit("'plugins.enabled' is no list")
        if NAME not in (plugins.get("enabled") or ()):
            if not plugins.get("enabled"):
                plugins["enabled"] = []
            plugins["enabled"].insert(0, NAME)
        return
    _drop_plugin(document)
    servers = _table(document, host.servers)
    entry = servers.get(NAME)
    if entry is None:
        wait = {WAIT: str(host.longest_wait_s)} if host.longest_wait_s else {}
        env = {"env": {**server.env, **wait}} if server.env or wait else {}
        _put_first(servers, {"command": server.command, "args": list(server.args), **host.once, **env})
        return
    if not isinstance(entry, MutableMapping) or "command" not in entry:
        raise _CannotEdit(f"It has a server '{NAME}' that is not started by a command, so not one of ours")
    for name, value in (("command", server.command), ("args", list(server.args))):
        if entry.get(name) != value:
            entry[name] = value
    env = _table(entry, "env")
    for name in (HOME, ENVIRONMENTS):
        wanted = server.env.get(name)
        if wanted is not None and env.get(name) != wanted:
            env[name] = wanted
        elif wanted is None:
            env.pop(name, None)
    if not env:
        del entry["env"]


def _unregister(document: Document, host: Host) -> None:
    _drop_server(document, host)
    _drop_plugin(document)


def _is_registered(document: Document, host: Host) -> bool:
    servers, plugins = document.get(host.servers), document.get("plugins")
    enabled = plugins.get("enabled") if isinstance(plugins, Mapping) else None
    return (isinstance(servers, Mapping) and NAME in servers) or (isinstance(enabled, list) and NAME in enabled)


def _drop_server(document: Document, host: Host) -> None:
    servers = document.get(host.servers)
    if isinstance(servers, MutableMapping) and NAME in servers:
        del servers[NAME]
        if not servers:
            del document[host.servers]


def _drop_plugin(document: Document) -> None:
    plugins = document.get("plugins")
    enabled = plugins.get("enabled") if isinstance(plugins, Mapping) else None
    if isinstance(enabled, list) and NAME in enabled:
        enabled.remove(NAME)


def _table(inside: Document, name: str) -> Document:
    """The table of this name, made where there is none."""
    if inside.get(name) is None:
        inside[name] = {}
    if not isinstance(inside[name], MutableMapping):
        raise _CannotEdit(f"'{name}' is no table")
    return inside[name]


def _put_first(servers: Document, entry: dict[str, Any]) -> None:
    """Comments belong to what stands above them: in YAML the last server has those of the next section."""
    if hasattr(servers, "insert"):
        servers.insert(0, NAME, entry)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        servers[NAME] = entry


def _parsed(text: str, form: Format) -> Document:
    """What the text says, to be changed and written again; an empty one says nothing. Raises _Misread."""
    if form == "json":
        return _parsed_json(text)
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


def _parsed_json(text: str) -> Document:
    try:
        document = json.loads(text) if text.strip() else {}
    except json.JSONDecodeError as error:
        is_comment = text[error.pos : error.pos + 2] in ("//", "/*")
        raise _Misread(error.lineno, "it holds a comment, which JSON has not" if is_comment else error.msg) from error
    if not isinstance(document, dict):
        raise _Misread(1, "it is no object")
    return document


def _dumped(document: Document, form: Format, text: str) -> str:
    """The document as a text, indented as this one is."""
    if form == "json":
        found = _INDENT.search(text)
        return json.dumps(document, indent=found[1] if found else "  ", ensure_ascii=False) + "\n"
    if form == "toml":
        import tomlkit

        return tomlkit.dumps(document)
    out = io.StringIO()
    _yaml().dump(document, out)
    return out.getvalue()


def _writings(text: str, document: Document, host: Host) -> Iterator[str]:
    """Ways to write the document, the best first: which of them are right depends on how the file is written.

    tomlkit counts the comment above somebody's next table as part of the table before it, and moves or drops it: so our
    table comes as the last one, and goes as lines.
    """
    if host.format == "toml":
        import tomlkit

        entry = document.get(host.servers, {}).get(NAME)
        if entry is None:
            yield _without_table(text, host.servers)
        elif NAME not in tomlkit.parse(text).get(host.servers, {}):
            apart = "\n\n" if text and not text.endswith("\n") else "\n" if text else ""
            yield text + apart + tomlkit.dumps({host.servers: {NAME: entry}})
    yield _dumped(document, host.format, text)


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


def _yaml() -> Any:
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 2**20  # lines are not broken anew
    return yaml


def _said(value: Any) -> Any:
    """What a document says, without order and comments: a section without anything in it says nothing."""
    if isinstance(value, Mapping):
        told = {str(name): _said(inner) for name, inner in value.items()}
        return {name: inner for name, inner in told.items() if inner not in ({}, [], None)}
    return [_said(inner) for inner in value] if isinstance(value, list) else value


def _comments(text: str) -> Counter[str]:
    def found() -> Iterator[str]:
        for line in text.splitlines():
            if "#" in line:
                yield line.partition("#")[2].strip()

    return Counter(found())
