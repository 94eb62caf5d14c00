"""The base model that a service serves, and how much memory of the engine its adapters and
snapshots may take.

Each half of the budget is one kind's: many publishes push no adapter out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from halteres.config import environ
from halteres.engine.protocol import LoraConfig
from halteres.errors import NotFound, nearest, shortened
from halteres.models import builtin_names, builtin_path, model_folder, names_of, stored_models
from halteres.models.shape import ModelShape, adapter_numbers, diagonal_numbers, read_shape
from halteres.process import main_memory

LONGEST_PATH = 4096  # characters; every part of one is looked up on disk
NUMBER = 4  # bytes of a number; adapters are fp32
SHARE = 4  # the default budget is one part in so many of the memory that the base model leaves free
LEAST = 1 << 29  # bytes of the default budget where little is free, or nobody knows how much
# adapters and snapshots, half of them each, that a budget is for where the model's shape cannot be
# read
UNKNOWN = 32

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BaseModel:
    """One base model: its name and its folder, which also holds the tokenizer."""

    name: str
    folder: Path  # absolute
    models_home: Path  # where other names of it may be registered, also while it is served

    @property
    def names(self) -> tuple[str, ...]:
        """Every name it answers to, its own first; its folder's path is another."""
        return tuple(dict.fromkeys((self.name, *names_of(self.folder, self.models_home))))

    def answers_to(self, name: str) -> bool:
        """Whether a client's name means this model: its name, its folder's path, a name registered
        for that folder.
        """
        if name in (self.name, str(self.folder)):
            return True
        if not name.startswith("/") or len(name) > LONGEST_PATH:
            return name in self.names
        try:
            return Path(name).resolve() == self.folder.resolve()
        except (OSError, ValueError):  # no path at all: too long, a zero byte
            return False

    def check(self, name: str) -> str:
        """The name as the client wrote it: the SDK finds the tokenizer by that name or folder."""
        if self.answers_to(name):
            return name
        raise NotFound(
            f"There is no base model '{shortened(name)}' here.",
            f"This service serves '{self.name}' (folder {self.folder}).",
            "Name that one, or start a service with --model.",
            did_you_mean=nearest(name, self.names),
            allowed=[*self.names, str(self.folder)],
        )


def base_model(name: str) -> BaseModel:
    """The base model behind a built-in name, a name in the store, or a folder; NotFound where it is
    none of them.
    """
    models_home = environ.home() / "models"
    folder = model_folder(name, models_home)
    if folder is None:
        there = Path(name).expanduser()
        place = there if there.is_absolute() or there.is_dir() else models_home / name
        known = [*builtin_names(), *(stored for stored, _ in stored_models(models_home))]
        raise NotFound(
            f"There is no model '{name}'.",
            f"{place.absolute()} holds no config.json.",
            f"Name a folder in Hugging Face format or one of {', '.join(known)}, or register one: "
            "`halteres models add`"
            " (a folder, a GGUF file, a name of the hub).",
            did_you_mean=nearest(name, known),
            allowed=known,
        )
    is_name = builtin_path(name) is not None or folder.is_relative_to(models_home)
    return BaseModel(
        name if is_name and not Path(name).is_absolute() else str(folder), folder, models_home
    )


class HasLora(Protocol):
    """An adapter or a snapshot."""

    lora: LoraConfig | None


H = TypeVar("H", bound=HasLora)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsBudget:
    """Bytes for all adapters and snapshots in the engine. Whatever is in use stays, also beyond
    it.
    """

    total: int
    shape: ModelShape | None  # of the base model; None: unknown

    @classmethod
    def of(cls, folder: Path, total: int | None = None) -> WeightsBudget:
        """For the base model in this folder; without a total, by what is free now, before the model
        is loaded.
        """
        try:
            shape = read_shape(folder)
        except (OSError, ValueError) as error:
            log.warning("Adapters are counted, not weighed: %s.", error)
            shape = None
        if total is None:
            loaded = NUMBER * shape.parameters if shape else 0
            total = max(LEAST, ((main_memory().free or 0) - loaded) // SHARE)
        return cls(total=total, shape=shape)

    def bytes_of(self, lora: LoraConfig | None, *, trained: bool) -> int:
        """Of a snapshot: weights, and its B's once more; of an adapter that is trained two
        gradients and two moments too. As if it were on every projection; one that is not made yet
        weighs nothing.
        """
        if self.shape is None:
            return self.total // UNKNOWN
        rank, copies = lora.rank if lora else 0, 5 if trained else 1
        return NUMBER * (
            copies * adapter_numbers(self.shape, rank) + diagonal_numbers(self.shape, rank)
        )

    def evict(
        self, held: dict[str, H], may_leave: Callable[[H], bool], *, trained: bool
    ) -> list[H]:
        """Take those out of `held`, from its beginning, that have to leave the engine so that the
        rest fits.
        """
        # one half is for adapters, the other for snapshots
        excess, leaving = -(self.total // 2), list[H]()
        excess += sum(self.bytes_of(one.lora, trained=trained) for one in held.values())
        for name, one in list(held.items()):
            if excess > 0 and may_leave(one):
                excess -= self.bytes_of(one.lora, trained=trained)
                leaving.append(held.pop(name))
        return leaving
