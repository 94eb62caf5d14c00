"""The reward server, through HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from deadlines import until

from halteres.clients.rewards import RewardClient, score
from halteres.errors import InvalidData, NotFound, NotReady
from halteres.loopback import body_within
from halteres.rewards import __main__, server
from halteres.rewards.scorer import LocalScorer, open_scorer, score_once
from halteres.rewards.server import MOST_ITEMS, create_app
from halteres.scores import Scorable, Score

from .standin_model import HALVED, StandIn, listening

KEY = "tml-key"


@pytest.fixture
def model() -> StandIn:
    return StandIn()


@pytest.fixture
async def url(model: StandIn) -> AsyncIterator[str]:
    plain = StandIn(calibration=None, notes=("no halteres_reward.json: the template was guessed",))
    async with listening(create_app({"lengths": model, "plain": plain})) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[RewardClient]:
    async with RewardClient(url, timeout_s=10) as client:
        yield client


async def post(url: str, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, json=body, headers=headers) as answer,
    ):
        return answer.status, await answer.json()


async def get(url: str, path: str, **headers: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(url + path, headers=headers) as answer,
    ):
        return answer.status, await answer.text()


async def test_each_item_has_its_score_in_both_units_and_what_was_read_of_it(url: str) -> None:
    items = [
        {"prompt": "ab", "completion": "c", "id": "x"},
        {"completion": [{"role": "user", "content": "abcde"}]},
    ]
    status, answer = await post(url, "/score", {"items": items})
    assert status == 200
    assert (answer["model"], answer["output"]) == ("lengths", "standardised")
    first, second = answer["items"]
    assert first == {
        "index": 0,
        "id": "x",
        "score": 1.5,
        "raw": 3.0,
        "tokens": 3,
        "truncated": False,
        "ended_with_eos": True,
        "converted": False,
        "out_of_range": False,
    }
    assert (second["index"], second["raw"]) == (1, 5.0)


@pytest.mark.parametrize(
    "body",
    [
        {"texts": ["abc", "d"]},
        {"messages": [[{"role": "user", "content": "abc"}], [{"role": "user", "content": "d"}]]},
    ],
)
async def test_texts_and_chats_are_scored_without_items(url: str, body: dict[str, Any]) -> None:
    _, answer = await post(url, "/score", body)
    assert [item["raw"] for item in answer["items"]] == [3.0, 1.0]


async def test_one_chat_is_one_text(url: str) -> None:
    _, answer = await post(url, "/score", {"messages": [{"role": "user", "content": "abc"}]})
    assert [item["raw"] for item in answer["items"]] == [3.0]


async def test_a_bad_item_fails_alone_by_its_index(url: str, model: StandIn) -> None:
    items = [
        {"completion": "ab"},
        {"completion": 7},
        {"completion": "unreadable"},
        {"prompt": "p", "completion": []},
    ]
    status, answer = await post(url, "/score", {"items": items})
    assert status == 200
    assert answer["items"][0]["raw"] == 2.0
    assert [item["code"] for item in answer["items"][1:]] == ["invalid_data"] * 3
    assert "completion" in answer["items"][1]["error"]
    assert "score" not in answer["items"][2]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"texts": ["a"], "items": []}, 400),
        ({"texts": []}, 400),
        ({"texts": ["a"], "output": "percent"}, 400),
        ({"texts": ["a"] * (MOST_ITEMS + 1)}, 413),
        ({"texts": ["a"], "model": "lenghts"}, 404),
        ({"texts": ["a"], "model": "plain", "output": "probability"}, 400),
        ({"texts": ["a"], "ouput": "raw"}, 400),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused_in_words(
    url: str, body: Any, status: int
) -> None:
    answered, answer = await post(url, "/score", body)
    assert answered == status
    assert answer["detail"]


async def test_a_misspelt_field_is_refused_with_the_nearest_name(url: str) -> None:
    _, answer = await post(url, "/score", {"texts": ["a"], "ouput": "raw"})
    assert "Did you mean 'output'?" in answer["detail"]
    _, answer = await post(
        url, "/score", {"items": [{"completion": "ab"}, {"completion": "ab", "promt": "p"}]}
    )
    assert (
        answer["items"][0]["raw"] == 2.0 and "Did you mean 'prompt'?" in answer["items"][1]["error"]
    )
    for top_n in (0, -1):
        status, answer = await post(
            url, "/rank", {"prompt": "", "completions": ["a", "b"], "top_n": top_n}
        )
        assert status == 400 and "top_n" in answer["detail"]
    # vLLM's has more fields
    assert (await post(url, "/classify", {"input": "ab", "priority": 0}))[0] == 200


async def test_a_server_that_is_not_there_is_refused_at_once() -> None:
    scorer = open_scorer("http://127.0.0.1:1")
    async with asyncio.timeout(5):
        with pytest.raises(NotFound, match=r"No server answers at http://127.0.0.1:1\..*Start it"):
            await score_once(scorer, [Scorable(completion="a")])


async def test_tools_and_template_arguments_reach_the_model(
    client: RewardClient, model: StandIn
) -> None:
    seen: list[Scorable] = []
    score_each = model.score_each

    def watched(texts: Sequence[Scorable], are_wanted: Any) -> Any:
        seen.extend(texts)
        return score_each(texts, are_wanted)

    model.score_each = watched
    tool = {"type": "function"}
    await client.score(
        [Scorable(completion="a", tools=(tool,), template_arguments={"thinking": False})]
    )
    assert (seen[0].tools, seen[0].template_arguments) == ((tool,), {"thinking": False})


async def test_a_model_without_calibration_gives_raw_scores_and_says_so(url: str) -> None:
    _, answer = await post(url, "/score", {"texts": ["abc"], "model": "plain"})
    assert (answer["output"], answer["items"][0]["score"]) == ("raw", 3.0)
    assert answer["notes"] == ["no halteres_reward.json: the template was guessed"]


async def test_completions_are_ranked_with_ties_and_what_could_not_be_scored(url: str) -> None:
    body = {"prompt": "", "completions": ["ab", "abcd", "cd", "unreadable"], "output": "raw"}
    _, answer = await post(url, "/rank", body)
    assert (answer["order"], answer["best"]) == ([1, 0, 2], 1)
    assert answer["scores"] == [2.0, 4.0, 2.0, None]
    assert answer["ties"] == [[0, 2]]
    assert answer["probability"][1] == 0.5
    # sigmoid((2 - 4) / T), T = 2
    assert answer["probability"][0] == pytest.approx(0.26894, abs=1e-5)
    assert [error["index"] for error in answer["errors"]] == [3]
    _, answer = await post(url, "/rank", {**body, "top_n": 1})
    assert answer["order"] == [1]


async def test_vllms_shapes_carry_raw_scores_unless_an_activation_is_asked_for(url: str) -> None:
    _, answer = await post(url, "/classify", {"model": "lengths", "input": ["ab", "abc"]})
    assert answer["data"] == [
        {"index": 0, "label": "LABEL_0", "probs": [2.0], "num_classes": 1},
        {"index": 1, "label": "LABEL_0", "probs": [3.0], "num_classes": 1},
    ]
    assert (answer["object"], answer["usage"]["prompt_tokens"]) == ("list", 5)
    _, answer = await post(
        url, "/pooling", {"messages": [{"role": "user", "content": "ab"}], "use_activation": True}
    )
    assert answer["data"] == [{"index": 0, "object": "pooling", "data": [pytest.approx(0.880797)]}]
    status, _ = await post(url, "/classify", {"input": [[1, 2, 3]]})
    assert status == 400  # token ids are another model's


async def test_health_models_and_figures_are_told(url: str) -> None:
    await post(url, "/score", {"texts": ["abc", "unreadable"]})
    async with RewardClient(url) as client:
        health = await client.health()
    assert health["status"] == "ok"
    assert [card["id"] for card in health["models"]] == ["lengths", "plain"]
    _, listed = await get(url, "/v1/models")
    assert '"object":"list"' in listed
    _, figures = await get(url, "/metrics")
    assert 'halteres_reward_texts_total{outcome="scored"} 1' in figures
    assert 'halteres_reward_texts_total{outcome="failed"} 1' in figures
    assert "halteres_reward_tokens_total 3" in figures


async def test_a_text_that_cannot_be_read_costs_another_clients_nothing(
    url: str, model: StandIn
) -> None:
    """Both wait while a third is computed, and are then computed together: one call, however many
    are unreadable.
    """
    empty = {"prompt": [{"role": "user", "content": "p"}], "completion": []}
    bodies = [
        {"texts": ["a"]},
        {"items": [empty, {"completion": "unreadable"}]},
        {"texts": ["good"]},
    ]
    model.gate.clear()
    first = asyncio.create_task(post(url, "/score", bodies[0]))
    await asyncio.to_thread(model.inside.wait, 10)
    others = [asyncio.create_task(post(url, "/score", body)) for body in bodies[1:]]
    async with asyncio.timeout(10):
        while '"waiting_texts":3' not in (await get(url, "/health"))[1]:
            pass
        model.gate.set()
        (_, _), (status, bad), (_, good) = await asyncio.gather(first, *others)
    assert status == 200
    assert [item["code"] for item in bad["items"]] == ["invalid_data"] * 2
    assert good["items"][0]["raw"] == 4.0
    assert model.computed == [1, 2]


PARTS = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
IMAGE = [{"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}]


def chat(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


async def test_content_in_parts_is_scored_as_its_text_and_what_is_no_text_fails_alone(
    url: str,
) -> None:
    items = [
        {"prompt": chat(PARTS), "completion": chat("de")},
        {"completion": chat(IMAGE)},
        {"completion": [{}]},
    ]
    _, answer = await post(url, "/score", {"items": items})
    assert [item.get("raw") for item in answer["items"]] == [5.0, None, None]
    assert [item["code"] for item in answer["items"][1:]] == ["invalid_data"] * 2
    _, answer = await post(url, "/score", {"messages": [chat(PARTS), chat(IMAGE)]})
    assert [item.get("raw") for item in answer["items"]] == [3.0, None]
    _, answer = await post(
        url, "/rank", {"prompt": chat(PARTS), "completions": [chat("a"), chat(IMAGE), chat(PARTS)]}
    )
    assert answer["order"] == [2, 0] and [one["index"] for one in answer["errors"]] == [1]
    for path in ("/classify", "/pooling"):
        assert (await post(url, path, {"messages": chat(PARTS)}))[1]["usage"]["prompt_tokens"] == 3
        assert (await post(url, path, {"messages": chat(IMAGE)}))[0] == 400


async def test_what_clients_asked_for_is_dropped_when_they_leave(url: str, model: StandIn) -> None:
    """The one that is computed is told so; those behind it are not computed at all."""
    model.gate.clear()
    leaving = [asyncio.create_task(post(url, "/score", {"texts": ["a"] * 3}))]
    await asyncio.to_thread(model.inside.wait, 10)
    leaving += [
        asyncio.create_task(post(url, "/rank", {"prompt": "p", "completions": ["a", "b"]}))
        for _ in range(3)
    ]
    await until(lambda: waiting_texts(url, 9))
    for task in leaving:
        task.cancel()
    await until(lambda: waiting_texts(url, 0))
    staying = asyncio.create_task(post(url, "/score", {"texts": ["good"]}))
    await until(lambda: waiting_texts(url, 1))
    model.gate.set()
    async with asyncio.timeout(10):
        assert (await staying)[1]["items"][0]["raw"] == 4.0
    assert (model.computed, model.wanted) == ([3, 1], [False, True])


async def waiting_texts(url: str, count: int) -> bool:
    return f'"waiting_texts":{count}' in (await get(url, "/health"))[1]


async def test_a_body_that_does_not_come_is_refused_in_time(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "body_within", partial(body_within, stall_s=0.05))
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /score HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 1000\r\n\r\n"
    writer.write(head.encode() + b'{"texts": ')
    async with asyncio.timeout(10):
        answer = await reader.read()  # to the connection's end
    writer.close()
    assert answer.startswith(b"HTTP/1.1 408") and b'"too_slow"' in answer


def test_weights_are_hashed_before_the_server_answers(
    model: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    from halteres.rewards.torch.model import RewardModel

    asked: list[Any] = []

    class Hashed(StandIn):
        def __getattribute__(self, name: str) -> Any:
            if name == "digest":
                asked.append(name)
            return super().__getattribute__(name)

    def load(folder: Path, **settings: Any) -> StandIn:
        asked.append(settings["device"])
        return Hashed()

    monkeypatch.setattr(RewardModel, "load", load)
    parsed = __main__.parser().parse_args(["a", "--device", "cpu"])
    assert list(__main__.load_models(parsed)) == ["a"]
    assert asked == ["cpu", "digest"]


async def test_requests_that_come_together_are_computed_together(
    client: RewardClient, model: StandIn
) -> None:
    model.gate.clear()
    first = asyncio.create_task(client.score([Scorable(completion="a")]))
    await asyncio.to_thread(model.inside.wait, 10)
    others = [asyncio.create_task(client.score([Scorable(completion="ab")] * 3)) for _ in range(4)]
    async with asyncio.timeout(10):
        while (await client.health())["waiting_texts"] < 13:
            pass
        model.gate.set()
        await asyncio.gather(first, *others)
    assert model.computed == [1, 12]


async def test_a_full_queue_refuses_with_when_to_come_again_and_the_client_comes_again(
    url: str, client: RewardClient, model: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_WAITING", 2)
    model.gate.clear()
    first = asyncio.create_task(client.score([Scorable(completion="a")] * 2))
    await asyncio.to_thread(model.inside.wait, 10)
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/score", json={"texts": ["b"]}) as answer,
    ):
        assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
    again = asyncio.create_task(client.score([Scorable(completion="bcd")]))
    async with asyncio.timeout(10):
        while "refused_requests_total 2" not in (await get(url, "/metrics"))[1]:
            pass
        model.gate.set()
        assert (await first)[0] == Score(value=0.5, num_tokens=1, out_of_range=False)
        assert await again == [Score(value=1.5, num_tokens=3, out_of_range=False)]


async def test_a_computation_that_fails_is_told_as_such_and_the_next_one_runs(url: str) -> None:
    status, answer = await post(url, "/score", {"texts": ["broken"]})
    assert status == 500
    assert "the weights are gone" in answer["detail"]
    assert (await post(url, "/score", {"texts": ["a"]}))[0] == 200


async def test_a_key_is_asked_for_where_there_is_one(model: StandIn) -> None:
    async with listening(create_app({"lengths": model}, key=KEY)) as url:
        assert (await post(url, "/score", {"texts": ["a"]}))[0] == 401
        assert (await get(url, "/health"))[0] == 401
        assert (await post(url, "/score", {"texts": ["a"]}, Authorization=f"Bearer {KEY}"))[
            0
        ] == 200
        assert await score(url, [Scorable(completion="ab")], key=KEY) == [
            Score(value=1.0, num_tokens=2, out_of_range=False)
        ]
        login = url.replace("://", f"://run:{KEY}@")
        client = RewardClient(login, output="raw")
        async with client:
            assert await client.score([Scorable(completion="ab")]) == [
                Score(value=2.0, num_tokens=2, out_of_range=False)
            ]
        assert client.name == url


async def test_a_page_from_elsewhere_is_refused(url: str) -> None:
    assert (await post(url, "/score", {"texts": ["a"]}, Origin="https://evil.example"))[0] == 403


async def test_the_client_has_none_for_what_could_not_be_scored_and_never_zero(
    client: RewardClient, caplog: pytest.LogCaptureFixture
) -> None:
    texts = [Scorable(completion="ab"), Scorable(completion="unreadable")] * 200
    scores = await client.score(texts)  # more than one request
    assert scores == [Score(value=1.0, num_tokens=2, out_of_range=False), None] * 200
    assert "could not score" in caplog.text


async def test_the_client_says_what_was_refused_and_gives_up_at_its_deadline(
    url: str, model: StandIn
) -> None:
    async with RewardClient(url, model="other") as client:
        with pytest.raises(InvalidData, match="There is no model 'other'"):
            await client.score([Scorable(completion="a")])
    model.gate.clear()
    async with RewardClient(url, timeout_s=0.2) as client:
        with pytest.raises(NotReady, match=r"no scores. It had 0.2 s"):
            await client.score([Scorable(completion="a")])
    model.gate.set()


async def test_a_model_in_this_process_scores_as_a_served_one_does(
    client: RewardClient, model: StandIn
) -> None:
    texts = [
        Scorable(completion="ab"),
        Scorable(prompt="p", completion="unreadable"),
        Scorable(completion="c"),
    ]
    assert await LocalScorer(model).score(texts) == await client.score(texts)
    assert model.calibration == HALVED
