"""Adapters on disk: PEFT folders, with optimiser state beside them.

An accumulated gradient is not part of a checkpoint. Adapters that somebody else wrote are brought
into our layout.

    adapter_config.json          PEFT's LoraConfig
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight, lora_B
    state.json                   version, adapter shape, steps of the optimiser
    optimizer.safetensors        first and second moments by the same names (weights for resuming
                                 only)
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from halteres.engine.checks import LossNotFinite
from halteres.engine.connection import decode, encode
from halteres.engine.folders import digest_of, size_of, write_hashed, written
from halteres.engine.protocol import BaseType, LoraConfig, Saved
from halteres.engine.shapes import (
    CONFIG,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    State,
    canonical,
    check_files,
    foreign_shape,
    read_state,
)
from halteres.engine.torch.adapter import AdamState, Checkpoint, Layout
from halteres.engine.torch.limits import attempt
from halteres.engine.torch.model import BaseModel
from halteres.engine.torch.ranks import Ranks
from halteres.errors import HalteresError, InvalidData

T = TypeVar("T")

READERS = 4  # folders that are read at a time: a disk that hangs under one need not stop the others

NUMBERS_AT_A_TIME = 1 << 18  # of a snapshot, so many are rounded, hashed and written while in cache


def write_snapshot(
    folder: Path, base_name: str, checkpoint: Checkpoint, dtype: BaseType = "float32"
) -> Saved:
    """Write a snapshot's folder, whole or not at all: its weights in this type, which are hashed
    while they are written.

    Raises:
        LossNotFinite: a weight is beyond what the type holds.
    """
    weights = _Weights(checkpoint, getattr(torch, dtype))
    with written(folder) as place:
        pieces = {
            CONFIG: [_config_of(checkpoint, base_name)],
            STATE: [_state_of(checkpoint)],
            WEIGHTS: weights.pieces(),
        }
        hashes = {name: write_hashed(place / name, content) for name, content in pieces.items()}
    return Saved(
        folder=str(folder),
        size_bytes=size_of(folder),
        version=checkpoint.version,
        sha256=digest_of(hashes),
        largest=weights.largest * max(1.0, checkpoint.layout.scale),
    )


def write_checkpoint(folder: Path, base_name: str, checkpoint: Checkpoint) -> Saved:
    """Write a folder that training can come back to, whole or not at all."""
    layout, adam = checkpoint.layout, checkpoint.adam
    with written(folder) as place:
        (place / CONFIG).write_bytes(_config_of(checkpoint, base_name))
        (place / STATE).write_bytes(_state_of(checkpoint))
        _save(layout.named(checkpoint.flat), place / WEIGHTS)
        if adam is not None:
            moments = {"first": adam.first, "second": adam.second}
            named = {kind: layout.named(moment) for kind, moment in moments.items()}
            _save(
                {f"{kind}.{n}": t for kind, found in named.items() for n, t in found.items()},
                place / OPTIMIZER,
            )
    return Saved(folder=str(folder), size_bytes=size_of(folder), version=checkpoint.version)


def read_checkpoint(folder: Path, base: BaseModel, *, optimizer: bool) -> Checkpoint:
    """Read a folder: one of ours, or (without the optimiser) any plain PEFT adapter that fits; that
    one has version 0.

    Raises:
        NotFound: a file that is needed is missing.
        InvalidData: unreadable, made for another base model, or asking for what this engine does
            not compute.
    """
    check_files(folder, optimizer)
    tensors, state = _load(folder / WEIGHTS), read_state(folder)
    if state is None:
        return _read_foreign(folder, tensors, base)
    layout, adam = Layout.of(base, state.lora), None
    if optimizer:
        moments = _load(folder / OPTIMIZER)
        first, second = (
            _flat(
                layout,
                {n.removeprefix(kind): t for n, t in moments.items() if n.startswith(kind)},
                base,
                folder,
            )
            for kind in ("first.", "second.")
        )
        adam = AdamState(first, second, state.adam_steps)
    return Checkpoint(
        layout=layout, flat=_flat(layout, tensors, base, folder), version=state.version, adam=adam
    )


class _Weights:
    """A snapshot's safetensors file, as pieces; its tensors lie there as in the flat buffer."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._checkpoint, self._dtype = checkpoint, dtype
        self.largest = 0.0  # magnitude of the numbers in the pieces so far

    def pieces(self) -> Iterator[bytes | memoryview]:
        """The header, then the numbers. LossNotFinite where the type does not hold one."""
        yield self._header()
        most = torch.finfo(self._dtype).max
        for piece in self._checkpoint.flat.detach().split(NUMBERS_AT_A_TIME):
            rounded = piece.to("cpu", self._dtype)
            magnitude = max(abs(float(end)) for end in rounded.aminmax())
            # of a NaN no comparison is true
            if not magnitude <= most:
                raise LossNotFinite(
                    "The weights cannot be published.",
                    f"One is beyond {most:.3g}, the largest number of {self._dtype}.",
                    "They have diverged: go on from an earlier checkpoint.",
                )
            self.largest = max(self.largest, magnitude)
            yield rounded.view(torch.uint8).numpy().data

    def _header(self) -> bytes:
        flat, size = self._checkpoint.flat, self._dtype.itemsize
        tensors = dict[str, dict[str, object]]()
        for name, tensor in self._checkpoint.layout.named(flat).items():
            begins = size * (tensor.storage_offset() - flat.storage_offset())
            tensors[name] = {
                "dtype": _SAFETENSORS[self._dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begins, begins + size * tensor.numel()],
            }
        header = json.dumps(tensors, separators=(",", ":")).encode()
        # the numbers begin at a multiple of 8
        header += b" " * (-len(header) % 8)
        return struct.pack("<Q", len(header)) + header


