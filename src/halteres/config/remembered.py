"""What environments said about themselves, remembered across processes: HALTERES_HOME/cache/environments.

Owns: the folder, its bounds; that what is remembered holds for the very files it was read from.
Never: fails anybody: where it cannot read or write, nothing is remembered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from halteres.config import environ
from halteres.config.discovery import BUILTIN_FOLDER
from halteres.files import replace_file

MOST_FILES = 256


def recall(key: str) -> Any:
    """What was remembered under this key; None where nothing was."""
    try:
        return json.loads(_file(key).read_bytes())
    except (OSError, ValueError):
        return None


def remember(key: str, told: Any) -> None:
    """Keep JSON under this key, and not too much altogether."""
    file = _file(key)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(told).encode())
        _prune(file.parent)


def forget(key: str) -> None:
    """Remember nothing under this key any more."""
    with contextlib.suppress(OSError):
        _file(key).unlink(missing_ok=True)


def stamp(file: Path) -> str:
    """Changes when the file does, or a Python file beside it (which it may import), or one of our own environments'
    room, which says what every environment's settings are.

    Raises:
        OSError: the file cannot be looked at.
    """
    looked = file.stat()
    beside = [_look(one) for folder in (file.parent, BUILTIN_FOLDER) for one in sorted(folder.glob("*.py"))]
    return json.dumps([str(file), looked.st_mtime_ns, looked.st_size, beside])


def _look(file: Path) -> tuple[str, int, int]:
    try:
        looked = file.stat()
    except OSError:
        return file.name, 0, 0
    return file.name, looked.st_mtime_ns, looked.st_size


def _file(key: str) -> Path:
    return environ.home() / "cache" / "environments" / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"


def _prune(folder: Path) -> None:
    files = list(folder.glob("*.json"))
    if len(files) > MOST_FILES:
        for old in sorted(files, key=lambda file: file.stat().st_mtime)[: MOST_FILES // 2]:
            old.unlink(missing_ok=True)
