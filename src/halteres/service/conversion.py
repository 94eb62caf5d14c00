"""Adapters in other forms: alone, merged into their base model, in one GGUF file, exported for
others.

Exports are files that only their recipients can read where that is asked for
(age-encryption.org/v1, by the library pyrage, the extra `age`).
"""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from halteres.config import environ
from halteres.engine.folders import size_of, written
from halteres.engine.process import EngineCommand, EngineProcess
from halteres.engine.protocol import MergedType, Saved, Trains
from halteres.errors import (
    Conflict,
    InvalidData,
    NotFound,
    ProcessFailed,
    ServerError,
    UserError,
    boundary,
)
from halteres.service.base import BaseModel
from halteres.service.checkpoint_folders import FILES, check_adapter, copy_adapter

CONVERTERS = (
    "convert_hf_to_gguf.py",
    "convert_hf_to_gguf",
    "convert-hf-to-gguf.py",
    "convert-hf-to-gguf",
)
"""Names that llama.cpp's converter is installed under."""

GGUF = "model.gguf"


def write_adapter(adapter: Path, out: Path) -> int:
    """The adapter as a plain PEFT folder; returns its bytes. NotFound where `adapter` is none,
    Conflict where `out` has something in it.
    """
    _refuse_full(out)
    check_adapter(adapter)
    with written(out) as place:
        copy_adapter(adapter, place)
    return size_of(out)


async def write_merged(
    base: BaseModel,
    adapter: Path,
    out: Path,
    *,
    dtype: MergedType = "base",
    threads: int | None = None,
) -> int:
    """The base model with the adapter merged in, in Hugging Face format; returns its bytes.
    InvalidData where it does not fit the base model, ProcessFailed where the engine does not start.
    """
    _refuse_full(out)
    check_adapter(adapter)
    command = EngineCommand(backend="torch", folder=base.folder, name=base.name, threads=threads)
    with tempfile.TemporaryDirectory(prefix="halteres-") as work:
        host = EngineProcess(command, Path(work) / "engine.log")
        try:
            await host.start()
            saved = await host.engine.merge(str(adapter.absolute()), str(out.absolute()), dtype)
        finally:
            await host.stop()
    return saved.size_bytes


async def write_gguf(
    base: BaseModel,
    adapter: Path,
    out: Path,
    *,
    converter: Path | None,
    dtype: MergedType = "base",
    threads: int | None = None,
) -> int:
    """The merged model as OUT/model.gguf, by llama.cpp's converter; returns its bytes. NotFound
    where none is installed, ProcessFailed with its last words where it fails.
    """
    found = str(converter) if converter else next(filter(None, map(shutil.which, CONVERTERS)), None)
    if found is None or not Path(found).is_file():
        raise NotFound(
            "There is no converter to GGUF here.",
            f"{found} is no file." if found else f"Looked on PATH for {', '.join(CONVERTERS)}.",
            "Get llama.cpp with the packages its convert_hf_to_gguf.py needs, and name that file: "
            "--converter FILE.",
        )
    command = [found] if os.access(found, os.X_OK) else [sys.executable, found]
    _refuse_full(out)
    with tempfile.TemporaryDirectory(prefix="halteres-") as work:
        merged = Path(work) / "merged"
        await write_merged(base, adapter, merged, dtype=dtype, threads=threads)
        with written(out) as place:
            command += [str(merged), "--outfile", str(place / GGUF)]
            try:
                ended = await asyncio.to_thread(
                    subprocess.run,
                    command,
                    capture_output=True,
                    text=True,
                    env=environ.for_sandboxed(),
                    encoding="utf-8",
                )
            except OSError as error:
                raise ProcessFailed(
                    "The converter cannot be started.", f"{command[0]}: {error.strerror}."
                ) from error
            if ended.returncode or not (place / GGUF).is_file():
                last_words = " ".join((ended.stderr or ended.stdout).strip().splitlines()[-3:])
                raise ProcessFailed(
                    f"The converter {command[0]} wrote no model (exit code {ended.returncode}).",
                    last_words or "It said nothing.",
                    "Export --format merged, and convert that folder yourself.",
                )
    return size_of(out)


def _refuse_full(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise Conflict(
            f"{out} exists.", "What is in it is not written over.", "Name a new folder with --out."
        )


# Exports

MAX_RECIPIENTS = 10
SUFFIX = ".age"
MAX_SHOWN = 24  # characters of a recipient that a message repeats

Encrypt = Callable[[Path, Path], None]


def encryption_to(keys: Sequence[str]) -> Encrypt:
    """What writes a second file that nobody but the recipients can read: native `age1…` keys
    (X25519) or SSH public keys.
    """
    if not 1 <= len(keys) <= MAX_RECIPIENTS:
        raise InvalidData(
            f"An export cannot be encrypted to {len(keys)} recipients.",
            f"It has 1 to {MAX_RECIPIENTS}.",
            "Leave age_encryption_recipients out for plain files.",
        )
    try:
        pyrage: Any = importlib.import_module("pyrage")
    except ImportError as error:
        raise UserError(
            "This service cannot encrypt an export.",
            "The package pyrage is not installed beside it.",
            "Run `pip install 'halteres[age]'` there, or leave age_encryption_recipients out.",
        ) from error
    recipients: list[Any] = []
    for key in map(str.strip, keys):
        kind = pyrage.x25519.Recipient if key.startswith("age1") else pyrage.ssh.Recipient
        try:
            recipients.append(kind.from_str(key))
        except pyrage.RecipientError as error:
            raise InvalidData(
                f"'{key[:MAX_SHOWN]}' is no age recipient.",
                f"{error}.",
                "Send a public key: one that begins with age1 (age-keygen prints it), or an SSH "
                "public key.",
            ) from error

    def encrypt(source: Path, target: Path) -> None:
        with boundary(ServerError, "pyrage.encrypt_file"):
            pyrage.encrypt_file(str(source), str(target), recipients)

    return encrypt


async def write_export(
    engine: Trains, model_id: str, folder: Path, base: Path, encrypt: Encrypt | None
) -> Saved:
    """A training run's weights as files for others, as the base model in `base` needs them."""

    def fill(plain: Path, place: Path) -> None:
        if encrypt is None:
            copy_adapter(plain, place, for_tinker=base)
            return
        with tempfile.TemporaryDirectory(dir=plain.parent) as folder:
            copy_adapter(plain, Path(folder), for_tinker=base)
            for name in FILES:
                encrypt(Path(folder) / name, place / f"{name}{SUFFIX}")

    with written(folder) as place, tempfile.TemporaryDirectory(dir=place) as work:
        plain = Path(work) / "plain"
        saved = await engine.save(model_id, str(plain), False)
        await asyncio.to_thread(fill, plain, place)
    return Saved(
        folder=str(folder),
        size_bytes=await asyncio.to_thread(size_of, folder),
        version=saved.version,
    )
