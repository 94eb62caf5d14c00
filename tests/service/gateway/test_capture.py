"""The calls of a session: what is sampled, what is a turn, and what a repeated request gets. We chose
it; the traps are those that other gateways fell into.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tinker
from deadlines import until

from halteres.errors import ServerError
from halteres.service.durable.journal import Entry
from halteres.service.limits import Allowances, Limits
from halteres.service.service import Options
from service.inference_fixtures import TOKENIZER, speaking
from service.live_service import DATA, STEP, LiveService, closing, serving, trainer
from service.recorded_responses import CALL, SAYS_TO_RESULTS, THINKS

from .episodes import EngineTap, Episode, opened, trained, user

RUN = "r17"

HELLO: dict[str, Any] = {"messages": [user("Hello.")], "max_tokens": 6}
SIX: dict[str, Any] = {**HELLO, "ignore_eos": True}
"""Six tokens, so that two draws differ."""


async def test_auxiliary_calls_are_answered_and_never_turns(tmp_path: Path) -> None:
    """Trap 5. Tokens are counted as the very next call has them; a title is another conversation,
    without the tools of the episode.
    """
    async with speaking(tmp_path, "4") as (scene, speaker):
        episode = await opened(scene)
        tools = [{"name": "add", "input_schema": {"type": "object"}}]
        asked = {"messages": [user("2 + 2?")], "tools": tools}
        answer = await episode.whole("/v1/messages", {**asked, "max_tokens": 6})
        asked["messages"] += [
            {"role": "assistant", "content": answer["content"]},
            user("Once more."),
        ]
        counted = await episode.whole("/v1/messages/count_tokens", asked)
        read = await episode.whole("/tokenize", {"messages": [user("2 + 2?")]})
        title = await episode.whole("/v1/chat/completions", {**HELLO, "max_tokens": 4})
        assert (read["count"] > 0, title["choices"][0]["message"]["content"]) == (True, "4")
        await episode.whole("/v1/messages", {**asked, "max_tokens": 6})
        assert counted["input_tokens"] == len(speaker.prompts[-1])
        view = await episode.view()
        assert [node["untrained"] for node in view["nodes"]] == [None, "auxiliary", None]
        assert len((await episode.sequences())["turns"]) == 2


async def test_an_sdks_retry_gets_the_answer_of_the_first_request(tmp_path: Path) -> None:
    """Trap 6. Of an engine, too, that would not draw the same again."""
    async with serving(tmp_path, exact=False) as scene:
        tap, episode = EngineTap(scene), await opened(scene)
        path = "/v1/chat/completions"
        first = await episode.whole(path, SIX, x_stainless_retry_count="0")
        again = await episode.whole(path, SIX, x_stainless_retry_count="1")
        assert again["choices"] == first["choices"]
        assert (again["usage"], again["prompt_token_ids"]) == (
            first["usage"],
            first["prompt_token_ids"],
        )
        keyed = {**HELLO, "logprobs": True, "top_logprobs": 2}
        named = await episode.whole(path, keyed, idempotency_key="call 1")
        assert (await episode.whole(path, keyed, idempotency_key="call 1"))["choices"] == named[
            "choices"
        ]
        status, refusal = await episode.post(path, HELLO, idempotency_key="call 1")
        assert (status, "another body" in refusal["error"]["message"]) == (422, True)
        assert len(tap.samplings) == len((await episode.view())["nodes"]) == 2
        new = await episode.whole(path, SIX, x_stainless_retry_count="0")
        assert new["choices"] != first["choices"]
        assert len(tap.samplings) == 3


async def test_a_retry_is_streamed_from_what_was_sampled(scene: LiveService) -> None:
    """Trap 6, as a stream."""
    tap, episode = EngineTap(scene), await opened(scene)
    first = await episode.whole("/v1/completions", {"prompt": "One", "max_tokens": 5, "n": 2})
    asked = {"prompt": "One", "max_tokens": 5, "stream": True}
    url = f"{scene.url}{episode.path}/v1/completions"
    texts: list[bytes] = []
    for _ in range(2):
        headers = {"Idempotency-Key": "k"}
        async with scene.http.post(url, json=asked, headers=headers) as response:
            texts.append(b"".join([line async for line in response.content if b"text" in line]))
    assert len(tap.samplings) == 3
    assert len(first["choices"]) == 2
    assert texts[0]
    said = [
        "".join(
            part.partition('"text":"')[2].partition('"')[0] for part in text.decode().split("data:")
        )
        for text in texts
    ]
    assert said[0] == said[1]


async def test_a_request_that_failed_is_sampled_again_with_its_own_seed(
    scene: LiveService,
) -> None:
    """Trap 6: a client that left, or an engine that failed, before there was an answer."""
    tap, episode = EngineTap(scene), await opened(scene)
    held = scene.engine.block("sample")
    leaving = asyncio.create_task(episode.post("/v1/chat/completions", HELLO))
    await held.inside()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await until(
        lambda: scene.rows("SELECT state FROM requests WHERE kind = 'gateway'")
        == [("failed_user",)]
    )
    held.release()
    [(drawn,)] = scene.rows("SELECT drawn FROM requests WHERE kind = 'gateway'")
    await episode.whole("/v1/chat/completions", HELLO, x_stainless_retry_count="1")
    [sampling] = tap.samplings
    assert f'"seed": {sampling.params.seed}' in drawn
    assert scene.rows("SELECT state FROM requests WHERE kind = 'gateway'") == [("done",)]
    scene.engine.fail_next("sample", ServerError("The device is lost."))
    other = {"messages": [user("Hi.")], "max_tokens": 6}
    assert (await episode.post("/v1/chat/completions", other))[0] == 500
    await episode.whole("/v1/chat/completions", other, x_stainless_retry_count="1")
    assert len((await episode.view())["nodes"]) == 2


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "One and two", "prompt_logprobs": 2}),
        ("/v1/completions", {"prompt": "One and two", "echo": True, "logprobs": 2, "n": 2}),
        ("/v1/chat/completions", {"messages": [user("Hello.")], "prompt_logprobs": 0}),
        (
            "/inference/v1/generate",
            {"token_ids": [5, 6, 7], "sampling_params": {"prompt_logprobs": 1, "max_tokens": 4}},
        ),
    ],
)
async def test_a_repeated_request_has_the_log_probabilities_of_its_prompt(
    tmp_path: Path, path: str, asked: dict[str, Any]
) -> None:
    if "sampling_params" not in asked:
        asked = {**asked, "max_tokens": 4}
    async with serving(tmp_path, exact=False) as scene:
        episode = await opened(scene)
        first = await episode.whole(path, asked, idempotency_key="k")
    async with serving(tmp_path, exact=False) as scene:
        again = await Episode(scene, episode.opened).whole(path, asked, idempotency_key="k")
        assert scene.engine.calls["sample"] == 0
    told = json.dumps(first)
    assert '"prompt_logprobs"' in told or '"token_logprobs": [null' in told
    assert (again["choices"], again.get("prompt_logprobs")) == (
        first["choices"],
        first.get("prompt_logprobs"),
    )


async def test_what_a_program_counts_or_gets_wrong_is_not_kept(scene: LiveService) -> None:
    """However many different bodies come: nothing of them is needed again."""
    episode = await opened(scene)
    for number in range(3):
        messages = [user(f"Hello {number}.")]
        await episode.whole("/tokenize", {"messages": messages})
        assert (await episode.post("/v1/messages", {"messages": messages}))[0] == 400
    await episode.chat([user("Hello.")])
    capture = await scene.gateway.capture_of(scene.gateway.sessions.find(episode.id, "local"))
    assert len(capture._num_rows) == 1  # pyright: ignore[reportPrivateUsage] - nothing else shows it


async def test_calls_that_failed_count_among_those_of_a_session(tmp_path: Path) -> None:
    limits = Limits(gateway_calls=2)
    async with serving(tmp_path, Options(limits=Allowances(default=limits))) as scene:
        episode = await opened(scene)
        for text in ("One.", "Two."):
            scene.engine.fail_next("sample", ServerError("The device is lost."))
            body = {"messages": [user(text)], "max_tokens": 6}
            assert (await episode.post("/v1/chat/completions", body))[0] == 500
        status, refusal = await episode.post("/v1/chat/completions", HELLO)
        assert (status, "2 are the limit" in refusal["error"]["message"]) == (400, True)


async def test_the_same_request_twice_at_once_is_two_calls(scene: LiveService) -> None:
    """Without a key or a retry's count: two rollouts of one thought, say."""
    tap, episode = EngineTap(scene), await opened(scene)
    held = scene.engine.block("sample")
    path = "/v1/chat/completions"
    both = [asyncio.create_task(episode.whole(path, SIX)) for _ in range(2)]
    await held.inside()
    held.release()
    await asyncio.gather(*both)
    assert len(tap.samplings) == len((await episode.view())["nodes"]) == 2


