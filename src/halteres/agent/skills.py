"""The Agent Skills that come with the package: folders of instructions that hosts load when a task calls for them.

Owns: which there are, what their front matter says, the example environment that one of them holds.
Never: puts one anywhere (`agent_clients.installation`, the Hermes plugin).

Source: the Agent Skills format (agentskills.io): a folder named like the skill, in it SKILL.md with YAML front matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

FOLDER: Final = Path(__file__).parents[1] / "skills"

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


def example_environment() -> str:
    """The environment in `write-an-environment`, whole and ready to run."""
    found = _CODE.search((FOLDER / "write-an-environment" / "SKILL.md").read_text())
    if found is None:
        raise LookupError("write-an-environment holds no Python code")
    return found[1]


def _read(folder: Path) -> Skill:
    front = yaml.safe_load((folder / "SKILL.md").read_text().removeprefix("---").partition("\n---")[0])
    return Skill(name=str(front["name"]), description=str(front["description"]), folder=folder)
