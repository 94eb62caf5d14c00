"""Tasks of any form, read from a file of JSON lines."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from halteres.documents import DocumentError, read_json_lines
from halteres.environments.rows import HELD_OUT_SHARE
from halteres.errors import InvalidConfig, InvalidData

Task = Mapping[str, Any]
"""A JSON object; its fields are the author's."""


NONE_HELD_OUT = "None of the tasks in env.tasks is held out: all are trained on."

ADD_TASKS = "Add a task to the file, or to the folder's test.jsonl."


def load_tasks(source: str | Path) -> tuple[Sequence[Task], Sequence[Task]]:
    """The tasks to train on and the held-out ones.

    Args:
        source: a `.jsonl` file, of whose tasks a tenth is held out (chosen by hash: a task keeps
            its side, whatever is added; where none is chosen, the last); or a folder with
            `train.jsonl` and `test.jsonl`.

    Raises:
        InvalidConfig: no such file.
        InvalidData: a line that is no JSON object, with its place; no task to train on.
    """
    # of any text: `Path` would raise for an unknown user, or a name that is too long
    path = Path(os.path.expanduser(source))
    if os.path.isdir(path):
        train, held_out = _read(path / "train.jsonl"), _read(path / "test.jsonl")
    else:
        train, held_out = list[Task](), list[Task]()
        for task in _read(path):
            first_byte = hashlib.sha256(json.dumps(task, sort_keys=True).encode()).digest()[0]
            if first_byte < HELD_OUT_SHARE * 256:
                held_out.append(task)
            else:
                train.append(task)
        if not held_out and len(train) > 1:
            held_out.append(train.pop())
    if not train:
        raise InvalidData(
            f"{source} holds no task to train on.",
            next="Write tasks into it, a JSON object a line.",
        )
    return train, held_out


def _read(file: Path) -> list[Task]:
    try:
        rows = list(read_json_lines(file))
    except OSError as error:
        raise InvalidConfig(
            f"The tasks in {file.absolute()} cannot be read.",
            f"{error.strerror or error}.",
            "Give the whole path of a JSONL file, or of a folder with train.jsonl and test.jsonl.",
        ) from error
    except DocumentError as error:
        raise InvalidData(
            f"{file.absolute()} is no file of JSON lines.", f"{error}.", "A task is a JSON object."
        ) from error
    for number, fields in rows:
        if not isinstance(fields, dict):
            raise InvalidData(
                f"{file}:{number} is no task.", "A task is a JSON object.", 'Write {"name": …}.'
            )
    return [fields for _, fields in rows]
