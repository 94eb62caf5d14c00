"""Which adapters vLLM may be given, and the folders that it reads them from.

It takes a matrix of a wrong width, numbers that are not finite and an adapter of the unembedding
without a word, and computes something else, also for others. So nothing is loaded that was not
looked at here.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import msgspec
import numpy as np
from safetensors.numpy import save_file

from halteres.engine.protocol import Weights, WeightsDamaged
from halteres.engine.shapes import CONFIG, WEIGHTS, kind_of, module_of, read_adapter_config
from halteres.errors import InvalidConfig, InvalidData, ServerError
from halteres.files import linked, open_regular
from halteres.models.shape import read_config, tensor_headers, weight_files

TARGETS = ("attn", "mlp")
"""What an adapter may be on: vLLM ignores that of an unembedding, or ends by it."""

NUMBERS = {"F32": 4, "F16": 2, "BF16": 2}  # bytes of the types that an adapter may have
MAGNITUDE = {"F32": ("<u4", 0x7FFFFFFF), "F16": ("<u2", 0x7FFF), "BF16": ("<u2", 0x7FFF)}
"""All bits but the sign. As whole numbers they are in the order of the magnitudes, whatever the
type; infinity and NaN are beyond all others.
"""

LARGEST = {"float32": 3.4028234e38, "bfloat16": 3.3895313e38, "float16": 65504.0}
"""Numbers that a vLLM computing in this type holds: larger ones become infinite there."""

EARLIER = "Use an earlier one."

MOST_HEADER = 1 << 26  # bytes
CHUNK = 1 << 22  # bytes that are looked through at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Projections:
    """The base model's matrices that an adapter may be on."""

    sizes: Mapping[str, tuple[int, int]]  # outputs and inputs, by module
    vocabulary: int
    context: int  # tokens that the model was made for
    architecture: str

    @classmethod
    def of(cls, folder: Path) -> Projections:
        """Those of the model in a folder, by the headers of its weights. InvalidConfig where they
        cannot be read.
        """
        try:
            config = read_config(folder)
            headers = {
                name: one
                for file in weight_files(folder)
                for name, one in tensor_headers(file).items()
            }
        except (OSError, ValueError) as error:
            raise InvalidConfig(
                f"The model in {folder} cannot be sampled by vLLM.", f"{error}."
            ) from error
        sizes = {
            name.removesuffix(".weight"): (one.sizes[0], one.sizes[1])
            for name, one in headers.items()
            if name.endswith("_proj.weight") and len(one.sizes) == 2
        }
        if not sizes or not isinstance(config.get("vocab_size"), int):
            raise InvalidConfig(
                f"The model in {folder} cannot be sampled by vLLM.",
                "None of its weights is called like a projection (q_proj, up_proj, ...), which "
                "adapters are on.",
                "Let the engine sample: leave vllm out of inference.samplers.",
            )
        kinds = config.get("architectures") or ("",)
        return cls(
            sizes=sizes,
            vocabulary=config["vocab_size"],
            context=int(config.get("max_position_embeddings") or 0),
            architecture=str(kinds[0]),
        )

    @property
    def targets(self) -> list[str]:
        """Their names without layers, as `--lora-target-modules` wants them."""
        return sorted({module.rpartition(".")[2] for module in self.sizes})


def check_adapter(
    folder: Path, base: Projections, max_rank: int, most: float, largest: float | None = None
) -> None:
    """Refuse an adapter that vLLM would compute wrongly, or end by.

    Args:
        folder: PEFT.
        max_rank: of the server.
        most: magnitude of numbers that it computes with.
        largest: magnitude in the folder, as `protocol.Weights` has it; None: every number is read.

    Raises:
        InvalidData: its shape is not the base model's, or a number is not finite or too large.
        WeightsDamaged: a file is missing or cut off.
    """
    _check_is_there(folder)
    settings = read_adapter_config(folder)
    rank = settings["r"]
    if rank > max_rank:
        _refuse(
            folder,
            f"Its rank is {rank}, and this vLLM takes up to {max_rank}.",
            "Train with a smaller rank, or give the sampler a larger one.",
        )
    with _opened(folder) as file:
        tensors, begins = _header(file, folder)
        _check_shapes(folder, tensors, base, rank)
        if largest is None:
            # vLLM keeps B times the scale
            scale = max(1.0, _scale(settings))
            for name, one in tensors.items():
                _check_numbers(folder, file, name, one, begins, most / scale)
        elif largest > most:
            _refuse(
                folder, f"It holds {largest:.3g}, and {most:.3g} is the largest there.", EARLIER
            )


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _opened(folder: Path) -> BinaryIO:
    try:
        return open_regular(folder / WEIGHTS)
    except OSError as error:
        raise WeightsDamaged(
            f"The weights in {folder} cannot be read.", f"{error.strerror or error}."
        ) from error


def _scale(settings: Mapping[str, Any]) -> float:
    """What B @ A is multiplied by."""
    if settings.get("use_rslora"):
        return settings["lora_alpha"] / math.sqrt(settings["r"])
    return settings["lora_alpha"] / settings["r"]


def _check_is_there(folder: Path) -> None:
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise WeightsDamaged(
                f"The weights in {folder} are not there.", f"{name} is missing.", "Publish others."
            )


