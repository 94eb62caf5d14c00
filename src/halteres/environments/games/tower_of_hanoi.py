"""TowerofHanoi: bring all disks from tower A to tower C."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from halteres.environments.games.game import Game, Level, Move


@dataclass(frozen=True, slots=True, kw_only=True)
class Disks(Level):
    """Disk 1 is the smallest."""

    num_disks: int


class TowerOfHanoi(Game[Disks, tuple[str, str]]):
    """Move disks; at the turn limit, those on C are paid."""

    name = "TowerofHanoi"
    levels: ClassVar[Mapping[str, Disks]] = {
        "easy": Disks(num_disks=3, max_turns=10),
        "hard": Disks(num_disks=5, max_turns=35),
    }
    random_levels = (levels["easy"], Disks(num_disks=4, max_turns=20), levels["hard"])
    # GEM's `\s*,?\s*` matches the same, in time that grows with the square of the spaces.
    pattern = re.compile(r"\\boxed\{([ABCabc])\s*(?:,\s*)?([ABCabc])\}")
    state = ("towers",)
    format_error = "You did not provide a valid action."

    towers: dict[str, list[int]]  # disks by tower, the lowest first

    def setup(self) -> None:
        """All disks on A."""
        self.towers = {"A": list(range(self.level.num_disks, 0, -1)), "B": [], "C": []}

    def rules(self) -> str:
        """The same for every episode of a level."""
        return (
            f"You are playing Tower of Hanoi with {self.level.num_disks} disks.\n"
            "You have to move the disks from tower A to tower C.\n"
            "To move a disk, type the source tower and the target tower (e.g., '\\boxed{A C}').\n"
            "Note that you can only move the top disk of a tower, and that a bigger disk cannot be placed on a smaller"
            " disk.\n"
            "As you play, the history of your moves will be displayed.\n"
        )

    def suffix(self) -> str:
        """The towers."""
        towers = "\n".join(f"{tower}: {disks}" for tower, disks in self.towers.items())
        return f"Here is the current state of the tower of hanoi:\n{towers}\n\nEnter your move."

    def parse(self, found: re.Match[str]) -> tuple[str, str]:
        """From where, to where."""
        return found[1].upper(), found[2].upper()

    def move(self, action: tuple[str, str]) -> Move:
        """Move the top disk of a tower, perhaps onto the same tower."""
        source, target = action
        if not self.towers[source]:
            return Move(f"At turn {self.turn}, you tried to move from tower {source}, which is empty.")
        disk = self.towers[source][-1]
        if self.towers[target] and disk > self.towers[target][-1]:
            return Move(
                f"At turn {self.turn}, you tried to move from tower {source} to tower {target}, but the top disk on"
                f" tower {source} is larger than the top disk on tower {target}."
            )
        self.towers[source].pop()
        self.towers[target].append(disk)
        if len(self.towers["C"]) == self.level.num_disks:
            return Move("Congratulations! You solved the Tower of Hanoi Puzzle", 1.0, "success")
        return Move(f"At turn {self.turn}, you moved disk {disk} from tower {source} to tower {target}.")

    def turn_limit_reward(self, action: tuple[str, str]) -> float:
        """The share of disks on C."""
        return len(self.towers["C"]) / self.level.num_disks

    def random_action(self, rng: random.Random) -> str:
        """Any two towers, perhaps the same."""
        return f"\\boxed{{{rng.choice('ABC')} {rng.choice('ABC')}}}"