async def test_a_retry_gets_the_answer_of_a_request_whose_row_is_not_written_yet(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trap 6: a client gives a request up sooner than a slow disk."""
    tap, episode = EngineTap(scene), await opened(scene)
    accept, disk = scene.service.journal.accept, asyncio.Event()
    waiting = asyncio.Event()

    async def slow(entry: Entry) -> str:
        waiting.set()
        await disk.wait()
        return await accept(entry)

    monkeypatch.setattr(scene.service.journal, "accept", slow)
    capture = await scene.gateway.capture_of(scene.gateway.sessions.find(episode.id, "local"))
    seen = list[str]()
    key_of = capture._key_of  # pyright: ignore[reportPrivateUsage] - when the retry has come

    def noted(digest: str, headers: Mapping[str, str]) -> str:
        seen.append(key_of(digest, headers))
        return seen[-1]

    monkeypatch.setattr(capture, "_key_of", noted)
    path = "/v1/chat/completions"
    first = asyncio.create_task(episode.whole(path, SIX))
    await waiting.wait()
    retry = asyncio.create_task(episode.whole(path, SIX, x_stainless_retry_count="1"))
    await until(lambda: len(seen) == 2)
    disk.set()
    assert (await first)["choices"] == (await retry)["choices"]
    assert len(tap.samplings) == len((await episode.view())["nodes"]) == 1


async def test_prompts_of_a_repeated_request_are_those_that_were_sampled_from(
    tmp_path: Path,
) -> None:
    """Also one that begins with what was sampled for another of the same request."""
    scored = {"max_tokens": 3, "ignore_eos": True, "echo": True, "logprobs": 2}
    async with serving(tmp_path) as scene:
        alone = await opened(scene, sampling={"seed": 5})
        asked = {**scored, "prompt": "One"}
        said = (await alone.whole("/v1/completions", asked))["choices"][0]["text"]
        episode = await opened(scene, sampling={"seed": 5})
        asked = {**scored, "prompt": ["One", f"{said} and two"], "n": 2}
        first = await episode.whole("/v1/completions", asked, idempotency_key="k")
        assert first["choices"][0]["text"] == said
        again = await episode.whole("/v1/completions", asked, idempotency_key="k")
        assert again["choices"] == first["choices"]


async def test_what_was_asked_has_no_seed_of_the_sessions_own(scene: LiveService) -> None:
    """A stream with its prompt's log-probabilities, which is written in one piece."""
    episode = await opened(scene, sampling={"seed": 5})
    await episode.streamed("/v1/completions", prompt="One", max_tokens=2, echo=True, logprobs=1)
    assert [node["asked"] for node in (await episode.view())["nodes"]] == [{"seed": None}]


async def test_two_requests_of_one_key_at_once_are_one_call(scene: LiveService) -> None:
    tap, episode = EngineTap(scene), await opened(scene)
    held = scene.engine.block("sample")
    path, headers = "/v1/chat/completions", {"idempotency_key": "k"}
    first = asyncio.create_task(episode.whole(path, HELLO, **headers))
    await held.inside()
    second = asyncio.create_task(episode.whole(path, HELLO, **headers))
    held.release()
    assert (await first)["choices"] == (await second)["choices"]
    assert len(tap.samplings) == 1


async def test_a_stream_is_sent_while_it_is_sampled_and_is_a_node_before_its_end(
    scene: LiveService,
) -> None:
    """Trap 7: the first piece is there while the next one is held back."""
    episode = await opened(scene)
    scene.engine.latency_s["piece"] = 0.005
    url = f"{scene.url}{episode.path}/v1/completions"
    asked = {"prompt": "One", "max_tokens": 40, "ignore_eos": True, "stream": True}
    async with scene.http.post(url, json=asked) as response:
        assert await response.content.readline()
        assert scene.engine.under_way["stream"] == 1
        assert (await episode.view())["nodes"] == []
        async for line in response.content:
            if b'"finish_reason":"length"' in line:
                assert len((await episode.view())["nodes"]) == 1
    [node] = (await episode.view())["nodes"]
    assert node["sampled_tokens"] == 40


async def test_a_stream_that_its_client_leaves_is_no_node(scene: LiveService) -> None:
    episode = await opened(scene)
    scene.engine.latency_s["piece"] = 0.01
    url = f"{scene.url}{episode.path}/v1/completions"
    asked = {"prompt": "One", "max_tokens": 900, "ignore_eos": True, "stream": True}
    async with scene.http.post(url, json=asked) as response:
        assert await response.content.readline()
        response.close()
    await until(lambda: scene.engine.under_way["stream"] == 0)
    assert (await episode.view())["nodes"] == []


async def test_truncating_sampling_is_neutral_and_what_was_asked_is_recorded(
    scene: LiveService,
) -> None:
    """Trap 8. A seed of the program's is not used either: all rollouts of a group would be one."""
    tap = EngineTap(scene)
    episode = await opened(scene, sampling={"temperature": 0.8, "max_tokens": 5})
    asked = {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7}
    mode = {"logprobs_mode": "processed_logprobs"}
    await episode.chat([user("Hello.")], **asked, **mode, max_tokens=9)
    [sampling] = tap.samplings
    params = sampling.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.8, 1.0, -1, 0.0)
    assert (params.max_tokens, params.logprobs, params.seed != 7) == (5, "raw", True)
    [node] = (await episode.view())["nodes"]
    assert node["asked"] == {**asked, **mode, "max_tokens": 9}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": [user("Hello.")], "max_completion_tokens": 9}),
        ("/v1/chat/completions", {"messages": [user("Hello.")]}),
        ("/v1/responses", {"input": "Hello.", "max_output_tokens": 9}),
        ("/v1/messages", {"messages": [user("Hello.")], "max_tokens": 9}),
        ("/generate", {"text": "Hello.", "sampling_params": {"max_new_tokens": 9}}),
    ],
)
async def test_a_sessions_length_holds_whatever_a_program_calls_its_own(
    scene: LiveService, path: str, asked: dict[str, Any]
) -> None:
    tap = EngineTap(scene)
    episode = await opened(scene, sampling={"max_tokens": 5})
    await episode.whole(path, asked)
    assert [sampling.params.max_tokens for sampling in tap.samplings] == [5]


