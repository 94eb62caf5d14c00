"""Adapters in other forms: alone, merged into their base model, in one GGUF file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from halteres.config import environ
from halteres.engine.folders import size_of, written
from halteres.engine.process import EngineCommand, EngineProcess
from halteres.engine.protocol import MergedType
from halteres.errors import Conflict, NotFound, ProcessFailed
from halteres.service.base import BaseModel
from halteres.service.checkpoints.peft_folders import check_adapter, copy_adapter

CONVERTERS = ("convert_hf_to_gguf.py", "convert_hf_to_gguf", "convert-hf-to-gguf.py", "convert-hf-to-gguf")
"""Names that llama.cpp's converter is installed under."""

GGUF = "model.gguf"


def write_adapter(adapter: Path, out: Path) -> int:
    """The adapter as a plain PEFT folder; returns its bytes. NotFound where `adapter` is none, Conflict where `out` has
    something in it."""
    _refuse_full(out)
    check_adapter(adapter)
    with written(out) as place:
        copy_adapter(adapter, place)
    return size_of(out)


async def write_merged(
    base: BaseModel, adapter: Path, out: Path, *, dtype: MergedType = "base", threads: int | None = None
) -> int:
    """The base model with the adapter merged in, in Hugging Face format; returns its bytes.

    Raises:
        InvalidData: it does not fit the base model.
        ProcessFailed: the engine did not start.
        HalteresError: as `write_adapter`.
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
    """The merged model as OUT/model.gguf, by llama.cpp's converter; returns its bytes.

    Raises:
        NotFound: no converter is installed.
        ProcessFailed: it failed; its last words are in the error.
        HalteresError: as `write_merged`.
    """
    found = str(converter) if converter else next(filter(None, map(shutil.which, CONVERTERS)), None)
    if found is None or not Path(found).is_file():
        raise NotFound(
            "There is no converter to GGUF here.",
            f"{found} is no file." if found else f"Looked on PATH for {', '.join(CONVERTERS)}.",
            "Get llama.cpp with the packages its convert_hf_to_gguf.py needs, and name that file: --converter FILE.",
        )
    command = [found] if os.access(found, os.X_OK) else [sys.executable, found]
    _refuse_full(out)
    with tempfile.TemporaryDirectory(prefix="halteres-") as work:
        merged = Path(work) / "merged"
        await write_merged(base, adapter, merged, dtype=dtype, threads=threads)
        with written(out) as place:
            _convert([*command, str(merged), "--outfile", str(place / GGUF)], place / GGUF)
    return size_of(out)


def _convert(command: list[str], file: Path) -> None:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, env=environ.for_sandboxed(), check=False)
    except OSError as error:
        raise ProcessFailed("The converter cannot be started.", f"{command[0]}: {error.strerror}.") from error
    if ended.returncode or not file.is_file():
        said = " ".join((ended.stderr or ended.stdout).strip().splitlines()[-3:])
        raise ProcessFailed(
            f"The converter {command[0]} wrote no model (exit code {ended.returncode}).",
            said or "It said nothing.",
            "Export --format merged, and convert that folder yourself.",
        )


def _refuse_full(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise Conflict(f"{out} exists.", "What is in it is not written over.", "Name a new folder with --out.")
