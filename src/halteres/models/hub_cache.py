"""Entries of a Hugging Face cache that let a name of ours resolve without a hub.

Owns: the layout of an entry, the mark that makes one ours, the models that it stands for.
Never: downloads; changes an entry that somebody else made, or a snapshot within one.

    CACHE/models--ORG--NAME/refs/main               the commit
    CACHE/models--ORG--NAME/snapshots/<commit>/     copies of config.json and of the tokenizer's files
    CACHE/models--ORG--NAME/halteres.json           the mark: {"commit": ..., "for": [names of models]}

Source: the layout that huggingface_hub 2.4 reads. With HF_HUB_OFFLINE=1 `AutoTokenizer.from_pretrained(NAME)` asks for
nothing more; a hub that is reached overrides the entry.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from halteres.errors import Conflict
from halteres.files import replace_file
from halteres.models.copying import copy_files

TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_MARK = "halteres.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What makes an entry ours."""

    commit: str  # 40 hex digits, of the files' contents
    models: frozenset[str]  # names of the registered models that need it


@dataclass(frozen=True, slots=True)
class HubCache:
    """A Hugging Face cache: the folder `hub`."""

    folder: Path

    def check(self, name: str, model: Path) -> None:
        """That the entry of this name is ours to write, or has the model's tokenizer already.

        Raises:
            Conflict: somebody else's entry has another tokenizer, or cannot be resolved.
        """
        entry = self._entry(name)
        if not self._is_foreign(entry) or _same_tokenizer(_snapshot(entry), model):
            return
        raise Conflict(
            f"The Hugging Face cache has another '{name}'.",
            f"{entry} was not made by `halteres models`, and its tokenizer is not the one in {model}.",
            "Give another name with --as, or delete that folder if nothing needs it.",
        )

    def write(self, name: str, model: Path, needed_for: str) -> None:
        """Make the name resolve to the tokenizer of the model in this folder; somebody else's entry is left alone.

        Raises:
            OSError: the cache cannot be written.
        """
        if self._is_foreign(entry := self._entry(name)):
            return
        before, commit = self._mark(entry), _commit(model)
        others = before.models if before else frozenset[str]()
        (entry / "refs").mkdir(parents=True, exist_ok=True)
        (entry / "refs" / "main").unlink(missing_ok=True)  # without one the mark holds, whatever comes between
        _put_mark(entry, Mark(commit=commit, models=others | {needed_for}))
        if not (snapshot := entry / "snapshots" / commit).is_dir():
            copy_files(_files(model), snapshot)
        replace_file(entry / "refs" / "main", commit.encode())
        if before and before.commit != commit:
            shutil.rmtree(entry / "snapshots" / before.commit, ignore_errors=True)

    def release(self, model: str) -> None:
        """Remove the entries of ours that nothing but the model of this name needs.

        Raises:
            OSError: the cache cannot be written.
        """
        for entry, mark in self._ours():
            if mark.models == frozenset((model,)):
                _remove(entry, mark)
            elif model in mark.models:
                _put_mark(entry, Mark(commit=mark.commit, models=mark.models - {model}))

    def resolves(self, name: str) -> bool:
        """Whether clients find a tokenizer by this name without a hub."""
        snapshot = _snapshot(self._entry(name))
        return snapshot is not None and (snapshot / "tokenizer.json").is_file()

    def models(self) -> frozenset[str]:
        """The models that have entries of ours."""
        return frozenset(name for _, mark in self._ours() for name in mark.models)

    def _entry(self, name: str) -> Path:
        return self.folder / f"models--{name.replace('/', '--')}"

    def _is_foreign(self, entry: Path) -> bool:
        return _holds_snapshots(entry) and self._mark(entry) is None

    def _ours(self) -> Iterator[tuple[Path, Mark]]:
        for file in sorted(self.folder.glob(f"models--*/{_MARK}")):
            if (mark := self._mark(file.parent)) is not None:
                yield file.parent, mark

    def _mark(self, entry: Path) -> Mark | None:
        """The entry's mark; None once a download has replaced what it marks."""
        try:
            told = json.loads((entry / _MARK).read_bytes())
            mark = Mark(commit=str(told["commit"]), models=frozenset(map(str, told["for"])))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return mark if _reference(entry) in (mark.commit, None) else None


def _put_mark(entry: Path, mark: Mark) -> None:
    replace_file(entry / _MARK, json.dumps({"commit": mark.commit, "for": sorted(mark.models)}).encode())


def _remove(entry: Path, mark: Mark) -> None:
    """Ours, and the entry with it unless it holds another snapshot."""
    shutil.rmtree(entry / "snapshots" / mark.commit, ignore_errors=True)
    (entry / "refs" / "main").unlink(missing_ok=True)
    (entry / _MARK).unlink()
    if not _holds_snapshots(entry):
        shutil.rmtree(entry)


def _holds_snapshots(entry: Path) -> bool:
    return any((entry / "snapshots").glob("*"))


def _files(model: Path) -> list[Path]:
    return [file for name in ("config.json", *TOKENIZER_FILES) if (file := model / name).is_file()]


def _commit(model: Path) -> str:
    """40 hex digits that change with the files: what a git commit is to the hub."""
    digest = hashlib.sha256()
    for file in _files(model):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:40]


def _snapshot(entry: Path) -> Path | None:
    """What the entry's name means without a hub."""
    commit = _reference(entry)
    return entry / "snapshots" / commit if commit else None


def _reference(entry: Path) -> str | None:
    try:
        return (entry / "refs" / "main").read_text().strip()
    except OSError:
        return None


def _same_tokenizer(snapshot: Path | None, model: Path) -> bool:
    try:
        return snapshot is not None and _tokens(snapshot) == _tokens(model)
    except OSError:
        return False


def _tokens(folder: Path) -> bytes:
    return (folder / "tokenizer.json").read_bytes()
