"""A reward model without weights: a text's raw score is its length in characters, and one that says
'unreadable' has none.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from halteres.errors import InvalidData
from halteres.loopback import Server, open_listener, url_of
from halteres.rewards.model_folder import Calibration
from halteres.scores import Scorable, Score

HALVED = Calibration(temperature=2.0, scale=2.0, quantiles={"1.0": 20.0})
"""Standardised, it is half of the raw score."""


@dataclass
class StandIn:
    """See above. `gate` holds every computation until it is set; `computed` tells how many texts
    each one had.
    """

    folder: Path | None = None
    calibration: Calibration | None = HALVED
    digest: str = "sha256:0"
    notes: tuple[str, ...] = ()
    gate: threading.Event = field(default_factory=threading.Event)
    inside: threading.Event = field(default_factory=threading.Event)
    computed: list[int] = field(default_factory=list)
    wanted: list[bool] = field(default_factory=list)  # whether a client still waited for each one

    def __post_init__(self) -> None:
        self.gate.set()

    def score_each(
        self, texts: Sequence[Scorable], are_wanted: Callable[[], bool] = lambda: True
    ) -> list[Score | InvalidData]:
        self.inside.set()
        assert self.gate.wait(10)
        self.wanted.append(are_wanted())
        self.computed.append(len(texts))
        return [_score(text) for text in texts]


def _score(text: Scorable) -> Score | InvalidData:
    whole = f"{_words(text.prompt)}{_words(text.completion)}"
    if "broken" in whole:
        raise RuntimeError("the weights are gone")
    if "unreadable" in whole:
        return InvalidData("The text cannot be read.")
    return Score(value=float(len(whole)), num_tokens=len(whole))


def _words(text: Any) -> str:
    return (
        "".join(message["content"] for message in text)
        if isinstance(text, tuple | list)
        else text or ""
    )


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[str]:
    """An app on a free port; its address."""
    with open_listener(0) as bound:
        server = Server(
            uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=1)
        )
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        try:
            yield url_of(bound)
        finally:
            server.end()
            await serving
