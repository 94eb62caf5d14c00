"""Fetching a base model from Hugging Face's hub.

Owns: which of its files are fetched, and what is said where that fails.
Never: is imported by anything that runs without network.
"""

from __future__ import annotations

from pathlib import Path

from halteres.errors import NotReady, boundary

_FILES = ["*.json", "*.jinja", "*.safetensors", "*.txt", "*.model"]
_NOT = ["*/*", "consolidated*"]  # copies in other formats: onnx/, original/


def download(name: str, cache: Path) -> Path:
    """The folder of the model of this name on the hub: a snapshot in the Hugging Face cache, fetched if need be.

    Raises:
        NotReady: it cannot be fetched.
    """
    from huggingface_hub import snapshot_download

    try:
        with boundary(NotReady, "huggingface_hub"):
            return Path(snapshot_download(name, cache_dir=cache, allow_patterns=_FILES, ignore_patterns=_NOT))
    except NotReady as failure:
        raise NotReady(
            f"The model '{name}' is neither on this disk nor could it be downloaded.",
            f"{' '.join(failure.what.split()).rstrip('.')}.",
            f"Check the name and the network (with HF_HUB_OFFLINE set, nothing is asked; a gated model needs `hf auth"
            f" login`); or fetch its folder elsewhere, then run `halteres models add FOLDER --as {name}`.",
        ) from failure
