"""Records episodes of GEM's games, which the tests replay without GEM (scripts/record-games).

Usage: python -m environments.games.record [--source FOLDER] [FAMILY...]

FOLDER holds another state of the package `gem`; its episodes go to FAMILY-head. The release 0.1.0
lacks FifteenPuzzle's ways to draw a solvable board: FifteenPuzzle-head comes from 0.1.0 with those
of axon-rl/gem at 1406ac9.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from halteres.environments.games import FAMILIES

from .episodes import GEM, Episode, draw_episodes, play_with_gem, v0_ids

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).with_name("golden")
NUM_EPISODES = 4  # of each id
MAX_STEPS = 12  # of a recorded episode on levels other than easy


def wanted(family: str, from_source: bool) -> list[dict[str, Any]]:
    """The parameters under which a family is recorded."""
    if family != "FifteenPuzzle":
        return [{}]
    return [{}, {"init_algo": "pure_random"}] if from_source else [{"init_algo": "gem-0.1.0"}]


def episodes(id: str, parameters: dict[str, Any]) -> list[Episode]:
    """A few, the long ones cut off."""
    drawn = islice(draw_episodes(id, 10_000, seed=1, **parameters), NUM_EPISODES)
    short = None if id.endswith("easy") else MAX_STEPS
    return [
        Episode(id=id, seed=one.seed, actions=one.actions[:short], parameters=parameters)
        for one in drawn
    ]


def main() -> None:
    """One file for each family and source."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=Path)
    parser.add_argument("families", nargs="*", default=[family.name for family in FAMILIES])
    arguments = parser.parse_args()
    python = subprocess.run(
        [ROOT / "scripts" / "client", *GEM], check=True, stdout=subprocess.PIPE, text=True
    )
    for family in FAMILIES:
        if family.name in arguments.families:
            asked = [
                episode
                for parameters in wanted(family.name, arguments.source is not None)
                for id in v0_ids(family.name)
                for episode in episodes(id, parameters)
            ]
            with tempfile.TemporaryDirectory() as folder:
                transcripts = play_with_gem(
                    python.stdout.strip(), asked, Path(folder), arguments.source
                )
            write(family.name + ("-head" if arguments.source else ""), asked, transcripts)


def write(name: str, asked: list[Episode], transcripts: list[list[Any]]) -> None:
    """One line for each reset and step, so that a change of one is seen as such."""
    lines = [
        json.dumps(
            {"id": one.id, "parameters": one.parameters, "seed": one.seed, "actions": one.actions}
        )
        + "".join(f"\n{json.dumps(step)}" for step in transcript)
        for one, transcript in zip(asked, transcripts, strict=True)
    ]
    GOLDEN.mkdir(exist_ok=True)
    (GOLDEN / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
