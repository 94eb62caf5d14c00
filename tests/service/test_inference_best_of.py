"""`best_of`: several sequences are sampled, and the best of them answered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rewards.standin_model import StandIn, listening

from halteres.rewards.server import create_app
from halteres.service.service import Options

from .inference_fixtures import whole
from .live_service import LiveService, serving

HI = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
ASKED: dict[str, Any] = {"prompt": "What is 17 + 25?", "max_tokens": 12, "seed": 3, "logprobs": 0}


@pytest.fixture
async def scored(tmp_path: Path) -> AsyncIterator[LiveService]:
    """A service whose operator named a reward model that likes long answers, and one that is
    gone.
    """
    async with listening(create_app({"lengths": StandIn()})) as url:
        models = {"lengths": url, "gone": "http://any:tml-secret@127.0.0.1:9"}
        async with serving(tmp_path / "state", Options(reward_models=models)) as scene:
            yield scene


async def test_without_a_reward_model_the_likeliest_per_token_are_answered_and_all_tokens_are_counted(
    scene: LiveService,
) -> None:
    """As OpenAI's API has it: each prompt's own best, in their order."""
    body = ASKED | {"prompt": [ASKED["prompt"], "1 + 1"], "stop": ["e", "3"]}
    everything = await whole(scene, "/v1/completions", **body, n=6)
    best = await whole(scene, "/v1/completions", **body, n=2, best_of=6)

    def mean(choice: dict[str, Any]) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return sum(logprobs) / len(logprobs)

    ranked = [
        sorted(everything["choices"][at : at + 6], key=mean, reverse=True)[:2] for at in (0, 6)
    ]
    expected = [choice["token_ids"] for of_prompt in ranked for choice in of_prompt]
    assert [choice["token_ids"] for choice in best["choices"]] == expected
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert best["usage"] == everything["usage"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_named_reward_model_chooses(scored: LiveService, path: str) -> None:
    body: dict[str, Any] = {"prompt": "Hi"} if path == "/v1/completions" else {"messages": HI}
    body |= {"max_tokens": 24, "seed": 3}

    def said(answer: Any) -> list[str]:
        return [
            choice["text"] if "text" in choice else choice["message"]["content"]
            for choice in answer["choices"]
        ]

    everything = await whole(scored, path, **body, n=8)
    best = await whole(scored, path, **body, n=3, best_of=8, reward_model="lengths")
    assert len({len(text) for text in said(everything)}) > 3
    assert [len(text) for text in said(best)] == sorted(map(len, said(everything)), reverse=True)[
        :3
    ]
    assert best["usage"]["completion_tokens"] == everything["usage"]["completion_tokens"]


@pytest.mark.parametrize("name", ["http://127.0.0.1:9", "/etc", "length"])
async def test_a_request_chooses_by_name_alone_and_hears_which_there_are(
    scored: LiveService, name: str
) -> None:
    """No address and no folder of a request is ever opened."""
    status, answer = await scored.ask("/v1/completions", **ASKED, best_of=2, reward_model=name)
    assert status == 400 and "lengths" in answer["error"]["message"]
    assert "127.0.0.1" not in answer["error"]["message"].replace(name, "")


async def test_a_service_without_reward_models_says_how_it_gets_them(scene: LiveService) -> None:
    status, answer = await scene.ask("/v1/completions", **ASKED, best_of=2, reward_model="lengths")
    assert status == 400 and "--reward-model NAME=URL" in answer["error"]["message"]


async def test_a_reward_model_that_does_not_answer_is_told_without_its_address(
    scored: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halteres.service.inference.best_of.SCORED_WITHIN_S", 0.3)
    status, answer = await scored.ask("/v1/completions", **ASKED, best_of=2, reward_model="gone")
    assert status == 503 and "'gone' could not be asked" in answer["error"]["message"]
    assert "127.0.0.1" not in str(answer) and "secret" not in str(answer)


async def test_where_no_completion_could_be_scored_that_is_an_error(scored: LiveService) -> None:
    """A missing score is no zero."""
    status, answer = await scored.ask(
        "/v1/completions", **ASKED | {"prompt": "unreadable"}, best_of=2, reward_model="lengths"
    )
    assert status == 503 and "could not score one of 2 answers" in answer["error"]["message"]


@pytest.mark.parametrize(
    "extra",
    [
        {"n": 3, "best_of": 2},
        {"best_of": 2, "stream": True},
        {"reward_model": "lengths"},
        {"best_of": 5000},
    ],
)
async def test_a_choice_that_cannot_be_made_is_refused(
    scored: LiveService, extra: dict[str, Any]
) -> None:
    for path, body in (
        ("/v1/completions", ASKED),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 4}),
    ):
        status, answer = await scored.ask(path, **body | extra)
        assert status == 400, answer
