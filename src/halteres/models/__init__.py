"""Base models and where they lie: those that come with the package, those put into the store, any
folder.

Owns: the names of built-in models and their folders; which folder a name means.
Never: loads weights, imports a machine learning library.

The store is a folder of models (HALTERES_HOME/models): `STORE/qwen3-0.6b/config.json` is the model
'qwen3-0.6b', and `STORE/Qwen/Qwen3-0.6B/config.json` is 'Qwen/Qwen3-0.6B'. A name of the hub also
means the store's folder of its last part, whoever its owner.
"""

import os
from collections.abc import Iterator
from pathlib import Path

TINY = "halteres/tiny"

_FOLDERS = {TINY: Path(__file__).parent / "tiny"}


def builtin_path(name: str) -> Path | None:
    """The folder of the built-in model of this name, as `transformers` reads it; None for any other
    name.
    """
    return _FOLDERS.get(name)


def builtin_names() -> tuple[str, ...]:
    """Names of the built-in models."""
    return tuple(_FOLDERS)


def model_folder(name: str, models_home: Path) -> Path | None:
    """The absolute folder that a name or a path means: built-in, in the store, anywhere; None where
    there is none.
    """
    there = Path(name).expanduser()
    return known_folder(name, models_home) or (
        there.absolute() if name and is_model(there) else None
    )


def known_folder(name: str, models_home: Path) -> Path | None:
    """The absolute folder that a name means: built-in or in the store; None where there is none."""
    if (builtin := builtin_path(name)) is not None:
        return builtin
    there = Path(name).expanduser()
    stored = (
        ()
        if there.is_absolute() or ".." in there.parts
        else (models_home / there, models_home / there.name)
    )
    return next((folder.absolute() for folder in stored if name and is_model(folder)), None)


def names_of(folder: Path, models_home: Path) -> tuple[str, ...]:
    """Every name that means the model in this folder: built-in, in the store (where links may lead
    to it).
    """
    there = folder.resolve()
    known = (*_FOLDERS.items(), *stored_models(models_home))
    return tuple(name for name, place in known if place.resolve() == there)


def stored_models(models_home: Path) -> Iterator[tuple[str, Path]]:
    """Name and folder of every model in the store; names that begin with a dot are of folders being
    written.
    """
    for pattern in ("[!.]*", "[!.]*/[!.]*"):
        for folder in sorted(models_home.glob(pattern)):
            if is_model(folder):
                yield folder.relative_to(models_home).as_posix(), folder


def is_model(folder: Path) -> bool:
    """Whether a folder is laid out as one of Hugging Face's."""
    return os.path.isfile(folder / "config.json")  # False for what can be no path, too
