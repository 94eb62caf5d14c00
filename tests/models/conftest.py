"""Folders of models as others make them: the built-in model's files, changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from safetensors.torch import load_file

from halteres.models import TINY, builtin_path

Change = Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A model folder of the user's."""
    source = builtin_path(TINY)
    assert source is not None
    return Path(
        shutil.copytree(source, tmp_path / "own", ignore=shutil.ignore_patterns("halteres.json"))
    )


def edit(file: Path, **fields: Any) -> None:
    """Change fields of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def change_weights(folder: Path, change: Change) -> None:
    """Write the weights of a folder anew, in fp32."""
    file = folder / "model.safetensors"
    tensors = {name: one.float().numpy() for name, one in load_file(file).items()}
    save_file(change(tensors), file, metadata={"format": "pt"})


def without(part: str) -> Change:
    """All tensors but those of whose names this is a part."""
    return lambda tensors: {name: one for name, one in tensors.items() if part not in name}


def prefixed(prefix: str) -> Change:
    """Each tensor under a longer name."""
    return lambda tensors: {prefix + name: one for name, one in tensors.items()}
