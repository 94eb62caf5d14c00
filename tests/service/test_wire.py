"""Bodies and results on the wire, read back by the SDK's own code."""

from __future__ import annotations

import tracemalloc
from typing import Literal

import numpy as np
import pytest
import zstandard
from contract.requirements import proves
from tinker.proto.response_conv import (
    deserialize_forward_backward_output,
    deserialize_sample_response,
)

from halteres.engine.protocol import Array, ExtraLogprobs, PassResult, SampleResult, Sequence, TopK
from halteres.errors import InvalidData
from halteres.service.wire import bodies, results, tinker_public_pb2, training

from .test_order import pass_body


def array(*rows: object) -> Array:
    """float32 values in the shape of the nested lists."""
    values = np.array(rows, np.float32)
    return Array(dtype="float32", shape=values.shape, data=values.tobytes())


def test_datums_arrive_as_the_sdk_sent_them() -> None:
    asked = training.read_pass(pass_body("m:train:0", 3))
    assert (asked.model_id, asked.seq_id, asked.loss, asked.forward_only) == (
        "m:train:0",
        3,
        "cross_entropy",
        False,
    )
    first = asked.data[0]
    assert np.frombuffer(first.tokens, np.int32).tolist() == [5, 6, 7]
    assert np.frombuffer(first.inputs["target_tokens"].data, np.int64).tolist() == [6, 7, 8]
    assert (first.inputs["weights"].dtype, first.inputs["weights"].shape) == ("float32", (3,))


def test_the_newer_settings_win() -> None:
    message = tinker_public_pb2.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    message.loss_fn_config["beta"] = 1.0
    message.loss_fn_config["clip"] = 3.0
    message.loss_fn_config_v2["beta"].number = 2.0
    asked = training.read_pass(message.SerializeToString())
    assert dict(asked.config) == {"beta": 2.0, "clip": 3.0}


@proves("pass:logprobs", "pass:wide-targets")
def test_logprobs_arrive_per_datum_whatever_their_shapes() -> None:
    rows = [
        array(1, 2, 3),
        array(),
        array([1, 2], [3, 4]),
        array([5, 6]),
        array([1, 2, 3]),
        array(9),
    ]
    output = deserialize_forward_backward_output(
        results.write_pass(PassResult(logprobs=tuple(rows), metrics={"loss:sum": 2.5}))
    )
    assert [one["logprobs"].shape for one in output.loss_fn_outputs] == [
        list(row.shape) for row in rows
    ]
    found = [one["logprobs"].to_numpy().tobytes() for one in output.loss_fn_outputs]
    assert found == [row.data for row in rows]
    assert output.metrics == {"loss:sum": 2.5}


def test_a_body_that_is_unpacked_is_in_memory_once() -> None:
    size = 2**26
    packed = zstandard.compress(bytes(size))
    tracemalloc.start()
    try:
        assert len(bodies.decompressed(packed, "zstd")) == size
        assert tracemalloc.get_traced_memory()[1] < 1.7 * size
    finally:
        tracemalloc.stop()


def topk(*rows: list[tuple[int, float]]) -> TopK:
    ids = np.array([[token for token, _ in row] for row in rows], np.int32)
    logprobs = np.array([[logprob for _, logprob in row] for row in rows], np.float32)
    return TopK(k=len(rows[0]), length=len(rows), ids=ids.tobytes(), logprobs=logprobs.tobytes())


def sequence(token: int, reason: Literal["stop", "length"], top: TopK | None = None) -> Sequence:
    tokens, logprobs = np.full(2, token, np.int32), np.full(2, -1.5, np.float32)
    return Sequence(
        tokens=tokens.tobytes(), logprobs=logprobs.tobytes(), stop_reason=reason, top=top
    )


@proves("sample:prompt-logprobs", "sample:topk-prompt", "sample:topk-sampled")
def test_everything_of_a_sample_arrives() -> None:
    prompt = np.array([np.nan, -1, -2], np.float32).tobytes()
    filler = [(0, -99999.0), (0, -99999.0)]
    result = SampleResult(
        sequences=(sequence(4, "stop", topk([(4, -0.5)], [(9, -0.25)])), sequence(5, "length")),
        version=1,
        prompt_logprobs=prompt,
        topk_prompt=topk(filler, [(7, -1.0), (8, -2.0)], [(6, -1.5), (5, -3.0)]),
        target_logprobs=array([-1.0, 0.0], [-2.0, -3.0]),
        alternatives=topk([(3, -1.0)], [(2, -4.0)]),
    )
    response = deserialize_sample_response(
        results.write_sample(result, results.ExtraOutputs(ExtraLogprobs()))
    )
    assert [(one.tokens, one.stop_reason) for one in response.sequences] == [
        ([4, 4], "stop"),
        ([5, 5], "length"),
    ]
    assert response.sequences[0].topk_logprobs == [[(4, -0.5)], [(9, -0.25)]]
    assert response.sequences[1].topk_logprobs is None
    assert response.prompt_logprobs == [None, -1.0, -2.0]
    assert response.topk_prompt_logprobs == [None, [(7, -1.0), (8, -2.0)], [(6, -1.5), (5, -3.0)]]
    assert response.target_prompt_logprobs is not None
    assert response.target_prompt_logprobs.tolist() == [[-1.0, 0.0], [-2.0, -3.0]]
    assert response.prompt_alt_tokens is not None
    assert (
        response.prompt_alt_tokens.tokens.dtype,
        response.prompt_alt_tokens.tokens.tolist(),
    ) == (
        "int64",
        [[3], [2]],
    )
    assert response.prompt_cache_hit_tokens == 0
    last = deserialize_sample_response(
        results.write_sample(result, results.ExtraOutputs(ExtraLogprobs(), last_n=1))
    )
    assert last.prompt_logprobs == [None, None, -2.0]
    assert last.topk_prompt_logprobs == [None, None, [(6, -1.5), (5, -3.0)]]


