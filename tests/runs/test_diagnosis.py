"""The rules: each speaks of what it watches for, once, with a call that an agent can make; and is
silent otherwise.

`healthy_rows.jsonl` are rows of three real runs of the built-in model on arithmetic (40 steps,
seeds 0 to 2).
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halteres.agent.table import BY_NAME
from halteres.config.settings import InferenceSettings, Settings, TrainerSettings
from halteres.next_step import Remedy
from halteres.observe.metrics import Row
from halteres.process import identity
from halteres.runs.diagnosis.alerts import (
    FIRST_STEP_S,
    LASTING_S,
    LEAST_CALLS,
    LEAST_S,
    Calls,
    Diagnosis,
    RefusedCalls,
    StallDetector,
)
from halteres.runs.diagnosis.rules import logprob_drift
from halteres.runs.diagnosis.run_facts import Debounce, History, RunFacts, trend
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.alerts import STALE_S, Alert, stalled
from halteres.runs.state import RunState, lock_taken, write_state

HEALTHY = [
    json.loads(line)
    for line in Path(__file__).with_name("healthy_rows.jsonl").read_text().splitlines()
]

CASE = RunFacts(
    run_id="3fa9c1d2",
    environment="arithmetic",
    trainer=TrainerSettings(learning_rate=0.001, max_token_trainer_length=300),
    env={
        "group_size": 16,
        "batch_size": 48,
        "max_new_tokens": 64,
        "max_token_length": 256,
        "max_num_workers": 64,
    },
    given={"env.seed": 7},
)


def rows(count: int, **figures: Any) -> Iterator[dict[str, Any]]:
    """Steps of a run that learns steadily, but for these figures; a function is called with the
    step.
    """
    for step in range(1, count + 1):
        learning = {
            "reward/mean": 0.2 + 0.01 * step,
            "reward/min": 0.0,
            "reward/max": 1.0,
            "groups/without_signal": 0.25,
            "policy/entropy": 0.3,
            "logprobs/absdiff_p999": 0.0,
            "logprobs/diff": 0.0,
            "train/loss": -1.5,
            "train/skipped": 0.0,
            "train/truncated": 0.02,
            "time/batch": 3.0,
            "time/train": 6.0,
            "time/step": 9.1,
        }
        changed = {
            name: value(step) if callable(value) else value for name, value in figures.items()
        }
        yield {"step": step, "src": "trainer", **learning, **changed}


def told(given: Iterable[dict[str, Any]], case: RunFacts = CASE) -> list[Alert]:
    diagnosis = Diagnosis(case)
    return [alert for row in given for alert in diagnosis.observe(row)]


def the_one(given: Iterable[dict[str, Any]], case: RunFacts = CASE) -> Alert:
    (alert,) = told(given, case)
    assert_calls(alert.remedy)
    assert len(alert.evidence) <= 150, len(alert.evidence)
    return alert


def assert_calls(remedy: Remedy) -> None:
    """A remedy begins with a call, each names a tool and arguments that it takes, and an answer has
    room for it.
    """
    assert remedy.steps
    assert len(str(remedy)) <= 260, len(str(remedy))
    for step in (*remedy.steps, *remedy.later):
        BY_NAME[step.tool].arguments.model_validate(step.args)
        sections = {field.partition(".")[0] for field in step.args.get("changes", {})}
        assert sections <= {"run", "env", "inference", "trainer"}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_healthy_run_raises_no_alert(seed: int) -> None:
    assert told(row for row in HEALTHY if row["seed"] == seed) == []


def test_steady_learning_raises_no_alert() -> None:
    assert told(rows(70)) == []


def test_no_variance_below_the_ceiling_is_told_once_with_larger_groups() -> None:
    dull = {
        "reward/mean": 0.25,
        "groups/without_signal": 1.0,
        "train/loss": None,
        "train/skipped": 1.0,
    }
    alert = the_one(rows(30, **dull))
    assert (alert.rule, alert.step) == ("no_reward_variance", 5)
    assert "mean reward 0.25" in alert.evidence
    assert str(alert.remedy).startswith('rl_get_rollouts("3fa9c1d2", which="best"); ')
    assert str(alert.remedy).endswith(
        'rl_stop_training("3fa9c1d2") then rl_start_training(resume_from="3fa9c1d2", '
        'changes={"env.group_size":32,"env.batch_size":64})'
    )


def test_where_no_answer_ever_scored_the_scorer_is_looked_at_first() -> None:
    none = {
        "reward/mean": 0.0,
        "reward/max": 0.0,
        "groups/without_signal": 1.0,
        "train/skipped": 1.0,
    }
    alert = the_one(rows(30, **{**none, "train/loss": None}))
    assert "mean reward 0" in alert.evidence
    assert str(alert.remedy).startswith(
        'rl_get_rollouts("3fa9c1d2", which="worst"); would the scorer know a right answer?'
    )
    assert '"env.group_size":32' in str(alert.remedy)


@pytest.mark.parametrize(
    ("share", "remedy"),
    [
        (0.99, 'rl_stop_training("3fa9c1d2") then rl_get_results("3fa9c1d2")'),
        (0.0, 'rl_get_rollouts("3fa9c1d2", which="worst")'),
        (0.5, 'rl_get_rollouts("3fa9c1d2", which="best")'),
        (None, 'rl_get_rollouts("3fa9c1d2", which="best")'),
    ],
)
def test_dropped_groups_are_mended_by_the_share_of_them_that_was_right(
    share: float | None, remedy: str
) -> None:
    diagnosis = Diagnosis(CASE)
    for row in rows(3):
        diagnosis.observe(row)
    notice = {
        "rule": "no_reward_variance",
        "step": 4,
        "evidence": "64 groups in a row.",
        "percent_correct": share,
    }
    assert str(diagnosis.notice(notice, resumable=True).remedy).startswith(remedy)


def test_no_variance_at_the_ceiling_says_that_all_is_learnt() -> None:
    solved = {
        "reward/mean": 1.0,
        "groups/without_signal": 1.0,
        "train/loss": None,
        "train/skipped": 1.0,
    }
    alert = the_one([*rows(20), *rows(30, **solved)])
    assert alert.rule == "no_reward_variance"
    assert (
        "at their ceiling (1 of 1)" in alert.evidence
        and "Nothing is left to learn" in alert.evidence
    )
    assert str(alert.remedy).startswith(
        'rl_stop_training("3fa9c1d2", mode="after_step") then rl_get_results("3fa9c1d2")'
    )


def test_one_lucky_group_of_many_does_not_hide_that_nothing_is_learnt() -> None:
    assert [alert.rule for alert in told(rows(8, **{"groups/without_signal": 0.98}))] == [
        "no_reward_variance"
    ]


def test_groups_without_signal_now_and_then_are_no_alarm() -> None:
    now_and_then = {"groups/without_signal": lambda step: 1.0 if step % 4 else 0.5}
    assert told(rows(40, **now_and_then)) == []


def test_an_alert_comes_again_only_after_the_excursion_was_over() -> None:
    twice = {
        "groups/without_signal": lambda step: 0.2
        if 10 < step <= 20
        else 0.9
        if 25 < step <= 30
        else 1.0
    }
    assert [(alert.rule, alert.step) for alert in told(rows(40, **twice))] == [
        ("no_reward_variance", 5),
        ("no_reward_variance", 25),
    ]


def test_what_follows_from_a_spoilt_policy_is_mended_by_smaller_updates() -> None:
    """As a real run with a learning rate of .05 went: no right answer any more, and none that
    ends.
    """
    spoilt = {
        "reward/mean": lambda step: 0.4 if step < 4 else 0.0,
        "groups/without_signal": lambda step: 0.1 if step < 4 else 1.0,
        "train/truncated": lambda step: 0.0 if step < 5 else 1.0,
    }
    alerts = told(rows(12, **spoilt))
    assert [alert.rule for alert in alerts] == ["truncation", "no_reward_variance"]
    for alert in alerts:
        assert_calls(alert.remedy)
        assert '"trainer.learning_rate":0.00025' in str(
            alert.remedy
        ) and "was 0.4 and is lost" in str(alert.remedy)


def wobble(step: int) -> float:
    return (step * 7 % 5 - 2) * 0.02


def test_a_reward_that_does_not_rise_is_told_with_figures_and_a_rate() -> None:
    alert = the_one(rows(60, **{"reward/mean": lambda step: 0.3 + wobble(step)}))
    assert (alert.rule, alert.step) == ("reward_flat", 34)
    assert re.search(r"went from 0\.(29|3)\d* to 0\.3", alert.evidence)
    assert str(alert.remedy).startswith('rl_get_rollouts("3fa9c1d2", which="worst")')
    assert '"trainer.learning_rate":0.002' in str(alert.remedy)


def climb(slope: float, error: float, steps: int) -> list[dict[str, Any]]:
    """A reward that rises steadily from .1, measured with an error."""
    noise = random.Random(3)
    return list(
        rows(steps, **{"reward/mean": lambda step: 0.1 + slope * step + noise.gauss(0, error)})
    )


def test_a_rise_that_the_noise_hides_is_not_called_flat() -> None:
    """From .1 to .5 in a hundred steps of 64 rollouts; one of 1,024 shows that nothing rises."""
    assert told(climb(0.004, 0.05, 100)) == []
    assert told(climb(0.0, 0.15, 32)) == [], "who cannot tell says nothing"
    assert [alert.rule for alert in told(climb(0.0, 0.012, 40))] == ["reward_flat"]


def test_a_reward_that_falls_is_told_with_a_smaller_rate() -> None:
    alert = the_one(rows(40, **{"reward/mean": lambda step: 0.8 - 0.01 * step + wobble(step)}))
    assert alert.rule == "reward_flat" and "it falls" in alert.evidence
    assert '"trainer.learning_rate":0.0005' in str(alert.remedy)


def test_a_flat_reward_at_its_ceiling_is_no_alarm() -> None:
    assert (
        told(
            rows(
                60, **{"reward/mean": lambda step: min(0.97, 0.5 + 0.05 * step) + wobble(step) / 2}
            )
        )
        == []
    )


def test_a_slow_but_certain_rise_is_no_alarm() -> None:
    assert (
        told(rows(60, **{"reward/mean": lambda step: 0.3 + 0.003 * step + wobble(step) / 4})) == []
    )


def test_entropy_that_collapses_below_the_ceiling_is_told_with_a_fresh_start() -> None:
    alert = the_one(rows(40, **{"policy/entropy": lambda step: 0.3 * 0.8**step}))
    assert alert.rule == "entropy_collapse"
    assert "% of what it began with (0.19)" in alert.evidence
    assert (
        'rl_start_training(environment="arithmetic", '
        'changes={"env.seed":7,"trainer.learning_rate":0.0005' in str(alert.remedy)
    )


def test_a_fresh_start_is_one_that_is_not_refused(run: RunDirectory) -> None:
    """The environment is named beside `changes`: among them it is refused."""
    (run.path / "settings.json").write_text(Settings().model_dump_json())
    (run.path / "config.yaml").write_text("env: {}")
    chosen = {"run.environment": "arithmetic", "trainer.lora_rank": 8}
    rows = {name: {"value": value, "source": "edit"} for name, value in chosen.items()}
    (run.path / "config.resolved.json").write_text(json.dumps(rows))
    call = RunFacts.of(run).begin_anew({})
    assert call.args == {"environment": "arithmetic", "changes": {"trainer.lora_rank": 8}}


@pytest.mark.parametrize(
    ("inference", "variable", "expected"),
    [
        ({"dtype": "bfloat16"}, "cpu", True),
        ({"dtype": "float32"}, "cuda", False),
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"device": "auto"}, "cpu", True),
        ({"device": "cpu"}, "cuda", False),
        ({"samplers": 2}, "cuda", False),
    ],
)
def test_drift_is_judged_by_the_type_that_samplers_compute_in(
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    inference: dict[str, Any],
    variable: str,
    expected: bool,
) -> None:
    """By default that is bfloat16 on a GPU."""
    monkeypatch.setenv("HALTERES_DEVICE", variable)
    given = InferenceSettings(**{"samplers": "vllm", **inference})
    (run.path / "settings.json").write_text(Settings(inference=given).model_dump_json())
    (run.path / "config.yaml").write_text("env: {}")
    case = RunFacts.of(run)
    assert case.samples_roughly is expected
    # two right implementations: 9e-4 apart in bfloat16
    row = {"step": 1, "src": "train", "logprobs/absdiff_p999": 0.1, "kl_sample_train_v2": 9e-4}
    found = logprob_drift.look(case, History(), row)
    assert found is not None
    assert found.holds is not expected
    # twice as far as these ever were is no rounding any more, and is said of either type
    apart = {**row, "kl_sample_train_v2": 2.1e-3}
    found = logprob_drift.look(case, History(), apart)
    assert found is not None
    assert found.holds
    what = "99.9th percentile"
    if expected:
        what = "Half the mean square"
    assert what in found.evidence


def test_entropy_that_falls_because_all_is_learnt_is_no_alarm() -> None:
    learnt = {
        "policy/entropy": lambda step: 0.3 * 0.8**step,
        "reward/mean": lambda step: min(0.98, 0.2 + 0.06 * step),
    }
    assert told(rows(40, **learnt)) == []


def evaluation(step: int, share: float, error: float | None = 0.015) -> dict[str, Any]:
    return {
        "step": step,
        "src": "eval",
        "eval/percent_correct": share,
        "eval/percent_correct_stderr": error,
    }


def examined(
    shares: Iterable[float], error: float | None = 0.015, **figures: Any
) -> list[dict[str, Any]]:
    """Steps of a run with an evaluation before the first and after every tenth of them."""
    exams = [evaluation(10 * number, share, error) for number, share in enumerate(shares)]
    trained = list(rows(10 * len(exams) - 10, **figures))
    given = trained[:1] + exams[:1] + trained[1:10]
    for number, exam in enumerate(exams[1:], 1):
        given += [exam, *trained[10 * number : 10 * number + 10]]
    return given


def test_a_certain_fall_of_held_out_answers_while_rewards_rise_is_told_at_once() -> None:
    alert = the_one(examined((0.4, 0.45, 0.32, 0.3)))
    assert (alert.rule, alert.step) == ("reward_hacking", 20)
    assert (
        "From step 10 to 20 the held-out share correct fell from 0.45 to 0.32, while the mean "
        "reward" in alert.evidence
    )
    assert 'rl_get_rollouts("3fa9c1d2", which="best")' in str(alert.remedy)


def test_held_out_answers_that_stay_low_while_rewards_rise_far_are_told_as_hacking() -> None:
    climbing: dict[str, Any] = {"reward/mean": lambda step: min(0.97, 0.03 + 0.06 * step)}
    alert = the_one(examined((0.03, 0.04, 0.03, 0.04, 0.03), **climbing))
    assert (alert.rule, alert.step) == ("reward_hacking", 30)
    assert (
        "From step 0 to 30 the held-out share correct went from 0.03 to 0.04, while the mean"
        in alert.evidence
    )
    assert told(examined((0.03, 0.15, 0.25, 0.35, 0.4), **climbing)) == [], (
        "they follow, at some distance"
    )
    flat = examined((0.03,) * 5, **climbing)
    graded = [{**row, "eval/mean_score": 0.1} if row["src"] == "eval" else row for row in flat]
    assert told(graded) == [], (
        "the scores themselves may have risen: nothing is known of their error"
    )


def test_the_best_of_many_evaluations_is_no_yardstick() -> None:
    """Twenty evaluations that differ by their errors alone: the luckiest is three errors above one,
    not above two.
    """
    scatter = (0.50, 0.52, 0.55, 0.47, 0.51, 0.46, 0.50, 0.49, 0.53, 0.47)
    rising: dict[str, Any] = {"reward/mean": lambda step: 0.3 + 0.002 * step}
    assert told(examined(scatter * 2, error=0.025, **rising)) == []


def answered(run: RunDirectory, exam: dict[str, Any], chances: Iterable[float]) -> dict[str, Any]:
    """The evaluation's samples, twenty of each task; and its row."""
    folder = run.path / "evals" / f"step_{exam['step']}"
    folder.mkdir(parents=True)
    scores = [
        (task, int(i < 20 * chance)) for task, chance in enumerate(chances) for i in range(20)
    ]
    lines = [{"prompt": str(task), "score": score, "temperature": 1.0} for task, score in scores]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {**exam, "eval/percent_correct": sum(score for _, score in scores) / len(scores)}


