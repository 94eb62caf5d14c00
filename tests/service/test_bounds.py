"""What one request may take of the event loop and the memory that everybody shares (we chose
it).
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import zstandard
from deadlines import until

from halteres import errors
from halteres.errors import InvalidData, nearest
from halteres.models import TINY
from halteres.service.inference import requests
from halteres.service.inference.openai import CompletionAnswer
from halteres.service.limits import LONG, MOST_THREADS, Threads
from halteres.service.sampling.samples import params_of
from halteres.service.service import Options
from halteres.service.wire import bodies, results
from halteres.tokenizer import Tokenizer

from .inference_fixtures import TOKENIZER
from .live_service import LiveService, serving

WAIT_S = 20

HI = [{"role": "user", "content": "Hi"}]
LONG_PROMPT = [5 + at % 50 for at in range(300)]
SCORED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": LONG_PROMPT, "prompt_logprobs": 5, "n": 4096, "max_tokens": 1}),
    (
        "/v1/completions",
        {"prompt": LONG_PROMPT, "echo": True, "logprobs": 5, "n": 4096, "max_tokens": 0},
    ),
    (
        "/generate",
        {"prompt_token_ids": LONG_PROMPT, "prompt_logprobs": 5, "n": 4096, "max_tokens": 1},
    ),
    (
        "/generate",
        {
            "input_ids": LONG_PROMPT,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 5,
            "sampling_params": {"n": 4096, "max_new_tokens": 1},
        },
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi " * 200}], "prompt_logprobs": 9, "n": 4096},
    ),
]


@pytest.mark.parametrize(("path", "body"), SCORED)
async def test_log_probabilities_of_a_prompt_are_bounded_with_the_number_of_sequences(
    scene: LiveService, path: str, body: dict[str, Any]
) -> None:
    status, answer = await scene.ask(path, **body)
    assert status == 400, answer
    assert "log-probabilities of its prompts" in str(answer)
    assert scene.engine.calls["sample"] == 0


async def test_positions_of_a_prompt_that_are_not_told_do_not_count(scene: LiveService) -> None:
    body = {"input_ids": LONG_PROMPT, "return_logprob": True, "top_logprobs_num": 5}
    params = {"n": 400, "max_new_tokens": 1}
    for start, status in ((0, 400), (290, 200), (1000, 200)):
        assert (
            await scene.ask("/generate", **body, sampling_params=params, logprob_start_len=start)
        )[0] == status


LIKELY: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "1", "logprobs": 256, "n": 512}),
    ("/v1/completions", {"prompt": ["1"] * 64, "logprobs": 256, "n": 8}),
    ("/v1/completions", {"prompt": "1", "logprobs": 256, "n": 1, "best_of": 512}),
    ("/v1/chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 20, "n": 64}),
    (
        "/generate",
        {
            "text": "1",
            "return_logprob": True,
            "top_logprobs_num": 256,
            "sampling_params": {"n": 64},
        },
    ),
    ("/generate", {"prompt": "1", "logprobs": 256, "n": 512}),
]


@pytest.mark.parametrize(("path", "body"), LIKELY)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_small_request_cannot_ask_for_very_many_likely_tokens(
    scene: LiveService, path: str, body: dict[str, Any], stream: bool
) -> None:
    """Sequences, times tokens of each, times likely ones at each: 80 bytes asked for two
    gigabytes.
    """
    if stream and "best_of" in body:
        body = {name: value for name, value in body.items() if name != "best_of"} | {"n": 512}
    status, answer = await scene.ask(path, **body, stream=stream)
    assert (status, "likely tokens" in str(answer)) == (400, True)
    assert scene.engine.calls["sample"] + scene.engine.calls["stream"] == 0


async def test_likely_tokens_are_counted_by_the_tokens_that_may_come(scene: LiveService) -> None:
    body = {"messages": HI, "logprobs": True, "top_logprobs": 20}
    assert (await scene.ask("/v1/chat/completions", **body))[0] == 200
    assert (await scene.ask("/v1/chat/completions", **body, n=64, max_tokens=16))[0] == 200
    scored = {"prompt": "1", "prompt_logprobs": 5, "logprobs": 256, "n": 512, "max_tokens": 0}
    assert (await scene.ask("/v1/completions", **scored))[0] == 200


async def test_a_sample_that_is_too_large_for_json_says_so(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client reads no protobuf."""
    monkeypatch.setattr(results, "MAX_JSON_SAMPLE", 200)
    made = {"session_id": await scene.session(), "sampling_session_seq_id": 0, "base_model": TINY}
    sampler = (await scene.post("create_sampling_session", made))[1]["sampling_session_id"]
    for seq, top, kind in ((1, 0, "sample"), (2, 20, None)):
        body = {
            "sampling_session_id": sampler,
            "seq_id": seq,
            "prompt": {"chunks": [{"tokens": [5]}]},
            "sampling_params": {"max_tokens": 4},
            "topk_sample_logprobs": top,
        }
        _, promised = await scene.post("asample", body)
        poll = {"request_id": promised["request_id"]}
        status, answer = await scene.post("retrieve_future", poll, Accept="application/json")
        assert (status, answer.get("type"), answer.get("category")) == (
            200,
            kind,
            None if kind else "user",
        )