_SAFETENSORS = {torch.float32: "F32", torch.bfloat16: "BF16"}


def _load(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise _unreadable(file.parent, error) from error


def _unreadable(folder: Path, error: Exception) -> InvalidData:
    return InvalidData(
        f"The checkpoint {folder} cannot be read.", f"{error}.", "Use another checkpoint."
    )


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    """safetensors raises errors of its own for what the disk refuses; they become OSError like all
    others.
    """
    try:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, file)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _flat(layout: Layout, tensors: Mapping[str, Tensor], base: BaseModel, folder: Path) -> Tensor:
    flat = torch.zeros(layout.size)
    views = layout.named(flat)
    wrong = sorted(
        name
        for name, view in views.items()
        if name not in tensors or tensors[name].shape != view.shape
    )
    if wrong or len(tensors) != len(views):
        raise InvalidData(
            f"The checkpoint {folder} does not fit this base model.",
            f"{len(wrong)} of {len(views)} tensors are missing or of another shape, {wrong[0]} "
            "first."
            if wrong
            else f"It holds {len(tensors)} tensors, its configuration asks for {len(views)}.",
            "Load it with the base model it was trained on.",
        )
    for name, view in views.items():
        view.copy_(tensors[name])
    if not all(math.isfinite(float(end)) for end in flat.aminmax()):
        raise InvalidData(
            f"The checkpoint {folder} cannot be used.",
            "It holds a NaN or infinite value.",
            "Use an earlier one.",
        )
    return flat.to(base.device)


def _state_of(checkpoint: Checkpoint) -> bytes:
    steps = 0
    if checkpoint.adam is not None:
        steps = checkpoint.adam.steps
    state = State(version=checkpoint.version, lora=checkpoint.layout.config, adam_steps=steps)
    return msgspec.json.format(msgspec.json.encode(state))


def _config_of(checkpoint: Checkpoint, base_name: str) -> bytes:
    """PEFT's LoraConfig; alpha as an integer where it is one, as other readers expect."""
    layout = checkpoint.layout
    config = layout.config
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(
            {part.module.rpartition(".")[2] for one in layout.projections for part in one.parts}
        ),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
    }
    return json.dumps(content, indent=2).encode()


