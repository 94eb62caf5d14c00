"""rl_get_rollouts: what the policy answered, and how it was scored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halteres.next_step import NextStep, Remedy
from halteres.runs.directory import RunDirectory
from halteres.runs.reading import rollouts as rooms

from .run_fixtures import (
    READ_BEST,
    RUN,
    STOP,
    add_alert,
    change,
    make_run,
    replied,
    supervised,
    tokens,
    told,
)
from .run_results import add_group, completion

BUDGET = 1500


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))


@pytest.fixture
def run() -> RunDirectory:
    """Two steps; in the second, two groups of three."""
    run = make_run(steps=2)
    add_group(run, 1, completion("early", 0.5))
    add_group(
        run,
        2,
        completion("\\boxed{42}", 1.0),
        completion("\\boxed{41}"),
        completion("...", finish="length"),
    )
    add_group(
        run,
        2,
        completion("\\boxed{42}", 1.0),
        completion("\\boxed{7}", 0.25),
        completion("\\boxed{7}", 0.25),
    )
    return run


async def test_dropped_groups_are_counted_and_shown_only_where_none_was_sent(
    run: RunDirectory,
) -> None:
    dropped = {"code": "same_scores"}
    add_group(run, 2, completion("alike", 0.0), completion("alike", 0.0), dropped=dropped)
    answer = await told("rl_get_rollouts", run_id=RUN, which="worst")
    assert answer["figures"]["dropped_groups"] == {"same_scores": 1}
    assert (answer["figures"]["groups"], answer["figures"]["rollouts"]) == (2, 6)
    assert "alike" not in str(answer["rollouts"])
    add_group(run, 3, completion("alone", 0.0), dropped=dropped)
    answer = await told("rl_get_rollouts", run_id=RUN)
    assert (answer["step"], answer["figures"]["groups"]) == (3, 0)
    assert "alone" in answer["rollouts"][0]["completion"]


async def test_the_newest_step_is_shown_with_the_figures_of_all_its_rollouts(
    run: RunDirectory,
) -> None:
    answer = await told("rl_get_rollouts", run_id=RUN)
    assert (answer["run_id"], answer["step"], answer["steps"]) == (RUN, 2, [1, 2])
    assert len(answer["rollouts"]) == 3
    assert answer["rollouts"][0].keys() >= {
        "prompt",
        "completion",
        "score",
        "tokens",
        "finish",
        "group_scores",
        "item",
    }
    assert answer["figures"] == {
        "groups": 2,
        "rollouts": 6,
        "mean_score": 0.4167,
        "mean_tokens": 12.0,
        "truncated": 0.1667,
        "distinct": 0.6667,
        "commonest": 0.3333,
    }


async def test_the_best_and_the_worst_are_chosen_by_score_and_no_completion_comes_twice(
    run: RunDirectory,
) -> None:
    best = (await told("rl_get_rollouts", run_id=RUN, which="best"))["rollouts"]
    assert [(one["completion"], one["score"]) for one in best][:2] == [
        ("\\boxed{42}", 1.0),
        ("\\boxed{7}", 0.25),
    ]
    assert [one.get("times") for one in best] == [2, 2, None]
    assert best[1]["group_scores"] == [1.0, 0.25, 0.25]
    worst = (await told("rl_get_rollouts", run_id=RUN, which="worst", n=2))["rollouts"]
    assert {one["completion"] for one in worst} == {"\\boxed{41}", "..."}


async def test_after_reading_comes_what_is_left_of_the_remedy_that_asked_for_it(
    run: RunDirectory,
) -> None:
    anew = NextStep("rl_start_training", {"environment": "gsm8k"})
    remedy = Remedy((STOP, READ_BEST), "mend the scorer, then", (anew,))
    mended = 'mend the scorer, then rl_start_training(environment="gsm8k")'
    add_alert(run, "reward_hacking", 2, remedy=remedy)
    with supervised(run):
        best = await told("rl_get_rollouts", run_id=RUN, which="best")
        assert best["next"] == f"{STOP.call} then {READ_BEST.call}; {mended}"
    change(run, status="stopped", resumable=True)
    assert (await told("rl_get_rollouts", run_id=RUN, which="best"))["next"] == mended
    read_worst = NextStep("rl_get_rollouts", {"run_id": RUN, "which": "worst"})
    add_alert(run, "reward_hacking", 2, remedy=replace(remedy, steps=(read_worst,)))
    assert (await told("rl_get_rollouts", run_id=RUN, which="worst"))["next"] == mended


async def test_a_random_choice_is_the_same_every_time() -> None:
    run = make_run()
    for group in range(30):
        add_group(run, 1, *(completion(f"{group}.{place}") for place in range(8)))
    first, again = [(await told("rl_get_rollouts", run_id=RUN))["rollouts"] for _ in range(2)]
    assert first == again
    assert len({one["completion"].split(".")[0] for one in first}) > 1


async def test_a_score_that_is_no_number_is_the_worst_and_null(run: RunDirectory) -> None:
    add_group(run, 2, completion("broken", None))
    worst = (await told("rl_get_rollouts", run_id=RUN, which="worst", n=1))["rollouts"]
    assert (worst[0]["completion"], worst[0]["score"], worst[0]["group_scores"]) == (
        "broken",
        None,
        [None],
    )


async def test_a_step_that_is_not_there_is_refused_with_the_nearest(run: RunDirectory) -> None:
    reply = await replied("rl_get_rollouts", run_id=RUN, step=40)
    assert reply.failed and reply.body["code"] == "invalid_arguments"
    assert (reply.body["steps"], reply.body["nearest"]) == ([1, 2], 2)
    assert reply.body["next"] == 'rl_get_rollouts("3fa9c1d2", step=2)'


async def test_a_run_without_rollouts_says_so_and_when_to_ask_again() -> None:
    run = make_run()
    with supervised(run, status="starting"):
        reply = await replied("rl_get_rollouts")
        assert (reply.body["code"], reply.body["next"]) == (
            "not_ready",
            'rl_check_status("3fa9c1d2", wait_s=45, until="step>=1")',
        )
    reply = await replied("rl_get_rollouts", run_id=RUN)
    assert reply.failed and reply.body["next"].startswith("rl_get_logs")


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("reasoning step by step, " * 20_000, id="long"),
        pytest.param('"\\\n' * 50_000, id="escapes"),
        pytest.param("数学🧮" * 50_000, id="wide characters"),
    ],
)
async def test_however_long_rollouts_are_the_answer_keeps_its_budget(n: int, text: str) -> None:
    run = make_run()
    scores = [
        completion(f"{place}{text}end", place / 7, tokens=40_000, finish="length")
        for place in range(64)
    ]
    for _ in range(2):
        add_group(
            run, 1, *scores, prompt=text, item={"question": text, "answer": list(range(5000))}
        )
    answer = await told("rl_get_rollouts", run_id=RUN, which="best", n=n)
    assert len(answer["rollouts"]) == n
    assert tokens(answer) <= BUDGET
    shown = answer["rollouts"][0]["completion"]
    assert shown.startswith("63") and shown.endswith("end") and "characters left out" in shown
    assert len(json.dumps(shown)) > 600, "and what there is room for is told"


async def test_several_turns_are_shown_apart_with_the_observations_between_them(
    run: RunDirectory,
) -> None:
    turns = [
        {"text": "Is it 4?", "observation": "Too low."},
        {"text": "Is it 7?", "observation": "", "reward": 0.5},
    ]
    add_group(
        run, 3, {**completion("Is it 4?Is it 7?", 1.0), "turns": turns, "outcome": "turn_limit"}
    )
    (shown,) = (await told("rl_get_rollouts", run_id=RUN))["rollouts"]
    assert shown["turns"] == [
        {"text": "Is it 4?", "observation": "Too low."},
        {"text": "Is it 7?", "reward": 0.5},
    ]
    assert shown["outcome"] == "turn_limit"
    assert "completion" not in shown


async def test_many_long_turns_keep_the_budget_and_say_what_is_left_out(run: RunDirectory) -> None:
    turns = [
        {"text": f"{number} {'move ' * 500}", "observation": "board " * 500} for number in range(40)
    ]
    add_group(
        run, 3, *({**completion(f"{place}", place / 7), "turns": turns} for place in range(3))
    )
    answer = await told("rl_get_rollouts", run_id=RUN, n=3)
    assert tokens(answer) <= BUDGET
    shown = answer["rollouts"][0]["turns"]
    assert {"left_out": 32} in shown and len(shown) == 9
    assert (shown[0]["text"][:2], shown[-1]["text"][:3]) == ("0 ", "39 ")


async def test_the_mark_tells_how_many_characters_are_missing(run: RunDirectory) -> None:
    add_group(run, 3, completion("z" * 50_000, 1.0))
    (one,) = (await told("rl_get_rollouts", run_id=RUN))["rollouts"]
    left = one["completion"].split(" [... ")[1].split(" characters")[0]
    assert one["completion"].count("z") + int(left) == 50_000


async def test_a_torn_line_and_a_strange_one_are_passed_over(run: RunDirectory) -> None:
    with (run.path / "rollouts" / "step_2.jsonl").open("a") as file:
        file.write('[1, 2]\n{"completions": "none"}\n{"group": 9, "completions": [{"text": "to')
    (run.path / "rollouts" / "step_x.jsonl").write_text("{}")
    answer = await told("rl_get_rollouts", run_id=RUN)
    assert (answer["step"], answer["figures"]["rollouts"]) == (2, 6)


async def test_a_newest_step_without_rollouts_gives_way_to_the_one_before(
    run: RunDirectory,
) -> None:
    failures = [{"code": "env_error", "why": "KeyError: 'answer'"}] * 3
    add_group(run, 3, failures=failures)
    assert (await told("rl_get_rollouts", run_id=RUN))["step"] == 2
    figures = (await told("rl_get_rollouts", run_id=RUN, step=3))["figures"]
    assert figures == {
        "groups": 0,
        "rollouts": 0,
        "failed": {"env_error": 3},
        "last_failure": "env_error: KeyError: 'answer'",
    }


async def test_a_step_that_is_too_large_is_read_as_far_as_it_goes(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        rooms, "READ_BYTES", (run.path / "rollouts" / "step_2.jsonl").stat().st_size - 1
    )
    figures = (await told("rl_get_rollouts", run_id=RUN))["figures"]
    assert (figures["groups"], figures["note"]) == (
        1,
        "the step is too large; these are of its first groups",
    )


async def test_a_secret_is_struck_out_before_a_text_is_cut(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "sk-planted-" + "abcdefghij" * 500
    monkeypatch.setenv("PLANTED_API_KEY", secret)
    add_group(
        run, 3, completion(f"key: {secret}"), item={"key": secret}, prompt=f"The key is {secret}."
    )
    (one,) = (await told("rl_get_rollouts", run_id=RUN))["rollouts"]
    assert (one["prompt"], one["completion"], one["item"]) == (
        "The key is ***.",
        "key: ***",
        {"key": "***"},
    )


async def test_following_the_advice_ends(run: RunDirectory) -> None:
    asked: dict[str, Any] = {"run_id": RUN}
    following = [
        (await told("rl_get_rollouts", **asked, which=which))["next"]
        for which in ("random", "worst", "best")
    ]
    assert following == [
        'rl_get_rollouts("3fa9c1d2", step=2, which="worst")',
        'rl_get_rollouts("3fa9c1d2", step=2, which="best")',
        'rl_get_results("3fa9c1d2")',
    ]
