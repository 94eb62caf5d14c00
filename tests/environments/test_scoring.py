"""A config's `rewards` on groups and on held-out answers, in environments of every kind."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from halteres.environments.base import Backlog, BaseEnv
from halteres.environments.item_rollout import DrawnItem, SettledItem, settle_item
from halteres.environments.multi_turn import MultiTurnEnv, Reply, Step
from halteres.environments.scored import ScoredDataGroup, to_wire
from halteres.errors import EnvironmentGaveUp, InvalidConfig
from halteres.observe.metrics import read_rows
from halteres.rollouts.rng import Draw

from .fakes import Digits, Inference, Trainer, at_work, config, server, serving

FUNCTIONS = '''
"""Rewards of the tests."""

import threading

calls = []


def length(completions, completion_ids, **columns):
    calls.append(len(completions))
    return [len(ids) / 10 for ids in completion_ids]


def digit(completions, **columns):
    return [float(messages[-1]["content"][-3]) for messages in completions]


def small_digit(completions, **columns):
    digits = [float(messages[-1]["content"][-3]) for messages in completions]
    return [digit if digit < 5 else None for digit in digits]


def said(completions, **columns):
    return [float(messages[-1]["content"].count("!")) for messages in completions]


def stuck(completions, **columns):
    threading.Event().wait(30)


def broken(completions, **columns):
    raise RuntimeError("out of memory")
'''


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    return file


def digits(inference: Inference, rewards: Sequence[Mapping[str, Any]], **changes: Any) -> Digits:
    return Digits(config(rewards=rewards, **changes), [server(inference)])


@asynccontextmanager
async def judge_saying(text: str) -> AsyncIterator[str]:
    """The address of a judge that gives every question this answer, and no log-probabilities."""

    async def judge(request: web.Request) -> web.Response:
        message = {"role": "assistant", "content": text}
        return web.json_response({"choices": [{"message": message}], "usage": {"total_tokens": 10}})

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", judge)])
    async with serving(app) as url:
        yield url


async def settled(env: BaseEnv, item: Any = 7) -> SettledItem:
    result = await settle_item(env, DrawnItem(draw=Draw(seed=0, step=0, ordinal=0), item=item))
    await env.server.close()
    return result


async def test_without_rewards_a_group_has_the_environments_own_scores(
    inference: Inference,
) -> None:
    env = digits(inference, [])
    assert env.rewards is None
    (group,) = (await settled(env)).groups
    assert "rewards" not in group and set(group["scores"]) <= {0.0, 1.0}


def test_an_environment_whose_rewards_cannot_be_opened_need_not_be_started_again(
    inference: Inference, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match=r"There is no function|cannot be loaded"):
        digits(inference, [{"name": "gone", "function": "nowhere.py:gone"}], run_dir=str(tmp_path))
    assert json.loads((tmp_path / "control" / "failure.json").read_text())["code"] == "env_gave_up"


async def test_a_group_is_scored_in_one_call_per_component(
    inference: Inference, functions: Path
) -> None:
    rewards = [
        {"name": "own", "environment": True, "weight": 2.0},
        {"name": "length", "function": f"{functions}:length"},
    ]
    env = digits(inference, rewards)
    (group,) = (await settled(env)).groups
    record = group.get("rewards")
    assert record is not None
    lengths = [sum(mask != -100 for mask in masks) / 10 for masks in group["masks"]]
    assert group["scores"] == [
        2 * own + length for own, length in zip(record.own, lengths, strict=True)
    ]
    assert {name for values in record.values for name in values} == {"own", "length"}
    assert set(record.seconds) == {"own", "length"} and record.group_s >= max(
        record.seconds.values()
    )
    assert "rewards" not in to_wire(group, include_messages=True)


async def test_a_rollout_without_any_value_is_sampled_again(
    inference: Inference, functions: Path
) -> None:
    rewards = [{"name": "small", "function": f"{functions}:small_digit"}]
    (group,) = (await settled(digits(inference, rewards, rollout_retries=20))).groups
    assert len(group["scores"]) == 4 and max(group["scores"]) < 5
    failures = group.get("failures", [])
    assert failures and {one.code for one in failures} == {"reward_missing"}


async def test_a_rollout_whose_gate_cannot_be_evaluated_is_sampled_again(
    inference: Inference, functions: Path
) -> None:
    gate = {
        "name": "small",
        "function": f"{functions}:small_digit",
        "gate": True,
        "threshold": -1.0,
    }
    rewards = [gate, {"name": "length", "function": f"{functions}:length"}]
    (group,) = (await settled(digits(inference, rewards, rollout_retries=20))).groups
    assert "The gate 'small' could not be evaluated." in {
        one.why for one in group.get("failures", [])
    }


@pytest.mark.parametrize(
    ("function", "sentence"),
    [("stuck", "gave no scores within 0.05 s"), ("broken", "RuntimeError: out of memory")],
)
async def test_a_scorer_that_cannot_score_is_named_and_its_group_has_failed(
    inference: Inference, functions: Path, function: str, sentence: str
) -> None:
    """What was sampled is not sampled again: the scorer is at fault, and it has been tried."""
    rewards = [
        {"name": "own", "environment": True},
        {
            "name": "odd",
            "function": f"{functions}:{function}",
            "timeout_s": 0.05 if function == "stuck" else 20,
        },
    ]
    result = await settled(digits(inference, rewards))
    assert not result.groups and [one.code for one in result.failures] == ["scorer_failed"]
    assert (
        "The reward 'odd' could not score." in result.failures[0].why
        and sentence in result.failures[0].why
    )
    assert len(inference.requests) == 1


async def test_a_run_whose_reward_never_answers_ends_with_that_reward_and_not_with_the_environments_file(
    inference: Inference, functions: Path, tmp_path: Path
) -> None:
    rewards = [{"name": "odd", "function": f"{functions}:broken"}]
    env = digits(inference, rewards, max_failed_groups=4, run_dir=str(tmp_path))
    async with asyncio.timeout(10), at_work(env, Trainer(batch_size=8, group_size=4)) as task:
        with pytest.raises(
            EnvironmentGaveUp, match="See whether that reward answers, or take it out"
        ) as caught:
            await task
    assert ".py" not in caught.value.next
    (notice,) = read_rows(tmp_path / "events.jsonl")
    assert notice["remedy"] == "See whether that reward answers, or take it out of env.rewards."


@pytest.mark.parametrize("relative", [False, True])
async def test_a_judge_that_never_grades_is_named_with_its_reason(
    inference: Inference, functions: Path, relative: bool
) -> None:
    """Where it is all there is the group fails, sampled once; where another component pays the
    group stays.
    """
    async with judge_saying("I cannot say.") as url:
        rubric = {} if relative else {"rubric": {"criteria": [{"name": "k", "text": "?"}]}}
        rewards: list[dict[str, Any]] = [
            {"name": "g", **rubric, "judge": {"base_url": f"{url}/v1"}}
        ]
        alone = await settled(digits(inference, rewards))
        sampled = len(inference.requests)
        beside = await settled(digits(inference, [*rewards, {"name": "own", "environment": True}]))
    (failure,) = alone.failures
    assert failure.code == "scorer_failed" and sampled == 1
    assert (
        "The reward 'g'" in failure.why
        and "Its answer was no grade: 'I cannot say.'" in failure.why
    )
    assert len(beside.groups) == 1


async def test_what_judges_spent_on_groups_that_failed_is_told(
    inference: Inference, functions: Path, tmp_path: Path
) -> None:
    """Every group fails by another component, and the run ends by it: its last row tells what was
    paid for.
    """
    async with judge_saying('{"verdict": "B"}') as url:
        rewards = [
            {"name": "broken", "function": f"{functions}:broken"},
            {
                "name": "g",
                "rubric": {"criteria": [{"name": "k", "text": "?"}]},
                "judge": {"base_url": f"{url}/v1"},
            },
        ]
        env = digits(inference, rewards, max_failed_groups=2, run_dir=str(tmp_path))
        async with asyncio.timeout(5), at_work(env, Trainer(batch_size=8, group_size=4)) as task:
            with pytest.raises(EnvironmentGaveUp):
                await task
        assert env.rewards is not None
        await env.rewards.close()
    row = read_rows(tmp_path / "metrics.jsonl")[-1]
    assert row["groups/failed"] >= 2 and row["judge/g/calls"] >= 5, row
    assert row["judge/g/tokens"] == 10 * row["judge/g/calls"]


class Talk(MultiTurnEnv):
    """Asks twice; pays a tenth for the first answer and 1 for the second."""

    name = "talk"

    def reset(self, task: Any) -> str:
        return "Speak."

    def step(self, reply: Reply) -> Step:
        return Step("Again.", reward=0.1) if reply.turn == 0 else Step(reward=1.0, done=True)

    def eval_items(self) -> Sequence[int]:
        return [1]


async def talked(inference: Inference, rewards: Sequence[Mapping[str, Any]]) -> ScoredDataGroup:
    inference.answer = lambda prompt, _: "Yes!!!" if "Again." in prompt else "Oh!"
    values = {
        "group_size": 1,
        "max_new_tokens": 16,
        "max_token_length": 128,
        "ensure_scores_are_not_same": False,
    }
    env = Talk(
        Talk.env_config_cls.model_validate({**values, "rewards": rewards}), [server(inference)]
    )
    (group,) = (await settled(env)).groups
    return group


async def test_an_episodes_score_comes_with_its_last_turn(
    inference: Inference, functions: Path
) -> None:
    """The spans keep the environment's own rewards, by their weight; the trainer pays the rest of
    the score last.
    """
    rewards = [
        {"name": "own", "environment": True, "weight": 0.5},
        {"name": "said", "function": f"{functions}:said"},
    ]
    group = await talked(inference, rewards)
    assert group["scores"] == [pytest.approx(0.55 + 3)]
    assert [span[-1] for span in group.get("spans") or ()] == [0.05, 0.5]


@pytest.mark.parametrize(("when", "paid"), [("turn", [1.0, 3.0]), ("difference", [1.0, 2.0])])
async def test_turns_are_scored_as_states_or_by_what_they_changed(
    inference: Inference, functions: Path, when: str, paid: list[float]
) -> None:
    group = await talked(
        inference, [{"name": "said", "function": f"{functions}:said", "when": when}]
    )
    assert [span[-1] for span in group.get("spans") or ()] == paid
    assert group["scores"] == [sum(paid)]


class Whole(Digits):
    """Collects its groups itself, with or without messages."""

    name = "whole"
    with_messages = True

    async def collect_trajectories(self, item: Any) -> tuple[Any, Backlog]:
        group, backlog = await super().collect_trajectories(item)
        assert isinstance(group, dict)
        group.pop("rewards")
        if not self.with_messages:
            group.pop("messages")
        return group, backlog


async def test_a_group_that_an_author_collects_is_scored_by_its_messages(
    inference: Inference, functions: Path
) -> None:
    rewards = [{"name": "digit", "function": f"{functions}:digit"}]
    (group,) = (await settled(Whole(config(rewards=rewards), [server(inference)]))).groups
    messages = group.get("messages")
    assert messages and group["scores"] == [float(chat[-1]["content"][-3]) for chat in messages]


class SlowToCollect(Whole):
    """Its groups take a while, by a clock that the test moves."""

    now = 100.0

    async def collect_trajectories(self, item: Any) -> tuple[Any, Backlog]:
        collected = await super().collect_trajectories(item)
        type(self).now += 60.0
        return collected


async def test_what_a_group_takes_includes_its_sampling_also_where_an_author_collects_it(
    inference: Inference, functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise any scorer of a second would seem to take most of it."""
    monkeypatch.setattr(time, "monotonic", lambda: SlowToCollect.now)
    rewards = [{"name": "digit", "function": f"{functions}:digit"}]
    (group,) = (await settled(SlowToCollect(config(rewards=rewards), [server(inference)]))).groups
    record = group.get("rewards")
    assert record is not None and (record.group_s, record.seconds["digit"]) == (60.0, 0.0)


