"""docs/games.md: its tables are those of the code, its figures can be had again, and a run's rows
have its keys.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from training.fakes import REGISTRATION, FakePolicy, FakeServer, stopping

from halteres.config.gem_ids import GEM, OTHER_FAMILIES
from halteres.config.settings import Settings, TrainerSettings
from halteres.environments.games import FAMILIES, IDS, make
from halteres.observe.metrics import read_rows
from halteres.training.batch_source import Trajectories
from halteres.training.folder import RunFolder
from halteres.training.loop import train
from halteres.training.report import Report
from halteres.types import Batch, Group, Span

PAGE = (Path(__file__).parents[2] / "docs" / "games.md").read_text()
METRICS = {
    *(
        "step",
        "time/sample",
        "time/train",
        "sampler/episode_return",
        "sampler/num_turns_per_episode",
    ),
    *(
        "sampler/action_num_tokens",
        "sampler/num_episodes",
        "sampler/token_entropy",
        "train/loss:sum",
    ),
    *("train/kl_sample_train_v1", "train/kl_sample_train_v2"),
}
"""What GEM's script tells of each step."""


def table(first_column: str) -> list[list[str]]:
    """The cells of the page's table with this head, as they stand without code's backticks."""
    (text,) = re.findall(
        rf"^\| {re.escape(first_column)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE
    )
    return [
        [cell.strip().replace("`", "") for cell in line.strip("|").split(" |")]
        for line in text.splitlines()
    ]


def test_the_fields_of_the_script_are_told_as_the_recipe_takes_them() -> None:
    fields = [[name, field.key, field.default, field.note] for name, field in GEM.fields.items()]
    assert table("field of the script") == fields
    assert all(f"`{key}={value}`" in PAGE for key, value in GEM.further.items())


def test_every_game_is_on_the_page_and_no_other() -> None:
    told = [
        f"game:{name}-{version}-{level}"
        for name, *levels, _, _ in table("game")
        for version, listed in zip(("v0", "v1"), levels, strict=True)
        for level in filter(None, listed.split(", "))
    ]
    assert sorted(told) == sorted(IDS)


@pytest.mark.parametrize("name", ["GuessTheNumber", "Mastermind", "FifteenPuzzle", "Hangman"])
def test_what_random_answers_earn_can_be_had_again(name: str) -> None:
    """A thousand games, seeds 0 to 999."""
    (row,) = [row for row in table("game") if row[0] == name]
    game, rng, earned, won = make(f"game:{name}-v0-easy"), random.Random(0), 0.0, 0
    for seed in range(1000):
        game.reset(seed)
        done, success = False, False
        while not done:
            _, reward, done, _, info = game.step(game.random_action(rng))
            earned, success = earned + reward, info["success"]
        won += success
    assert row[-2:] == [f"{earned / 1000:.3f}", f"{won / 1000:.3f}"]
    assert len(table("game")) == len(FAMILIES)


def test_gems_other_families_are_told_as_their_ids_are_refused() -> None:
    families = [one for one in OTHER_FAMILIES if one.kind != "native"]
    told = [[one.prefix, one.kind, one.why, one.instead.format(name="NAME")] for one in families]
    assert table("ids") == told


async def test_a_row_of_a_run_has_every_key_of_the_script(tmp_path: Path) -> None:
    """Two episodes: two turns of one sequence, and one turn."""
    group = Group(
        tokens=((1, 2, 3, 4, 5), (1, 2, 6)),
        masks=((-100, -100, 3, -100, 5), (-100, -100, 6)),
        scores=(1.0, 0.0),
        logprobs=((1.0, 1.0, -0.5, 1.0, -0.25), (1.0, 1.0, -0.75)),
        versions=((0, 0), (0, 0)),
        episodes=(0, 1),
        spans=(
            Span(sequence=0, start=2, stop=3, reward=0.0),
            Span(sequence=0, start=4, stop=5, reward=1.0),
            Span(sequence=1, start=2, stop=3, reward=0.0),
        ),
    )
    server = FakeServer(lambda _: Batch(groups=(group,)))
    source = Trajectories(server, replace(REGISTRATION, batch_size=2), stopping(tmp_path))
    config = TrainerSettings(total_steps=1, advantage="rebn", gamma=0.9)
    await train(FakePolicy(), source, Report(RunFolder(tmp_path)), Settings(trainer=config))
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert {key for key, _ in table("key")} == METRICS <= set(row)
    assert (row["sampler/episode_return"], row["sampler/num_turns_per_episode"]) == (0.5, 1.5)
    assert (row["sampler/action_num_tokens"], row["sampler/num_episodes"]) == (1.5, 2.0)
    assert (row["sampler/token_entropy"], row["train/loss:sum"]) == (0.5, row["train/loss"])
    assert row["train/kl_sample_train_v1"] == row["train/kl_sample_train_v2"] == 0.0
    assert (row["time/sample"], row["time/train"] > 0) == (row["time/batch"], True)
