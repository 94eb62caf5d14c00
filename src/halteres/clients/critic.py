"""A run's critic over HTTP: values of tokens, updates on returns, its state on disk; what crosses
the wire, and the trainer's client of it.

Both sides count updates. One that is asked for twice, because the critic's process died before its
answer came, is done once: the second answer is the first's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from halteres.clients.json_client import JsonClient
from halteres.clients.trajectories.address import Address
from halteres.errors import ServerError, boundary

T = TypeVar("T")

VALUES, UPDATE, SAVE = "/values", "/update", "/save"
PASS_TOKENS = 2048
"""Tokens of one pass with its gradient: what bounds the memory of a critic's process."""

STATE = "state"
"""Folder of the newest state, next to those that are kept: what a critic goes on from."""


def step_name(step: int) -> str:
    """What the folder is called that keeps the state after this many updates."""
    return f"step-{step:06d}"


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Places of one sequence: row i has read its tokens up to token i."""

    tokens: list[int]
    rows: list[int]


class Targets(Rows, frozen=True, kw_only=True):
    """What values of these places are to become."""

    values: list[float]  # what they were when the batch was sampled
    returns: list[float]


class ValuesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /values."""

    step: int  # updates that the critic has done
    sequences: list[Rows]


class UpdateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /update."""

    step: int  # updates that the critic has done afterwards
    sequences: list[Targets]
    minibatches: list[list[int]]  # sequences of each optimiser step, in order
    learning_rate: float
    clip: float  # how far a value may move before its loss is clipped


class SaveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /save: keep the state after this many updates."""

    step: int


class Updated(msgspec.Struct, frozen=True, kw_only=True):
    """What an update came to: means over its optimiser steps; nothing where there was none."""

    step: int
    loss: float | None = None  # half the mean squared error per token, clipped; before each step
    clipped: float | None = None  # share of tokens whose loss the clip raised
    gradient_norm: float | None = None  # before it is clipped


class CriticClient(JsonClient):
    """One critic's server.

    Args:
        url: its address; the key that it asks for is the password in it.
        timeout_s: of one call; a server that starts again meanwhile is waited for.

    Every call raises NotReady where the server cannot be reached within the timeout, InvalidData
    where it refuses, ServerError where it fails or gives no answer in time.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        address = Address.of(url)
        super().__init__(
            address.url,
            api_key=address.token or "",
            timeout_s=timeout_s,
            ready_within_s=timeout_s,
            repeatable=True,
        )

    async def values(self, step: int, sequences: Sequence[Rows]) -> list[list[float]]:
        """The values of these places, in reward units; `step`: updates done so far."""
        body = {"step": step, "sequences": sequences}
        return await self._call(VALUES, body, list[list[float]])

    async def update(self, request: UpdateRequest) -> Updated:
        """Learn the returns; once, however often it is asked for."""
        return await self._call(UPDATE, msgspec.structs.asdict(request), Updated)

    async def save(self, step: int) -> None:
        """Keep the state after this many updates, to resume from."""
        await self._call(SAVE, {"step": step}, dict[str, Any])

    async def _call(self, path: str, body: Mapping[str, Any], of: type[T]) -> T:
        answer = await self.post_when_ready(path, body)
        with boundary(ServerError, f"Reading the answer of {path}"):
            return msgspec.convert(answer, of)
