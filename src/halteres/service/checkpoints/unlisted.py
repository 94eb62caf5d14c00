"""Checkpoints that no journal lists: known by their folder alone.

Owns: what such a folder tells: `state.json`, which an engine writes beside weights, or `checkpoint.json`, which
`halteres checkpoints add` writes beside somebody else's.
Never: reads weights.

Folders come without a journal when they were copied here from another service's state, or put here while the service
runs. They belong to the tenant that `checkpoint.json` names, else to the one tenant of a service without keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from halteres.engine.folders import size_of
from halteres.engine.protocol import LoraConfig
from halteres.service.checkpoints.paths import KINDS, TinkerPath, parse
from halteres.service.tenancy.tenants import LOCAL, Tenant

CARD, STATE, CONFIG = "checkpoint.json", "state.json", "adapter_config.json"


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of weights that somebody else made."""

    path: str  # tinker://
    lora: LoraConfig
    tenant: Tenant = LOCAL
    version: int = 0
    base_model: str = ""  # "" is whatever is served


class _State(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    lora: LoraConfig


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    base_model_name_or_path: str | None = None


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder tells of itself."""

    card: Card
    size_bytes: int
    created_at: float  # unix s


def read(path: TinkerPath, state: Path) -> Found | None:
    """What the folder of a path tells; None where there is none, or it tells too little."""
    folder = path.folder(state)
    try:
        card = _card(path, folder)
        created_at = (folder / CONFIG).stat().st_mtime
    except (OSError, msgspec.MsgspecError):
        return None
    return Found(card=card, size_bytes=size_of(folder), created_at=created_at)


def put_here(state: Path) -> Iterator[TinkerPath]:
    """The paths of all folders with a `checkpoint.json` that names them."""
    for kind in KINDS:
        for card in (state / "checkpoints").glob(f"*/{kind}/*/{CARD}"):
            try:
                path = parse(msgspec.json.decode(card.read_bytes(), type=Card).path)
            except (OSError, msgspec.MsgspecError):
                continue
            if path.folder(state) == card.parent:
                yield path


def _card(path: TinkerPath, folder: Path) -> Card:
    if (folder / CARD).is_file():
        card = msgspec.json.decode((folder / CARD).read_bytes(), type=Card)
        if card.path != str(path):
            raise msgspec.ValidationError(f"{folder} is {card.path}.")
        return card
    state = msgspec.json.decode((folder / STATE).read_bytes(), type=_State)
    config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=_Config)
    return Card(path=str(path), lora=state.lora, version=state.version, base_model=config.base_model_name_or_path or "")
