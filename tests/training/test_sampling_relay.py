"""The sampling relay over a stand-in of the SDK's client: shapes, versions, refusals, failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import tinker
from deadlines import until

from halteres.clients.inference import InferenceClient
from halteres.files import replace_file
from halteres.models import TINY, builtin_path
from halteres.tokenizer import Tokenizer, load_tokenizer
from halteres.training.folder import Published, Wiring
from halteres.training.sampling_relay import Relay, Weights, WeightsOfService

SECRET = "tml-run-secret"
LOGIN = {"Authorization": f"Bearer {SECRET}"}
PATH = "tinker://a:train:0/sampler_weights/step-000010"


class StandInClient:
    """A `SamplingClient` whose samples are the tokens of a text."""

    def __init__(self, tokens: list[int], name: str = "") -> None:
        self.tokens, self.name = tokens, name
        self.asked: list[dict[str, Any]] = []
        self.failure: Exception | None = None
        self.waits = False
        self.was_cancelled = False

    def sample(self, **asked: Any) -> Any:
        self.asked.append(asked)
        return self._answer(asked["num_samples"])

    async def _answer(self, n: int) -> tinker.SampleResponse:
        if self.waits:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.was_cancelled = True
                raise
        if self.failure is not None:
            raise self.failure
        one = tinker.SampledSequence(
            stop_reason="stop",
            sequence_id="s",
            tokens_np=np.array(self.tokens, np.int32),
            logprobs_np=np.full(len(self.tokens), -0.5, np.float32),
        )
        return tinker.SampleResponse(sequences=[one] * n)


class StandInWeights(WeightsOfService):
    """Weights whose clients need no service; `opened` has the handles and names that were asked
    for.
    """

    def __init__(self, client: StandInClient, published: Path | None) -> None:
        wiring = Wiring(run_id="r", service_url="http://none", api_url="", base_model=TINY)
        super().__init__(wiring, published)
        self.client = client
        self.opened: list[str] = []

    def _client_of(self, newest: Published) -> Any:
        self.opened.append(newest.handle)
        return self.client

    async def _find_named(self, name: str) -> Weights:
        self.opened.append(name)
        version = None if name.startswith("tinker://") else 0
        client: Any = self.client
        return Weights(client, version)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(builtin_path(TINY)))


@pytest.fixture
def sampler(tokenizer: Tokenizer) -> StandInClient:
    return StandInClient([*tokenizer.encode("3 + 4 = 7."), tokenizer.eos_token_id])


@pytest.fixture
def published(tmp_path: Path) -> Path:
    file = tmp_path / "published.json"
    publish(file, 3)
    return file


def publish(file: Path, version: int) -> None:
    newest = Published(version=version, handle=f"handle of {version}")
    replace_file(file, msgspec.json.encode(newest))


@pytest.fixture
def weights(sampler: StandInClient, published: Path) -> StandInWeights:
    return StandInWeights(sampler, published)


@pytest.fixture
def post(weights: StandInWeights, tokenizer: Tokenizer) -> Callable[..., Any]:
    app = Relay(weights, tokenizer, TINY).app(SECRET)

    async def post(path: str, body: Any, **headers: str) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post(path, json=body, headers=headers or LOGIN)

    return post


async def test_an_answer_has_tokens_logprobs_and_the_version_that_was_newest(
    post: Any, sampler: StandInClient, weights: StandInWeights, published: Path
) -> None:
    parameters = {"max_new_tokens": 9, "temperature": 0, "top_p": 0.9, "n": 2, "sampling_seed": 5}
    body = {"input_ids": [1, 2, 3], "sampling_params": parameters, "return_logprob": True}
    reply = await post("/runs/r/generate", body)
    assert reply.status_code == 200
    first, second = reply.json()
    assert first["output_ids"] == sampler.tokens and first["text"] == "3 + 4 = 7."
    assert first["meta_info"]["output_token_logprobs"][0] == [-0.5, sampler.tokens[0], None]
    assert first["meta_info"]["policy_version"] == second["meta_info"]["policy_version"] == [3, 3]
    asked = sampler.asked[0]
    assert asked["prompt"].to_ints() == [1, 2, 3] and asked["num_samples"] == 2
    params = asked["sampling_params"]
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (9, 0, 0.9, 5)

    publish(published, 4)
    reply = await post("/runs/r/generate", {**body, "sampling_params": {"n": 1}})
    assert reply.json()["meta_info"]["policy_version"] == [4, 4]
    assert weights.opened == ["handle of 3", "handle of 4"]


async def test_a_chat_is_rendered_and_cut_before_what_stopped_it(
    post: Any, sampler: StandInClient, tokenizer: Tokenizer
) -> None:
    messages = [{"role": "user", "content": "What is 3 + 4?"}]
    body = {"messages": messages, "max_tokens": 16, "stop": [" =", ""], "stream": False}
    answer = (await post("/runs/r/v1/chat/completions", body)).json()
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "3 + 4"}
    assert choice["token_ids"] == sampler.tokens and answer["policy_version"] == [3, 3]
    prompt = tokenizer.apply_chat_template(messages)
    assert sampler.asked[0]["prompt"].to_ints() == prompt
    assert answer["usage"]["total_tokens"] == len(prompt) + len(sampler.tokens)
    completion = (await post("/runs/r/v1/completions", {"prompt": "3 + 4"})).json()
    assert completion["choices"][0]["text"] == "3 + 4 = 7."


@pytest.mark.parametrize(
    ("route", "asked", "part"),
    [
        ("completions", {"prompt": "3 + 4"}, {"text": "3 + 4 = 7."}),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "?"}]},
            {"delta": {"role": "assistant", "content": "3 + 4 = 7."}},
        ),
    ],
)
async def test_a_chat_with_a_run_reads_an_answer_as_events(
    post: Any, route: str, asked: dict[str, Any], part: dict[str, Any]
) -> None:
    """Halteres's own choice: the SDK has an answer whole, and a chat asks for a stream."""
    reply = await post(f"/runs/r/v1/{route}", {**asked, "stream": True, "n": 2})
    assert reply.headers["content-type"].startswith("text/event-stream")
    event, end = reply.text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    first, second = json.loads(event.removeprefix("data: "))["choices"]
    assert part.items() <= first.items() and (first["index"], second["index"]) == (0, 1)
    assert first["finish_reason"] == "stop"