def _header(file: BinaryIO, folder: Path) -> tuple[dict[str, _Tensor], int]:
    """The tensors of a safetensors file, and where their bytes begin."""
    try:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > MOST_HEADER:
            raise ValueError("its header is too long")
        raw = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        tensors = {
            name: msgspec.json.decode(one, type=_Tensor, strict=True) for name, one in raw.items()
        }
    except (struct.error, ValueError) as error:  # msgspec's errors are ValueErrors
        raise _damaged(folder, f"{error}") from error
    size = file.seek(0, 2)
    for name, one in tensors.items():
        begins, ends = one.data_offsets
        wanted = math.prod(one.shape) * NUMBERS.get(one.dtype, 0)
        if one.dtype in NUMBERS and ends - begins != wanted:
            raise _damaged(folder, f"'{name}' has {ends - begins} bytes, not {wanted}")
        if not 0 <= begins <= ends or 8 + length + ends > size:
            raise _damaged(folder, f"it ends before '{name}' does")
    return tensors, 8 + length


def _damaged(folder: Path, why: str) -> WeightsDamaged:
    return WeightsDamaged(
        f"The weights in {folder} are cut off or no safetensors file.",
        f"{why.rstrip('.')}.",
        "They are written again where the trainer still has them; else publish new ones.",
    )


def _check_shapes(
    folder: Path, tensors: Mapping[str, _Tensor], base: Projections, rank: int
) -> None:
    for name, one in tensors.items():
        module = module_of(name)
        if module and kind_of(module) == "unembed":
            _refuse(
                folder,
                f"'{name}' is of the unembedding, which vLLM ignores.",
                "Train adapters without it (train_unembed: false), or let the engine sample "
                "(`own` in inference.samplers).",
            )
        if not module or not name.startswith("base_model.model.") or module not in base.sizes:
            _refuse(folder, f"'{name}' is no LoRA tensor of a projection of the base model.")
        outputs, inputs = base.sizes[module]
        wanted, other = (outputs, rank), name.replace(".lora_B.", ".lora_A.")
        if ".lora_A." in name:
            wanted, other = (rank, inputs), name.replace(".lora_A.", ".lora_B.")
        if one.shape != wanted or one.dtype not in NUMBERS:
            _refuse(
                folder,
                f"'{name}' is {one.dtype} of shape {list(one.shape)}; the base model needs "
                f"{list(wanted)}.",
            )
        if other not in tensors:
            _refuse(folder, f"'{name}' is there without the other matrix of its product.")
    if not tensors:
        _refuse(folder, "It holds no tensor.")


def _check_numbers(
    folder: Path, file: BinaryIO, name: str, tensor: _Tensor, data_begins: int, most: float
) -> None:
    kind, magnitude = MAGNITUDE[tensor.dtype]
    limit = _bits(most, tensor.dtype)
    begins, ends = tensor.data_offsets
    file.seek(data_begins + begins)
    left = ends - begins
    while left:
        piece = file.read(min(CHUNK, left))
        left -= len(piece)
        if ((np.frombuffer(piece, kind) & magnitude) > limit).any():
            _refuse(folder, f"'{name}' holds a NaN, or a number beyond {most:.3g}.", EARLIER)


def _bits(most: float, kind: str) -> int:
    """Those of the largest number of this type that is not beyond `most`."""
    if kind == "F16":
        return int(np.float16(min(most, LARGEST["float16"])).view(np.uint16))
    whole = int(np.float32(min(most, LARGEST["float32"])).view(np.uint32))
    if kind == "BF16":
        return whole >> 16
    return whole


def _refuse(
    folder: Path, why: str, next: str = "Use an adapter that was made for this base model."
) -> NoReturn:
    raise InvalidData(f"The adapter in {folder} cannot be sampled by vLLM.", why, next)


class AdapterFolders:
    """Folders that vLLM reads adapters from, one per loaded name. They are links of the published
    ones where the disk can, so that a name keeps its bytes whatever becomes of those.
    """

    def __init__(self, place: Path) -> None:
        self._place = place  # nothing else writes there

    def path(self, name: str) -> Path:
        """The folder of this name."""
        return self._place / name

    def clear(self) -> None:
        """Remove those of an earlier life."""
        shutil.rmtree(self._place, ignore_errors=True)

    def make(self, name: str, source: Weights, folder: Path) -> Path:
        """The folder of this name. WeightsDamaged where the published one is gone."""
        target = self._place / name
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            for file in (CONFIG, WEIGHTS):
                (target / file).unlink(missing_ok=True)
                linked(str(folder / file), str(target / file))
        except FileNotFoundError as error:
            self.remove(name)
            raise WeightsDamaged(
                f"The weights {source.name} (policy version {source.version}) are gone.",
                f"{error.filename} is missing.",
                "They are written again where the trainer still has them; else publish new ones.",
            ) from error
        except OSError as error:
            self.remove(name)
            raise self._unwritable(error) from error
        return target

    def make_probe(self, name: str, base: Projections, rank: int) -> Path:
        """An adapter that adds nothing, on one projection."""
        module, (outputs, inputs) = next(iter(sorted(base.sizes.items())))
        target = self._place / name
        try:
            target.mkdir(parents=True, exist_ok=True)
            config = {
                "peft_type": "LORA",
                "r": rank,
                "lora_alpha": rank,
                "target_modules": [module.rpartition(".")[2]],
            }
            (target / CONFIG).write_text(json.dumps(config), encoding="utf-8")
            zeros = {
                f"base_model.model.{module}.lora_A.weight": np.zeros((rank, inputs), np.float32),
                f"base_model.model.{module}.lora_B.weight": np.zeros((outputs, rank), np.float32),
            }
            save_file(zeros, target / WEIGHTS)
        except OSError as error:
            raise self._unwritable(error) from error
        return target

    def remove(self, name: str) -> None:
        """Forget a name that is not loaded any more."""
        shutil.rmtree(self._place / name, ignore_errors=True)

    def _unwritable(self, error: OSError) -> ServerError:
        return ServerError(
            f"The folder {self._place} for a sampler's weights cannot be written.",
            f"{error.strerror or error}.",
            "Free space or make the place writable (inference.weights_folder).",
        )
