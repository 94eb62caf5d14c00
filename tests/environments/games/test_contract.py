"""What every game promises, whatever its rules."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from halteres.environments.games import IDS, make
from halteres.environments.games.game import FORMAT_ERROR_REWARD, Game, Step, episode_seed
from halteres.errors import InvalidConfig, InvalidData, NotFound

from .episodes import MALFORMED, draw_action

each_game = pytest.mark.parametrize("id", IDS)


def rest_of_episode(game: Game[Any, Any], rng: random.Random, num_steps: int = 20) -> list[Step]:
    """Up to that many steps, at least to the end of the episode."""
    results: list[Step] = []
    while len(results) < num_steps and not (results and results[-1][2]):
        results.append(game.step(draw_action(game, rng, skill=0.5, carelessness=0.0)))
    return results


@each_game
def test_a_task_and_a_seed_are_the_whole_initial_state(id: str) -> None:
    one, other = make(id), make(id)
    one.reset(7)
    rest_of_episode(one, random.Random(1))
    assert one.reset(3) == other.reset(3)
    assert rest_of_episode(one, random.Random(2)) == rest_of_episode(other, random.Random(2))


@each_game
def test_no_game_touches_the_process_wide_generator(id: str) -> None:
    before = random.getstate()
    game = make(id)
    game.reset()
    rest_of_episode(game, random.Random(2))
    assert random.getstate() == before


@each_game
def test_a_saved_game_goes_on_identically(id: str) -> None:
    game, other = make(id), make(id)
    game.reset()
    for _ in range(3):
        game.step(game.random_action(random.Random(5)))
    saved = json.loads(json.dumps(game.save()))
    expected = [rest_of_episode(game, random.Random(6)), game.reset(), game.rng.random()]
    other.restore(saved)
    assert [rest_of_episode(other, random.Random(6)), other.reset(), other.rng.random()] == expected


JUNK = (None, True, -1, 10**6, 1.5, "x", [], {}, [1], ["a"], {"a": 1})


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the parts of a value of JSON are; of long lists, the first ones and the last."""
    yield at
    if isinstance(value, dict):
        for name in value:
            yield from places(value[name], (*at, name))
    elif isinstance(value, list):
        for number in {*range(min(len(value), 4)), len(value) - 1} - {-1}:
            yield from places(value[number], (*at, number))


def damaged(saved: dict[str, Any], at: tuple[Any, ...], junk: object) -> Any:
    """The same, with something else at one place; with `places` as junk, without it."""
    if not at:
        return junk
    copied = json.loads(json.dumps(saved))
    part = copied
    for step in at[:-1]:
        part = part[step]
    if junk is places:
        del part[at[-1]]
    else:
        part[at[-1]] = junk
    return copied


@pytest.mark.parametrize("id", [id for id in IDS if id.endswith("-easy")])
def test_a_damaged_state_is_refused_and_changes_nothing_or_can_be_played(id: str) -> None:
    rng = random.Random(id)
    game, other = make(id), make(id)
    game.reset(5)
    game.step(game.random_action(rng))
    other.reset(1)
    saved, before = json.loads(json.dumps(game.save())), json.dumps(other.save())
    for at in places(saved):
        for junk in (places, *rng.sample(JUNK, 2)) if at else JUNK:
            try:
                other.restore(damaged(saved, at, junk))
            except InvalidData:
                assert json.dumps(other.save()) == before
                continue
            for _ in range(5):
                other.step(other.random_action(rng))
            other.restore(json.loads(before))


@pytest.mark.parametrize(
    "damage",
    [
        lambda saved: {},
        lambda saved: saved.pop("generator"),
        lambda saved: saved["state"].clear(),
        lambda saved: saved["state"].update(tiles=[1, 2, 3]),
        lambda saved: saved["state"].update(tiles=[1, 1, 2, 3]),
        lambda saved: saved["state"].update(tiles="1230"),
        lambda saved: saved.update(turn="1"),
        lambda saved: saved.update(turn=-1),
        lambda saved: saved.update(generator=[3, [1], None]),
        lambda saved: saved["seeds"].update(split="both"),
        lambda saved: saved["task"].pop("id"),
    ],
)
def test_a_state_that_no_episode_comes_to_is_refused(
    damage: Callable[[dict[str, Any]], object],
) -> None:
    game = make("game:FifteenPuzzle-v0-easy")
    game.reset(5)
    saved = game.save()
    made = damage(saved)
    with pytest.raises(InvalidData, match="game:FifteenPuzzle-v0-easy is damaged"):
        make("game:FifteenPuzzle-v0-easy").restore({} if made == {} else saved)


CONTINUED = """
import json, random, sys
from halteres.environments.games import make
steps = []
for saved in json.load(sys.stdin):
    game = make(saved["task"]["id"], **saved["task"]["parameters"])
    game.restore(saved)
    rng = random.Random(9)
    steps.append([game.step(game.random_action(rng)) for _ in range(5)])
json.dump(steps, sys.stdout)
"""


