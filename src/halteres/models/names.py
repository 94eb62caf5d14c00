"""What a base model may be called, and which other names clients look its tokenizer up by.

Owns: the form of names, the name that a folder suggests, the stand-ins for gated Llama tokenizers.
Never: reads a model.
"""

from __future__ import annotations

import re
from pathlib import Path

from halteres.errors import UserError

_FORM = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_MAX_LENGTH = 96
_LLAMA_3 = "meta-llama/Llama-3"
LLAMA_3_TOKENIZERS = ("thinkingmachineslabinc/meta-llama-3-instruct-tokenizer", "baseten/Meta-Llama-3-tokenizer")
"""What clients load instead of a gated Llama 3 tokenizer: tinker 0.38.0 (sampling_client.py) and tinker-cookbook 0.6.1
the first, seed 003 the second."""


def checked_name(name: str) -> str:
    """The name, if it is of the hub's form: 'name' or 'organisation/name'.

    Raises:
        UserError: it is not.

    Source: huggingface_hub 2.4, validate_repo_id: a cache entry's folder has '--' for '/', so no name may hold one.
    """
    if len(name) > _MAX_LENGTH or not _FORM.fullmatch(name) or name.endswith((".git", ".", "-")):
        raise UserError(
            f"A model cannot be called '{name}'.",
            f"A name is 'name' or 'organisation/name' of letters, digits, '_', '.', '-', at most {_MAX_LENGTH} of them,"
            " without '--' and '..'.",
            "Give another with --as.",
        )
    return name


def suggested_name(folder: Path) -> str:
    """The name of the model in a folder: its own last part; of a snapshot in a Hugging Face cache, the entry's."""
    entry = folder.parent.parent.name
    if folder.parent.name == "snapshots" and entry.startswith("models--"):
        return entry.removeprefix("models--").replace("--", "/")
    return folder.name


def tokenizer_names(name: str) -> tuple[str, ...]:
    """Every name under which clients of the model of this name look for its tokenizer."""
    return (name, *LLAMA_3_TOKENIZERS) if name.startswith(_LLAMA_3) else (name,)