async def test_what_was_sampled_under_penalties_is_not_trained_on_unless_the_session_says_so(
    scene: LiveService,
) -> None:
    """Recorded, and context of what goes on from it."""
    for train_shaped in (False, True):
        tap, episode = EngineTap(scene), await opened(scene, train_shaped=train_shaped)
        messages = [user("Hello.")]
        choice = await episode.chat(messages, presence_penalty=0.5)
        await episode.chat([*messages, choice["message"], user("Go on.")])
        first, second = (await episode.view())["nodes"]
        assert (first["shaped_by"], second["shaped_by"]) == (["presence_penalty"], [])
        assert tap.samplings[0].params.presence_penalty == 0.5
        assert first["untrained"] == (None if train_shaped else "shaped")
        [sequence] = (await episode.sequences())["sequences"]
        shown = tap.samplings if train_shaped else tap.samplings[1:]
        assert [mask for mask in sequence["masks"] if mask >= 0] == [
            token for one in shown for token in one.tokens
        ]
        assert sequence["tokens"] == tap.samplings[1].prompt + tap.samplings[1].tokens


async def test_what_was_asked_is_recorded_of_a_streamed_request_that_scores_its_prompt(
    scene: LiveService,
) -> None:
    episode = await opened(scene)
    asked = {"prompt": "One", "max_tokens": 4, "temperature": 0.5, "prompt_logprobs": 1}
    await episode.streamed("/v1/completions", **asked)
    [node] = (await episode.view())["nodes"]
    assert node["asked"] == {"temperature": 0.5}


