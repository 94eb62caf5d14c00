"""The Agent Skills of this package, and the workspace in which an agent writes environments.

A skill is a folder named like it, in it SKILL.md with YAML front matter (agentskills.io). A
workspace's environments are found through HALTERES_ENVIRONMENTS, which `halteres install-agent
--project` hands to the tools.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from halteres.documents import parse_yaml
from halteres.errors import Conflict, ServerError
from halteres.files import replace_file

FOLDER: Final = Path(__file__).parents[1] / "skills"
WORKSPACE: Final = Path(__file__).parent / "workspace"

_CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill:
    """One skill."""

    name: str
    description: str  # when to use it; all that a host shows its model until then
    folder: Path

    @property
    def file(self) -> Path:
        """Its SKILL.md."""
        return self.folder / "SKILL.md"


def skill_folders() -> tuple[Path, ...]:
    """The folder of every skill, by name."""
    return tuple(sorted(file.parent for file in FOLDER.glob("*/SKILL.md")))


def skills() -> tuple[Skill, ...]:
    """Every skill, by name."""
    return tuple(_read(folder) for folder in skill_folders())


def _read(folder: Path) -> Skill:
    front = parse_yaml(
        (folder / "SKILL.md").read_text(encoding="utf-8").removeprefix("---").partition("\n---")[0]
    )
    return Skill(name=str(front["name"]), description=str(front["description"]), folder=folder)


def example_environment() -> str:
    """The environment in `write-an-environment`, whole and ready to run."""
    found = _CODE.search((FOLDER / "write-an-environment" / "SKILL.md").read_text(encoding="utf-8"))
    if found is None:
        raise LookupError("write-an-environment holds no Python code")
    return found[1]


ENVIRONMENTS: Final = "environments"
_IGNORED = """\
# Of environments that were run
__pycache__/
# Written by `process`
data/
"""


@dataclass(frozen=True, slots=True)
class WorkspaceFile:
    """What became of one file of a workspace."""

    # left alone: it is there, and says something else
    outcome: Literal["wrote", "already there", "left alone"]
    file: Path


def lay_out(folder: Path) -> tuple[WorkspaceFile, ...]:
    """Make a workspace of a folder, which need not be there. Safe to repeat: a file that is there
    stays as it is.

    Raises:
        Conflict: a file is where a folder must be.
        ServerError: the file system refuses.
    """
    files = {
        "AGENTS.md": (WORKSPACE / "AGENTS.md").read_text(encoding="utf-8"),
        f"{ENVIRONMENTS}/example.py": example_environment(),
        ".gitignore": _IGNORED,
    }
    return tuple(_written(folder / name, text.encode()) for name, text in files.items())


def _written(file: Path, content: bytes) -> WorkspaceFile:
    advice = "Choose another folder."
    try:
        if file.exists():
            return WorkspaceFile(
                "already there" if file.read_bytes() == content else "left alone", file
            )
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise Conflict(
            f"{file} cannot be written.", f"{error.strerror}: {error.filename}.", advice
        ) from error
    except OSError as error:
        raise ServerError(f"{file} cannot be written.", f"{error.strerror}.", advice) from error
    return WorkspaceFile("wrote", file)
