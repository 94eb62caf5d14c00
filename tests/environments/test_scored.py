"""Scored groups: from turns to the wire, and what is unfit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from halteres.environments.scored import (
    NotFiniteScore,
    check,
    finite,
    group_of,
    items_of,
    rollouts_of,
    scores_of,
    to_wire,
    turns_of,
)
from halteres.errors import EnvironmentFailed, InvalidData
from halteres.types import FailedRollout, PolicyVersion, Trajectory, Turn


def turn(prompt: tuple[int, ...], action: tuple[int, ...], version: int = 3) -> Turn:
    return Turn(
        prompt=prompt,
        action=action,
        logprobs=tuple(-0.25 for _ in action),
        text="",
        version_min=PolicyVersion(version),
        version_max=PolicyVersion(version + 1),
        stop_reason="stop",
    )


def paid(one: Turn, reward: float) -> Turn:
    return replace(one, reward=reward)


def rollout(score: float, *turns: Turn) -> Trajectory:
    return Trajectory(turns=turns, score=score)


def group(**changes: Any) -> Any:
    made = group_of(
        [items_of(rollout(1.0, turn((5, 6), (7, 8)))), items_of(rollout(0.0, turn((5, 6), (9,))))]
    )
    return {**made, **changes}


def test_context_is_masked_and_marked_and_actions_are_not() -> None:
    (item,) = items_of(rollout(0.5, turn((5, 6), (7, 8))))
    assert item["tokens"] == [5, 6, 7, 8]
    assert item["masks"] == [-100, -100, 7, 8]
    assert item.get("inference_logprobs") == [1.0, 1.0, -0.25, -0.25]
    assert item.get("policy_version") == [3, 4]


def test_later_turns_keep_earlier_actions_and_join_their_versions() -> None:
    (item,) = items_of(rollout(1.0, turn((5,), (7,), 1), turn((5, 7, 6), (8, 9), 4)))
    assert item["tokens"] == [5, 7, 6, 8, 9]
    assert item["masks"] == [-100, 7, -100, 8, 9]
    assert item.get("policy_version") == [1, 5]


def test_a_turn_that_rewrites_its_history_begins_another_sequence_of_its_rollout() -> None:
    first, second = items_of(rollout(1.0, turn((5,), (7,), 1), turn((5, 8), (9,), 4)))
    assert (first["tokens"], second["tokens"]) == ([5, 7], [5, 8, 9])
    assert second["masks"] == [-100, -100, 9]
    assert (first["scores"], second["scores"]) == (1.0, 1.0)
    assert (first.get("policy_version"), second.get("policy_version")) == ([1, 2], [4, 5])
    with pytest.raises(InvalidData):
        items_of(rollout(1.0))


def test_a_group_tells_its_rollouts_and_what_each_turn_was_paid() -> None:
    whole = rollout(0.5, paid(turn((5,), (7,)), 0.25), paid(turn((5, 7, 6), (8, 9)), 0.25))
    split = rollout(1.0, turn((5,), (7,)), paid(turn((6,), (8,)), 0.5))
    made = group_of([items_of(whole), items_of(split), items_of(rollout(0.0, turn((5,), (4,))))])
    assert made["scores"] == [0.5, 1.0, 1.0, 0.0]
    assert made.get("episodes") == [0, 1, 1, 2]
    assert rollouts_of(made) == [[0], [1, 2], [3]]
    assert scores_of(made) == [0.5, 1.0, 0.0]
    assert made.get("spans") == [
        (0, 1, 2, 0.25),
        (0, 3, 5, 0.25),
        (1, 1, 2, 0.0),
        (2, 1, 2, 0.5),
        (3, 1, 2, 0.0),
    ]
    check(made, "env")
    assert [(one.action, one.observation, one.reward) for one in turns_of(made, [1, 2])] == [
        ([7], [6], 0.0),
        ([8], [], 0.5),
    ]
    with pytest.raises(NotFiniteScore):
        check({**made, "spans": [(0, 1, 2, math.nan)]}, "env")


def test_some_rollouts_of_a_group_may_be_left_out_of_training() -> None:
    muted = items_of(rollout(1.0, turn((5,), (7,))))
    muted[0]["overrides"] = {"set_advantage_to_zero": True}
    made = group_of([muted, items_of(rollout(0.0, turn((5,), (8,))))])
    assert made.get("overrides") == [{"set_advantage_to_zero": True}, {}]


def test_an_untagged_turn_leaves_its_group_untagged() -> None:
    made = group_of(
        [items_of(rollout(1.0, turn((5,), (7,)))), items_of(rollout(1.0, turn((5,), (8,), -1)))]
    )
    assert "policy_version" not in made


def test_a_sound_group_passes() -> None:
    check(group(), "env")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"scores": [1.0]}, "1 scores"),
        ({"masks": [[-100, -100, 7, 8], [-100, 9]]}, "2 masks"),
        (
            {"inference_logprobs": [[1.0, 1.0, math.nan, 0.0], [1.0, 1.0, 0.0]]},
            "inference_logprobs",
        ),
        ({"tokens": [], "masks": [], "scores": []}, "empty"),
        ({"tokens": [[1], []]}, "empty"),
        ({"scores": [1.0, "good"]}, "'good'"),
    ],
)
def test_an_unfit_group_is_named_by_its_field(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(EnvironmentFailed, match=why):
        check(group(**changes), "env")


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf, 10**400])
def test_a_score_that_is_not_finite_is_typed(score: float) -> None:
    with pytest.raises(NotFiniteScore):
        finite(score, "env.score")
    with pytest.raises(NotFiniteScore):
        check(group(scores=[1.0, score]), "env")


def test_own_records_stay_at_home_and_messages_are_sent_only_if_asked() -> None:
    made = group(
        failures=[FailedRollout(code="env_error", why="w")], messages=[[], []], images=None
    )
    assert set(to_wire(made, include_messages=False)) == {
        "tokens",
        "masks",
        "scores",
        "inference_logprobs",
        "policy_version",
    }
    assert "messages" in to_wire(made, include_messages=True)