async def test_a_stream_tells_fewer_log_probabilities_of_its_prompt_than_an_answer(
    scene: LiveService,
) -> None:
    body = {"prompt": LONG_PROMPT, "prompt_logprobs": 5, "n": 64, "max_tokens": 1}
    assert (await scene.ask("/v1/completions", **body))[0] == 200
    status, answer = await scene.ask("/v1/completions", **body, stream=True)
    assert (status, "no stream" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize(("path", "body"), SCORED[:4])
async def test_the_prompt_part_of_an_answer_is_made_once_for_all_sequences(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    made = list[int]()
    shaped = TOKENIZER.token

    def token(self: Tokenizer, token_id: int) -> str:
        made.append(token_id)
        return shaped(token_id)

    monkeypatch.setattr(Tokenizer, "token", token)
    params = body.get("sampling_params")
    few = {**body, "n": 8}
    if params is not None:
        few = {**body, "sampling_params": {**params, "n": 8}, "return_text_in_logprobs": True}
    assert (await scene.ask(path, **few))[0] == 200
    assert len(made) < 8 * len(LONG_PROMPT)


async def test_a_large_answer_is_made_off_the_event_loop(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[threading.Thread]()

    choice = CompletionAnswer._choice  # pyright: ignore[reportPrivateUsage] - nothing else is made there

    def shaped(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return choice(*given)

    monkeypatch.setattr(CompletionAnswer, "_choice", shaped)
    body = {"prompt": LONG_PROMPT, "echo": True, "logprobs": 5, "n": 64, "max_tokens": 1}
    assert (await scene.ask("/v1/completions", **body))[0] == 200
    assert threading.main_thread() not in threads


SMALL: dict[str, dict[str, Any]] = {
    "create_session": {"tags": [], "user_metadata": {"a": "x" * 2**16}},
    "session_heartbeat": {"session_id": "x" * 2**16},
    "retrieve_future": {"request_id": "x" * 2**16},
    "create_sampling_session": {"session_id": "x" * 2**16, "sampling_session_seq_id": 0},
    "sessions/search": {"display_name": "x" * 2**16},
}


@pytest.mark.parametrize("path", SMALL)
async def test_a_body_without_datums_and_prompts_is_small(scene: LiveService, path: str) -> None:
    status, answer = await scene.post(path, SMALL[path])
    assert (status, "64.0 KiB are the limit" in str(answer)) == (413, True)


async def test_a_request_without_datums_stays_small_when_it_is_decompressed(
    scene: LiveService,
) -> None:
    """And its number is used up, so that the next one need not wait for it."""
    model = await scene.model()
    told = b'{"model_id": "%s", "seq_id": 1, "optimizer_params": {"a": "%s"}}' % (
        model.encode(),
        b"x" * 2**16,
    )
    headers = {"Content-Encoding": "zstd", "Content-Type": "application/json"}
    status, answer = await scene.post("optim_step", zstandard.compress(told), **headers)
    assert (status, "64 KiB are the limit" in str(answer)) == (400, True)
    _, promised = await scene.post(
        "optim_step", {"model_id": model, "seq_id": 2, "adam_params": {}}
    )
    async with asyncio.timeout(WAIT_S):
        assert "no gradient" in (await scene.redeem(promised["request_id"]))["error"], (
            "it had its turn"
        )


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/tokenize", "/api/v1/asample"])
async def test_a_long_body_is_read_off_the_event_loop(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A long name is cut before it is compared with the names that are known."""
    compared = list[str]()
    monkeypatch.setattr(
        errors.difflib, "get_close_matches", lambda name, *_, **__: compared.append(name) or []
    )
    readers = list[threading.Thread]()
    decode = bodies.msgspec.json.decode

    def decoded(body: bytes, **given: Any) -> Any:
        if len(body) > LONG:
            readers.append(threading.current_thread())
        return decode(body, **given)

    monkeypatch.setattr(bodies.msgspec.json, "decode", decoded)
    body: dict[str, Any] = {"model": "x" * 2**18, "prompt": "a"}
    if path.endswith("asample"):
        body = {"sampling_session_id": "x" * 2**18, "seq_id": 0, "prompt": {"chunks": []}}
    assert (await scene.ask(path, **body))[0] == 404
    assert readers
    assert threading.main_thread() not in readers
    assert all(len(name) <= 200 for name in compared)


async def test_a_compressed_body_is_unpacked_off_the_event_loop(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few bytes are sent: 8 KB of zstd may become 256 MiB."""
    threads = list[threading.Thread]()
    decompressor = zstandard.ZstdDecompressor

    def noted(**given: Any) -> zstandard.ZstdDecompressor:
        threads.append(threading.current_thread())
        return decompressor(**given)

    monkeypatch.setattr(bodies.zstandard, "ZstdDecompressor", noted)
    zeros = zstandard.compress(bytes(2**25))
    assert len(zeros) < LONG
    for kind, content_type in (("forward_backward", bodies.PROTOBUF), ("optim_step", bodies.JSON)):
        status, _ = await scene.post(
            kind, zeros, **{"Content-Encoding": "zstd", "Content-Type": content_type}
        )
        assert status == 400
    assert len(threads) >= 2
    assert threading.main_thread() not in threads


def test_the_nearest_of_very_many_names_is_looked_for_among_the_last() -> None:
    assert nearest("halteres/tinny", [TINY]) == TINY
    assert nearest("last", [*map(str, range(10_000)), "laste"]) == "laste"


async def test_a_text_longer_than_the_model_reads_is_refused_before_it_is_tokenised(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = list[str]()
    monkeypatch.setattr(Tokenizer, "encode", lambda _, text, **__: encoded.append(text) or [5])
    for path, body in (
        ("/v1/completions", {"prompt": "x" * 2**19}),
        ("/generate", {"text": "x" * 2**19}),
        ("/tokenize", {"prompt": "x" * 2**19}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 2**19}], "max_tokens": 1}),
    ):
        status, answer = await scene.ask(path, **body)
        assert (status, "characters" in str(answer)) == (400, True)
    assert not encoded


async def test_too_many_prompts_and_tokens_that_no_model_reads_are_refused_before_any_is_made(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = list[str]()
    monkeypatch.setattr(Tokenizer, "encode", lambda _, text, **__: encoded.append(text) or [5])
    for path, body, said in (
        ("/v1/completions", {"prompt": ["x"] * 1025}, "1025 prompts"),
        ("/generate", {"text": ["x"] * 1025}, "1025 prompts"),
        ("/v1/completions", {"prompt": []}, "empty"),
        ("/v1/completions", {"prompt": ["x", [5] * 2**18]}, "the prompt has 262144."),
        ("/generate", {"input_ids": [5] * 2**18}, "262144"),
    ):
        status, answer = await scene.ask(path, **body)
        assert (status, said in str(answer)) == (400, True), answer
    assert encoded == ["x"]


async def test_a_list_of_very_many_stops_is_refused(scene: LiveService) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "1", "stop": ["a"] * 1025}),
        ("/v1/completions", {"prompt": "1", "stop_token_ids": [5] * 1025}),
        ("/generate", {"text": "1", "sampling_params": {"stop_token_ids": [5] * 1025}}),
    ):
        assert (await scene.ask(path, **body))[0] == 400
    with pytest.raises(InvalidData, match="1025 texts and tokens"):
        params_of(bodies.Sampling(stop=[5] * 1025), 0)


async def test_a_chat_template_runs_off_the_event_loop(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the model's own code."""
    threads = list[threading.Thread]()
    render = requests.Tokenizer.render

    def rendered(*given: Any, **named: Any) -> str:
        threads.append(threading.current_thread())
        return render(*given, **named)

    monkeypatch.setattr(Tokenizer, "render", rendered)
    chat = [{"role": "user", "content": "Hi"}]
    assert (await scene.ask("/v1/chat/completions", messages=chat, max_tokens=1))[0] == 200
    assert (await scene.ask("/tokenize", messages=chat))[0] == 200
    assert threads
    assert threading.main_thread() not in threads


async def test_one_tenants_long_texts_keep_no_other_waiting() -> None:
    threads, held, begun = Threads(), threading.Event(), list[int]()

    def slow() -> None:
        begun.append(1)
        held.wait(WAIT_S)

    flood = [asyncio.create_task(threads.run("alice", LONG, slow)) for _ in range(50)]
    try:
        await until(lambda: len(begun) == MOST_THREADS)
        async with asyncio.timeout(WAIT_S):
            assert await threads.run("bob", LONG, lambda: "read") == "read"
        assert len(begun) == MOST_THREADS
    finally:
        held.set()
        await asyncio.gather(*flood)
        threads.close()


@pytest.mark.parametrize("cancellations", [1, 2])
async def test_a_thread_whose_client_has_gone_counts_until_it_has_ended(cancellations: int) -> None:
    threads, held, begun = Threads(), threading.Event(), list[int]()

    def slow() -> None:
        begun.append(1)
        held.wait(WAIT_S)

    gone = [asyncio.create_task(threads.run("alice", LONG, slow)) for _ in range(MOST_THREADS)]
    await until(lambda: len(begun) == MOST_THREADS)
    for _ in range(cancellations):
        for one in gone:
            one.cancel()
        await asyncio.wait(gone, timeout=0)
    later = asyncio.create_task(threads.run("alice", LONG, lambda: begun.append(2)))
    try:
        for _ in range(2):
            assert await threads.run("bob", LONG, lambda: "read") == "read"
        assert not later.done()
        assert 2 not in begun
    finally:
        held.set()
        await asyncio.gather(*gone, return_exceptions=True)
        await later
        threads.close()


async def test_headers_are_bounded_before_any_key_is_asked_for(scene: LiveService) -> None:
    port = int(scene.url.rpartition(":")[2])
    for size, status in ((2**15, b"200"), (2**17, b"400")):
        reading, writing = await asyncio.open_connection("127.0.0.1", port)
        lines = b"".join(b"a%d: b\r\n" % number for number in range(size // 10))
        writing.write(b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n" + lines + b"\r\n")
        async with asyncio.timeout(WAIT_S):
            assert (await reading.readline()).split()[1] == status
        writing.close()


@pytest.mark.parametrize(("journal_bytes", "kept"), [(1, 0), (2**30, 1)])
async def test_a_journal_that_has_grown_large_keeps_settled_requests_for_a_minute(
    tmp_path: Path, journal_bytes: int, kept: int
) -> None:
    async with serving(tmp_path, Options(journal_bytes=journal_bytes)) as scene:
        assert (await scene.ask("/generate", text="Hi"))[0] == 200
        await scene.service.journal.flush()
        for later_s, rows in ((30, 1), (90, kept)):
            await scene.service.reap(time.time() + later_s)
            assert len(scene.rows("SELECT id FROM requests")) == rows