async def test_a_group_without_messages_cannot_be_scored_and_says_so(
    inference: Inference, functions: Path
) -> None:
    env = Whole(
        config(rewards=[{"name": "digit", "function": f"{functions}:digit"}]), [server(inference)]
    )
    env.with_messages = False
    (failure,) = (await settled(env)).failures
    assert "Its groups carry no messages." in failure.why


async def test_values_seconds_and_version_are_on_record(
    inference: Inference, functions: Path, tmp_path: Path
) -> None:
    rewards = [
        {"name": "own", "environment": True},
        {"name": "digit", "function": f"{functions}:digit", "weight": 0.1},
        {"name": "small", "function": f"{functions}:small_digit", "weight": 0.0},
    ]
    run = tmp_path / "run"

    async def one_group(number: int) -> tuple[Mapping[str, Any], Mapping[str, float]]:
        env = digits(inference, rewards, run_dir=str(run))
        (group,) = (await settled(env)).groups
        env.records.group(1, number, 7, group)
        return read_rows(run / "rollouts" / "step_1.jsonl")[-1], env.records.close(before=2)[1]

    row, figures = await one_group(0)
    assert all(set(one["rewards"]) == {"own", "digit", "small"} for one in row["completions"])
    assert set(row["rewards_s"]) == {"own", "digit", "small"}
    values = [one["rewards"]["digit"] for one in row["completions"]]
    assert figures["reward/digit"] == sum(values) / len(values)
    assert figures["train/percent_correct"] == figures["reward/own"], (
        "right is what the environment says is right"
    )
    assert figures["reward/small_none"] == sum(value >= 5 for value in values)
    assert {"reward/digit_s", "rollouts/group_s"} <= figures.keys()

    again, _ = await one_group(1)
    functions.write_text(FUNCTIONS + "\n# changed\n")
    changed, _ = await one_group(2)
    assert row["rewards_version"] == again["rewards_version"] != changed["rewards_version"]
    events = [
        event for event in read_rows(run / "events.jsonl") if event["type"] == "rewards_version"
    ]
    assert [(event["version"], event["before"]) for event in events] == [
        (row["rewards_version"], None),
        (changed["rewards_version"], row["rewards_version"]),
    ], "a change inside a run, also over a restart"


