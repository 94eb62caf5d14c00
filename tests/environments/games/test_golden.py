"""Episodes recorded from GEM (scripts/record-games), replayed by our games."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from halteres.environments.games import FAMILIES

from .episodes import Episode, Transcript, difference, play

GOLDEN = Path(__file__).with_name("golden")


def recorded(file: Path) -> Iterator[tuple[Episode, Transcript]]:
    """A line for each episode, followed by one for its reset and one for each step."""
    episode, transcript = None, []
    for line in map(json.loads, file.read_text().splitlines()):
        if isinstance(line, dict):
            if episode:
                yield episode, transcript
            episode, transcript = Episode(**line), []
        else:
            transcript.append(line)
    assert episode
    yield episode, transcript


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.jsonl")), ids=lambda file: file.stem)
def test_a_recorded_episode_of_gem_plays_the_same_here(file: Path) -> None:
    for episode, transcript in recorded(file):
        assert difference(play(episode), transcript) is None, (episode.id, episode.seed)


def test_every_family_has_recorded_episodes() -> None:
    assert {family.name for family in FAMILIES} <= {file.stem for file in GOLDEN.glob("*.jsonl")}