async def test_the_programs_own_session_header_separates_subagents_and_names_no_session(
    scene: LiveService,
) -> None:
    """Trap 9: two subagents that begin alike are none that threw away the other's answer."""
    tap, episode = EngineTap(scene), await opened(scene)
    for name in ("a", "b"):
        choice = await episode.whole("/v1/chat/completions", HELLO, x_session_id=name)
        message = choice["choices"][0]["message"]
        more = {**HELLO, "messages": [*HELLO["messages"], message, user("Go on.")]}
        await episode.whole("/v1/chat/completions", more, x_session_id=name)
    await episode.whole("/v1/chat/completions", HELLO, x_session_id="c")
    view = await episode.view()
    assert [node["harness_session"] for node in view["nodes"]] == ["a", "a", "b", "b", "c"]
    assert view["discarded"] == []
    assert len(view["branches"]) == 3
    assert trained(await episode.sequences()) == [
        (one.tokens, one.logprobs) for one in tap.samplings
    ]


async def test_a_subagent_goes_on_from_its_own_answer_where_another_got_the_same(
    tmp_path: Path,
) -> None:
    """Trap 9."""
    async with speaking(tmp_path, "4") as (scene, _):
        episode = await opened(scene)
        for name in ("a", "b"):
            await episode.whole("/v1/chat/completions", HELLO, x_session_id=name)
        said = [*HELLO["messages"], {"role": "assistant", "content": "4"}, user("Go on.")]
        await episode.whole("/v1/chat/completions", {"messages": said}, x_session_id="a")
        first, _, third = (await episode.view())["nodes"]
        assert (third["parent"], third["continues"]) == (first["id"], first["id"])