@proves("wire:zstd")
def test_compressed_bodies_are_read_up_to_a_limit() -> None:
    body = pass_body("m", 1)
    packed = zstandard.compress(body)
    assert bodies.decompressed(packed, "zstd") == body
    streamed = zstandard.ZstdCompressor().compressobj()
    # which names no size
    assert bodies.decompressed(streamed.compress(body) + streamed.flush(), "zstd") == body
    with pytest.raises(InvalidData, match="too large"):
        bodies.decompressed(zstandard.compress(bytes(2**26)), "zstd", 2**20)
    for broken in (b"nonsense", b"", packed[:-1], packed[:5], packed + b"x", packed + packed):
        with pytest.raises(InvalidData, match="not valid zstd"):
            bodies.decompressed(broken, "zstd")
    with pytest.raises(InvalidData, match="gzip"):
        bodies.decompressed(b"", "gzip")


def test_a_broken_body_still_gives_its_model_and_number() -> None:
    def address(kind: str, content_type: str, body: bytes) -> tuple[str, int] | None:
        return training.address_of(kind, content_type, body)

    body = pass_body("session:train:0", 300)
    assert address("forward_backward", bodies.PROTOBUF, body[:-1]) == ("session:train:0", 300)
    assert address("forward_backward", bodies.PROTOBUF, b"nonsense") is None
    assert address("save_weights", bodies.JSON, b'{"model_id": "m", "seq_id": 2, "path": 5}') == (
        "m",
        2,
    )
    assert address("forward", bodies.JSON, b'{"model_id": "m", "seq_id": 2, "x": NaN}') == ("m", 2)
    for broken in (
        b"[1]",
        b'{"model_id": "m", "seq_id": 0}',
        b'{"model_id": "m", "seq_id": 1e30}',
        b"{" * 5000,
    ):
        assert address("optim_step", bodies.JSON, broken) is None
    noise = np.random.default_rng(0).bytes(4000)
    assert bodies.head_of(zstandard.compress(noise)[:-9], "zstd") == noise[: bodies.HEAD_BYTES]
    assert bodies.head_of(zstandard.compress(body) + b"x", "zstd") == body[: bodies.HEAD_BYTES]
    assert bodies.head_of(b"nonsense", "zstd") == b""


@pytest.mark.parametrize("seq", [0, -1])
def test_a_request_without_a_number_of_its_own_is_refused(seq: int) -> None:
    with pytest.raises(InvalidData, match="seq_id"):
        training.read_request("forward_backward", bodies.PROTOBUF, pass_body("m", seq))
    with pytest.raises(InvalidData, match="seq_id"):
        training.read_request("optim_step", bodies.JSON, b'{"model_id": "m", "seq_id": %d}' % seq)
    with pytest.raises(InvalidData, match="seq_id"):
        training.read_request("forward_backward", bodies.PROTOBUF, b"")


@proves("sample:no-images")
def test_images_and_unknown_dtypes_are_flaws_of_the_request_not_of_the_wire() -> None:
    message = tinker_public_pb2.ForwardBackwardRequest(
        model_id="m", seq_id=1, loss_fn="cross_entropy"
    )
    message.data.add().model_input.add().image.data = b"x"
    asked = training.read_pass(message.SerializeToString())
    assert asked.flaw is not None
    assert "image" in asked.flaw.sentence
    message.data[0].model_input[0].encoded_text.tokens = bytes(4)
    message.data[0].loss_fn_inputs["weights"].dense = bytes(4)
    asked = training.read_pass(message.SerializeToString())
    assert asked.flaw is not None
    assert "dtype" in asked.flaw.sentence


@proves("wire:null-and-unknown")
def test_null_means_absent_and_unknown_fields_are_ignored() -> None:
    body = b'{"sampling_session_id":"s","seq_id":1,"prompt":{"chunks":[{"tokens":[1]}],"new":1},"num_samples":null,'
    asked = bodies.read(
        body + b'"sampling_params":{"temperature":null,"stop":null}}', bodies.Sample
    )
    assert (asked.num_samples, asked.sampling_params.temperature, asked.prompt.chunks[0].type) == (
        1,
        1.0,
        "encoded_text",
    )


def test_numbers_that_are_none_are_read_where_older_sdks_write_them() -> None:
    asked = bodies.read(
        b'{"model_id":"m","seq_id":1,"adam_params":{"learning_rate":NaN,"eps":Infinity}}',
        bodies.OptimStep,
    )
    assert asked.adam_params is not None
    assert (np.isnan(asked.adam_params.learning_rate), asked.adam_params.eps) == (True, np.inf)


@pytest.mark.parametrize(
    "body",
    [
        b'{"path": 3, "x": NaN}',
        b'{"path": 3, "x": "\\ud800"}',
        b'{"tinker_path": "\\ud800", "x": NaN}',
        b'{"tinker_path": "x", "y": 1' + b"0" * 5000 + b', "x": NaN}',
        b'{"tinker_path": [NaN]}',
        b"[" * 20_000,
        b'{"a":' * 5_000,
        b'{"NaN":' * 5_000,
        b"",
        b"\xff",
        b"NaN",
    ],
)
def test_a_body_that_cannot_be_read_is_the_callers_error(body: bytes) -> None:
    with pytest.raises(InvalidData, match="The body "):
        bodies.read_field(body, "tinker_path")
    assert bodies.address_of(body) is None