def test_evaluations_with_samples_are_compared_task_by_task(run: RunDirectory) -> None:
    """A fall of .1 on every task is certain, though tasks differ by far more."""
    tasks = [0.05 * (number % 16) + 0.2 for number in range(64)]
    falls = {0: 0.0, 10: 0.0, 20: 0.1, 30: 0.15}
    case = RunFacts(run_id=CASE.run_id, environment="e", trainer=CASE.trainer, folder=run.path)
    given = [
        answered(run, row, [task - falls[row["step"]] for task in tasks])
        if row["src"] == "eval"
        else row
        for row in examined((0.5,) * 4, error=0.04)
    ]
    assert [(alert.rule, alert.step) for alert in told(given, case)] == [("reward_hacking", 20)]
    assert told(given) == [], "by their standard errors alone they might be equal"


@pytest.mark.parametrize(
    ("shares", "error", "flat"),
    [
        ((0.4, 0.45, 0.44, 0.44), 0.015, False),
        ((0.4, 0.45, 0.3, 0.3), 0.2, False),
        ((0.4, 0.45, 0.1, 0.1), None, False),
        ((0.4, 0.45, 0.3, 0.3), 0.015, True),
        ((0.4, 0.45, 0.385, 0.44), 0.015, False),
    ],
    ids=["within its error", "few tasks", "no error known", "rewards do not rise", "one alone"],
)
def test_evaluations_that_scatter_are_no_hacking(
    shares: tuple[float, ...], error: float | None, flat: bool
) -> None:
    assert told(examined(shares, error, **({"reward/mean": 0.4} if flat else {}))) == []