async def published(client: tinker.ServiceClient) -> tinker.TrainingClient:
    training = await trainer(client)
    await training.save_weights_and_get_sampling_client()
    return training


async def step(training: tinker.TrainingClient) -> None:
    """One version more, published."""
    passed, stepped = (
        training.forward_backward(DATA, "cross_entropy"),
        training.optim_step(STEP),
    )
    await passed
    await stepped
    await training.save_weights_and_get_sampling_client()


async def test_the_policy_may_change_in_mid_episode_and_each_token_has_its_version(
    scene: LiveService,
) -> None:
    """Trap 11, and what `pin_policy` is for."""
    async with closing(await scene.client(halteres_run=RUN)) as client:
        training = await published(client)
        episode = await opened(scene, run=RUN)
        pinned = await opened(scene, run=RUN, pin_policy=True)
        for one in (episode, pinned):
            messages = [user("Hello.")]
            choice = await one.chat(messages)
            if one is episode:
                await step(training)
            await one.chat([*messages, choice["message"], user("Go on.")])
        [sequence] = (await episode.sequences())["sequences"]
        versions = [
            version
            for version, mask in zip(sequence["versions"], sequence["masks"], strict=True)
            if mask >= 0
        ]
        first, second = (await episode.view())["nodes"]
        expected = [0] * first["sampled_tokens"] + [1] * second["sampled_tokens"]
        assert versions == expected
        assert all(version == -1 for version in sequence["versions"] if version not in (0, 1))
        nodes = (await pinned.view())["nodes"]
        assert [node["policy_version"] for node in nodes] == [[0, 0], [0, 0]]


