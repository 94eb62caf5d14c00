"""Entries of a Hugging Face cache that let a name of ours resolve without a hub.

    CACHE/models--ORG--NAME/refs/main               the commit
    CACHE/models--ORG--NAME/snapshots/<commit>/     copies of config.json and of the tokenizer's files
    CACHE/models--ORG--NAME/halteres.json           what makes it ours: {"commit": ..., "for": [names of models]}

An entry that somebody else made, or a snapshot within one of ours, is never changed.
Source: the layout that huggingface_hub 2.4 reads. With HF_HUB_OFFLINE=1 `AutoTokenizer.from_pretrained(NAME)` asks for
nothing more; a hub that is reached overrides the entry.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from halteres.errors import Conflict
from halteres.files import replace_file

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
        tokenizer, own = self._tokenizer(entry), model / "tokenizer.json"
        if _is_foreign(entry) and not (tokenizer and own.is_file() and tokenizer.read_bytes() == own.read_bytes()):
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
        entry = self._entry(name)
        if _is_foreign(entry):
            return
        files = [file for one in ("config.json", *TOKENIZER_FILES) if (file := model / one).is_file()]
        digest = hashlib.sha256()  # what a git commit is to the hub: it changes with the files
        for file in files:
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)}\n".encode() + content)
        commit = digest.hexdigest()[:40]
        before = _read_mark(entry)
        (entry / "refs").mkdir(parents=True, exist_ok=True)
        (entry / "refs" / "main").unlink(missing_ok=True)  # without one the mark holds, whatever comes between
        _write_mark(entry, commit, {*(before.models if before else ()), needed_for})
        if not (snapshot := entry / "snapshots" / commit).is_dir():
            copy_files(files, snapshot)
        replace_file(entry / "refs" / "main", commit.encode())
        if before and before.commit != commit:
            shutil.rmtree(entry / "snapshots" / before.commit, ignore_errors=True)

    def release(self, model: str) -> None:
        """Remove the entries of ours that nothing but the model of this name needs.

        Raises:
            OSError: the cache cannot be written.
        """
        for entry, mark in self._own_entries():
            if mark.models == frozenset((model,)):
                shutil.rmtree(entry / "snapshots" / mark.commit, ignore_errors=True)
                (entry / "refs" / "main").unlink(missing_ok=True)
                (entry / _MARK).unlink()
                if not _holds_snapshots(entry):
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
        """The file that the entry's name leads to without a hub."""
        file = entry / "snapshots" / (_reference(entry) or ".") / "tokenizer.json"
        return file if file.is_file() else None


def copy_files(files: Iterable[Path], folder: Path) -> None:
    """Copy files (what links lead to) into a new folder, which is there whole or not at all; its parents are made.

    Raises:
        OSError: one cannot be read, or the place cannot be written; then there is no such folder.
    """
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    beside.mkdir(parents=True)
    try:
        for file in files:
            shutil.copyfile(file, beside / file.name)
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Mark:
    commit: str  # 40 hex digits, of the files' contents
    models: frozenset[str]  # names of the registered models that need it


def _read_mark(entry: Path) -> _Mark | None:
    """The entry's mark; None once a download has replaced what it marks."""
    try:
        content = json.loads((entry / _MARK).read_bytes())
        mark = _Mark(str(content["commit"]), frozenset(map(str, content["for"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return mark if _reference(entry) in (mark.commit, None) else None


def _write_mark(entry: Path, commit: str, models: Collection[str]) -> None:
    replace_file(entry / _MARK, json.dumps({"commit": commit, "for": sorted(models)}).encode())


def _is_foreign(entry: Path) -> bool:
    return _holds_snapshots(entry) and _read_mark(entry) is None


def _holds_snapshots(entry: Path) -> bool:
    return any((entry / "snapshots").glob("*"))


def _reference(entry: Path) -> str | None:
    try:
        return (entry / "refs" / "main").read_text().strip()
    except OSError:
        return None
