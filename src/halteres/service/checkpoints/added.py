"""Checkpoints that no journal lists: known by their folder alone; and how somebody else's adapter becomes one.

Folders come without a journal when they were copied here from another service's state, or put here while the service
runs. They belong to the tenant that `checkpoint.json` names, else to the one tenant of a service without keys.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from halteres.engine.folders import size_of, written
from halteres.engine.protocol import LoraConfig
from halteres.engine.shapes import foreign_shape
from halteres.errors import Conflict, InvalidData
from halteres.service.checkpoints.paths import KINDS, TinkerPath, checked_name, checked_run, parse
from halteres.service.checkpoints.peft_folders import FILES, WEIGHTS, check_adapter, tensor_names
from halteres.service.tenancy.tenants import LOCAL, Tenant
from halteres.service.tenancy.tenants import checked_name as checked_tenant

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


RUN = "added"
"""The training run that such adapters are named under, unless another is."""

RESUMABLE = (STATE, "optimizer.safetensors")
"""What our own checkpoints have beside the adapter."""


def add_adapter(folder: Path, name: str, state: Path, *, run: str = RUN, tenant: Tenant = LOCAL) -> TinkerPath:
    """Copy a PEFT folder into a service's state directory; returns the path it has from now on.

    Args:
        folder: adapter_config.json and adapter_model.safetensors; of our own checkpoints the optimiser comes along.
        name: what the checkpoint is called.
        state: the service's state directory; the service may be running.
        run: the training run it is named under.
        tenant: whose it is, where the service has keys.

    Raises:
        NotFound: it is no PEFT folder.
        InvalidData: it asks for what this service does not compute, or the name cannot be one.
        Conflict: the name is taken.
        ServerError: the state directory cannot be written.
    """
    path = TinkerPath(checked_run(run), "weights", checked_name(name))
    check_adapter(folder)
    version, lora = _shape(folder)
    target = path.folder(state)
    if target.exists():
        raise Conflict(f"{path} exists.", "Saved weights are not replaced by accident.", "Choose another name.")
    card = Card(path=str(path), lora=lora, tenant=checked_tenant(tenant), version=version)
    with written(target) as place:
        for file in (*FILES, *RESUMABLE):
            if (folder / file).is_file():
                shutil.copyfile(folder / file, place / file)
        (place / CARD).write_bytes(msgspec.json.encode(card))
    return path


def _shape(folder: Path) -> tuple[int, LoraConfig]:
    """Version and shape: a foreign adapter begins at version 0."""
    if not (folder / STATE).is_file():
        return 0, foreign_shape(folder, tensor_names(folder / WEIGHTS))
    try:
        own = msgspec.json.decode((folder / STATE).read_bytes(), type=_State)
    except msgspec.MsgspecError as error:
        raise InvalidData(f"{folder / STATE} cannot be read.", f"{error}.", "Use another checkpoint.") from error
    return own.version, own.lora
