"""Base models in HALTERES_HOME/models: fetching, registering, listing and removing them; and the
entries of a Hugging Face cache by which clients find their tokenizers.

A model in the store is a link to its folder, or a folder made here (a copy, a converted file) that
carries the mark `.halteres-copy`; a folder that somebody put there by hand is never removed. A
cache's entry lets a name of ours resolve without a hub:

    CACHE/models--ORG--NAME/refs/main               the commit
    CACHE/models--ORG--NAME/snapshots/<commit>/     copies of config.json and of the tokenizer's
                                                    files
    CACHE/models--ORG--NAME/halteres.json           what makes it ours: {"commit": ..., "for":
                                                    [names of models]}

An entry that somebody else made, or a snapshot within one of ours, is never changed.
Source: the layout that huggingface_hub 2.4 reads. With HF_HUB_OFFLINE=1
`AutoTokenizer.from_pretrained(NAME)` asks for nothing more; a hub that is reached overrides the
entry.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from halteres.errors import Conflict, NotFound, NotReady, ServerError, UserError, boundary, nearest
from halteres.files import UnreadableFile, read_json, read_regular, replace_file
from halteres.models import builtin_path, is_model, stored_models
from halteres.models.shape import INDEX, ModelShape, read_shape, weight_files
from halteres.tokenizer import TEMPLATES, Tokenizer, end_token_file, tokenizer_files

_MARK = "halteres.json"
LLAMA_3_TOKENIZERS = (
    "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer",
    "baseten/Meta-Llama-3-tokenizer",
)
"""What clients load instead of a gated Llama 3 tokenizer: tinker 0.38.0 (sampling_client.py) and
tinker-cookbook 0.6.1 the first, seed 003 the second.
"""

_FORM = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_MAX_LENGTH = 96
_LLAMA_3 = "meta-llama/Llama-3"
_COPY = ".halteres-copy"
_DOWNLOADED = ["*.json", "*.jinja", "*.safetensors", "*.txt", "*.model"]
_NOT_DOWNLOADED = ["*/*", "consolidated*"]  # copies in other formats: onnx/, original/
_NAMED_TEMPLATES = [f"{TEMPLATES}/*.jinja"]


@dataclass(frozen=True, slots=True)
class HubCache:
    """A Hugging Face cache: the folder `hub`."""

    folder: Path

    def check(self, name: str, model: Path) -> None:
        """That the entry of this name is ours to write, or has the model's tokenizer already:
        Conflict where somebody else's has another, or cannot be resolved.
        """
        entry = self._entry(name)
        tokenizer, own = self._tokenizer(entry), model / "tokenizer.json"
        if _is_foreign(entry) and not (
            tokenizer and own.is_file() and tokenizer.read_bytes() == own.read_bytes()
        ):
            raise Conflict(
                f"The Hugging Face cache has another '{name}'.",
                f"{entry} was not made by `halteres models`, and its tokenizer is not the one in "
                f"{model}.",
                "Give another name with --as, or delete that folder if nothing needs it.",
            )

    def write(self, name: str, model: Path, needed_for: str) -> None:
        """Make the name resolve to the tokenizer of the model in this folder; somebody else's entry
        is left alone.
        """
        entry = self._entry(name)
        if _is_foreign(entry):
            return
        names = ["config.json", *tokenizer_files(model)]
        digest = hashlib.sha256()  # what a git commit is to the hub: it changes with the files
        for file in names:
            content = read_regular(model / file)
            digest.update(f"{file} {len(content)}\n".encode() + content)
        commit = digest.hexdigest()[:40]
        before = _read_mark(entry)
        (entry / "refs").mkdir(parents=True, exist_ok=True)
        # without one the mark holds, whatever comes between
        (entry / "refs" / "main").unlink(missing_ok=True)
        _write_mark(entry, commit, {*(before.models if before else ()), needed_for})
        if not (snapshot := entry / "snapshots" / commit).is_dir():
            with _writing(snapshot) as beside:
                _copy(model, names, beside)
        replace_file(entry / "refs" / "main", commit.encode())
        if before and before.commit != commit:
            shutil.rmtree(entry / "snapshots" / before.commit, ignore_errors=True)

    def release(self, model: str) -> None:
        """Remove the entries of ours that nothing but the model of this name needs."""
        for entry, mark in self._own_entries():
            if mark.models == {model}:
                shutil.rmtree(entry / "snapshots" / mark.commit, ignore_errors=True)
                (entry / "refs" / "main").unlink(missing_ok=True)
                (entry / _MARK).unlink()
                if not any((entry / "snapshots").glob("*")):
                    shutil.rmtree(entry)
            elif model in mark.models:
                _write_mark(entry, mark.commit, mark.models - {model})

    def resolves(self, name: str) -> bool:
        """Whether clients find a tokenizer by this name without a hub."""
        return self._tokenizer(self._entry(name)) is not None

    def models(self) -> frozenset[str]:
        """The models that have entries of ours."""
        return frozenset(name for _, mark in self._own_entries() for name in mark.models)

    def _entry(self, name: str) -> Path:
        return self.folder / f"models--{name.replace('/', '--')}"

    def _own_entries(self) -> Iterator[tuple[Path, _Mark]]:
        for file in sorted(self.folder.glob(f"models--*/{_MARK}")):
            if (mark := _read_mark(file.parent)) is not None:
                yield file.parent, mark

    @staticmethod
    def _tokenizer(entry: Path) -> Path | None:
        file = entry / "snapshots" / (_reference(entry) or ".") / "tokenizer.json"
        return file if file.is_file() else None


def _copy(source: Path, names: Iterable[str], place: Path) -> None:
    """Copy files of a folder, by their names in it."""
    for name in names:
        target = place / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target)


@contextmanager
def _writing(folder: Path) -> Iterator[Path]:
    """A new folder beside this one, to be filled; it becomes this one if the block succeeds. Its
    parents are made.
    """
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    beside.mkdir(parents=True)
    try:
        yield beside
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


class _Mark(msgspec.Struct, frozen=True, rename={"models": "for"}):
    commit: str  # 40 hex digits, of the files' contents
    models: set[str]  # names of the registered models that need it


def _read_mark(entry: Path) -> _Mark | None:
    """The entry's mark; None once a download has replaced what it marks."""
    try:
        mark = read_json(entry / _MARK, _Mark)
    except UnreadableFile:
        return None
    return mark if _reference(entry) in (mark.commit, None) else None