def test_a_saved_game_goes_on_identically_in_another_process() -> None:
    saved: list[dict[str, Any]] = []
    expected: list[list[Step]] = []
    for id in IDS:
        game, rng = make(id), random.Random(9)
        game.reset(11)
        game.step(game.random_action(random.Random(8)))
        saved.append(game.save())
        expected.append([game.step(game.random_action(rng)) for _ in range(5)])
    continued = subprocess.run(
        [sys.executable, "-c", CONTINUED],
        input=json.dumps(saved),
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(continued.stdout) == json.loads(json.dumps(expected))


@each_game
def test_a_spawned_game_is_in_the_same_state_where_that_is_asked(id: str) -> None:
    game = make(id, base_seed=4)
    begun = game.reset()
    twin, sibling = game.spawn(same_state=True), game.spawn()
    assert rest_of_episode(twin, random.Random(2)) == rest_of_episode(game, random.Random(2))
    assert sibling.reset() == begun


@each_game
def test_any_text_gives_a_result_and_no_exception(id: str) -> None:
    game = make(id)
    for action in MALFORMED:
        game.reset(5)
        observation, reward, terminated, truncated, info = game.step(action)
        assert observation
        assert 0.0 <= reward <= 1.0 or reward == FORMAT_ERROR_REWARD
        assert terminated == (info.get("outcome") is not None)
        assert not truncated or terminated


@each_game
def test_a_long_answer_is_read_in_time_that_grows_with_its_length(id: str) -> None:
    """With the square of it, these would take hours."""
    game = make(id)
    game.reset(1)
    for begin in ("\\boxed{", "\\boxed{1 ", "\\boxed{A", "\\boxed{a1", "\\boxed{reveal 1 "):
        for filling in (" ", "1", "1 ", "a", "a ", "\\boxed{"):
            assert game.step(begin + filling * 100_000)[4]["outcome"] == "format_error"


@each_game
def test_a_random_action_is_well_formed(id: str) -> None:
    game, rng = make(id), random.Random(1)
    for seed in range(6):
        game.reset(seed)
        *_, info = game.step(game.random_action(rng))
        assert info.get("outcome") != "format_error"


@each_game
def test_an_episode_ends_by_its_last_turn_and_says_how(id: str) -> None:
    game, rng = make(id), random.Random(1)
    for seed in range(3):
        game.reset(seed)
        results = rest_of_episode(game, rng, num_steps=1000)
        *_, reward, terminated, truncated, info = results[-1]
        assert terminated
        assert len(results) <= game.level.max_turns
        assert info["outcome"] in ("success", "failure", "turn_limit")
        assert truncated == (info["outcome"] == "turn_limit")
        assert info["success"] == (info["outcome"] == "success")
        assert sum(info["reward_components"].values()) == reward
        assert all(
            result[4]["outcome"] is None and result[4]["seed"] == seed for result in results[:-1]
        )


@each_game
def test_a_format_error_ends_the_episode_and_is_truncated_only_on_the_last_turn(id: str) -> None:
    game = make(id)
    game.reset(1)
    _, reward, terminated, truncated, info = game.step("I give up.")
    assert (reward, terminated, truncated) == (FORMAT_ERROR_REWARD, True, False)
    assert (info["outcome"], info["reward_components"]) == (
        "format_error",
        {"format_error": FORMAT_ERROR_REWARD},
    )
    game.reset(1)
    game.turn = game.level.max_turns - 1
    assert game.step("I give up.")[2:4] == (True, True)


@each_game
def test_resets_without_a_seed_follow_one_sequence_for_each_split_and_base_seed(id: str) -> None:
    def seeds(**sequence: Any) -> list[int]:
        game = make(id, **sequence)
        return [game.reset()[1]["seed"] for _ in range(3)]

    assert seeds() == seeds()
    assert seeds()[1] == episode_seed(make(id).task, "train", 0, 1)
    drawn = [*seeds(), *seeds(split="eval"), *seeds(base_seed=1)]
    assert len(set(drawn)) == len(drawn)
    assert all(0 <= seed < 2**32 for seed in drawn)


def test_a_reset_with_a_seed_takes_none_of_the_sequence() -> None:
    one, other = make("game:GuessTheNumber-v0-easy"), make("game:GuessTheNumber-v0-easy")
    other.reset(5)
    assert one.reset() == other.reset()


def test_an_unknown_id_names_the_nearest() -> None:
    with pytest.raises(NotFound, match="'game:Sudoku-v0-easy'"):
        make("game:Soduku-v0-easy")


def test_an_unknown_option_and_value_name_the_known_ones() -> None:
    with pytest.raises(InvalidConfig, match="'init_algo'"):
        make("game:FifteenPuzzle-v0-easy", init_alg="monte_carlo")
    with pytest.raises(InvalidConfig, match="'pure_random'"):
        make("game:FifteenPuzzle-v0-easy", init_algo="purely_random")


def test_a_state_of_another_task_is_refused() -> None:
    game = make("game:Sudoku-v0-easy")
    game.reset(1)
    with pytest.raises(
        InvalidData, match="Sudoku-v0-easy cannot be restored into game:Sudoku-v0-hard"
    ):
        make("game:Sudoku-v0-hard").restore(game.save())


LOADED = """
import sys
before = set(sys.modules)
import halteres.environments.games
print(*{name.split(".")[0] for name in set(sys.modules) - before})
"""


def test_importing_the_games_loads_the_standard_library_alone() -> None:
    loaded = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=True
    )
    assert set(loaded.stdout.split()) <= {*sys.stdlib_module_names, "halteres"}