async def test_held_out_answers_are_scored_by_rewards_and_panel(
    inference: Inference, functions: Path
) -> None:
    """The share of right answers stays the environment's own."""
    env = digits(
        inference,
        [{"name": "digit", "function": f"{functions}:digit"}],
        panel=[{"name": "length", "function": f"{functions}:length"}],
        eval_tasks=4,
        eval_samples=2,
        eval_best_of=8,
    )
    plain = digits(inference, [], eval_tasks=4, eval_samples=8)
    metrics, own = await env.evaluate(), await plain.evaluate()
    await env.server.close()
    await plain.server.close()
    assert own.items() <= metrics.items()
    added = metrics.keys() - own.keys()
    assert added == {
        *("eval/reward/digit", "eval/reward/total", "eval/reward/total_std"),
        *("eval/panel/length", "eval/panel/length_std"),
        *("eval/best_of_8", "eval/percent_correct_best_of_8"),
    }
    assert metrics["eval/reward/total"] == metrics["eval/reward/digit"] > 0


async def test_an_evaluation_tells_how_far_an_ensemble_is_apart_on_nearly_all_answers(
    inference: Inference,
) -> None:
    """One answer of twenty may be further apart."""

    async def score(request: web.Request) -> web.Response:
        texts = [item["completion"][-1]["content"] for item in (await request.json())["items"]]
        return web.json_response({"items": [{"score": float(text[-3])} for text in texts]})

    app = web.Application()
    app.add_routes([web.post("/score", score)])
    async with serving(app) as first:
        env = digits(
            inference, [], reward_model_path=f"{first},{first}", eval_tasks=4, eval_samples=8
        )
        metrics = await env.evaluate()
        await env.server.close()
        assert env.rewards is not None
        await env.rewards.close()
    assert metrics["eval/reward/reward_model/disagreement"] == 0.0
    assert metrics["eval/reward/reward_model/disagreement_q95"] == 0.0


