"""Pictures of an answer, for wires that carry text.

Owns: a PNG file in base64.
Never: knows a wire.
"""

from __future__ import annotations

import base64
from pathlib import Path


def base64_of(file: Path) -> str | None:
    """A PNG; None where it is gone: the answer names its path and says all without it."""
    try:
        return base64.b64encode(file.read_bytes()).decode()
    except OSError:
        return None
