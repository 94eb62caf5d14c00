"""The folders of named weights: their tinker:// paths, adapters copied under other tensor names or
taken in.

STATE/checkpoints/<training run, ':' as '_'>/<kind>/<name>/

Source of the file format: https://huggingface.co/docs/safetensors: 8 bytes with the header's length
(little endian), a JSON header padded with spaces, the data that the header's offsets count from.

An engine names the unembedding's tensors `base_model.model.lm_head…`, as PEFT, vLLM and SGLang do.
tinker-cookbook 0.6.1 finds the weight to merge into by the base model's files: `lm_head` where
there is a weight of that name; where it is tied to the embedding there is none, and only the Tinker
API's own name, `base_model.model.model.unembed_tokens…`, is merged (into the embedding). So that is
the name in an export from a tied model; PEFT reads it with `key_mapping={"model.unembed_tokens":
"lm_head"}`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import msgspec
from safetensors import SafetensorError, safe_open

from halteres.engine.folders import written
from halteres.engine.protocol import LoraConfig
from halteres.engine.shapes import State, check_shape, check_unlinked, foreign_shape, read_state
from halteres.errors import Conflict, InvalidData, NotFound, UserError, shortened
from halteres.files import UnreadableFile, read_json
from halteres.models.shape import HEAD, tensor_headers, weight_files
from halteres.service.keys import LOCAL, Tenant
from halteres.service.keys import checked_name as checked_tenant

Kind = Literal["weights", "sampler_weights", "external_weights"]

KINDS: tuple[Kind, ...] = get_args(Kind)

LOADABLE: tuple[Kind, ...] = ("weights", "sampler_weights")
"""What this service trains from and samples; external weights are files for others, perhaps
encrypted.
"""

SHORTEST_S = 3600
LONGEST_S = 10 * 366 * 24 * 3600  # ten years, however many of them are leap years

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,127}")
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")


@dataclass(frozen=True, slots=True)
class TinkerPath:
    """A parsed tinker:// path."""

    run: str  # training run id
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    def folder(self, state: Path) -> Path:
        """Where it lies."""
        return state / "checkpoints" / self.run.replace(":", "_") / self.kind / self.name


def parse(path: str) -> TinkerPath:
    """Read a tinker:// path; InvalidData where it is none.

    >>> parse("tinker://r1/weights/final").name
    'final'
    """
    scheme, _, rest = path.partition("://")
    parts, what = rest.split("/"), f"'{shortened(path)}' is no path of weights."
    kind: Kind | None = next((kind for kind in KINDS if parts[1:2] == [kind]), None)
    if scheme != "tinker" or len(parts) != 3 or kind is None:
        forms = (
            "tinker://TRAINING_RUN/weights/NAME, …/sampler_weights/NAME or …/external_weights/NAME"
        )
        raise InvalidData(what, next=f"Write {forms}.")
    if not _RUN.fullmatch(parts[0]) or not _NAME.fullmatch(parts[2]):
        raise InvalidData(what, "Its run or name holds a character that none can have.")
    return TinkerPath(parts[0], kind, parts[2])


def folder_of(state: Path, tinker_path: str) -> Path:
    """The folder that a tinker:// path stands for, in a service's state directory; it need not
    exist.
    """
    return parse(tinker_path).folder(state)


def checked_name(name: str | None) -> str:
    """A name that weights can have."""
    if not name or not _NAME.fullmatch(name):
        raise InvalidData(
            f"'{shortened(name or '')}' cannot name a checkpoint.",
            "It may have letters, digits and . _ + = @ -, up to 128, and no '/'; it begins with a "
            "letter, digit or _.",
            "Choose another name.",
        )
    return name


def checked_run(run: str) -> str:
    """A training run id that weights can be named under."""
    if not _RUN.fullmatch(run):
        raise InvalidData(
            f"'{shortened(run)}' cannot name a training run.",
            "It may have letters, digits and _ . : -.",
        )
    return run


def checked_ttl(ttl_s: int | None) -> int | None:
    """A time to live in seconds; None is for ever."""
    if ttl_s is not None and not SHORTEST_S <= ttl_s <= LONGEST_S:
        raise InvalidData(
            f"A checkpoint cannot expire after {ttl_s} s.",
            f"ttl_seconds is {SHORTEST_S} (an hour) to {LONGEST_S} (ten years).",
            "Choose another, or leave it out: the checkpoint then stays until it is deleted.",
        )
    return ttl_s


def end_of_life(ttl_s: int | None, now: float) -> float | None:
    """When a checkpoint that is made now expires, unix s; None: never."""
    return None if ttl_s is None else now + ttl_s


def refuse_token(token: str | None) -> None:
    """Weights are shared by publishing them; there are no access tokens, and none is ignored."""
    if token:
        raise UserError(
            "This service has no weights access tokens.",
            "Weights of another owner can be read here only while they are public.",
            "Ask their owner to publish them (tinker checkpoint publish PATH), and send no token.",
        )


CONFIG, WEIGHTS, STATE, CARD = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "state.json",
    "checkpoint.json",
)

