"""A workspace: a folder in which environments are written and an agent is told where it is.

Owns: what a new one holds.
Never: overwrites: a file that is there stays as it is.

Its environments are found through HALTERES_ENVIRONMENTS, which `halteres install-agent --project` hands to the tools
and a person exports in a shell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from halteres.agent.skills import example_environment
from halteres.errors import Conflict, ServerError
from halteres.files import replace_file

ENVIRONMENTS: Final = "environments"

Outcome = Literal["wrote", "already there", "left alone"]

_IGNORED = """\
# Of environments that were run
__pycache__/
# Written by `process`
data/
# Settings of agent hosts as they were before `halteres install-agent`
*.halteres.bak
"""


@dataclass(frozen=True, slots=True)
class Laid:
    """What became of one file."""

    outcome: Outcome  # left alone: it is there, and says something else
    file: Path


def lay_out(folder: Path) -> tuple[Laid, ...]:
    """Make a workspace of a folder, which need not be there. Safe to repeat.

    Raises:
        Conflict: a file is where a folder must be.
        ServerError: the file system refuses.
    """
    return tuple(_laid(folder / name, text.encode()) for name, text in _files())


def _files() -> Iterator[tuple[str, str]]:
    yield "AGENTS.md", (Path(__file__).parent / "AGENTS.md").read_text()
    yield f"{ENVIRONMENTS}/example.py", example_environment()
    yield ".gitignore", _IGNORED


def _laid(file: Path, content: bytes) -> Laid:
    try:
        if file.exists():
            return Laid("already there" if file.read_bytes() == content else "left alone", file)
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise Conflict(
            f"{file} cannot be written.", f"{error.strerror}: {error.filename}.", "Choose another folder."
        ) from error
    except OSError as error:
        raise ServerError(f"{file} cannot be written.", f"{error.strerror}.", "Choose another folder.") from error
    return Laid("wrote", file)
