"""A checkpoint: what is known of named weights, and how the journal and a folder tell it.

Owns: the value, its row, the reading of both.
Never: knows which others there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from halteres.engine.protocol import LoraConfig
from halteres.service.checkpoints import unlisted
from halteres.service.checkpoints.paths import LOADABLE, TinkerPath, parse
from halteres.service.tenancy.tenants import Tenant

LONGEST_RENAMED = 118
"""Characters of a name that leave room for a number behind it."""

_COLUMNS = (
    "tenant",
    "public",
    "request_id",
    "version",
    "size_bytes",
    "base_model",
    "user_metadata",
    "created_at",
    "expires_at",
)
"""Of the table `checkpoints`, those that are told as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What is known of named weights."""

    path: TinkerPath
    folder: Path
    version: int  # optimiser steps
    size_bytes: int
    base_model: str
    lora: LoraConfig
    tenant: Tenant
    public: bool = False  # everybody may load it
    request_id: str | None = None  # whose outcome it is
    created_at: float  # unix s
    expires_at: float | None = None  # unix s
    user_metadata: dict[str, Any] = field(default_factory=dict)

    def expired(self, now: float) -> bool:
        """Whether its time is over."""
        return self.expires_at is not None and self.expires_at <= now

    def can_be_renamed(self, tenant: Tenant) -> bool:
        """Whether newer weights of its training run may have its path, and it a numbered one: a request of that run
        saved it. Others' weights, publications and exports stay where they are."""
        own = self.tenant == tenant and self.request_id is not None
        return own and not self.public and self.path.kind in LOADABLE and len(self.path.name) <= LONGEST_RENAMED

    @property
    def row(self) -> dict[str, Any]:
        """Of the table `checkpoints`."""
        facts = {name: getattr(self, name) for name in _COLUMNS}
        return {**facts, "path": str(self.path), "model_id": self.path.run, "lora": msgspec.to_builtins(self.lora)}

    @classmethod
    def of_row(cls, row: Mapping[str, Any], state: Path) -> Checkpoint:
        """The checkpoint that a row tells of; its folder may be gone."""
        path = parse(row["path"])
        lora = msgspec.convert(row["lora"], LoraConfig)
        return cls(path=path, folder=path.folder(state), lora=lora, **{name: row[name] for name in _COLUMNS})

    @classmethod
    def of_folder(cls, path: TinkerPath, state: Path) -> Checkpoint | None:
        """The checkpoint that a folder tells of, which no journal lists; None where it tells too little."""
        found = unlisted.read(path, state)
        if found is None:
            return None
        return cls(
            path=path,
            folder=path.folder(state),
            version=found.card.version,
            size_bytes=found.size_bytes,
            base_model=found.card.base_model,
            lora=found.card.lora,
            tenant=found.card.tenant,
            created_at=found.created_at,
        )


def age(checkpoint: Checkpoint) -> float:
    """By which the newest of several is found."""
    return checkpoint.created_at
