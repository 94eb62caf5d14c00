"""tinker:// paths: what names weights.

Owns: `tinker://{training run}/{weights|sampler_weights|external_weights}/{name}`, which runs and names can be, and
their place on disk.
Never: touches the disk, knows which weights there are.

    STATE/checkpoints/<training run, ':' as '_'>/<kind>/<name>/
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from halteres.errors import InvalidData

Kind = Literal["weights", "sampler_weights", "external_weights"]

KINDS: tuple[Kind, ...] = get_args(Kind)

LOADABLE: tuple[Kind, ...] = ("weights", "sampler_weights")
"""What this service trains from and samples; external weights are files for others, perhaps encrypted."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@-]{0,127}")
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")


@dataclass(frozen=True, slots=True)
class TinkerPath:
    """A parsed tinker:// path."""

    run: str  # training run id
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    def folder(self, state: Path) -> Path:
        """Where it lies."""
        return state / "checkpoints" / self.run.replace(":", "_") / self.kind / self.name


def parse(path: str) -> TinkerPath:
    """Read a tinker:// path.

    Raises:
        InvalidData: it is none.

    >>> parse("tinker://r1/weights/final").name
    'final'
    """
    scheme, _, rest = path.partition("://")
    parts = rest.split("/")
    kind: Kind | None = next((kind for kind in KINDS if parts[1:2] == [kind]), None)
    if scheme != "tinker" or len(parts) != 3 or kind is None:
        raise InvalidData(
            f"'{_shown(path)}' is no path of weights.",
            next="Write tinker://TRAINING_RUN/weights/NAME, …/sampler_weights/NAME or …/external_weights/NAME.",
        )
    if not _RUN.fullmatch(parts[0]) or not _NAME.fullmatch(parts[2]):
        raise InvalidData(
            f"'{_shown(path)}' is no path of weights.", "Its run or name holds a character that none can have."
        )
    return TinkerPath(parts[0], kind, parts[2])


def folder_of(state: Path, tinker_path: str) -> Path:
    """The folder that a path stands for, in a service's state directory; it need not exist.

    Raises:
        InvalidData: no tinker:// path.
    """
    return parse(tinker_path).folder(state)


def checked_name(name: str | None) -> str:
    """A name that weights can have.

    Raises:
        InvalidData: it cannot be one: empty, too long, with a path in it, or with characters that a URL or a file
            system would change.
    """
    if not name or not _NAME.fullmatch(name):
        raise InvalidData(
            f"'{_shown(name or '')}' cannot name a checkpoint.",
            "It may have letters, digits and . _ + = @ -, up to 128, and no '/'; it begins with a letter, digit or _.",
            "Choose another name.",
        )
    return name


def checked_run(run: str) -> str:
    """A training run id that weights can be named under.

    Raises:
        InvalidData: it cannot be one.
    """
    if not _RUN.fullmatch(run):
        raise InvalidData(f"'{_shown(run)}' cannot name a training run.", "It may have letters, digits and _ . : -.")
    return run


def _shown(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}…"