def test_truncated_answers_are_told_with_longer_limits() -> None:
    alert = the_one(rows(20, **{"train/truncated": 0.41}))
    assert (alert.rule, alert.step) == ("truncation", 3)
    assert "41%" in alert.evidence and "max_new_tokens 64, max_token_length 256" in alert.evidence
    changes = '{"env.max_new_tokens":128,"env.max_token_length":320,"trainer.max_token_trainer_length":320}'
    assert changes in str(alert.remedy)


def test_the_share_of_paid_answers_that_were_cut_off_is_told_beside_that_of_all() -> None:
    alert = the_one(rows(20, **{"train/truncated": 0.41, "train/truncated_paid": 0.9}))
    assert "41% of the answers (90% of the paid ones) were cut off" in alert.evidence


def test_some_truncated_answers_are_no_alarm() -> None:
    assert told(rows(20, **{"train/truncated": lambda step: 0.35 if step % 3 else 0.1})) == []


def test_sampler_and_trainer_that_differ_are_told_once_per_excursion() -> None:
    drifting = {"logprobs/absdiff_p999": lambda step: 1e-3 if step in (4, 5, 6, 9) else 1e-6}
    alerts = told(rows(12, **drifting))
    assert [(alert.rule, alert.step) for alert in alerts] == [
        ("logprob_drift", 4),
        ("logprob_drift", 9),
    ]
    assert "1.0e-03" in alerts[0].evidence and str(alerts[0].remedy).startswith(
        'rl_get_logs("3fa9c1d2", role="engine")'
    )