async def test_an_answer_that_a_limit_cut_off_costs_its_penalty_and_is_counted(
    inference: Inference,
) -> None:
    """The end of every other answer does not come within the limit."""
    inference.answer = lambda prompt, digest: "\\boxed{2}." + (
        " and so on" * 20 if digest % 2 else ""
    )
    free, charged = (digits(inference, [], missing_eos_penalty=penalty) for penalty in (0.0, 0.75))
    (group,), (paid,) = (await settled(free)).groups, (await settled(charged)).groups
    cut = [finish == "length" for finish in paid.get("finish", [])]
    assert 0 < sum(cut) < len(cut)
    before = zip(group["scores"], cut, strict=True)
    assert paid["scores"] == [score - 0.75 * one for score, one in before]
    charged.records.group(0, 0, 7, paid)
    assert charged.records.close(before=1)[0]["train/truncated"] == sum(cut) / len(cut)


async def test_a_penalty_for_the_limit_makes_no_right_answer_wrong(inference: Inference) -> None:
    """Every answer is right, and cut off."""
    inference.answer = lambda prompt, digest: "2" * 200
    env = digits(inference, [], missing_eos_penalty=2.0, ensure_scores_are_not_same=False)
    (group,) = (await settled(env)).groups
    env.records.group(0, 0, 7, group)
    figures = env.records.close(before=1)[0]
    assert (figures["train/truncated"], figures["train/percent_correct"]) == (1.0, 1.0)
    assert figures["train/truncated_paid"] == 1.0
    assert max(group["scores"]) < 0 and "own_scores" not in to_wire(group, include_messages=False)


