"""Our games beside the real GEM 0.1.0: the same seeds and actions, random, skilled and malformed.

`--game-actions 10000` plays that many for each family (by default 300). Observations, suffixes,
rewards and ends are equal, but for:

- Where GEM raises an exception, ours answers with a format error.
- FifteenPuzzle: 0.1.0 shuffles the first board, so that about half of the boards cannot be solved;
  ours does so with `init_algo="gem-0.1.0"`, and otherwise what axon-rl/gem does since (recorded in
  tests/environments/games/golden).
- FifteenPuzzle-v0-random cannot be made in GEM (TypeError); its level is drawn there by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from environments.games.episodes import GEM, difference, draw_episodes, play, play_with_gem, v0_ids

from halteres.environments.games import FAMILIES

pytestmark = pytest.mark.clients

PARAMETERS = {"FifteenPuzzle": {"init_algo": "gem-0.1.0"}}
"""As this release draws the first board."""


SHARES = {"game:Sokoban-v0-hard": 0.03, "game:Sokoban-v0-random": 0.03}
"""Of the actions, where 1 is what other levels have: GEM takes seconds for one of these rooms."""


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_a_game_plays_as_in_gem(
    client_python: Callable[..., str], family: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    ids = v0_ids(family)
    num_actions = int(pytestconfig.getoption("--game-actions")) // sum(
        SHARES.get(id, 1.0) for id in ids
    )
    episodes = [
        episode
        for id in ids
        for episode in draw_episodes(
            id, int(num_actions * SHARES.get(id, 1.0)), **PARAMETERS.get(family, {})
        )
    ]
    transcripts = play_with_gem(client_python(*GEM), episodes, tmp_path)
    found = {
        (episode.id, episode.seed): difference(play(episode), transcript)
        for episode, transcript in zip(episodes, transcripts, strict=True)
    }
    assert {place: what for place, what in found.items() if what} == {}
