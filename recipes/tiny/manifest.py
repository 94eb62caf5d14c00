"""The manifest: which files, numbers and versions made the weights.

Owns: halteres.json, the hash of the recipe's sources.
Never: decides anything about the model.
"""

import hashlib
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pretrain import Stage

NAME, VERSION = "halteres/tiny", "1"
HERE = Path(__file__).resolve().parent
SOURCES = ("corpus.py", "make.py", "manifest.py", "pretrain.py", "text.py", "tokenizer.py")
PROBLEMS = HERE.parents[1] / "src" / "halteres" / "environments" / "problems.py"


def recipe_hash() -> str:
    """SHA-256 of the files that decide the weights, each with its name and length before it."""
    digest = hashlib.sha256()
    for path in [*(HERE / name for name in SOURCES), PROBLEMS]:
        content = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_manifest(folder: Path, *, seed: int, threads: int, stages: "tuple[Stage, ...]") -> dict[str, Any]:
    """Write halteres.json beside the weights; what it says."""
    import tokenizers
    import torch
    import transformers

    manifest = {
        "name": NAME,
        "version": VERSION,
        "recipe_hash": recipe_hash(),
        "weights_sha256": file_hash(folder / "model.safetensors"),
        "tokenizer_sha256": file_hash(folder / "tokenizer.json"),
        "seed": seed,
        "threads": threads,
        "steps": {stage.name: stage.steps for stage in stages},
        "stages": [asdict(stage) for stage in stages],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "tokenizers": tokenizers.__version__,
            "transformers": transformers.__version__,
        },
    }
    (folder / "halteres.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest
