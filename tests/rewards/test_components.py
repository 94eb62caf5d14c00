"""A list of components: what may stand in it, and what it makes of a group's values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from halteres.environments.config import APIServerConfig, BaseEnvConfig, Overrides, effective
from halteres.rewards.components import Reward, RewardSpec, Value, compose

JUDGE = {"base_url": "http://127.0.0.1:1/v1", "model": "m"}


def spec(name: str, **changes: Any) -> RewardSpec:
    return RewardSpec.model_validate({"name": name, "function": f"m:{name}", **changes})


def column(*totals: float | None) -> list[Value | None]:
    return [None if total is None else Value(total=total) for total in totals]


def totals(rewards: Sequence[Reward | None]) -> list[float | None]:
    return [None if reward is None else reward.total for reward in rewards]


def test_a_reward_is_the_weighted_sum_of_what_applies() -> None:
    specs = [spec("a", weight=2.0), spec("b", weight=-1.0)]
    values = {"a": column(1.0, 0.5, None), "b": column(1.0, None, None)}
    assert totals(compose(specs, values, "sum_then_normalize")) == [1.0, 1.0, None], (
        "only None is no zero"
    )


def test_a_value_is_clipped_before_it_is_weighted() -> None:
    specs = [spec("a", weight=2.0, clip=[-1.0, 1.0])]
    assert totals(compose(specs, {"a": column(5.0, -5.0, 0.25)}, "sum_then_normalize")) == [
        2.0,
        -2.0,
        0.5,
    ]


def test_behind_a_closed_gate_nothing_but_the_gate_counts() -> None:
    specs = [spec("right", gate=True, environment=True, function=None), spec("style", weight=3.0)]
    values = {"right": column(1.0, 0.0), "style": column(0.5, 0.9)}
    assert totals(compose(specs, values, "sum_then_normalize")) == [2.5, 0.0]


def test_a_rollout_whose_gate_cannot_be_evaluated_has_no_reward() -> None:
    specs = [spec("right", gate=True, function=None, model="http://127.0.0.1:1"), spec("style")]
    rewards = compose(
        specs, {"right": column(1.0, None), "style": column(0.5, 0.9)}, "sum_then_normalize"
    )
    assert totals(rewards) == [1.5, None]


def test_a_scorer_that_missed_one_rollout_counts_for_none_of_the_group() -> None:
    """A missing score among scores would be the lowest of them, or the highest of negative ones."""
    specs = [spec("length"), spec("model", function=None, model="http://127.0.0.1:1")]
    values = {"length": column(0.1, 0.2, 0.3), "model": column(-4.0, None, -2.0)}
    assert totals(compose(specs, values, "sum_then_normalize")) == [0.1, 0.2, 0.3]


def test_normalised_components_weigh_the_same_whatever_their_scale() -> None:
    specs = [spec("small"), spec("large")]
    values = {"small": column(0.0, 0.01), "large": column(1000.0, 0.0)}
    first, second = totals(compose(specs, values, "normalize_then_sum"))
    assert first is not None and second is not None
    assert abs(first) < 0.02 and abs(second) < 0.02
    plain = totals(compose(specs, values, "sum_then_normalize"))
    assert plain == [1000.0, 0.01]
    equal = compose([spec("a")], {"a": column(3.0, 3.0)}, "normalize_then_sum")
    assert totals(equal) == [0.0, 0.0], "nothing to tell apart"


def test_turns_are_paid_by_weight_and_add_up_to_the_total() -> None:
    specs = [
        spec("state", when="turn", weight=2.0),
        spec("own", function=None, environment=True, weight=0.5),
    ]
    values = {"state": [Value(total=0.75, turns=(0.25, 0.5))], "own": column(1.0)}
    (reward,) = compose(specs, values, "sum_then_normalize")
    assert reward == Reward(total=2.0, turns=(0.5, 1.0), own_weight=0.5)


@pytest.mark.parametrize(
    ("component", "sentence"),
    [
        ({"name": "a"}, "exactly one of .* it has none"),
        ({"name": "a", "environment": True, "function": "m:f"}, "it has environment, function"),
        ({"name": "a", "rubric": "r.toml"}, "a rubric with its judge"),
        ({"name": "mean", "environment": True}, "name of another metric"),
        ({"name": "share_of_gain", "environment": True}, "name of another metric"),
        ({"name": "a b", "environment": True}, "pattern"),
        ({"name": "a", "function": "m:f", "clip": [1, 0]}, r"\[lowest, highest\]"),
        ({"name": "a", "judge": JUDGE, "when": "turn"}, "whole episodes"),
        ({"name": "a", "function": "m:f", "waight": 1}, "waight"),
        ({"name": "a", "judge": {**JUDGE, "key_variable": "TINKER_API_KEY"}}, "JUDGE"),
    ],
)
def test_a_component_that_cannot_be_meant_is_refused(
    component: Mapping[str, Any], sentence: str
) -> None:
    with pytest.raises(ValidationError, match=sentence):
        RewardSpec.model_validate(component)


def test_two_components_do_not_share_a_metric() -> None:
    twice = [{"name": "a", "function": "m:f"}, {"name": "a", "function": "m:g"}]
    with pytest.raises(ValidationError, match="share the metrics of 'a'"):
        BaseEnvConfig.model_validate({"rewards": twice})
    with pytest.raises(ValidationError, match="share the metrics of 'a'"):
        BaseEnvConfig.model_validate(
            {"rewards": [{"name": "a", "function": "m:f"}, {"name": "a_s", "function": "m:g"}]}
        )


def test_turns_values_are_not_standardised() -> None:
    turned = [{"name": "a", "function": "m:f", "when": "turn"}]
    with pytest.raises(ValidationError, match="use sum_then_normalize"):
        BaseEnvConfig.model_validate(
            {"rewards": turned, "reward_aggregation": "normalize_then_sum"}
        )


@pytest.mark.parametrize("written", [json.dumps, yaml.safe_dump])
def test_a_list_may_come_as_text(written: Any) -> None:
    config = BaseEnvConfig.model_validate(
        {"rewards": written([{"name": "own", "environment": True, "weight": 2}])}
    )
    assert config.rewards[0].weight == 2.0
    assert BaseEnvConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_component_is_written_down_without_its_defaults() -> None:
    given = {"name": "judge", "rubric": "r.toml", "judge": JUDGE, "clip": [0.0, 1.0]}
    assert RewardSpec.model_validate(given).model_dump(mode="json") == given


def test_a_mistake_inside_a_component_is_named_by_its_place() -> None:
    changes = Overrides(env={"rewards": [{"name": "own", "environment": True, "wieght": 2}]})
    (problem,) = effective(BaseEnvConfig(), APIServerConfig(), changes).problems
    assert (problem.field, problem.rule) == ("rewards", "0.wieght: there is no such setting")


def test_a_reward_models_path_is_short_for_one_component() -> None:
    (one,) = BaseEnvConfig(reward_model_path="/models/rm").all_rewards
    assert (one.name, one.model, one.weight, one.output) == (
        "reward_model",
        "/models/rm",
        1.0,
        "standardised",
    )


def test_the_best_of_several_is_chosen_by_rewards() -> None:
    with pytest.raises(ValidationError, match="chosen by `rewards`"):
        BaseEnvConfig(eval_best_of=4)