async def test_a_repeated_request_needs_no_weights_that_are_gone(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer is in the journal, however many policies were published since."""
    monkeypatch.setattr("halteres.service.sampling.sessions.KEPT_VERSIONS", 1)
    async with closing(await scene.client(halteres_run=RUN)) as client:
        training = await published(client)
        episode = await opened(scene, run=RUN)
        first = await episode.whole("/v1/chat/completions", SIX)
        await step(training)
        again = await episode.whole("/v1/chat/completions", SIX, x_stainless_retry_count="1")
        assert again["choices"] == first["choices"]
        assert again["policy_version"] == [0, 0]


async def test_any_name_of_a_model_is_the_sessions_policy(scene: LiveService) -> None:
    """Trap 18: names with a slash, whatever stands before it; in a session of the base model, too,
    and of weights by name, below a run that has none.
    """
    async with closing(await scene.client(halteres_run=RUN)) as client:
        training = await published(client)
        await step(training)
        for opening, version in (
            ({"run": RUN}, 1),
            ({"model": RUN}, 1),
            ({"run": "eval", "model": "halteres/tiny"}, 0),
            ({}, 0),
        ):
            episode = await opened(scene, **opening)
            for name in ("openai/gpt-4o", "halteres/tiny", "halteres--tiny", RUN, "claude-x"):
                answer = await episode.whole("/v1/chat/completions", {**HELLO, "model": name})
                assert answer["model"] == name
            nodes = (await episode.view())["nodes"]
            assert [node["policy_version"] for node in nodes] == [[version, version]] * 5
            scored = {"prompt": "One", "echo": True, "logprobs": 0, "max_tokens": 0, "model": "x"}
            answer = await episode.whole("/v1/completions", scored)
            assert answer["policy_version"] == [version, version]
            status, models = await scene.get(f"{episode.path}/v1/models")
            assert (status, models["data"][0]["max_model_len"]) == (200, 2048)


async def test_an_overflow_is_told_in_the_words_that_clients_act_on_and_is_no_node(
    scene: LiveService,
) -> None:
    """Trap 16."""
    episode = await opened(scene)
    long = {"messages": [user("word " * 3000)], "max_tokens": 4}
    status, refusal = await episode.post("/v1/chat/completions", long)
    assert (status, refusal["error"]["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 2048 tokens" in refusal["error"]["message"]
    status, refusal = await episode.post("/v1/messages", long)
    assert (status, refusal["error"]["message"][:18]) == (400, "prompt is too long")
    ids = {"token_ids": [5] * 3000, "sampling_params": {"max_tokens": 4}}
    status, refusal = await episode.post("/inference/v1/generate", ids)
    assert (status, refusal["error"]["code"]) == (400, "context_length_exceeded")
    assert (await episode.view())["nodes"] == []


async def test_tools_work_on_a_template_without_them(tmp_path: Path) -> None:
    """Trap 17: told in words, called, answered, and all of it one sequence."""
    says = '<tool_call>\n{"name":"add","arguments":{"a":1}}\n</tool_call>'
    async with speaking(tmp_path, says, template=None) as (scene, speaker):
        episode = await opened(scene)
        tools = [{"type": "function", "function": {"name": "add"}}]
        messages = [user("Add.")]
        choice = await episode.chat(messages, tools=tools, max_tokens=64)
        assert choice["finish_reason"] == "tool_calls"
        call = choice["message"]["tool_calls"][0]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        await episode.chat([*messages, choice["message"], result], tools=tools, max_tokens=64)
        assert "<tool_response>\n3" in TOKENIZER.decode(
            speaker.prompts[1], skip_special_tokens=False
        )
        assert len((await episode.sequences())["sequences"]) == 1


async def test_sampling_parameters_beside_token_ids_are_refused_rather_than_passed_over(
    scene: LiveService,
) -> None:
    """Trap 22: vLLM's /generate would write 16 tokens where 4 were asked for."""
    episode = await opened(scene)
    nested = {"prompt_token_ids": [5, 6], "sampling_params": {"max_tokens": 4}}
    status, refusal = await episode.post("/generate", nested)
    assert (status, "sampling_params" in refusal["detail"]) == (400, True)
    plain = await episode.whole("/generate", {"prompt_token_ids": [5, 6], "max_tokens": 4})
    assert len(plain["token_ids"][0]) <= 4
    sglang = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}}
    assert len((await episode.whole("/generate", sglang))["output_ids"]) <= 3
    assert len((await episode.view())["nodes"]) == 2


