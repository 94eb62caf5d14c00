"""Finding the environment that a call names.

Owns: from where a relative path is meant; the error that has all names, or all places.
Never: reads an environment (`config.discovery` does).
"""

from __future__ import annotations

from pathlib import Path

from halteres.config import environ
from halteres.config.discovery import EnvironmentFile, EnvironmentNotFound, discover, find_environment
from halteres.config.environment_name import is_path, joined_name, split_name


def found_environment(environment: str) -> EnvironmentFile:
    """The environment of this name, or in this file.

    Raises:
        EnvironmentNotFound: neither, or a file that is not Python; `available` names, and `did_you_mean`.
        EnvironmentBroken: its file cannot be used.
    """
    base, variant = split_name(environment)
    places = _places(base)
    file = next((place for place in places if place.is_file()), None)
    if file is not None and file.suffix != ".py":
        raise EnvironmentNotFound(
            f"Environment '{environment}' not found: it is not a .py file.",
            available=[one.name for one in discover().environments],
        )
    try:
        return find_environment(environment if file is None else joined_name(str(file), variant))
    except EnvironmentNotFound as error:
        guess = error.details.get("did_you_mean")
        raise EnvironmentNotFound(
            f"Environment '{environment}' not found.",
            f"Did you mean '{guess}'?" if guess else _looked_for(places),
            available=[one.name for one in discover().environments],
            did_you_mean=guess,
        ) from error


def _places(environment: str) -> list[Path]:
    """Where a path may lead: from the folder of this process, which its user need not know; from a folder of
    environments; from the one around it, as a workspace's texts have it (environments/sums.py). None of a name."""
    if not is_path(environment):
        return []
    folders = environ.environment_folders()
    begins = [Path.cwd(), *folders, *(folder.parent for folder in folders)]
    return list(dict.fromkeys(begin / Path(environment).expanduser() for begin in begins))


def _looked_for(places: list[Path]) -> str:
    return f"There is no file {', '.join(map(str, places))}." if places else ""
