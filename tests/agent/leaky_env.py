"""An environment that tells whatever it can find out: its variables, those of the process that
started it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from paced_env import PacedEnv

LIVES_FOR = 14
"""Answers that are scored before it dies."""


def found_out() -> str:
    """Variables of our own and of our parents, as far as the kernel lets us read them."""
    told, pid = [str(dict(os.environ))], os.getppid()
    while pid > 1:
        told.append(Path(f"/proc/{pid}/environ").read_text().replace("\0", " "))
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return " ".join(told)


class LeakyEnv(PacedEnv):
    """Prints, raises and dies with secrets on its lips."""

    name = "leaky"
    pace_s = 0.05
    scored = 0

    async def setup(self) -> None:
        sys.stdout.write(f"on stdout: {found_out()}\n")
        for piece in found_out().split("_"):  # no newline, and cut wherever it may be
            os.write(2, piece.encode())
            os.write(2, b"_")

    async def score(self, item: Any, text: str) -> float:
        LeakyEnv.scored += 1
        if LeakyEnv.scored > LIVES_FOR:
            words = [word for word in found_out().split() if word.startswith("MY_TOKEN=")]
            sys.stderr.write(f"error: The environment gave up: {words}\n")
            sys.stderr.flush()
            os._exit(3)
        if LeakyEnv.scored % 5 == 0:
            raise RuntimeError(f"I know {dict(os.environ)}")
        return await super().score(item, text)


if __name__ == "__main__":
    LeakyEnv.cli()
