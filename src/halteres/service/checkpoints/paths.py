"""tinker:// paths: what names weights, how long such a name may live.

STATE/checkpoints/<training run, ':' as '_'>/<kind>/<name>/
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from halteres.errors import InvalidData, UserError, shortened

Kind = Literal["weights", "sampler_weights", "external_weights"]

KINDS: tuple[Kind, ...] = get_args(Kind)

LOADABLE: tuple[Kind, ...] = ("weights", "sampler_weights")
"""What this service trains from and samples; external weights are files for others, perhaps encrypted."""

SHORTEST_S = 3600
LONGEST_S = 10 * 366 * 24 * 3600  # ten years, however many of them are leap years

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
    parts, what = rest.split("/"), f"'{shortened(path)}' is no path of weights."
    kind: Kind | None = next((kind for kind in KINDS if parts[1:2] == [kind]), None)
    if scheme != "tinker" or len(parts) != 3 or kind is None:
        forms = "tinker://TRAINING_RUN/weights/NAME, …/sampler_weights/NAME or …/external_weights/NAME"
        raise InvalidData(what, next=f"Write {forms}.")
    if not _RUN.fullmatch(parts[0]) or not _NAME.fullmatch(parts[2]):
        raise InvalidData(what, "Its run or name holds a character that none can have.")
    return TinkerPath(parts[0], kind, parts[2])


def folder_of(state: Path, tinker_path: str) -> Path:
    """The folder that a path stands for, in a service's state directory; it need not exist.

    Raises:
        InvalidData: no tinker:// path.
    """
    return parse(tinker_path).folder(state)


def checked_name(name: str | None) -> str:
    """A name that weights can have."""
    if not name or not _NAME.fullmatch(name):
        raise InvalidData(
            f"'{shortened(name or '')}' cannot name a checkpoint.",
            "It may have letters, digits and . _ + = @ -, up to 128, and no '/'; it begins with a letter, digit or _.",
            "Choose another name.",
        )
    return name


def checked_run(run: str) -> str:
    """A training run id that weights can be named under."""
    if not _RUN.fullmatch(run):
        raise InvalidData(f"'{shortened(run)}' cannot name a training run.", "It may have letters, digits and _ . : -.")
    return run


def checked_ttl(ttl_s: int | None) -> int | None:
    """A time to live in seconds; None is for ever."""
    if ttl_s is not None and not SHORTEST_S <= ttl_s <= LONGEST_S:
        raise InvalidData(
            f"A checkpoint cannot expire after {ttl_s} s.",
            f"ttl_seconds is {SHORTEST_S} (an hour) to {LONGEST_S} (ten years).",
            "Choose another, or leave it out: the checkpoint then stays until it is deleted.",
        )
    return ttl_s


def end_of_life(ttl_s: int | None, now: float) -> float | None:
    """When a checkpoint that is made now expires, unix s; None: never."""
    return None if ttl_s is None else now + ttl_s


def refuse_token(token: str | None) -> None:
    """Weights are shared by publishing them; there are no access tokens, and none is ignored."""
    if token:
        raise UserError(
            "This service has no weights access tokens.",
            "Weights of another owner can be read here only while they are public.",
            "Ask their owner to publish them (tinker checkpoint publish PATH), and send no token.",
        )