def test_batches_too_far_off_the_policy_are_told_with_fresher_ones() -> None:
    off_policy = RunFacts(
        run_id="3fa9c1d2",
        environment="arithmetic",
        trainer=TrainerSettings(max_staleness=4, loss="ppo"),
    )
    alert = the_one(rows(10, **{"logprobs/diff": 0.12, "policy/staleness_max": 4}), off_policy)
    assert (alert.rule, alert.step) == ("kl_drift", 3)
    assert "0.12 nats per token" in alert.evidence and "4 policy versions old" in alert.evidence
    assert '{"trainer.max_staleness":2,"trainer.learning_rate":0.00075}' in str(alert.remedy)


def test_at_another_temperature_sampler_and_trainer_differ_rightly() -> None:
    hot = {"logprobs/diff": 0.63, "kl_sample_train_v2": None, "tokens/compared": 0.0}
    at_1_6 = replace(CASE, env={**CASE.env, "temperature": 1.6})
    assert told(rows(10, **hot), at_1_6) == []
    # of older policy versions nothing is compared either, and that is what the rule watches for
    assert the_one(rows(10, **hot)).rule == "kl_drift"


def test_a_usual_distance_between_policies_is_no_alarm() -> None:
    assert told(rows(30, **{"logprobs/diff": lambda step: 0.02 + wobble(step) / 2})) == []