async def test_a_session_holds_so_many_calls_and_bytes(tmp_path: Path) -> None:
    limits = Limits(gateway_calls=2)
    async with serving(tmp_path, Options(limits=Allowances(default=limits))) as scene:
        episode = await opened(scene)
        for _ in range(2):
            await episode.chat([user("Hello.")])
        status, refusal = await episode.post("/v1/chat/completions", HELLO)
        assert (status, "2 are the limit" in refusal["error"]["message"]) == (400, True)
        again = {"messages": [user("Hello.")], "max_tokens": 8}
        await episode.whole("/v1/chat/completions", again, x_stainless_retry_count="1")
    limits = Limits(gateway_bytes=100)
    async with serving(tmp_path / "other", Options(limits=Allowances(default=limits))) as scene:
        episode = await opened(scene)
        await episode.chat([user("Hello.")])
        status, refusal = await episode.post("/v1/chat/completions", HELLO)
        assert (status, "100 B are the limit" in refusal["error"]["message"]) == (400, True)


async def test_a_restart_knows_repeated_requests_again(tmp_path: Path) -> None:
    async with serving(tmp_path, exact=False) as scene:
        episode = await opened(scene)
        first = await episode.whole("/v1/chat/completions", SIX)
    async with serving(tmp_path, exact=False) as scene:
        again = Episode(scene, episode.opened)
        repeated = await again.whole("/v1/chat/completions", SIX, x_stainless_retry_count="2")
        assert repeated["choices"] == first["choices"]
        assert scene.engine.calls["sample"] == 0
        new = await again.whole("/v1/chat/completions", SIX)
        assert new["choices"] != first["choices"]


@pytest.mark.parametrize("thinks", [False, True])
async def test_a_loop_over_responses_is_one_sequence(tmp_path: Path, thinks: bool) -> None:
    """Calls come back as items, thinking apart from the text: where the session keeps reasoning it
    stands in the tokens as it was sampled.
    """
    says = THINKS
    if not thinks:
        says = f"Let me see.\n{CALL}"
    async with speaking(tmp_path, says, template=None) as (scene, speaker):
        speaker.says_to_results = SAYS_TO_RESULTS
        tap, episode = EngineTap(scene), await opened(scene, keep_reasoning=thinks)
        tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
        asked: dict[str, Any] = {"input": [user("17 + 25?")], "tools": [tool]}
        answer = await episode.whole("/v1/responses", asked)
        call = answer["output"][-1]
        given = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
        asked["input"] += [*answer["output"], given]
        told = await episode.streamed("/v1/responses", **asked)
        last = told[-1]["response"]["output"][-1]
        assert last["content"][0]["text"] == SAYS_TO_RESULTS
        await episode.reward(reward=1.0)
        sequences = await episode.sequences()
        assert len(sequences["sequences"]) == 1
        assert [tokens for tokens, _ in trained(sequences)] == [one.tokens for one in tap.samplings]
        nodes = (await episode.view())["nodes"]
        assert {node["dialect"] for node in nodes} == {"v1/responses"}


async def test_calls_at_once_have_seeds_of_their_own_that_follow_from_the_sessions(
    scene: LiveService,
) -> None:
    tap = EngineTap(scene)
    for _ in range(2):
        episode = await opened(scene, sampling={"seed": 7})
        await asyncio.gather(*(episode.chat([user("Go.")]) for _ in range(8)))
    seeds = [one.params.seed for one in tap.samplings]
    assert len(set(seeds[:8])) == 8
    assert sorted(seeds[8:]) == sorted(seeds[:8])
