"""One attempt at a task: calls that are counted, limited and written down.

Owns: the counts, the limits, the transcript.
Never: decides what to call; writes a secret.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.agent import files
from halteres.redaction import Redactor

MOST_CALLS, MOST_TOKENS, WITHIN_S = 40, 100_000, 1200.0
"""Where an attempt is ended. What is aimed at is less: `report.TARGET`."""


class Told(NamedTuple):
    """What a tool answered."""

    text: str  # JSON
    images: int = 0


Arguments = Mapping[str, Any] | str
"""Of a call; a text where a model wrote no JSON object."""

CallTool = Callable[[str, Arguments], Awaitable[Told]]


class GaveUp(Exception):
    """The attempt is over without an answer: limits are reached, or the agent does not know how to
    go on.
    """


@dataclass(slots=True)
class Transcript:
    """What was said, a line each; nowhere where there is no file."""

    file: Path | None = None
    redactor: Redactor = field(default_factory=Redactor.of_this_process)

    def add(self, **line: Any) -> None:
        """Write a line down, without secrets."""
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(
                    json.dumps(self.redactor.json({"t": round(time.time(), 2), **line})) + "\n"
                )


@dataclass(slots=True)
class Sitting:
    """An agent at its tools."""

    tools: CallTool
    workspace: files.Workspace
    transcript: Transcript = field(default_factory=Transcript)
    calls: int = 0
    size: int = 0  # bytes of answers' text
    images: int = 0
    errors: int = 0  # answers that were errors
    waited_s: float = 0.0  # within calls
    began: float = field(default_factory=time.monotonic)

    @property
    def tokens(self) -> int:
        """Of the tools' answers, as the spec counts them."""
        return self.size // 4

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began

    async def call(self, name: str, arguments: Arguments) -> str:
        """A tool's answer. GaveUp instead, once the attempt is over."""
        self._check()
        self.calls += 1
        began = time.monotonic()
        told = (
            Told(self.workspace.call(name, arguments))
            if name in files.NAMES
            else await self.tools(name, arguments)
        )
        self.waited_s += time.monotonic() - began
        self.size += len(told.text.encode())
        self.images += told.images
        self.errors += told.text.startswith('{"error"')
        self.transcript.add(call=name, arguments=arguments, answer=told.text, images=told.images)
        return told.text

    def _check(self) -> None:
        over = (self.calls >= MOST_CALLS, "calls"), (self.tokens >= MOST_TOKENS, "tokens")
        for reached, what in (*over, (self.seconds >= WITHIN_S, "time")):
            if reached:
                raise GaveUp(f"the limit of {what} is reached")