def test_a_trainer_that_waits_is_told_with_as_many_workers_as_groups() -> None:
    slow = {"time/batch": 40.0, "time/train": 2.0, "time/step": 42.0}
    few = RunFacts(
        run_id="3fa9c1d2",
        environment="e",
        trainer=CASE.trainer,
        env={**CASE.env, "max_num_workers": 2},
    )
    alert = the_one(rows(30, **slow), few)
    assert (alert.rule, alert.step) == ("trainer_starved", 10)
    assert "95% of the time for its batch (40.0 of 42.0 s)" in alert.evidence
    assert '"env.max_num_workers":3' in str(alert.remedy)
    assert str(the_one(rows(30, **slow)).remedy).startswith(
        'rl_get_rollouts("3fa9c1d2", which="worst")'
    )


STARVED = {"time/batch": 40.0, "time/train": 2.0, "time/step": 42.0}


def with_environment(**figures: float) -> list[Row]:
    """Steps that wait for their batch, each after what its environment says."""
    return [
        row
        for step in rows(30, **STARVED)
        for row in ({"step": step["step"], "src": "env", "groups/sent": 8, **figures}, step)
    ]


def test_a_healthy_run_whose_answers_take_their_time_is_not_starved() -> None:
    assert told(with_environment(**{"time/item": 20.0, "time/item_sampling": 19.5})) == []


def test_a_trainer_that_waits_for_a_scorer_is_told_with_the_seconds() -> None:
    alert = the_one(with_environment(**{"time/item": 2.3, "time/item_sampling": 0.3}))
    assert (alert.rule, alert.step) == ("trainer_starved", 10)
    assert "a group takes 2.3 s, 2.0 s of them no sampling" in alert.evidence
    assert [step.tool for step in alert.remedy.steps] == ["rl_get_logs"]


def test_a_trainer_that_waits_for_groups_that_are_dropped_is_told_so() -> None:
    figures = {"time/item": 2.0, "time/item_sampling": 1.9, "groups/dropped/same_scores": 87}
    alert = the_one(with_environment(**figures))
    assert "87 of 95 groups were dropped (same_scores)" in alert.evidence
    assert [step.tool for step in alert.remedy.steps] == ["rl_stop_training", "rl_start_training"]


@pytest.mark.parametrize(
    "figures",
    [
        {"time/batch": 0.5, "time/train": 0.01, "time/step": 0.51},
        {"time/batch": 40.0, "time/train": 1.0, "time/step": 41.0, "groups/without_signal": 0.9},
    ],
    ids=["too short to matter", "hardly anything to train on"],
)
def test_waiting_that_means_nothing_is_no_alarm(figures: dict[str, float]) -> None:
    assert told(rows(30, **figures)) == []


def test_an_environment_that_waits_for_the_trainer_is_told() -> None:
    alert = the_one(rows(30, **{"time/batch": 0.5, "time/train": 40.0, "time/step": 40.6}))
    assert (alert.rule, alert.step) == ("env_idle", 10)
    assert '{"trainer.max_staleness":1}' in str(alert.remedy)


def test_groups_that_are_set_aside_are_told_with_fewer_at_once() -> None:
    ahead = [
        {"step": step, "src": "env", "groups/sent": 10, "groups/set_aside": 4}
        for step in range(1, 9)
    ]
    alert = the_one(ahead)
    assert (alert.rule, alert.step) == ("env_ahead", 3)
    assert "4 of 10 groups" in alert.evidence and '{"env.max_num_workers":3}' in str(alert.remedy)
    few = RunFacts(
        run_id="3fa9c1d2",
        environment="e",
        trainer=CASE.trainer,
        env={**CASE.env, "max_num_workers": 3},
    )
    assert '{"trainer.max_staleness":1}' in str(the_one(ahead, few).remedy)
    assert told({**row, "groups/set_aside": 1} for row in ahead) == []


