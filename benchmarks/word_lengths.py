"""An environment for benchmarks of an engine without weights: an answer of an odd length scores 1,
any other 0.
"""

from __future__ import annotations

from halteres.environments.single_turn import SingleTurnEnv


class WordLengths(SingleTurnEnv):
    """Scores that differ within a group, whatever samples it."""

    name = "word_lengths"

    async def get_next_item(self) -> int:
        """A number that makes prompts differ."""
        return self.rng.randint(0, 10**6)

    def prompt(self, item: int) -> str:
        """The task."""
        return f"Say something about {item}."

    def score(self, item: int, text: str) -> float:
        """1 for an odd number of characters."""
        return float(len(text) % 2)


if __name__ == "__main__":
    WordLengths.cli()
