"""Base models: those on this disk and well-known ones; which of them fit into this machine, and by
how much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from halteres.models import builtin_names, model_folder, stored_models
from halteres.models.shape import ModelShape, read_shape
from halteres.runs.planning import resources
from halteres.runs.planning.models import models_home
from halteres.runs.planning.resources import Workload, need

_COLUMNS = (
    *(
        "family",
        "layers",
        "width",
        "feed",
        "vocabulary",
        "heads",
        "kv_heads",
        "head_width",
        "context",
        "tied",
    ),
)
CATALOGUE: Mapping[str, ModelShape] = {
    str(name): ModelShape(**dict[str, Any](zip(_COLUMNS, shape, strict=True)))
    for name, *shape in (
        ("Qwen/Qwen3-0.6B", "qwen3", 28, 1024, 3072, 151_936, 16, 8, 128, 40_960, True),
        ("Qwen/Qwen3-1.7B", "qwen3", 28, 2048, 6144, 151_936, 16, 8, 128, 40_960, True),
        ("Qwen/Qwen3-4B", "qwen3", 36, 2560, 9728, 151_936, 32, 8, 128, 40_960, True),
        ("Qwen/Qwen3-8B", "qwen3", 36, 4096, 12_288, 151_936, 32, 8, 128, 40_960, False),
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2", 24, 896, 4864, 151_936, 14, 2, 64, 32_768, True),
        ("Qwen/Qwen2.5-1.5B-Instruct", "qwen2", 28, 1536, 8960, 151_936, 12, 2, 128, 32_768, True),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2", 28, 3584, 18_944, 152_064, 28, 4, 128, 32_768, False),
        (
            "meta-llama/Llama-3.2-1B-Instruct",
            "llama",
            16,
            2048,
            8192,
            128_256,
            32,
            8,
            64,
            131_072,
            True,
        ),
        (
            "meta-llama/Llama-3.2-3B-Instruct",
            "llama",
            28,
            3072,
            8192,
            128_256,
            24,
            8,
            128,
            131_072,
            True,
        ),
        (
            "meta-llama/Llama-3.1-8B-Instruct",
            "llama",
            32,
            4096,
            14_336,
            128_256,
            32,
            8,
            128,
            131_072,
            False,
        ),
    )
}
"""Shapes by the name under which they are published."""

TYPICAL = Workload(
    rank=16, group_size=8, batch_size=64, rows=64, positions=1024, answer_tokens=512, steps=1
)
"""The run that memory is reckoned for where no other is given: LoRA of rank 16, 64 answers at once
of 1,024 tokens.
"""

Fits = Literal["yes", "no", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A base model, as far as it is known without loading it."""

    name: str  # for inference.model
    folder: Path | None  # None: not on this disk
    parameters: int
    size_gb: float  # of the weights on disk; of one that is not here: in 16 bits
    need_gb: float  # memory at the peak of a run; where the model lies
    free_gb: float | None  # of that memory, now
    fits: Fits
    note: str = ""

    @property
    def present(self) -> bool:
        """Whether it is on this disk."""
        return self.folder is not None

    @property
    def spare_gb(self) -> float | None:
        """What would be left; negative: what is missing."""
        if self.free_gb is None:
            return None
        return round(self.free_gb - self.need_gb, 2)

    @property
    def facts(self) -> dict[str, Any]:
        """As an answer has it."""
        names = (
            "name",
            "present",
            "parameters",
            "size_gb",
            "need_gb",
            "free_gb",
            "fits",
            "spare_gb",
        )
        return {name: getattr(self, name) for name in names} | (
            {"note": self.note} if self.note else {}
        )


def known_models(
    work: Workload = TYPICAL, there: resources.Machine | None = None
) -> tuple[KnownModel, ...]:
    """Every model that is here or well known, the smallest first.

    Args:
        work: the run that memory is reckoned for.
        there: the machine it is to fit; default: this one, now.
    """
    there = there or resources.this_machine()
    here = dict(_here())
    owned = {name.rpartition("/")[2].lower() for name in here}
    found = [_on_disk(name, folder, work, there) for name, folder in here.items()]
    found += [
        _sized(name, None, shape, work, there)
        for name, shape in CATALOGUE.items()
        if name.rpartition("/")[2].lower() not in owned
    ]
    return tuple(sorted(found, key=lambda model: (model.parameters, model.name)))


def proposed(models: tuple[KnownModel, ...] | None = None) -> KnownModel:
    """The smallest model that is here and fits; if none fits, the smallest that is here."""
    here = [model for model in models or known_models() if model.present and model.parameters]
    return next((model for model in here if model.fits != "no"), here[0])


def _here() -> Iterator[tuple[str, Path]]:
    builtin = {
        name: folder
        for name in builtin_names()
        if (folder := model_folder(name, models_home())) is not None
    }
    yield from builtin.items()
    own = {folder.resolve() for folder in builtin.values()}
    yield from (
        (name, folder)
        for name, folder in stored_models(models_home())
        if folder.resolve() not in own
    )


def _on_disk(name: str, folder: Path, work: Workload, there: resources.Machine) -> KnownModel:
    try:
        return _sized(name, folder, read_shape(folder), work, there)
    except (OSError, ValueError) as error:
        return KnownModel(
            name=name,
            folder=folder,
            parameters=0,
            size_gb=0.0,
            need_gb=0.0,
            free_gb=resources.gb(there.model_memory.free),
            fits="no",
            note=f"not whole: {error}",
        )


def _sized(
    name: str, folder: Path | None, shape: ModelShape, work: Workload, there: resources.Machine
) -> KnownModel:
    needed, free = need(shape, work, on_gpu=there.gpu is not None).total, there.model_memory.free
    fits: Fits
    if free is None:
        fits = "unknown"
    elif needed <= free:
        fits = "yes"
    else:
        fits = "no"
    note = ""
    if not folder:
        note = (
            f"not on this disk: `halteres models add {name}`, or set model to the path of its "
            "folder"
        )
    if not shape.is_decoder:
        fits, note = (
            "no",
            f"'{shape.architecture}', of model_type '{shape.family}', is no causal language model",
        )
    return KnownModel(
        name=name,
        folder=folder,
        parameters=shape.parameters,
        size_gb=round((shape.size_bytes or 2 * shape.parameters) / 1e9, 3),
        need_gb=round(needed / 1e9, 2),
        free_gb=resources.gb(free),
        fits=fits,
        note=note,
    )
