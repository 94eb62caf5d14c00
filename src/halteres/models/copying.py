"""Copies of a model's files in a folder that is there whole or not at all.

Owns: that.
Never: chooses the files; replaces a folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path


def copy_files(files: Iterable[Path], folder: Path) -> None:
    """Copy files (what links lead to) into a new folder; its parents are made.

    Raises:
        OSError: one cannot be read, or the place cannot be written; then there is no such folder.
    """
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    beside.mkdir(parents=True)
    try:
        for file in files:
            shutil.copyfile(file, beside / file.name)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
