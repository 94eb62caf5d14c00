"""The models that come with the package, and where they lie.

Owns: the names of built-in models and their folders.
Never: loads weights or imports a machine learning library.
"""

from pathlib import Path

TINY = "halteres/tiny"

_FOLDERS = {TINY: Path(__file__).parent / "tiny"}


def builtin_path(name: str) -> Path | None:
    """The folder of the built-in model of this name, as `transformers` reads it; None for any other name."""
    return _FOLDERS.get(name)