async def test_named_weights_have_no_version_and_the_base_model_has_version_0(
    post: Any, weights: StandInWeights
) -> None:
    named = (await post("/runs/eval/generate", {"input_ids": [1], "model": PATH})).json()
    base = (await post("/runs/eval/generate", {"input_ids": [1], "model": TINY})).json()
    assert "policy_version" not in named["meta_info"]
    assert base["meta_info"]["policy_version"] == [0, 0]
    assert weights.opened == [PATH, TINY]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("generate", {"input_ids": [1], "policy_version": 2}),
        ("generate", {"input_ids": [1], "stream": True}),
        ("generate", {"input_ids": [1], "sampling_params": {"repetition_penalty": 1.2}}),
        ("generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}),
        ("generate", {"sampling_params": {}}),
        ("generate", {"input_ids": [1], "text": "a"}),
        ("v1/chat/completions", {"messages": [{"content": "no role"}]}),
        ("v1/chat/completions", {"messages": [], "tools": [{"type": "function"}]}),
        ("v1/completions", []),
    ],
)
async def test_what_the_sdk_cannot_do_is_refused(
    post: Any, sampler: StandInClient, path: str, body: Any
) -> None:
    reply = await post(f"/runs/r/{path}", body)
    assert reply.status_code == 400 and reply.json()["detail"]
    assert not sampler.asked


async def test_other_routes_and_other_keys_are_refused(post: Any) -> None:
    assert (await post("/runs/r/v1/responses", {"input": "?"})).status_code == 404
    reply = await post("/runs/r/generate", {"input_ids": [1]}, Authorization="Bearer other")
    assert reply.status_code == 401


async def test_before_the_first_version_clients_are_to_wait(post: Any, published: Path) -> None:
    published.unlink()
    reply = await post("/runs/r/generate", {"input_ids": [1]})
    assert (reply.status_code, reply.json()["code"]) == (503, "not_ready")


def of_status(status: int) -> Exception:
    request = httpx.Request("POST", "http://service/api/v1/asample")
    response = httpx.Response(status, request=request)
    return tinker.APIStatusError("said so", response=response, body=None)


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (of_status(404), 400, "request_refused"),
        (of_status(401), 400, "request_refused"),
        # the SDK has repeated these for as long as it would
        (of_status(429), 500, "service_failed"),
        (of_status(503), 500, "service_failed"),
        (TimeoutError(), 500, "service_failed"),
    ],
)
async def test_a_failure_says_whether_asking_again_may_help(
    post: Any, sampler: StandInClient, failure: Exception, status: int, code: str
) -> None:
    sampler.failure = failure
    reply = await post("/runs/r/generate", {"input_ids": [1]})
    assert (reply.status_code, reply.json()["code"]) == (status, code)


async def test_a_sample_without_logprobs_is_no_answer(post: Any, sampler: StandInClient) -> None:
    async def answer(n: int) -> tinker.SampleResponse:
        one = tinker.SampledSequence(
            stop_reason="stop", sequence_id="s", tokens_np=np.array([1], np.int32)
        )
        return tinker.SampleResponse(sequences=[one] * n)

    sampler._answer = answer  # type: ignore[method-assign]
    reply = await post("/runs/r/generate", {"input_ids": [1]})
    assert reply.status_code == 500 and "log-probability" in reply.json()["detail"]


async def test_a_client_that_leaves_ends_its_sample(
    weights: StandInWeights, sampler: StandInClient, tokenizer: Tokenizer
) -> None:
    app = Relay(weights, tokenizer, TINY).app(None)
    sampler.waits = True
    left = asyncio.Event()
    body = {"type": "http.request", "body": json.dumps({"input_ids": [1]}).encode()}
    waiting = [body]

    async def receive() -> dict[str, Any]:
        if waiting:
            return waiting.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        del message

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/runs/r/generate",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1")],
    }
    call = asyncio.create_task(app(scope, receive, send))
    await until(lambda: bool(sampler.asked))
    left.set()
    await asyncio.wait_for(call, 10)
    assert sampler.was_cancelled


async def test_our_own_client_reads_its_answers(
    monkeypatch: pytest.MonkeyPatch, post: Any, sampler: StandInClient
) -> None:
    async def send(self: InferenceClient, path: str, body: Any) -> Any:
        del self
        return (await post(f"/runs/r{path}", body)).json()

    monkeypatch.setattr(InferenceClient, "post_when_ready", send)
    from halteres.clients.inference import Sampling

    client = InferenceClient("http://127.0.0.1/v1", model=None)
    wanted = Sampling(max_new_tokens=8, stop=("\n",), seed=1)
    (turn,) = await client.generate([1, 2], wanted)
    assert (turn.tokens, turn.versions) == (tuple(sampler.tokens), (3, 3))
    chat = await client.chat([{"role": "user", "content": "?"}], wanted, n=2)
    assert [one.text for one in chat] == ["3 + 4 = 7."] * 2
