"""The file tools of the harnesses, for tasks with an environment to mend: `read_file`,
`write_file`.

Owns: that nothing outside the workspace is read or written, and no file is made.
Never: raises at the agent: what goes wrong is an answer with `error`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMES = ("read_file", "write_file")
LONGEST = 64 * 1024

_PATH = {"type": "string", "description": "name of a file in your workspace, or its absolute path"}
_CONTENT = {"type": "string", "description": "the whole new text"}
DEFINITIONS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": fields, "required": list(fields)},
        },
    }
    for name, description, fields in (
        ("read_file", "Read a file of your workspace.", {"path": _PATH}),
        ("write_file", "Replace a file of your workspace.", {"path": _PATH, "content": _CONTENT}),
    )
]


class Workspace:
    """A folder whose files can be read and replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to edit, and so no use for these tools."""
        return not self._names()

    def call(self, name: str, arguments: Mapping[str, Any] | str) -> str:
        """A tool's answer: compact JSON."""
        wanted = {"path"} if name == "read_file" else {"path", "content"}
        if (
            isinstance(arguments, str)
            or set(arguments) != wanted
            or not all(isinstance(value, str) for value in arguments.values())
        ):
            return _told(error=f"{name} takes {' and '.join(sorted(wanted))}, as texts.")
        file = (self._folder / arguments["path"].removeprefix("environments/")).resolve()
        if file.parent != self._folder or not file.is_file():
            return _told(
                error=f"There is no file {arguments['path']} in your workspace.",
                files=self._names(),
            )
        if name == "read_file":
            return _told(path=str(file), content=file.read_text(encoding="utf-8")[:LONGEST])
        file.write_text(arguments["content"][:LONGEST], encoding="utf-8")
        return _told(path=str(file), characters=len(arguments["content"]))

    def _names(self) -> list[str]:
        return sorted(file.name for file in self._folder.glob("*.py"))


def _told(**facts: Any) -> str:
    return json.dumps(facts, ensure_ascii=False, separators=(",", ":"))
