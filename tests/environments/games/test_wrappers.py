"""GEM's wrappers: what the policy sees, what a tool adds, how they are named."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from environments.games.peers import Markup, SearchServer, running_search_server
from halteres.environments.games import make
from halteres.environments.games import wrappers as wrappers_module
from halteres.environments.games.wrappers import (
    PYTHON_TOOLS,
    Environment,
    Wrapper,
    wrap,
    wrappers,
)
from halteres.errors import InvalidConfig, InvalidData

CALL = "Let me see. <search> who?\n</search> and more"


class Scripted:
    """An environment that shows what it is told to, one (observation, info) after another."""

    seed = 0

    def __init__(self, *shown: tuple[str, dict[str, Any]]) -> None:
        self.shown = list(shown)

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return self.shown[0]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        observation, info = self.shown[self.turn]
        return observation, 0.25, False, False, info

    def save(self) -> dict[str, Any]:
        return {"turn": self.turn}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.turn = saved["turn"]

    def spawn(self, same_state: bool = False) -> Scripted:
        return Scripted(*self.shown)

    def random_action(self, rng: random.Random) -> str:
        return "anything"

    def close(self) -> None:
        self.shown = []


@pytest.fixture
def played() -> Scripted:
    """Three observations, one of them empty, with a suffix for each and a prefix for the last."""
    infos: list[dict[str, Any]] = [
        {"suffix": "board 0"},
        {"suffix": "board 1"},
        {"suffix": "board 2", "prefix": "P:"},
    ]
    return Scripted(("rules", infos[0]), ("", infos[1]), ("second\n", infos[2]))


@pytest.fixture
def search_server() -> Iterator[SearchServer]:
    with running_search_server() as server:
        yield server


def observations(env: Environment, *actions: str) -> list[str]:
    return [env.reset(seed=1)[0], *(env.step(action)[0] for action in actions)]


def test_concat_shows_all_observations_and_the_latest_board(played: Scripted) -> None:
    seen = observations(wrap(played, "concat"), "one", "two\n")
    assert seen == ["rules\nboard 0", "rules\nboard 1", "P:rules\nsecond\nboard 2"]


def test_concat_with_action_shows_actions_between_them(played: Scripted) -> None:
    seen = observations(wrap(played, "concat_with_action"), "one", "two\n")
    assert seen == ["rules\nboard 0", "rules\none\nboard 1", "P:rules\none\ntwo\nsecond\nboard 2"]


def test_concat_chat_is_a_chat_with_the_board_behind_it(played: Scripted) -> None:
    seen = observations(wrap(played, "concat_chat", chat=Markup()), "one")
    assert seen[0] == "<user>rules</><assistant>board 0"
    assert seen[1] == "<user>rules</><assistant>one</><user></><assistant>board 1"


def test_concat_chat_on_reset_puts_the_first_observation_into_markup(played: Scripted) -> None:
    seen = observations(wrap(played, "concat_chat_on_reset", chat=Markup()), "one", "two\n")
    assert seen[0] == "<user>rules</><assistant>\nboard 0"
    assert seen[2] == "P:<user>rules</><assistant>\none\ntwo\nsecond\nboard 2"


def test_tracking_counts_steps_and_rewards_and_remembers_the_last_episode(played: Scripted) -> None:
    env = wrap(played, "concat,episode_tracking")
    env.reset()
    infos = [env.step("one")[4], env.step("two")[4], env.reset()[1]]
    assert [(info["step_counter"], info["cumulative_rewards"]) for info in infos] == [
        (1, 0.25),
        (2, 0.5),
        (0, 0.0),
    ]
    assert (infos[2]["prev_ep_step_counter"], infos[2]["prev_ep_cumulative_rewards"]) == (2, 0.5)


def test_the_inner_info_is_left_as_it_is(played: Scripted) -> None:
    env = wrap(played, "episode_tracking")
    env.reset()
    env.step("one")
    assert played.shown[1][1] == {"suffix": "board 1"}


def test_a_search_is_answered_paid_and_costs_no_turn(search_server: SearchServer) -> None:
    game = make("game:GuessTheNumber-v0-easy")
    env = wrap(game, "search_tool", search_url=search_server.url)
    rules, info = env.reset(3)
    assert rules.startswith("You are playing Guess The Number.")
    assert rules.endswith("\n  <answer> your answer here </answer>")
    assert (info["tool_use_counter"], info["use_tool"]) == (0, False)
    observation, reward, terminated, truncated, info = env.step(CALL)
    assert observation == (
        "\n\n<information>Doc 1(Title: Sky) It is blue.\nMostly.\nDoc 2(Title: Sea) "
        "\n</information>\n\n"
    )
    assert (reward, terminated, truncated, game.turn) == (0.3, False, False, 0)
    assert info["parsed_action"] == "Let me see. <search> who?\n</search>"
    assert (info["tool_use_counter"], info["tool_success_counter"], info["tool_type"]) == (
        1,
        1,
        "search",
    )
    assert (info["reward_components"], info["outcome"], info["seed"]) == (
        {"tool_use": 0.3},
        None,
        3,
    )
    assert search_server.asked == [{"query": "who?", "topk": 3, "return_scores": True}]


def test_what_follows_a_call_is_not_shown_again(search_server: SearchServer) -> None:
    env = wrap(
        Scripted(("rules", {})), "search_tool,concat_with_action", search_url=search_server.url
    )
    assert "</search>\n\n\n<information>" in observations(env, CALL)[1]


def test_the_fifth_use_is_told_to_be_the_last_and_the_next_call_is_an_action(
    search_server: SearchServer,
) -> None:
    env = wrap(
        make("game:GuessTheNumber-v0-easy"),
        "search_tool_no_int_reward",
        search_url=search_server.url,
    )
    env.reset(3)
    results = [env.step(CALL) for _ in range(6)]
    last = (
        "</information>\n\n\n\nReached the maximum number of tool use. Please output final "
        "answer directly."
    )
    assert [result[0].endswith(last) for result in results] == [False] * 4 + [True, False]
    assert [result[1] for result in results] == [0.0] * 5 + [-0.1]
    assert results[5][4]["outcome"] == "format_error"
    assert results[5][4]["use_tool"]


@pytest.mark.parametrize("trouble", ["status", "form", "away"])
def test_a_search_that_fails_is_told_to_the_policy_and_to_the_trainer(
    trouble: str, search_server: SearchServer
) -> None:
    url = search_server.url
    if trouble == "status":
        search_server.status = 500
    elif trouble == "form":
        search_server.result = {"result": [{"title": "Sky"}]}
    else:
        url = "http://127.0.0.1:9/"
    env = wrap(Scripted(("rules", {})), "search_tool", search_url=url)
    env.reset()
    observation, reward, _, _, info = env.step(CALL)
    assert re.fullmatch(r"\n\n<information>\[SearchTool Error: .+\]</information>\n\n", observation)
    assert reward == 0.3
    assert info["tool_error"]
    assert (info["tool_use_counter"], info["tool_success_counter"]) == (1, 0)


def test_a_block_of_python_is_answered_paid_and_costs_no_turn(cages: None) -> None:
    game = make("game:GuessTheNumber-v0-easy")
    env = wrap(game, "python_tool")
    rules, info = env.reset(3)
    assert rules.endswith("Return your final answer within \\boxed{}.")
    assert (info["tool_use_counter"], info["use_tool"]) == (0, False)
    called = "So: <python>\nprint(6 * 7)\n</python>"
    observation, reward, terminated, truncated, info = env.step(f"{called} it is. ```python\n1```")
    assert observation == "Code execution result: 42\n\n"
    assert (reward, terminated, truncated, game.turn) == (pytest.approx(0.3), False, False, 0)
    assert (info["parsed_action"], info["tool_type"]) == (called, "python_code")
    assert info["reward_components"] == {"tool_use": 0.05, "tool_success": 0.25}
    observation, reward, _, _, info = env.step("```python\nprint(1)\n1 / 0\n``` and <python>2")
    assert observation.startswith(
        "Code execution result: 1\n\nTraceback (most recent call last):\n"
        '  File "<string>", line 2, in <module>\n'
    )
    # from Python 3.13 on the line itself stands between
    assert observation.endswith("\nZeroDivisionError: division by zero\n")
    assert (reward, info["tool_error"]) == (0.05, "ZeroDivisionError: division by zero")
    assert (info["tool_use_counter"], info["tool_success_counter"]) == (2, 1)


def test_a_python_tool_without_rewards_may_show_the_last_line_of_the_errors_alone(
    cages: None,
) -> None:
    for name, begins in (
        ("python_tool_no_int_reward", "Traceback"),
        ("python_tool_no_int_reward_last_line_error", "NameError: name 'y'"),
    ):
        env = wrap(make("game:GuessTheNumber-v0-easy"), name)
        env.reset(3)
        observation, reward, *_ = env.step("<python>x = sqrt(4)\ny</python>")
        assert observation.startswith(f"Code execution result: {begins}"), "sqrt is lent, y is not"
        assert reward == 0.0


def test_a_python_tool_is_refused_where_there_is_no_cage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrappers_module, "cage_missing", lambda: "This kernel has no namespaces.")
    for name in PYTHON_TOOLS:
        with pytest.raises(InvalidConfig, match=r"runs what a model wrote.*has no namespaces"):
            wrappers(name)


def test_wrapped_games_are_saved_restored_and_spawned_as_one(search_server: SearchServer) -> None:
    def wrapped() -> Environment:
        names = "search_tool,concat_with_action,episode_tracking"
        return wrap(make("game:Hangman-v0-easy"), names, search_url=search_server.url)

    env, other = wrapped(), wrapped()
    env.reset(4)
    env.step(CALL)
    env.step("\\boxed{a}")
    other.restore(json.loads(json.dumps(env.save())))
    twin, sibling = env.spawn(same_state=True), env.spawn()
    expected = env.step("\\boxed{e}")
    assert expected[4]["step_counter"] == 3
    assert other.step("\\boxed{e}") == expected == twin.step("\\boxed{e}")
    assert sibling.reset(4)[1]["prev_ep_step_counter"] == 0


def test_attributes_are_those_of_the_game_now(played: Scripted) -> None:
    env = wrap(make("game:Hangman-v0-random"), "concat,episode_tracking")
    assert isinstance(env, Wrapper)
    for seed in range(5):
        env.reset(seed)
        assert (env.level, env.seed) == (env.unwrapped.level, seed)  # pyright: ignore
    with pytest.raises(AttributeError):
        env.no_such_thing  # noqa: B018


def test_no_name_is_no_wrapper() -> None:
    game = make("game:Hangman-v0-easy")
    assert wrap(game, "") is game


def test_an_unknown_wrapper_names_the_nearest() -> None:
    with pytest.raises(InvalidConfig, match="Did you mean 'concat_with_action'"):
        wrappers("concat_with_actions")


@pytest.mark.parametrize(
    ("names", "ordered"),
    [
        ("episode_tracking,concat", "concat,episode_tracking"),
        ("concat,search_tool", "search_tool,concat"),
        ("concat,concat", "concat"),
    ],
)
def test_another_order_is_refused_with_the_right_one(names: str, ordered: str) -> None:
    with pytest.raises(InvalidConfig, match=f"'{ordered}' is the order"):
        wrappers(names, search_url="http://127.0.0.1:1")


def test_what_a_wrapper_needs_is_named() -> None:
    with pytest.raises(InvalidConfig, match="search_url is not set"):
        wrappers("search_tool,concat")
    with pytest.raises(InvalidConfig, match="'search:8000' is no address"):
        wrappers("search_tool", search_url="search:8000")
    with pytest.raises(InvalidConfig, match="'concat_chat' needs a chat template"):
        wrap(make("game:Hangman-v0-easy"), "concat_chat")


@pytest.mark.parametrize(
    "damage",
    [
        lambda saved: saved.pop("env"),
        lambda saved: saved.pop("state"),
        lambda saved: saved["state"].pop("num_steps"),
        lambda saved: saved["state"].update(num_steps="1"),
        lambda saved: saved["env"]["state"]["actions"].append("x"),
        lambda saved: saved["env"]["state"]["observations"].append("x"),
        lambda saved: saved["env"]["state"].update(observations=[{"role": "user"}]),
        lambda saved: saved["env"]["env"].pop("turn"),
        lambda saved: saved["env"]["env"].update(state=None),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(
    damage: Callable[[dict[str, Any]], object],
) -> None:
    env = wrap(make("game:GuessTheNumber-v0-easy"), "concat_with_action,episode_tracking")
    env.reset(seed=3)
    env.step("\\boxed{5}")
    before = json.dumps(env.save())
    saved = json.loads(before)
    damage(saved)
    with pytest.raises(InvalidData, match="is damaged"):
        env.restore(saved)
    assert json.dumps(env.save()) == before