def _write_mark(entry: Path, commit: str, models: Collection[str]) -> None:
    replace_file(entry / _MARK, msgspec.json.encode({"commit": commit, "for": sorted(models)}))


def _is_foreign(entry: Path) -> bool:
    return any((entry / "snapshots").glob("*")) and _read_mark(entry) is None


def _reference(entry: Path) -> str | None:
    try:
        return (entry / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredModel:
    """A model that can be served by name."""

    name: str
    folder: Path  # absolute; in the store, or of the built-in model
    shape: ModelShape
    tokenizer_names: tuple[str, ...]  # that resolve in the Hugging Face cache
    end_tokens: tuple[int, ...]  # ids that its files name; those of no token end nothing
    end_token_file: str  # the file that names them

    @property
    def ends(self) -> bool:
        """A token ends its answers; without one they end at their longest."""
        return len(self.unknown_end_tokens) < len(self.end_tokens)

    @property
    def unknown_end_tokens(self) -> tuple[int, ...]:
        """Ids of end tokens that are beyond the vocabulary."""
        return tuple(token for token in self.end_tokens if token >= self.shape.vocabulary)


@dataclass(frozen=True, slots=True)
class ModelStore:
    """The folder of models, and the cache that makes their names known to clients."""

    folder: Path
    cache: HubCache

    def add(self, source: Path, name: str, *, copy: bool = False) -> RegisteredModel:
        """Put a model in the store, from its folder in Hugging Face format; safe to repeat.

        Args:
            name: what it is called from now on: 'name' or 'organisation/name'.
            copy: whether its files are copied, so that the folder may go.

        Raises:
            UserError: the folder holds no whole model that can be served, or the name cannot be.
            Conflict: another model has that name, here or in the Hugging Face cache.
        """
        name, shape = checked_name(name), checked_model(source)
        self._check_place(name, source)
        for known in tokenizer_names(name):
            self.cache.check(known, source)
        with boundary(ServerError, f"Registering '{name}'"):
            place = self.folder / name
            folder = builtin_path(name) or place
            if not folder.exists():
                place.unlink(missing_ok=True)  # a link whose model has gone
                place.parent.mkdir(parents=True, exist_ok=True)
                if copy:
                    names = [
                        "config.json",
                        *tokenizer_files(source),
                        *(file.name for file in weight_files(source)),
                    ]
                    names += [INDEX] if (source / INDEX).is_file() else []
                    with _writing(place) as beside:
                        _copy(source, names, beside)
                        (beside / _COPY).touch()
                else:
                    os.symlink(source.absolute(), place, target_is_directory=True)
            for known in tokenizer_names(name):
                self.cache.write(known, folder, name)
        return RegisteredModel(
            name=name,
            folder=folder,
            shape=shape,
            tokenizer_names=self._found_as(name),
            end_tokens=Tokenizer(folder).eos_token_ids,
            end_token_file=end_token_file(folder),
        )

    def add_written(self, write: Callable[[Path], None], name: str) -> RegisteredModel:
        """Put a model in the store that is written for it, into an empty folder: whole, or not at
        all. Raises as `add`, and as `write`.
        """
        place = self.folder / checked_name(name)
        self._check_place(name, None)
        # by a process that was killed while it wrote
        for left in place.parent.glob(f".{place.name}.*"):
            try:
                os.kill(int(left.suffix[1:]), 0)
            except ProcessLookupError:
                shutil.rmtree(left, ignore_errors=True)
            except PermissionError:
                pass  # it runs, as somebody else
        with boundary(ServerError, f"Writing the model '{name}'"), _writing(place) as beside:
            write(beside)
            checked_model(beside)
            for known in tokenizer_names(name):
                self.cache.check(known, beside)
            (beside / _COPY).touch()
            if place.is_symlink():  # to a model that has gone
                place.unlink()
        return self.add(place, name)

    def remove(self, name: str) -> None:
        """Take a model out of the store: its link or copy, and what it has in the Hugging Face
        cache. NotFound where nothing of this name is registered, Conflict where the folder was put
        there by hand.
        """
        place = self.folder / checked_name(name)
        if not self._is_registered(name) and place.is_dir():
            raise Conflict(
                f"'{name}' was put into the store by hand.",
                f"{place} holds the model itself; no `halteres models add` made it.",
                "Delete that folder yourself if it is to go.",
            )
        if not self._is_registered(name):
            known = list(self.registered())
            why = f"Registered: {', '.join(known) or 'none'}."
            raise NotFound(
                f"No model '{name}' is registered.",
                why,
                did_you_mean=nearest(name, known),
                allowed=known,
            )
        with boundary(ServerError, f"Removing '{name}'"):
            self.cache.release(name)
            if place.is_symlink():
                place.unlink()
            elif place.is_dir():
                shutil.rmtree(place)
            if (
                place.parent != self.folder
                and place.parent.is_dir()
                and not any(place.parent.iterdir())
            ):
                place.parent.rmdir()

    def registered(self) -> dict[str, tuple[str, ...]]:
        """The names that `add` has put here, each with those under which clients find its
        tokenizer.
        """
        stored = {name for name, _ in stored_models(self.folder) if self._is_registered(name)}
        # The cache may be shared with other stores, whose models are not here.
        cached = {
            name
            for name in self.cache.models()
            if builtin_path(name) or os.path.lexists(self.folder / name)
        }
        return {name: self._found_as(name) for name in sorted(stored | cached)}

    def _found_as(self, name: str) -> tuple[str, ...]:
        return tuple(known for known in tokenizer_names(name) if self.cache.resolves(known))

    def _is_registered(self, name: str) -> bool:
        place = self.folder / name
        return place.is_symlink() or (place / _COPY).is_file() or name in self.cache.models()

    def _check_place(self, name: str, source: Path | None) -> None:
        place = self.folder / name
        there = builtin_path(name) or (place if place.exists() else None)
        if place.parent != self.folder and (place.parent.is_symlink() or is_model(place.parent)):
            why = f"{place.parent} is a model itself."
        elif there is not None and (source is None or there.resolve() != source.resolve()):
            why = f"That is the model in {there.resolve()}."
        else:
            return
        next = f"Run `halteres models remove {name}` first, or give another name with --as."
        raise Conflict(f"The name '{name}' is taken.", why, next)


def checked_name(name: str) -> str:
    """The name, if it is of the hub's form: 'name' or 'organisation/name', UserError if it is not.
    Source: huggingface_hub 2.4, validate_repo_id: a cache entry's folder has '--' for '/', so no
    name may hold one.
    """
    if len(name) > _MAX_LENGTH or not _FORM.fullmatch(name) or name.endswith((".git", ".", "-")):
        raise UserError(
            f"A model cannot be called '{name}'.",
            "A name is 'name' or 'organisation/name' of letters, digits, '_', '.', '-', at most "
            f"{_MAX_LENGTH} of them,"
            " without '--' and '..'.",
            "Give another with --as.",
        )
    return name


def suggested_name(folder: Path) -> str:
    """The name of the model in a folder: its own last part; of a snapshot in a Hugging Face cache,
    the entry's.
    """
    entry = folder.parent.parent.name
    if folder.parent.name == "snapshots" and entry.startswith("models--"):
        return entry.removeprefix("models--").replace("--", "/")
    return folder.name


def tokenizer_names(name: str) -> tuple[str, ...]:
    """Every name under which clients of the model of this name look for its tokenizer."""
    return (name, *LLAMA_3_TOKENIZERS) if name.startswith(_LLAMA_3) else (name,)


def checked_model(folder: Path) -> ModelShape:
    """The shape of the model in a folder; UserError where it is no decoder, is not whole, or its
    tokenizer cannot be read.
    """
    try:
        shape = read_shape(folder)
    except (OSError, ValueError) as error:
        raise UserError(
            f"The folder {folder} holds no whole model.",
            f"{error}.",
            "Name a folder in Hugging Face format: config.json, tokenizer.json and "
            "model.safetensors.",
        ) from error
    if not shape.is_decoder:
        raise UserError(
            f"The model in {folder} cannot be used.",
            f"Its architecture is '{shape.architecture}', of model_type '{shape.family}': no "
            "causal language model.",
            "Take a decoder, such as Qwen3, Llama or Mistral.",
        )
    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"The model in {folder} has no tokenizer.",
            "tokenizer.json is missing.",
            "Save it with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER).",
        )
    Tokenizer(folder)
    return shape


def download(name: str, cache: Path) -> Path:
    """The folder of the model of this name on the hub: a snapshot in the Hugging Face cache,
    fetched if need be; NotReady where it cannot be.
    """
    from huggingface_hub import snapshot_download

    try:
        with boundary(NotReady, "huggingface_hub"):
            # An ignored pattern counts before an allowed one, so the one folder that is needed is
            # asked for by itself.
            snapshot_download(name, cache_dir=cache, allow_patterns=_NAMED_TEMPLATES)
            fetched = snapshot_download(
                name, cache_dir=cache, allow_patterns=_DOWNLOADED, ignore_patterns=_NOT_DOWNLOADED
            )
    except NotReady as failure:
        raise NotReady(
            f"The model '{name}' is neither on this disk nor could it be downloaded.",
            f"{' '.join(failure.what.split()).rstrip('.')}.",
            "Check the name and the network (with HF_HUB_OFFLINE set, nothing is asked; a gated "
            "model needs `hf auth"
            " login`); or fetch its folder elsewhere, then run `halteres models add FOLDER --as "
            f"{name}`.",
        ) from failure
    return Path(fetched)
