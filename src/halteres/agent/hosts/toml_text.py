"""TOML, edited as text: a table comes last or goes, a value changes where it stands; comments and order stay.

Owns: where our tables begin and end.
Never: lets the writer of TOML touch what it was not asked for: tables come and go as lines, since tomlkit counts the
comment above somebody's next table as ours, and moves or drops it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, MutableMapping
from typing import Any, cast

from halteres.agent.hosts.host import Keys, Misread, Settings
from halteres.agent.hosts.nesting import nested

_HEADER = re.compile(r"\s*\[+\s*(.+?)\s*\]+\s*(#.*)?$")
_LINE_NUMBER = re.compile(r"line (\d+)")


class TomlText:
    """Settings in TOML."""

    def read(self, text: str) -> Settings:
        """What it says. Raises Misread."""
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            found = _LINE_NUMBER.search(str(error))
            why = str(error).partition(" (at ")[0]
            raise Misread(int(found[1]) if found else text.count("\n") + 1, why[:1].lower() + why[1:]) from error

    def put(self, text: str, keys: Keys, value: Any) -> str:
        """A value of a table that is there is set in it; a new table comes last, as TOML lets it."""
        import tomlkit

        document = tomlkit.parse(text)
        table = _table(document, keys[:-1])
        if table is not None and not isinstance(value, dict):
            table[keys[-1]] = value
            return tomlkit.dumps(document)
        new = tomlkit.dumps(nested(keys, value)).strip() + "\n"
        if not text.strip():
            return new
        apart = "\n" if text.endswith("\n") else "\n\n"
        return text + (apart + new).replace("\n", "\r\n" if "\r\n" in text else "\n")

    def drop(self, text: str, keys: Keys) -> str:
        """A table goes with its own tables, up to its last value: comments below it may be somebody's."""
        lines = text.splitlines(keepends=True)
        if _first(lines, keys) is None:
            return _without_value(text, keys)
        while (table := _first(lines, keys)) is not None:
            last = max(line for line in table if not _is_idle(lines[line]))
            del lines[table.start : last + 1]
            _close_gap(lines, table.start)
        return "".join(lines)


def _first(lines: list[str], keys: Keys) -> range | None:
    """The lines of the first table at these keys or below."""
    tables = (range(*table) for table in _tables(lines))
    return next((table for table in tables if _names(lines[table.start])[: len(keys)] == keys), None)


def _table(document: Any, keys: Keys) -> MutableMapping[str, Any] | None:
    """The table at these keys, where there is one."""
    for key in keys:
        document = document.get(key) if isinstance(document, MutableMapping) else None
    return cast("MutableMapping[str, Any]", document) if isinstance(document, MutableMapping) else None


def _without_value(text: str, keys: Keys) -> str:
    """A value, or a table that has no header of its own."""
    import tomlkit

    document = tomlkit.parse(text)
    table = _table(document, keys[:-1])
    if table is None or keys[-1] not in table:
        return text
    del table[keys[-1]]
    return tomlkit.dumps(document)


def _tables(lines: list[str]) -> Iterator[tuple[int, int]]:
    """The lines from each header to the next one. A text over several lines may look like one: who edits checks."""
    headers = [number for number, line in enumerate(lines) if _HEADER.match(line)]
    return zip(headers, [*headers[1:], len(lines)], strict=False)


def _names(header: str) -> Keys:
    """The keys in a header."""
    found = _HEADER.match(header)
    try:
        inner: Any = tomllib.loads(f"[{found[1] if found else ''}]")
    except tomllib.TOMLDecodeError:
        return ()
    names: list[str] = []
    while inner:
        ((name, inner),) = inner.items()
        names.append(name)
    return tuple(names)


def _is_idle(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


def _close_gap(lines: list[str], at: int) -> None:
    """One blank line, not two, where a table was; none at the end."""
    while at > 0 and not lines[at - 1].strip() and (at == len(lines) or not lines[at].strip()):
        del lines[at - 1]
        at -= 1
