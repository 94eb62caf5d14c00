"""Scorers whose scores are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from halteres.rewards.evaluation import as_text
from halteres.scores import Output, Scorable, Score


class Scripted:
    """Scores a completion's text by a function; None means that it cannot."""

    def __init__(self, value: Callable[[str], float | None], name: str = "scripted") -> None:
        self.name, self._value = name, value
        self.units: Output | None = None
        self.calls: list[int] = []  # texts of each

    async def score(self, texts: Sequence[Scorable]) -> list[Score | None]:
        self.calls.append(len(texts))
        values = [self._value(as_text(text.completion)) for text in texts]
        return [None if value is None else Score(value=value) for value in values]

    async def close(self) -> None: ...
