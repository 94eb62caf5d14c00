"""Config files: YAML in our sections or in the seeds' format, and where the data that they name
lies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halteres.config.problem import Problem, UnknownSetting
from halteres.config.projection import Sections, from_seed_format, is_seed_format, section_of
from halteres.documents import read_document
from halteres.errors import InvalidConfig, nearest


def read_sections(file: Path, problems: list[Problem]) -> Sections:
    """Our sections of a config file, in either format; what cannot be placed is added to
    `problems`.
    """
    data = read_document(file, "config file")
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise InvalidConfig(
            f"The config file {file} holds no sections.", next="Start with `env:` or `trainer:`."
        )
    if is_seed_format(data):
        return from_seed_format(data, problems)
    known = ("run", "env", "inference", "trainer")
    others = [name for name in data if name not in known]
    problems.extend(
        UnknownSetting(field=name, got=data[name], did_you_mean=nearest(name, known))
        for name in others
    )
    return {name: section_of(data, name, problems) for name in known if name in data}


def data_place(given: Any, *folders: Path) -> Any:
    """A data set's file or folder as it is called from anywhere: the environment runs in another
    folder.

    It is looked for in these folders, the first of which is meant where none has it. A name on the
    hub stays as it is.
    """
    if not isinstance(given, str) or not given:
        return given
    path = Path(os.path.expanduser(given))  # of any text: Path would raise for an unknown user
    found = next((folder / path for folder in folders if os.path.exists(folder / path)), None)
    if found is None and (given.startswith((".", "~")) or path.suffix == ".jsonl"):
        found = folders[0] / path
    if found is not None:
        return str(found.absolute())
    return given
