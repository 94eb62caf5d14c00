"""Run-addressed inference: what environments call."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import tinker
from contract.requirements import proves

from halteres.clients.inference import InferenceClient, Sampling
from halteres.errors import ServerError
from halteres.models import TINY
from halteres.service.sampling.sessions import KEPT_VERSIONS
from halteres.tokenizer import load_tokenizer

from .live_service import BASE, DATA, STEP, LiveService, closing, trainer

RUN = "r17"
TOKENIZER = load_tokenizer(str(BASE.folder))


@pytest.fixture
async def training(scene: LiveService) -> tinker.TrainingClient:
    """A run whose trainer has published version 0."""
    async with closing(await scene.client(halteres_run=RUN)) as client:
        training = await trainer(client)
        await training.save_weights_and_get_sampling_client()
        yield training


@proves("inference:generate")
async def test_generate_answers_one_object_or_a_list_with_logprobs_and_versions(
    scene: LiveService, training: tinker.TrainingClient
) -> None:
    prompt = TOKENIZER.encode("What is 17 + 25?")
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 6, "seed": 1, "ignore_eos": True},
    }
    body["return_logprob"] = True
    status, one = await scene.ask(f"/runs/{RUN}/generate", **body)
    assert status == 200
    meta = one["meta_info"]
    assert one["text"] == TOKENIZER.decode(one["output_ids"])
    assert [row[1] for row in meta["output_token_logprobs"]] == one["output_ids"]
    assert all(row[0] < 0 and row[2] is None for row in meta["output_token_logprobs"])
    assert meta["finish_reason"] == {"type": "length"}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(prompt), 6)
    assert (meta["policy_version"], meta["weight_version"]) == ([0, 0], "0")
    body["sampling_params"]["n"] = 3
    _, several = await scene.ask(f"/runs/{RUN}/generate", **body)
    assert len(several) == 3
    assert several[0]["output_ids"] == one["output_ids"]
    _, text = await scene.ask(
        f"/runs/{RUN}/generate", text="What is", sampling_params={"max_new_tokens": 1}
    )
    assert text["meta_info"]["prompt_tokens"] == len(TOKENIZER.encode("What is"))
    assert "output_token_logprobs" not in text["meta_info"]


async def test_answers_come_from_the_newest_policy_and_say_its_version(
    scene: LiveService, training: tinker.TrainingClient
) -> None:
    async def version(**body: str) -> list[int]:
        _, answer = await scene.ask(
            f"/runs/{RUN}/v1/completions", prompt="1 + 1", max_tokens=2, **body
        )
        return answer["policy_version"]

    named = (await training.save_weights_for_sampler("zero")).path
    for step in (1, 2):
        await training.forward_backward(DATA, "cross_entropy")
        await training.optim_step(STEP)
        assert await version() == [step - 1, step - 1]
        await training.save_weights_for_sampler(f"step-{step}")
        assert await version() == [step, step]
    assert await version(model=named) == [0, 0]
    assert await version(model="any-other-name") == [2, 2]
    assert await version(model=TINY) == [0, 0]
    _, info = await scene.get("/halteres/v1/info")
    assert info["policies"] == {RUN: 2}
    assert (info["model"]["name"], info["engine"]["restarts"]) == (TINY, 0)


async def test_a_deterministic_run_samples_by_the_version_that_it_names(
    scene: LiveService, training: tinker.TrainingClient
) -> None:
    """Also while newer ones are published, and unchanged ones again; what is not there yet is worth
    waiting for.
    """
    body = {
        "input_ids": [5, 6],
        "sampling_params": {"max_new_tokens": 8, "seed": 1, "ignore_eos": True},
    }

    async def sampled(version: int) -> Any:
        status, answer = await scene.ask(f"/runs/{RUN}/generate", **body, policy_version=version)
        return (
            (status, *answer["meta_info"]["policy_version"], answer["output_ids"])
            if status == 200
            else status
        )

    first = await sampled(0)
    assert first[:3] == (200, 0, 0)
    assert await sampled(1) == 503
    for _ in range(2):
        await training.forward_backward(DATA, "cross_entropy")
        await training.optim_step(STEP)
        await training.save_weights_and_get_sampling_client()
        await training.save_weights_and_get_sampling_client()
    assert await sampled(0) == first
    assert [(await sampled(version))[1] for version in (1, 2)] == [1, 2]
    for _ in range(KEPT_VERSIONS):
        await training.forward_backward(DATA, "cross_entropy")
        await training.optim_step(STEP)
        await training.save_weights_and_get_sampling_client()
    assert (await sampled(2), (await sampled(3))[1]) == (500, 3)


@proves("inference:openai")
async def test_completions_take_texts_and_tokens_one_or_many(
    scene: LiveService, training: tinker.TrainingClient
) -> None:
    tokens = TOKENIZER.encode("1 + 1 =")
    for given, count in (
        ("1 + 1 =", 1),
        (tokens, 1),
        (["1 + 1 =", "2 + 2 ="], 2),
        ([tokens, tokens[:2]], 2),
    ):
        _, answer = await scene.ask(
            f"/runs/{RUN}/v1/completions", prompt=given, n=2, max_tokens=3, seed=4, logprobs=0
        )
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * count))
        for choice in answer["choices"]:
            assert choice["text"] == TOKENIZER.decode(choice["token_ids"])
            assert choice["finish_reason"] in ("stop", "length")
            assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
            assert "".join(choice["logprobs"]["tokens"]) == TOKENIZER.decode(
                choice["token_ids"], skip_special_tokens=False
            )
    assert answer["usage"]["prompt_tokens"] == len(tokens) + 2
    assert answer["object"] == "text_completion"


@proves("inference:openai")
async def test_chat_renders_the_template_and_answers_as_the_assistant(
    scene: LiveService, training: tinker.TrainingClient
) -> None:
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 1?"}],
        }
    ]
    _, answer = await scene.ask(
        f"/runs/{RUN}/v1/chat/completions", messages=messages, max_tokens=5, n=2, logprobs=True
    )
    rendered = TOKENIZER.apply_chat_template([{"role": "user", "content": "What is 1 + 1?"}])
    assert answer["prompt_token_ids"] == rendered
    assert answer["object"] == "chat.completion"
    for choice in answer["choices"]:
        assert choice["message"] == {
            "role": "assistant",
            "content": TOKENIZER.decode(choice["token_ids"]),
        }
        assert [one["logprob"] < 0 for one in choice["logprobs"]["content"]] == [True] * len(
            choice["token_ids"]
        )
    assert answer["policy_version"] == [0, 0]


async def test_a_stop_text_ends_the_answer_and_is_cut_off(
    scene: LiveService, training: tinker.TrainingClient
) -> None:
    body = {"prompt": "1 + 1 =", "max_tokens": 40, "seed": 1, "ignore_eos": True}
    _, answer = await scene.ask(f"/runs/{RUN}/v1/completions", **body)
    whole = answer["choices"][0]
    assert whole["finish_reason"] == "length"
    stop = whole["text"][len(whole["text"]) // 2]
    _, answer = await scene.ask(
        f"/runs/{RUN}/v1/completions", **body, stop=["never this text", stop]
    )
    cut = answer["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert len(cut["token_ids"]) < len(whole["token_ids"])


async def test_a_run_without_weights_answers_503_and_is_not_healthy(scene: LiveService) -> None:
    for path, body in (("generate", {"text": "x"}), ("v1/completions", {"prompt": "x"})):
        status, refusal = await scene.ask(f"/runs/none/{path}", **body)
        assert (status, "or there is no run of this name" in sentence(refusal)) == (503, True)
    assert (await scene.get("/runs/none/health"))[0] == 503


async def test_health_and_models_of_a_run(
    scene: LiveService, training: tinker.TrainingClient
) -> None:
    assert (await scene.get(f"/runs/{RUN}/health"))[0] == 200
    _, models = await scene.get(f"/runs/{RUN}/v1/models")
    assert [model["id"] for model in models["data"]] == [RUN, TINY, "halteres--tiny"]


def sentence(refusal: dict[str, Any]) -> str:
    """What an error says, in the shape of its route."""
    return refusal["error"]["message"] if "error" in refusal else refusal["detail"]


HI = [{"role": "user", "content": "Hi"}]

BAD_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("generate", {}),
    ("generate", {"text": "x", "input_ids": [5]}),
    ("generate", {"text": []}),
    ("generate", {"input_ids": []}),
    ("generate", {"input_ids": [[]]}),
    ("generate", {"input_ids": [700]}),
    ("generate", {"input_ids": [2**40]}),
    ("generate", {"input_ids": [[5], 5]}),
    ("generate", {"prompt": "x", "prompt_token_ids": [5]}),
    ("generate", {"prompt": {}}),
    ("generate", {"prompt": "x", "logprobs": 10**6}),
    ("generate", {"prompt": "x", "best_of": 3}),
    ("generate", {"text": "x", "image_data": ["data:"]}),
    ("generate", {"text": "x", "return_routed_experts": True}),
    ("generate", {"text": "x", "sampling_params": [{}]}),
    ("generate", {"text": "x", "sampling_params": {"n": 0}}),
    ("generate", {"text": "x", "sampling_params": {"n": 5000}}),
    ("generate", {"text": "x", "sampling_params": {"seed": 2**70}}),
    ("generate", {"text": "x", "sampling_params": {"temperature": -1}}),
    ("generate", {"text": "x", "sampling_params": {"max_new_tokens": 0}}),
    ("generate", {"text": "x", "sampling_params": {"max_new_tokens": 2**70}}),
    ("generate", {"text": "x", "sampling_params": {"json_schema": "{}"}}),
    ("generate", {"text": "x", "stream": True, "sampling_params": {"top_p": 2}}),
    ("generate", {"text": "x", "model": "tinker://a/weights/b"}),
    ("generate", {"text": "x", "model": "tinker://../../x"}),
    ("generate", {"text": "x", "model": "other;tinker://a/weights/b"}),
    ("v1/completions", {}),
    ("v1/completions", {"prompt": []}),
    ("v1/completions", {"prompt": ["x", 5]}),
    ("v1/completions", {"prompt": ["x"] * 1025}),
    ("v1/completions", {"prompt": ["x"] * 1000, "n": 1000}),
    ("v1/completions", {"prompt": "x", "n": 3, "best_of": 2}),
    ("v1/completions", {"prompt": "x", "logprobs": -1}),
    ("v1/completions", {"prompt": "x", "logprobs": 1000}),
    ("v1/completions", {"prompt": "x", "suffix": "y"}),
    ("v1/completions", {"prompt": "x", "presence_penalty": 2.1}),
    ("v1/completions", {"prompt": "x", "stop": ["y"] * 1000}),
    ("v1/completions", {"prompt": "x", "stream": True, "n": 0}),
    ("v1/chat/completions", {"messages": []}),
    ("v1/chat/completions", {"messages": [{"content": "no role"}]}),
    ("v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("v1/chat/completions", {"messages": "hello"}),
    ("v1/chat/completions", {"messages": HI, "max_tokens": 0}),
    ("v1/chat/completions", {"messages": HI, "top_logprobs": 3}),
    ("v1/chat/completions", {"messages": HI, "tool_choice": "required"}),
    (
        "v1/chat/completions",
        {"messages": HI, "tools": [{"type": "function", "function": {"description": "f"}}]},
    ),
    ("v1/chat/completions", {"messages": HI, "reasoning_effort": "high"}),
    ("v1/chat/completions", {"messages": HI, "response_format": {"type": "json_object"}}),
    ("v1/chat/completions", {"messages": HI, "modalities": ["audio"]}),
    ("v1/chat/completions", {"messages": HI, "functions": [{"name": "f"}]}),
    (
        "v1/chat/completions",
        {"messages": HI, "continue_final_message": True, "add_generation_prompt": True},
    ),
    ("v1/chat/completions", {"messages": HI, "chat_template_kwargs": {"messages": []}}),
    ("v1/responses", {}),
    ("v1/responses", {"input": 5}),
    ("v1/responses", {"input": "x", "max_output_tokens": 0}),
    ("v1/messages", {"messages": HI}),
    ("v1/messages", {"messages": [], "max_tokens": 3}),
    (
        "v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 3},
    ),
    (
        "v1/messages",
        {"messages": HI, "max_tokens": 3, "thinking": {"type": "enabled", "budget_tokens": 9}},
    ),
    (
        "v1/messages",
        {"messages": HI, "max_tokens": 3, "tools": [{"type": "bash_20250124", "name": "bash"}]},
    ),
    ("v1/messages", {"messages": HI, "max_tokens": 3, "system": [{"type": "image"}]}),
    ("inference/v1/generate", {}),
    ("inference/v1/generate", {"token_ids": []}),
    ("inference/v1/generate", {"token_ids": [700]}),
    ("inference/v1/generate", {"token_ids": [5], "sampling_params": {"min_p": 1.1}}),
    ("inference/v1/generate", {"token_ids": [5], "sampling_params": {"logprobs_mode": "raw"}}),
    ("inference/v1/generate", {"token_ids": [5], "content_parts": [{"type": "image"}]}),
    ("inference/v1/generate", {"token_ids": [5], "features": {"mm_hashes": {}}}),
    ("tokenize", {}),
    ("detokenize", {"tokens": [-1]}),
    ("detokenize", {"tokens": [2**40]}),
    ("detokenize", {"tokens": [5, 2**31 - 1]}),
]


async def test_what_cannot_be_used_is_answered_with_a_sentence_in_the_shape_of_its_route(
    scene: LiveService,
) -> None:
    for path, body in BAD_BODIES:
        status, answer = await scene.ask(f"/{path}", **body)
        assert 400 <= status < 500, (path, body, answer)
        assert len(sentence(answer)) > 15, (path, body)
        if path.startswith(("v1", "inference")):
            assert answer["error"]["type"] in ("invalid_request_error", "not_found_error")


GARBAGE = (
    b"",
    b"[]",
    b"{",
    b'{"prompt":',
    b"\xff\xfe",
    b"5",
    b'"x"',
    b"[" * 100000,
    b'{"messages":' * 50000,
)


async def test_garbage_is_a_400_on_every_route(scene: LiveService) -> None:
    for path in (
        "generate",
        "inference/v1/generate",
        "v1/completions",
        "v1/chat/completions",
        "v1/responses",
        "v1/messages",
        "tokenize",
        "detokenize",
    ):
        for body in GARBAGE:
            async with scene.http.post(f"{scene.url}/{path}", data=body) as response:
                assert response.status == 400, (path, body[:20], await response.text())


async def test_the_environments_own_client_is_served(
    scene: LiveService, training: tinker.TrainingClient
) -> None:
    async with InferenceClient(f"{scene.url}/runs/{RUN}/v1") as client:
        sampling = Sampling(max_new_tokens=12, seed=5, stop=("7",))
        written = await client.generate(TOKENIZER.encode("1 + 1 ="), sampling, n=3)
        assert [len(one.tokens) == len(one.logprobs) for one in written] == [True] * 3
        assert [one.versions for one in written] == [(0, 0)] * 3
        said = await client.chat(HI, sampling, n=2)
        assert [one.text for one in said] == [
            TOKENIZER.decode(one.tokens).split("7")[0] for one in said
        ]


async def test_requests_of_environments_are_rows_with_their_drawn_seeds(
    scene: LiveService, training: tinker.TrainingClient
) -> None:
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}}
    await asyncio.gather(*(scene.ask(f"/runs/{RUN}/generate", **body) for _ in range(4)))
    rows = scene.rows("SELECT subject, drawn FROM requests WHERE kind = 'generate'")
    assert [subject for subject, _ in rows] == [RUN] * 4
    assert len({drawn for _, drawn in rows}) == 4


async def test_a_request_that_failed_is_settled_with_its_failure(
    scene: LiveService, training: tinker.TrainingClient
) -> None:
    scene.engine.fail_next("sample", ServerError("The device is lost."))
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4}}
    assert (await scene.ask(f"/runs/{RUN}/generate", **body))[0] == 500
    assert (await scene.ask(f"/runs/{RUN}/generate", **body))[0] == 200
    await scene.session()  # its row is committed after those before it
    rows = scene.rows(
        "SELECT state, outcome FROM requests WHERE kind = 'generate' ORDER BY accepted_at"
    )
    assert [state for state, _ in rows] == ["failed_server", "done"]
    assert b"device is lost" in rows[0][1]