@pytest.mark.parametrize(
    "changes",
    [{"scores": [1.0]}, {"finish": ["length"]}, {"masks": [[1, 2]]}, {"scores": (1.0, 0.0)}],
)
async def test_a_group_that_cannot_be_penalised_has_failed_and_the_environment_goes_on(
    inference: Inference, changes: dict[str, Any]
) -> None:
    class Odd(Digits):
        async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
            made = {
                "tokens": [[1, 2], [1, 3]],
                "masks": [[-100, 2], [-100, 3]],
                "scores": [1.0, 0.0],
            }
            return {**made, "finish": ["length", "stop"], **changes}, []

    found = await settled(Odd(config(missing_eos_penalty=0.5, group_size=2), [server(inference)]))
    if isinstance(changes.get("scores"), tuple):
        assert found.groups[0]["scores"] == [0.5, 0.0], "a tuple is as good as a list"
    else:
        assert [failure.code for failure in found.failures] == ["env_error"]


async def test_the_best_of_several_is_the_one_that_the_rewards_like_best(
    inference: Inference, functions: Path
) -> None:
    """Right is an even digit, liked is a large one: with so many answers the best is a 9 or an
    8.
    """
    env = digits(
        inference,
        [{"name": "digit", "function": f"{functions}:digit"}],
        eval_tasks=6,
        eval_best_of=16,
    )
    metrics = await env.evaluate()
    await env.server.close()
    assert metrics["eval/num_samples"] == 16
    assert metrics["eval/percent_correct_best_of_16"] != metrics["eval/percent_correct"]


def test_a_list_from_a_file_is_checked_before_anything_runs() -> None:
    with pytest.raises(ValidationError, match="exactly one of"):
        config(rewards=json.dumps([{"name": "nothing"}]))


async def test_reward_models_score_messages_and_their_digest_is_in_the_version(
    inference: Inference, tmp_path: Path
) -> None:
    """Two servers, which say who they are; an ensemble takes the lower score of two."""
    digests, bodies = {"first": "d1", "second": "d2"}, []

    def server_of(name: str, per_letter: float) -> web.Application:
        async def score(request: web.Request) -> web.Response:
            body = await request.json()
            bodies.append(body)
            texts = [item["completion"][-1]["content"] for item in body["items"]]
            facts = {"raw": 0.0, "tokens": 1, "out_of_range": name == "second"}
            items = [{"score": len(text) * per_letter, **facts} for text in texts]
            return web.json_response({"items": items})

        async def health(request: web.Request) -> web.Response:
            return web.json_response({"models": [{"id": name, "digest": digests[name]}]})

        app = web.Application()
        app.add_routes([web.post("/score", score), web.get("/health", health)])
        return app

    async with (
        serving(server_of("first", 1.0)) as first,
        serving(server_of("second", 0.5)) as second,
    ):
        rewards = [
            {"name": "rm", "model": f"{first}, {second}", "combination": "min", "output": "raw"}
        ]

        async def one_group() -> ScoredDataGroup:
            env = digits(inference, rewards)
            (group,) = (await settled(env)).groups
            assert env.rewards is not None
            await env.rewards.close()
            return group

        group = await one_group()
        again = await one_group()
        digests["second"] = "d3"
        changed = await one_group()
    messages, records = (
        group.get("messages"),
        [one.get("rewards") for one in (group, again, changed)],
    )
    assert messages and group["scores"] == [len(chat[-1]["content"]) / 2 for chat in messages]
    assert bodies[0]["items"][0]["prompt"] == messages[0][:-1] and bodies[0]["output"] == "raw"
    versions = [record.version for record in records if record]
    assert versions[0] == versions[1] != versions[2]
    values = [value for record in records if record for value in record.values[0].values()]
    assert values[0] and values[0].parts == {
        "disagreement": group["scores"][0] / 2,
        "out_of_range": 1.0,
    }