def _read_foreign(folder: Path, tensors: Mapping[str, Tensor], base: BaseModel) -> Checkpoint:
    """An adapter without optimiser, its missing modules zero."""
    layout = Layout.of(base, foreign_shape(folder, tensors))
    flat = torch.zeros(layout.size)
    views = layout.named(flat)
    found = {
        canonical(name): tensor
        for name, tensor in tensors.items()
        if not _is_a_copy(name, tensor, base)
    }
    for name, tensor in found.items():
        other, flaw = name.replace(".lora_A.", ".lora_B."), ""
        if other == name:
            other = name.replace(".lora_B.", ".lora_A.")
        if name not in views:
            flaw = f"'{name}' is no LoRA tensor of a module that the base model has."
        elif not tensor.is_floating_point() or tensor.shape != views[name].shape:
            flaw = (
                f"'{name}' is {tensor.dtype} of shape {list(tensor.shape)}, not "
                f"{list(views[name].shape)}."
            )
        elif other not in found:
            flaw = f"'{name}' is there and '{other}' is not."
        elif not bool(torch.isfinite(tensor).all()):
            flaw = f"'{name}' holds a NaN or infinite value."
        if flaw:
            raise InvalidData(
                f"The adapter in {folder} does not fit this base model.",
                flaw,
                "Load it with the base model it was trained on, and export it again if it is "
                "damaged.",
            )
        views[name].copy_(tensor)
    return Checkpoint(layout=layout, flat=flat.to(base.device), version=0, adam=None)


def _is_a_copy(name: str, tensor: Tensor, base: BaseModel) -> bool:
    """PEFT writes embeddings beside an adapter of lm_head, unchanged ones too; those say
    nothing.
    """
    module = (
        name.removeprefix("base_model.model.").removesuffix(".weight").removesuffix(".base_layer")
    )
    own = {"model.embed_tokens": base.embedding_VD, "lm_head": base.head.weight_ED}.get(module)
    if own is None or own.shape != tensor.shape:
        return False
    # it may have been rounded to bfloat16
    return torch.allclose(tensor.to(own), own, rtol=2**-8, atol=1e-6)


class _Head(msgspec.Struct):
    """Of a checkpoint, what is no tensor."""

    config: LoraConfig
    version: int
    steps: int | None  # of the optimiser; None: fresh


def shared(ranks: Ranks, own: Checkpoint | None, base: BaseModel) -> Checkpoint:
    """The checkpoint that rank 0 has read, on every rank; the others have none of their own."""
    head = b""
    if own is not None:
        steps = None
        if own.adam is not None:
            steps = own.adam.steps
        head = encode(_Head(own.layout.config, own.version, steps))
    first = decode(ranks.exchange(head)[0], type=_Head)
    made: Checkpoint | HalteresError
    if own is None:
        made = attempt("load", partial(_empty, first, base))
    else:
        made = own
    # where one has no memory for it, none waits for numbers
    found = ranks.agreed(made)
    if isinstance(found, HalteresError):
        raise found
    ranks.copy(found.flat)
    if found.adam is not None:
        ranks.copy(found.adam.first)
        ranks.copy(found.adam.second)
    return found


def _empty(head: _Head, base: BaseModel) -> Checkpoint:
    """A checkpoint like that one, whose numbers are to come."""
    layout = Layout.of(base, head.config)

    def empty() -> Tensor:
        return torch.empty(layout.size, device=base.device)

    adam = None
    if head.steps is not None:
        adam = AdamState(empty(), empty(), head.steps)
    return Checkpoint(layout=layout, flat=empty(), version=head.version, adam=adam)


class Files:
    """Writes folders one after the other, and reads them, in the background; called from one
    thread.
    """

    def __init__(self) -> None:
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._readers = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="reading")
        self._newest: dict[Path, Future[Any]] = {}  # of each folder that is not written yet

    def write(self, folder: Path, work: Callable[[], T]) -> Future[T]:
        """Queue the writing of a folder."""
        self._newest = {
            place: pending for place, pending in self._newest.items() if not pending.done()
        }
        future = self._writer.submit(work)
        self._newest[folder.absolute()] = future
        return future

    def pending(self, folder: Path) -> Future[Any] | None:
        """Done once what was queued for this folder is written, or has failed; None if nothing
        was.
        """
        return self._newest.get(folder.absolute())

    def read(self, work: Callable[[], T]) -> Future[T]:
        """Queue the reading of a folder."""
        return self._readers.submit(work)

    def close(self) -> None:
        """End once everything is written; nobody waits any more for what is being read."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=True)
