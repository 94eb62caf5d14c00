"""An environment whose scorer does, for some answers, what no scorer may be able to do; and whose
`measure` says how many ways out of its process it found.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from halteres.environments.base import BaseEnvConfig
from halteres.environments.config import setting
from halteres.environments.single_turn import SingleTurnEnv

KINDS = 24
"""Answers are told apart into so many kinds: one each for the acts, the others are harmless."""


def loop() -> None:
    """For ever, deaf to every signal that can be blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    while True:
        pass


def shout() -> None:
    """1 GB on standard output."""
    for _ in range(1024):
        sys.stdout.write("x" * (1 << 20))


def take() -> None:
    """3 GB, every page of it."""
    len(bytearray(b"x") * (3 << 30))


def fork() -> None:
    """1,000 processes that stay, in sessions of their own."""
    for _ in range(1000):
        if os.fork() == 0:
            os.setsid()
            signal.pause()


ACTS: Mapping[str, Callable[[], Any]] = {
    "exit_at_once": lambda: os._exit(0),
    "exit": lambda: sys.exit(0),
    "loop": loop,
    "power": lambda: 10**10**10,
    "shout": shout,
    "take": take,
    "fork": fork,
}


class HostileConfig(BaseEnvConfig):
    """What the ways out lead to."""

    private: str = setting("", "a file of the user's")
    metrics: str = setting("", "files of runs, their names as a pattern")
    marker: str = setting("", "a file that does not exist")
    port: int = setting(0, "of a server on this machine")


def read(path: str) -> None:
    """Read a file."""
    Path(path).read_text()


def forge(pattern: str) -> None:
    """Add a line to each file of these names."""
    for path in glob.glob(pattern) or [pattern]:
        append(path)


def append(path: str) -> None:
    """Add a line to a file, or make it."""
    with Path(path).open("a") as file:
        file.write('{"step": 1, "forged": 1}\n')


def connect(port: int) -> None:
    """Reach a server."""
    socket.create_connection(("127.0.0.1", port), timeout=1).close()


def ways_out(config: HostileConfig) -> int:
    """How many of four ways out of this process are open."""
    ways: tuple[Callable[[], None], ...] = (
        lambda: read(config.private),
        lambda: forge(config.metrics),
        lambda: append(config.marker),
        lambda: connect(config.port),
    )
    found = 0
    for way in ways:
        try:
            way()
        except OSError:
            continue
        found += 1
    return found


def kind_of(text: str) -> int:
    """0 to KINDS - 1: what becomes of an answer."""
    return hashlib.sha256(text.encode()).digest()[0] % KINDS


def answer_of_kind(kind: int) -> str:
    """An answer of this kind."""
    texts = (f"The answer is {number}." for number in itertools.count())
    return next(text for text in texts if kind_of(text) == kind)


class Hostile(SingleTurnEnv):
    """Does one of ACTS for about one answer in four."""

    name = "hostile"
    unsafe_scorer = True
    env_config_cls: ClassVar[type[BaseEnvConfig]] = HostileConfig
    config: HostileConfig

    async def get_next_item(self) -> int:
        return self.rng.randint(0, 1000)

    def prompt(self, item: Any) -> str:
        return f"Question: {item}?"

    def score(self, item: Any, text: str) -> float:
        """Of a harmless answer: 0 to 1."""
        kind = kind_of(text)
        if kind < len(ACTS):
            list(ACTS.values())[kind]()
        return kind / KINDS

    def measure(self, item: Any, text: str) -> Mapping[str, float]:
        """The ways out that are open to a scorer."""
        return {"ways_out": ways_out(self.config)}


if __name__ == "__main__":
    Hostile.cli()