FILES = (CONFIG, WEIGHTS)  # an adapter as PEFT knows it
RESUMABLE = (STATE, "optimizer.safetensors")  # what our own checkpoints have beside the adapter
ADDED_RUN = "added"  # the training run that adapters of others are named under, unless another is

_HEAD, _TINKER_HEAD = "base_model.model.lm_head.", "base_model.model.model.unembed_tokens."


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """checkpoint.json: what is known of weights that somebody else made."""

    path: str  # tinker://
    lora: LoraConfig
    tenant: Tenant = LOCAL
    version: int = 0
    base_model: str = ""  # "" is whatever is served


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    base_model_name_or_path: str | None = None


def read_card(path: TinkerPath, folder: Path) -> Card | None:
    """What a folder says of itself; None where there is none, or it says too little."""
    try:
        if os.path.lexists(folder / CARD):
            card = read_json(folder / CARD, Card, linked=False)
            return card if card.path == str(path) and (folder / CONFIG).is_file() else None
        state = read_json(folder / STATE, State, linked=False)
        config = read_json(folder / CONFIG, _Config)
    except UnreadableFile:
        return None
    base_model = config.base_model_name_or_path or ""
    return Card(path=str(path), lora=state.lora, version=state.version, base_model=base_model)


def add_adapter(
    folder: Path, name: str, state: Path, *, run: str = ADDED_RUN, tenant: Tenant = LOCAL
) -> TinkerPath:
    """Copy a PEFT folder into a service's state directory, also while the service runs; returns its
    path from now on. Of our own checkpoints the optimiser comes along. NotFound where it is no PEFT
    folder, InvalidData where this service cannot compute it, Conflict where the name is taken.
    """
    path = TinkerPath(checked_run(run), "weights", checked_name(name))
    check_adapter(folder)
    check_unlinked(folder)
    if (own := read_state(folder)) is not None:
        check_shape(own.lora)
        tensor_names(folder / WEIGHTS)
        version, lora = own.version, own.lora
    else:  # a foreign adapter
        version, lora = 0, foreign_shape(folder, tensor_names(folder / WEIGHTS))
    target = path.folder(state)
    if target.exists():
        raise Conflict(
            f"{path} exists.", "Saved weights are not replaced by accident.", "Choose another name."
        )
    card = Card(path=str(path), lora=lora, tenant=checked_tenant(tenant), version=version)
    with written(target) as place:
        for file in (*FILES, *RESUMABLE):
            if (folder / file).is_file():
                shutil.copyfile(folder / file, place / file)
        (place / CARD).write_bytes(msgspec.json.encode(card))
    return path


def check_adapter(folder: Path) -> None:
    """Raise NotFound unless the folder holds an adapter's two files."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if not missing:
        return
    if (folder / "adapter_model.bin").is_file():
        raise InvalidData(
            f"The adapter in {folder} is a pickle.",
            "adapter_model.bin may run code when it is read.",
            "Save it again with safe_serialization=True.",
        )
    raise NotFound(
        f"{folder} is no PEFT folder.",
        f"It lacks {', '.join(missing)}.",
        "Name a folder that has both.",
    )


def copy_adapter(source: Path, target: Path, *, for_tinker: Path | None = None) -> None:
    """Copy the adapter's two files into a folder that exists, named for PEFT, vLLM and SGLang; or
    `for_tinker`, a base model in whose files tinker-cookbook is to find each weight.
    """
    old, new = (
        (_HEAD, _TINKER_HEAD)
        if for_tinker and not has_own_head(for_tinker)
        else (_TINKER_HEAD, _HEAD)
    )
    check_adapter(source)
    shutil.copyfile(source / CONFIG, target / CONFIG)
    rename_tensors(
        source / WEIGHTS,
        target / WEIGHTS,
        lambda name: new + name.removeprefix(old) if name.startswith(old) else name,
    )


def has_own_head(base: Path) -> bool:
    """Whether the files of a base model hold a weight of the unembedding, or it is tied to the
    embedding.
    """
    try:
        return any(HEAD in tensor_headers(file) for file in weight_files(base))
    except (OSError, ValueError) as error:
        raise InvalidData(
            f"The base model in {base} cannot be read.", f"{error}.", "Download it again."
        ) from error


def tensor_names(file: Path) -> set[str]:
    """The names in a safetensors file; InvalidData where it is none."""
    try:
        with safe_open(file, "numpy") as tensors:
            return set(tensors.keys())
    except SafetensorError as error:
        raise InvalidData(
            f"{file} is no safetensors file.", f"{error}.", "Export it again."
        ) from error


def rename_tensors(source: Path, target: Path, renamed: Callable[[str], str]) -> None:
    """Copy a safetensors file with every tensor under its new name."""
    tensor_names(source)  # it is whole
    with source.open("rb") as reading, target.open("wb") as writing:
        header = json.loads(reading.read(int.from_bytes(reading.read(8), "little")))
        facts = {
            name if name == "__metadata__" else renamed(name): facts
            for name, facts in header.items()
        }
        text = json.dumps(facts, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        writing.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(reading, writing, 2**20)
