"""rl_score as an agent calls it: what a scorer gives for texts, without a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web
from environments.fakes import serving

from halteres.agent.trial import report, testing
from halteres.environments.arithmetic import ArithmeticEnv
from halteres.rollouts.rng import Draw

from . import model_test_fixtures
from .model_test_fixtures import draft, write_environment
from .run_fixtures import tokens, told

pytestmark = pytest.mark.runs


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "home"))
    for name in ("TINKER_BASE_URL", "HALTERES_SESSION"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


async def test_texts_are_scored_as_answers_to_a_task_that_is_told(tmp_path: Path) -> None:
    first = await told("rl_score", environment="arithmetic", completions=[""])
    right = first["reference"]
    texts = [f"So it is \\boxed{{{right}}}.", right, "", "\\boxed{1000}"]
    answer = await told("rl_score", environment="arithmetic", completions=texts)
    assert [row["score"] for row in answer["scores"]] == [1, 0, 0, 0], answer
    assert [row["completion"] for row in answer["scores"]] == texts
    assert (answer["prompt"], answer["reference"], answer["success_above"]) == (
        first["prompt"],
        right,
        0,
    )
    assert "boxed" in answer["prompt"]
    assert tokens(answer) < 300
    question = answer["prompt"].removeprefix("Question: ").partition("\n")[0]
    again = await told("rl_score", environment="arithmetic", completions=texts, prompt=question)
    assert again["scores"] == answer["scores"]


async def test_a_question_of_a_later_step_is_known_as_those_of_the_first_are() -> None:
    env = ArithmeticEnv(*ArithmeticEnv.config_init())
    env.rng = Draw(seed=env.config.seed, step=20, ordinal=3, life=0).rng()
    asked = env.messages(await env.get_next_item())[-1]["content"]
    answer = await told("rl_score", environment="arithmetic", completions=["x"], prompt=asked)
    assert answer["prompt"].startswith(asked[:40])


async def test_a_scorer_that_fails_is_named_beside_the_texts_that_it_scored(tmp_path: Path) -> None:
    draft(
        write_environment(
            tmp_path, "if not text:\n    raise ValueError('nothing')\nreturn len(text)"
        )
    )
    answer = await told("rl_score", completions=["", "abc", "n" * 300])
    empty, short, long = answer["scores"]
    assert (empty["score"], short["score"], long["score"]) == (None, 3, 300)
    assert "ValueError: nothing" in empty["note"]
    assert len(long["completion"]) <= 60


async def test_what_cannot_be_scored_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = await told(
        "rl_score", environment="arithmetic", completions=["x"], prompt="Who are you?"
    )
    assert "word for word" in answer["error"]
    monkeypatch.setattr(testing, "WITHIN_S", 3.0)
    draft(write_environment(tmp_path, "time.sleep(600)"))
    assert "did not score within 3 s" in (await told("rl_score", completions=["x"]))["error"]
    assert (await told("rl_score", environment="nowhere", completions=["x"]))[
        "code"
    ] == "environment_not_found"


async def test_an_environment_whose_judge_needs_a_key_is_scored_and_tested_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_with = set[str | None]()

    async def judge(request: web.Request) -> web.Response:
        asked_with.add(request.headers.get("Authorization"))
        message = {"role": "assistant", "content": '{"reason": "So it is.", "verdict": "B"}'}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})

    monkeypatch.setenv("MY_JUDGE_KEY", "of-the-judge")
    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", judge)])
    async with serving(app) as url:
        graded = {
            "name": "graded",
            "rubric": {"criteria": [{"name": "kind", "text": "Is it kind?"}]},
            "judge": {"base_url": f"{url}/v1", "key_variable": "MY_JUDGE_KEY"},
        }
        draft(write_environment(tmp_path), **{"env.rewards": [graded]})
        scored = await told("rl_score", completions=["yes", "no"])
        assert [row["score"] for row in scored["scores"]] == [1, 0], scored
        (tested,) = (await model_test_fixtures.answered(num_steps=1, group_size=2))["models_tested"]
    assert (tested["steps_tested"], tested["mean_score"]) == (1, 1.0), tested
    assert asked_with == {"Bearer of-the-judge"}
    assert model_test_fixtures.files_with("of-the-judge", tmp_path / "home") == []


def test_odd_answers_that_are_paid_or_fail_are_said() -> None:
    found = report.odd_caveats(
        {"empty": 1.0, "boxless": 1.0, "long": 0.0, "symbols": "ValueError: no."}, 0.0
    )
    assert found == [
        "its scorer pays for answers that say nothing (empty)",
        "its scorer fails on odd answers (symbols: ValueError: no.)",
    ]
    assert report.odd_caveats({"empty": 0.0, "boxless": 1.0}, 0.0) == []


async def test_a_test_of_an_environment_tries_empty_boxless_and_odd_answers_by_itself(
    tmp_path: Path,
) -> None:
    draft("arithmetic")
    answer = await model_test_fixtures.answered(num_steps=1, group_size=2)
    odd = answer["summary"]["odd_answers"]
    assert {
        "empty",
        "blank",
        "boxless",
        "no_answer",
        "open_box",
        "prompt",
        "symbols",
        "scripts",
        "long",
    } == set(odd)
    assert set(odd.values()) == {0}
    assert "its scorer" not in answer["summary"]["why"]
    draft(
        write_environment(
            tmp_path,
            "if len(text) > 9999:\n    raise ValueError('too long')\nreturn float(not text)",
        )
    )
    cheated = (await model_test_fixtures.answered(num_steps=1, group_size=2))["summary"]
    assert cheated["odd_answers"]["empty"] == 1
    assert "its scorer pays for answers that say nothing (empty)" in cheated["why"]
    assert "its scorer fails on odd answers (long: " in cheated["why"]
    assert "too long" in cheated["odd_answers"]["long"]