def test_a_loss_that_is_no_number_is_told_and_a_skipped_step_is_not() -> None:
    alert = the_one(rows(6, **{"train/loss": lambda step: None if step == 4 else -1.0}))
    assert (alert.rule, alert.step) == ("nan_loss", 4)
    assert '"trainer.learning_rate":0.0005' in str(alert.remedy)
    assert told(rows(4, **{"train/loss": None, "train/skipped": 1.0})) == []


def test_what_a_role_noticed_becomes_an_alert_with_a_call() -> None:
    diagnosis = Diagnosis(CASE)
    notice = {
        "type": "notice",
        "rule": "nan_loss",
        "step": 7,
        "evidence": "The loss is not finite.",
    }
    kept = diagnosis.notice(notice, resumable=True)
    assert (kept.rule, kept.step, kept.evidence) == ("nan_loss", 7, "The loss is not finite.")
    assert (
        str(kept.remedy)
        == 'rl_start_training(resume_from="3fa9c1d2", changes={"trainer.learning_rate":0.0005})'
    )
    assert 'environment="arithmetic"' in str(diagnosis.notice(notice, resumable=False).remedy)
    for rule in ("temperature", "own_advantages", "no_reward_variance", "something_of_its_own"):
        assert_calls(diagnosis.notice({"rule": rule, "remedy": "Or else."}, resumable=True).remedy)


def test_what_a_resumed_run_was_carried_over_counts_and_is_not_told_again() -> None:
    diagnosis = Diagnosis(CASE)
    dull = list(rows(12, **{"groups/without_signal": 1.0}))
    diagnosis.remember(dull[:7])
    assert [alert for row in dull[7:] for alert in diagnosis.observe(row)] == []


def test_rows_with_nonsense_in_them_harm_nobody() -> None:
    odd: list[dict[str, Any]] = [
        {},
        {"step": "3", "reward/mean": 0.5},
        {"step": 1, "reward/mean": "high", "policy/entropy": None, "train/truncated": [1]},
        {
            "step": 2,
            "reward/mean": 1e308,
            "reward/max": -1e308,
            "policy/entropy": 0.0,
            "time/step": 0.0,
            "time/batch": 0.0,
        },
        {"step": 2, "reward/mean": 1e200, "logprobs/diff": 10**400},
        {"step": 3, "eval/percent_correct": 0.5, "eval/mean_score": 10**400},
        {"step": 3, "groups/sent": 0, "groups/set_aside": 3},
    ]
    assert told([*odd, *rows(30, **{"policy/entropy": 0.0})]) == []


def test_an_excursion_is_told_again_only_after_calm() -> None:
    debounce = Debounce(2, calm=3)
    looks = [True, True, True, False, False, True, True, False, False, False, True, True]
    assert [debounce.begins(holds) for holds in looks].count(True) == 2


def test_a_trend_is_in_its_own_standard_errors() -> None:
    assert trend([0.5] * 5) == (0.0, 0.0)
    rise, errors = trend([0.1, 0.0, 0.3, 0.2, 0.4])
    assert rise == pytest.approx(0.32) and 2 < errors < 4


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_no_step_for_long_is_told_once_and_again_after_the_next_one() -> None:
    clock = Clock()
    pulse = StallDetector(CASE, clock)
    for _ in range(4):
        clock.now += 30.0
        pulse.step({"time/step": 30.0})
    clock.now += 299.0
    assert [pulse.look({}, training=True) for _ in range(3)] == [None, None, None]
    clock.now += 2.0
    first, second, third = (pulse.look({}, training=True) for _ in range(3))
    assert first is None and third is None, (
        "a look after a sleep of ours comes before the rows; and once is enough"
    )
    assert second is not None and "No step was done for 301 s; a step takes 30 s" in second.evidence
    assert_calls(second.remedy)
    pulse.step({"time/step": 30.0})
    assert pulse.look({}, training=True) is None
    clock.now += 400.0
    assert [pulse.look({}, training=True) is not None for _ in range(2)] == [False, True]


