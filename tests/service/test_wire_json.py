"""JSON passes and JSON results, as SDKs up to 0.24 send and read them; their shapes are those of
recorded traffic.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import numpy as np
import pytest
import tinker
import zstandard
from contract.requirements import proves
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)

from halteres.models import TINY
from halteres.service.routes import training as training_routes

from .live_service import DATA, LiveService, datum, trainer
from .test_order import PROTO, pass_body, stepped

WAIT_S = 20
OLD = {"Accept": "application/json"}
BOTH = {"Accept": "application/x-protobuf, application/json"}
NEW = {"Accept": "application/x-protobuf"}


def chunk(*tokens: int, **fields: Any) -> dict[str, Any]:
    return {"tokens": list(tokens), **fields}


def tensor(*data: float, dtype: str = "float32", **fields: Any) -> dict[str, Any]:
    return {"data": list(data), "dtype": dtype, "shape": [len(data)], **fields}


def json_datum(*chunks: dict[str, Any], **inputs: Any) -> dict[str, Any]:
    return {"model_input": {"chunks": list(chunks)}, "loss_fn_inputs": inputs}


PLAIN = json_datum(
    chunk(5, 6, 7), target_tokens=tensor(6, 7, 8, dtype="int64"), weights=tensor(1, 1, 1)
)


def body_of(
    model: str, seq: int, *data: Any, field: str = "forward_backward_input", **fields: Any
) -> dict[str, Any]:
    inner = {
        "data": list(data or (PLAIN,)),
        "loss_fn": "cross_entropy",
        "loss_fn_config": None,
        **fields,
    }
    return {field: inner, "model_id": model, "seq_id": seq}


async def promised(scene: LiveService, path: str, body: Any, **headers: str) -> str:
    status, answer = await scene.post(path, body, **headers)
    assert status == 200, answer
    return answer["request_id"]


async def retrieved(
    scene: LiveService, request_id: str, accept: dict[str, str], **fields: Any
) -> Any:
    status, outcome = await scene.post(
        "retrieve_future", {"request_id": request_id, **fields}, **accept
    )
    assert status == 200, outcome
    return outcome


@proves("wire:content-type")
async def test_both_bodies_of_a_pass_give_the_same_bytes(scene: LiveService) -> None:
    model = await scene.model()
    binary = await promised(
        scene, "forward_backward", pass_body(model, 1, [datum([5, 6, 7, 8])]), **PROTO
    )
    json = await promised(scene, "forward_backward", body_of(model, 2))
    ahead = await promised(scene, "forward", body_of(model, 3, field="forward_input"))
    first = await retrieved(scene, binary, NEW)
    assert first == await retrieved(scene, json, NEW) == await retrieved(scene, ahead, NEW)
    assert "metrics" in await scene.redeem(await stepped(scene, model, 4))
    assert "gradient" in (await scene.redeem(await stepped(scene, model, 5)))["error"]


VARIANTS: list[dict[str, Any]] = [
    json_datum(chunk(5, 6, 7, type="encoded_text"), **PLAIN["loss_fn_inputs"]),
    json_datum(chunk(5), chunk(6, 7, type="encoded_text"), **PLAIN["loss_fn_inputs"]),
    json_datum(
        chunk(5, 6, 7),
        target_tokens=tensor(6, 7, 8, dtype="int64", shape=None),
        weights={"data": [1.0, 1, 1.0], "dtype": "float32"},
    ),
    json_datum(
        chunk(5, 6, 7),
        target_tokens=tensor(
            6, 7, 8, dtype="int64", sparse_crow_indices=None, sparse_col_indices=None, new=1
        ),
        weights=tensor(1, 1, 1),
    ),
    {**PLAIN, "model_input": {"chunks": [chunk(5, 6, 7)], "new": None}, "unknown": [1]},
]


@proves("wire:null-and-unknown")
async def test_every_shape_of_a_datum_means_the_same(scene: LiveService) -> None:
    model = await scene.model()
    requests = [
        await promised(scene, "forward_backward", body_of(model, seq, found))
        for seq, found in enumerate([PLAIN, *VARIANTS], 1)
    ]
    outcomes = [await retrieved(scene, request, OLD) for request in requests]
    assert outcomes == [outcomes[0]] * len(requests)
    assert outcomes[0]["loss_fn_outputs"][0]["logprobs"]["shape"] == [3]


async def test_wide_and_sparse_targets_come_as_json_too(scene: LiveService) -> None:
    model = await scene.model()
    rows, grid = [0, 2, 2, 3], [0, 1, 1]
    csr: dict[str, Any] = {"shape": [3, 2], "sparse_crow_indices": rows, "sparse_col_indices": grid}
    dense = json_datum(
        chunk(5, 6, 7),
        target_tokens=tensor(6, 9, 0, 0, 0, 8, dtype="int64", shape=[3, 2]),
        weights=tensor(1, 2, 0, 0, 0, 3, shape=[3, 2]),
    )
    sparse = json_datum(
        chunk(5, 6, 7),
        target_tokens=tensor(6, 9, 8, dtype="int64", **csr),
        weights=tensor(1, 2, 3, **csr),
    )
    for seq, data in enumerate((dense, sparse), 1):
        outcome = await retrieved(
            scene, await promised(scene, "forward_backward", body_of(model, seq, data)), OLD
        )
        logprobs = outcome["loss_fn_outputs"][0]["logprobs"]
        assert logprobs["shape"] == [3, 2]
        expected = -sum(w * lp for w, lp in zip([1, 2, 0, 0, 0, 3], logprobs["data"], strict=True))
        assert outcome["metrics"]["loss:sum"] == pytest.approx(expected, rel=1e-5)


FLAWS: list[tuple[dict[str, Any], str]] = [
    (json_datum(chunk(type="image", data="aGk=", format="png")), "'image'"),
    (
        json_datum({"type": "image_asset_pointer", "location": "x", "format": "png"}),
        "'image_asset_pointer'",
    ),
    (json_datum(chunk(2**31)), "token id"),
    (
        json_datum(chunk(5), target_tokens=tensor(6.5, dtype="int64")),
        "'target_tokens' holds a number",
    ),
    (
        json_datum(chunk(5), target_tokens=tensor(6, dtype="int8")),
        "'target_tokens' has the dtype 'int8'",
    ),
    (json_datum(chunk(5), target_tokens=tensor(6, dtype="int64", shape=[2])), "not the shape [2]"),
    (json_datum(chunk(5)), "no loss function input 'target_tokens'"),
]


@proves("pass:bad-datum", "sample:no-images")
async def test_what_is_wrong_with_a_datum_fails_its_promise_and_the_next_request_runs(
    scene: LiveService,
) -> None:
    model = await scene.model()
    for seq, (found, sentence) in enumerate(FLAWS, 1):
        request = await promised(scene, "forward_backward", body_of(model, seq, PLAIN, found))
        outcome = await retrieved(scene, request, OLD)
        assert outcome["category"] == "user"
        assert sentence in outcome["error"]
    last = await promised(scene, "forward_backward", body_of(model, len(FLAWS) + 1))
    assert "metrics" in await retrieved(scene, last, OLD)


async def test_settings_that_are_no_numbers_are_the_losss_to_refuse(scene: LiveService) -> None:
    """httpx before 0.28 writes NaN as it is."""
    model = await scene.model()
    raw = (
        '{"forward_backward_input": {"data": [], "loss_fn": "ppo", "loss_fn_config": '
        '{"clip_low_threshold": NaN}},'
    )
    request = await promised(
        scene, "forward_backward", f'{raw} "model_id": "{model}", "seq_id": 1}}'.encode(), **JSON
    )
    outcome = await retrieved(scene, request, OLD)
    assert (outcome["category"], "clip_low_threshold" in outcome["error"]) == ("user", True)


JSON = {"Content-Type": "application/json"}


@proves("order:burnt-number")
async def test_a_json_pass_that_does_not_fit_uses_up_its_number(scene: LiveService) -> None:
    model = await scene.model()
    broken: list[dict[str, Any]] = [
        {"model_id": model, "seq_id": 1},
        body_of(model, 2, field="forward_input"),
        body_of(model, 3, data=5),
        body_of(model, 4, json_datum({"tokens": ["a"]})),
        body_of(model, 5, json_datum({"tokens": [1.5]})),
    ]
    for body in broken:
        status, refusal = await scene.post("forward_backward", body)
        assert (status, len(refusal["detail"]) > 20) == (400, True), body
    compressed = zstandard.compress(pass_body(model, 6)) + b"x"
    status, _ = await scene.post(
        "forward_backward", compressed, **PROTO, **{"Content-Encoding": "zstd"}
    )
    assert status == 400
    request = await promised(scene, "forward_backward", body_of(model, 7))
    async with asyncio.timeout(WAIT_S):
        assert "metrics" in await retrieved(scene, request, OLD)


@proves("wire:zstd")
async def test_a_compressed_pass_is_read(scene: LiveService) -> None:
    model = await scene.model()
    compressed = zstandard.compress(pass_body(model, 1))
    request = await promised(
        scene, "forward_backward", compressed, **PROTO, **{"Content-Encoding": "zstd"}
    )
    assert (
        len(
            deserialize_forward_backward_output(
                await retrieved(scene, request, NEW)
            ).loss_fn_outputs
        )
        == 2
    )


@proves("wire:accept")
async def test_a_pass_is_told_in_the_form_that_its_client_reads(scene: LiveService) -> None:
    model = await scene.model()
    request = await promised(scene, "forward_backward", pass_body(model, 1), **PROTO)
    binary = deserialize_forward_backward_output(await retrieved(scene, request, NEW))
    for accept in (OLD, BOTH):
        json = await retrieved(scene, request, accept)
        assert json["loss_fn_output_type"] == "ArrayRecord"
        assert json["metrics"] == pytest.approx(binary.metrics)
        found = [
            (one["logprobs"]["data"], one["logprobs"]["shape"]) for one in json["loss_fn_outputs"]
        ]
        assert found == [
            (one["logprobs"].data, one["logprobs"].shape) for one in binary.loss_fn_outputs
        ]


@proves("wire:accept")
async def test_a_sample_is_told_in_the_form_that_its_client_reads(scene: LiveService) -> None:
    session = {
        "session_id": await scene.session(),
        "sampling_session_seq_id": 0,
        "base_model": TINY,
    }
    sampler = (await scene.post("create_sampling_session", session))[1]["sampling_session_id"]
    asked: dict[str, Any] = {
        "num_samples": 2,
        "prompt": {"chunks": [chunk(5, 6, 7)]},
        "sampling_params": {"max_tokens": 4, "seed": 1, "stop": [], "temperature": 0.7},
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 1,
        "prompt_alt_tokens_k": 2,
        "target_prompt_logprobs": tensor(
            6,
            7,
            dtype="int64",
            shape=[2, 3],
            sparse_crow_indices=[0, 1, 2],
            sparse_col_indices=[2, 0],
        ),
    }
    request = await promised(scene, "asample", asked)
    binary = deserialize_sample_response(await retrieved(scene, request, NEW))
    json = await retrieved(scene, request, OLD)
    assert json == await retrieved(scene, request, BOTH)
    assert json["type"] == "sample"
    assert [one["tokens"] for one in json["sequences"]] == [one.tokens for one in binary.sequences]
    assert [one["logprobs"] for one in json["sequences"]] == [
        one.logprobs for one in binary.sequences
    ]
    assert [one["stop_reason"] for one in json["sequences"]] == ["length", "length"]
    assert json["prompt_logprobs"] == binary.prompt_logprobs
    top = [row and [tuple(pair) for pair in row] for row in json["topk_prompt_logprobs"]]
    assert top == binary.topk_prompt_logprobs
    sampled = [
        [[tuple(pair) for pair in row] for row in one["topk_logprobs"]] for one in json["sequences"]
    ]
    assert sampled == [one.topk_logprobs for one in binary.sequences]
    assert binary.target_prompt_logprobs is not None
    targets = binary.target_prompt_logprobs
    assert (
        json["target_prompt_logprobs"]["sparse_col_indices"] == targets.sparse_col_indices == [2, 0]
    )
    assert json["target_prompt_logprobs"]["data"] == targets.data
    assert json["prompt_alt_tokens"]["tokens"]["shape"] == [2, 2]


@proves("promise:metadata")
async def test_a_large_result_is_announced_to_those_who_ask_for_it(
    scene: LiveService, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_routes, "INLINE_BYTES", 1000)
    model, many = await scene.model(), [datum(list(range(5, 505)))] * 20
    request = await promised(scene, "forward_backward", pass_body(model, 1, many), **PROTO)
    whole = await retrieved(scene, request, NEW)
    told = await retrieved(scene, request, NEW, allow_metadata_only=True)
    assert told == {"status": "complete_metadata", "response_payload_size": len(whole)}
    assert len((await retrieved(scene, request, OLD))["loss_fn_outputs"]) == 20
    small = await promised(scene, "forward_backward", pass_body(model, 2), **PROTO)
    assert isinstance(await retrieved(scene, small, NEW, allow_metadata_only=True), bytes)
    training = await trainer(client)
    assert len((await training.forward_backward(many, "cross_entropy")).loss_fn_outputs) == 20


@proves("promise:lost-sample")
async def test_a_promise_that_nobody_knows_is_410_to_a_sampling_client_and_404_to_others(
    scene: LiveService,
) -> None:
    lost = {"request_id": "x"}
    assert (await scene.post("retrieve_future", lost, **{"X-Tinker-Request-Type": "Sample"}))[
        0
    ] == 410
    assert (
        await scene.post("retrieve_future", lost, **{"X-Tinker-Request-Type": "ForwardBackward"})
    )[0] == 404


@proves("order:first-chunk-last")
async def test_2500_datums_arrive_in_chunks_the_first_one_last(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    data = [datum([5, 6, 7 + index % 64]) for index in range(2500)]
    stepping = await training.forward_backward(data, "cross_entropy")
    rows = scene.rows("SELECT seq FROM requests WHERE kind = 'forward_backward' ORDER BY rowid")
    assert sorted(rows[:-1]) == [(2,), (3,)] and rows[-1] == (1,), (
        "the others are sent side by side"
    )
    assert len(stepping.loss_fn_outputs) == 2500
    kept = [one["logprobs"].to_numpy() for one in stepping.loss_fn_outputs]
    assert np.allclose(kept[64], kept[0])
    assert stepping.metrics["loss:sum"] == pytest.approx(-sum(one.sum() for one in kept), rel=1e-4)
    await training.optim_step(tinker.AdamParams())


async def test_three_chunks_by_hand_run_in_order_whatever_their_bodies_are(
    scene: LiveService,
) -> None:
    model = await scene.model()
    later = [
        await promised(scene, "forward_backward", body_of(model, 2)),
        await promised(scene, "forward_backward", pass_body(model, 3), **PROTO),
    ]
    assert scene.engine.calls["forward_backward"] == 0
    first = await promised(scene, "forward_backward", body_of(model, 1, *[PLAIN] * 3))
    counts = [len((await retrieved(scene, one, OLD))["loss_fn_outputs"]) for one in (first, *later)]
    assert counts == [3, 1, len(DATA)]


async def test_no_form_of_a_result_holds_what_json_has_not(scene: LiveService) -> None:
    """A prompt's first log-probability is NaN on the wire, and null in JSON."""
    session = {
        "session_id": await scene.session(),
        "sampling_session_seq_id": 0,
        "base_model": TINY,
    }
    sampler = (await scene.post("create_sampling_session", session))[1]["sampling_session_id"]
    asked = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [chunk(5, 6)]},
        "prompt_logprobs": True,
    }
    request = await promised(scene, "asample", {**asked, "sampling_params": {"max_tokens": 1}})
    url = f"{scene.url}/api/v1/retrieve_future"
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json={"request_id": request}, headers=OLD) as response,
    ):
        text = await response.text()
    assert '"prompt_logprobs":[null,' in text
    assert "NaN" not in text
