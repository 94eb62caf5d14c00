"""Adapters that somebody else made, put where a service finds them.

Owns: the checks before, the copy, the card that tells a service what it is.
Never: talks to a service (one that runs finds the folder by itself), reads the tensors (the engine checks them when
they are loaded).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from halteres.engine.folders import written
from halteres.engine.protocol import LoraConfig
from halteres.engine.shapes import foreign_shape
from halteres.errors import Conflict, InvalidData
from halteres.service.checkpoints.paths import TinkerPath, checked_name, checked_run
from halteres.service.checkpoints.unlisted import CARD, STATE, Card
from halteres.service.exports.peft_folders import FILES, WEIGHTS, check_adapter
from halteres.service.exports.tensor_names import tensor_names
from halteres.service.tenancy.tenants import LOCAL, Tenant
from halteres.service.tenancy.tenants import checked_name as checked_tenant

RUN = "added"
"""The training run that such adapters are named under, unless another is."""

RESUMABLE = (STATE, "optimizer.safetensors")
"""What our own checkpoints have beside the adapter."""


class _State(msgspec.Struct, frozen=True, kw_only=True):
    version: int
    lora: LoraConfig


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