def test_short_steps_are_given_a_minute_and_the_first_one_ten() -> None:
    clock = Clock()
    pulse = StallDetector(CASE, clock)
    clock.now += FIRST_STEP_S - 1
    assert [pulse.look({}, training=True) for _ in range(3)] == [None] * 3
    pulse.step({"time/step": 0.01})
    clock.now += LEAST_S - 1
    assert [pulse.look({}, training=True) for _ in range(3)] == [None] * 3
    clock.now += 10 * FIRST_STEP_S
    assert [pulse.look({}, training=False) for _ in range(3)] == [None] * 3, (
        "while nothing trains nothing is overdue"
    )


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is there."""
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until_stopped(pid: int) -> None:
    ends = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < ends


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_a_stopped_process_is_told_by_role_and_pid() -> None:
    with sleeping() as process:
        processes = {
            "trainer": {**identity(process.pid), "exit": None},
            "api": {"pid": None, "exit": None},
        }
        pulse = StallDetector(CASE)
        assert [pulse.look(processes, training=False) for _ in range(3)] == [None] * 3
        os.kill(process.pid, signal.SIGSTOP)
        until_stopped(process.pid)
        first, second = (pulse.look(processes, training=False) for _ in range(2))
        assert first is None
        assert second is not None and f"trainer (process {process.pid})" in second.evidence
        assert_calls(second.remedy)
        assert f"kill -CONT {process.pid}" in str(second.remedy)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    path = tmp_path / "3fa9c1d2"
    (path / "control").mkdir(parents=True)
    (path / "heartbeat").touch()
    return RunDirectory(path)


def supervised(run: RunDirectory, who: dict[str, Any], **changes: Any) -> RunState:
    state = RunState(
        run_id=run.run_id,
        name="n",
        environment="arithmetic",
        environment_file="/nowhere.py",
        interpreter="/python",
        base_model="halteres/tiny",
        tokenizer="/nowhere",
        total_steps=9,
        created_at=1.0,
        supervisor=who,
        **{"status": "running", "step": 3, **changes},
    )
    write_state(run.path / "run.json", state)
    return state


def silent_for(run: RunDirectory, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(run.path / "heartbeat", (then, then))


def test_a_stale_heartbeat_under_a_held_lock_is_told_by_any_reader(run: RunDirectory) -> None:
    supervised(run, identity(os.getpid()))
    with lock_taken(run.path / "lock"):
        assert stalled(run) is None
        silent_for(run, STALE_S - 2)
        assert stalled(run) is None
        silent_for(run, STALE_S + 1.9)
        alert = stalled(run)
    assert alert is not None and (alert.rule, alert.step) == ("stalled", 3)
    assert "no sign of it for 14 s" in alert.evidence
    assert_calls(alert.remedy)
    assert 'rl_start_training(resume_from="3fa9c1d2")' in str(alert.remedy)


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_a_supervisor_that_a_signal_stopped_is_told_sooner(run: RunDirectory) -> None:
    with sleeping() as process, lock_taken(run.path / "lock"):
        supervised(run, identity(process.pid))
        os.kill(process.pid, signal.SIGSTOP)
        until_stopped(process.pid)
        silent_for(run, 6)
        alert = stalled(run)
    assert alert is not None and "was stopped by a signal (SIGSTOP)" in alert.evidence


def test_a_run_that_has_ended_or_lost_its_supervisor_is_not_stalled(run: RunDirectory) -> None:
    supervised(run, {"pid": 2**22 + 1}, status="completed")
    silent_for(run, 1000)
    assert stalled(run) is None
    supervised(run, {"pid": 2**22 + 1})
    assert stalled(run) is None, "nobody holds its lock: that is another story"
    assert stalled(RunDirectory(run.path / "nowhere")) is None


WORDS = "`stop` is a list of texts. It was 7."


def refused(number: int, status: int = 400, why: str = WORDS) -> Calls:
    last = {"status": status, "path": "/v1/chat/completions", "why": why, "at": 0.0}
    return Calls.of_service(
        {"answered": 9, "refused": 99, "refused_in_a_row": number, "last_refusal": last}
    )


def test_calls_that_are_all_refused_are_told_within_a_minute_in_the_servers_words() -> None:
    clock = Clock()
    rule = RefusedCalls(CASE, clock)
    assert rule.look(refused(LEAST_CALLS)) is None, "a refusal now and then is no trouble"
    clock.now += LASTING_S
    finding = rule.look(refused(1738))
    assert LASTING_S < 60 and finding is not None
    assert "refused 1738 calls in a row (HTTP 400, /v1/chat/completions)" in finding.evidence
    assert WORDS in finding.evidence
    assert str(finding.remedy).startswith(
        'rl_stop_training("3fa9c1d2") then rl_start_training(environment="arithmetic"'
    )
    assert "mend" not in str(finding.remedy).lower()
    assert rule.look(refused(1800)) is None, "it is told once"
    assert rule.look(refused(0)) is None
    assert rule.look(refused(LEAST_CALLS)) is None
    clock.now += LASTING_S
    assert rule.look(refused(LEAST_CALLS)) is not None, "and again once it came back"


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (400, "these words name"),
        (401, "openai.api_key"),
        (404, "openai.base_url"),
        (500, 'role="service"'),
    ],
)
def test_the_remedy_is_that_of_the_refusal(status: int, says: str) -> None:
    clock = Clock()
    rule = RefusedCalls(CASE, clock)
    rule.look(refused(LEAST_CALLS, status))
    clock.now += LASTING_S
    finding = rule.look(refused(LEAST_CALLS, status))
    assert finding is not None and says in str(finding.remedy)


def test_groups_that_the_trajectory_server_sets_aside_are_told_until_one_is_of_use() -> None:
    env = {"rejected": 7, "last_rejection": "scores[0] is not a finite number."}
    found = Calls.of_trajectories(
        {"groups_accepted": 0, "environments": [env], "last_refusal": None}
    )
    clock = Clock()
    rule = RefusedCalls(CASE, clock)
    rule.look(found)
    clock.now += LASTING_S
    finding = rule.look(found)
    assert finding is not None
    assert "trajectory server could use none of 7 groups: scores[0] is not" in finding.evidence
    refusal = {"path": "/scored_data", "status": 422, "why": "body.tokens: Expected `array`"}
    found = Calls.of_trajectories(
        {"groups_accepted": 0, "requests_refused": 3, "last_refusal": refusal}
    )
    assert (found.refused, found.status, found.why) == (3, 422, refusal["why"])
    assert Calls.of_trajectories({"groups_accepted": 1, "environments": [env]}).refused == 0


def test_after_the_first_step_refusals_are_the_pulses_matter() -> None:
    diagnosis = Diagnosis(CASE)
    diagnosis.remember(rows(2))
    assert not diagnosis.has_trained, "what a resumed run was carried over is none of its own"
    (row,) = rows(1)
    diagnosis.observe(row)
    assert diagnosis.has_trained
    assert diagnosis.look_at_calls(refused(99)) is None


def test_a_scorer_that_takes_most_of_a_groups_time_is_named() -> None:
    def slow(seconds: float, steps: int = 6) -> Iterator[dict[str, Any]]:
        figures = {
            "reward/judge_s": seconds,
            "reward/length_s": 0.01,
            "rollouts/group_s": seconds + 1.5,
        }
        return ({"step": step, "src": "env", **figures} for step in range(1, steps + 1))

    alert = the_one(slow(4.0))
    assert (alert.rule, alert.step) == ("scorer_slow", 3)
    assert alert.evidence.startswith("The reward 'judge' takes 4.0 of the 5.5 s of a group")
    assert told(slow(1.2)) == [] and told(slow(4.0, steps=2)) == []
    assert told({**row, "rollouts/group_s": 0.9} for row in slow(0.8)) == [], "nobody waits long"


def test_a_gain_that_the_panel_does_not_confirm_is_told_once() -> None:
    def evaluated(step: int, reward: float, panel: float) -> dict[str, Any]:
        spread = {"eval/reward/total_std": 1.0, "eval/panel/verifier_std": 0.5}
        return {
            "step": step,
            "src": "eval",
            "eval/reward/total": reward,
            "eval/panel/verifier": panel,
            **spread,
        }

    real = [evaluated(step, step / 10, step / 20) for step in range(0, 60, 10)]
    assert told(real) == []
    alert = the_one(
        [
            evaluated(0, 0.0, 0.5),
            evaluated(10, 0.3, 0.5),
            evaluated(20, 2.0, 0.6),
            evaluated(30, 3.0, 0.4),
        ]
    )
    assert (alert.rule, alert.step) == ("panel_disagrees", 20)
    assert (
        "gained 2 standard deviations and 'verifier' of the panel 0.2: 10% of the gain transfers"
        in alert.evidence
    )


def test_an_evaluation_many_of_whose_tasks_failed_is_an_alert() -> None:
    figures = {"src": "eval", "eval/percent_correct": 1.0}
    few = {"step": 0, **figures, "eval/num_tasks": 60, "eval/num_failed": 1}
    (alert,) = told([few, {"step": 2, **figures, "eval/num_tasks": 1, "eval/num_failed": 3}])
    assert (alert.rule, alert.step) == ("eval_tasks_failed", 2)
    assert alert.evidence == "3 of 4 held-out tasks failed; the figures are of the other 1."
    assert 'role="eval"' in str(alert.remedy)


def cleared(given: Iterable[dict[str, Any]]) -> list[tuple[str, int]]:
    """Rules whose alert was found over, each with the step."""
    diagnosis = Diagnosis(CASE)
    found: list[tuple[str, int]] = []
    for row in given:
        diagnosis.observe(row)
        found += [(rule, row["step"]) for rule in diagnosis.cleared]
    return found


def test_an_alert_is_over_once_its_cause_is_gone_and_only_then() -> None:
    def cut(step: int) -> float:
        return 0.5 if step <= 6 else 0.0

    steps = [{"step": step, "src": "env", "train/truncated": cut(step)} for step in range(1, 13)]
    assert cleared(steps[:8]) == []
    assert cleared(steps) == [("truncation", 9)]


def test_a_policy_that_has_decided_on_right_answers_has_not_collapsed_any_more() -> None:
    def entropy(step: int) -> float:
        return 0.15 if step <= 3 else 0.001

    def mean(step: int) -> float:
        return 0.3 if step < 12 else 0.98

    given = list(rows(24, **{"policy/entropy": entropy, "reward/mean": mean}))
    assert "entropy_collapse" in [alert.rule for alert in told(given)]
    assert ("entropy_collapse", 16) in cleared(given)
