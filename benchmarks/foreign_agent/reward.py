"""What an episode of `play.py` is worth: 1 for the right number in the last box of its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halteres.environments.answers import boxed_answer, is_number


def reward(folder: list[str], answer: list[str], **_: Any) -> list[float]:
    return [
        float(_is_right(Path(one) / "answer.txt", right))
        for one, right in zip(folder, answer, strict=True)
    ]


def _is_right(file: Path, right: str) -> bool:
    return file.is_file() and is_number(boxed_answer(file.read_text(encoding="utf-8")), right)
