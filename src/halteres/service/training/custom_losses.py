"""Custom losses: graphs of operations that clients wrote, by session."""

from __future__ import annotations

import time
from collections import Counter

import msgspec
from sqlalchemy import JSON, BigInteger, Column, Float, String, Table

from halteres.engine.graphs.checked import checked
from halteres.engine.protocol import CustomLoss
from halteres.errors import NotFound, UserError
from halteres.service.durable.journal import Journal
from halteres.service.durable.tables import SCHEMA

MAX_LOSSES = 1000
"""Custom losses of one session; the SDK makes each of them once."""

CUSTOM_LOSSES = Table(
    "custom_losses",
    SCHEMA,
    Column("id", String, primary_key=True),
    Column("session_id", String, nullable=False, index=True),
    Column("seq", BigInteger, nullable=False),
    Column("name", String, nullable=False),  # of the client's function
    Column("loss", JSON, nullable=False),  # CustomLoss, checked
    Column("created_at", Float, nullable=False),
)


class CustomLosses:
    """The custom losses of every session."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._known: dict[tuple[str, str], CustomLoss] = {}
        self._counts: Counter[str] = Counter()

    async def open(self) -> None:
        """Know again those of an earlier life of the service."""
        for row in await self._journal.rows(CUSTOM_LOSSES):
            self._add(row["session_id"], row["id"], msgspec.convert(row["loss"], CustomLoss))

    async def create(self, session_id: str, seq: int, name: str, inputs: object, graph: object) -> str:
        """Check and record a graph; returns its id. The same sequence number again returns the first one's id.

        Args:
            inputs: as it came: `[{"name": ..., "rank": ...}, ...]`.
            graph: as it came: `{"format": 1, "nodes": [...]}`.

        Raises:
            InvalidData: the graph holds what is not allowed; the message names node and target.
            UserError: the session has too many.
        """
        loss_id = f"{session_id}:loss:{seq}"
        if (session_id, loss_id) in self._known:
            return loss_id
        if self._counts[session_id] >= MAX_LOSSES:
            raise UserError(f"This session has {MAX_LOSSES} custom losses.", next="Use those, or make a new session.")
        loss = checked(graph, inputs)
        await self._journal.added(
            CUSTOM_LOSSES,
            id=loss_id,
            session_id=session_id,
            seq=seq,
            name=name,
            loss=msgspec.to_builtins(loss),
            created_at=time.time(),
        )
        self._add(session_id, loss_id, loss)
        return loss_id

    def find(self, session_id: str, loss_id: str | None) -> CustomLoss:
        """The custom loss of this id."""
        found = self._known.get((session_id, loss_id or ""))
        if found is None:
            raise NotFound(
                f"There is no custom loss '{loss_id}' in this session.",
                "A custom loss belongs to the session that made it.",
                "Make it with create_custom_loss.",
            )
        return found

    def _add(self, session_id: str, loss_id: str, loss: CustomLoss) -> None:
        self._counts[session_id] += (session_id, loss_id) not in self._known
        self._known[session_id, loss_id] = loss
