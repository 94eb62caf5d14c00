"""Binary bodies, read back by the SDK's own code."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from halteres.engine.protocol import PassResult, SampleResult, Sequence
from halteres.errors import InvalidData
from halteres.service.wire import bodies, codec, tinker_public_pb2

from .test_order import pass_body


def test_datums_arrive_as_the_sdk_sent_them() -> None:
    asked = codec.read_pass(pass_body("m:train:0", 3))
    assert (asked.model_id, asked.seq_id, asked.loss, asked.forward_only) == ("m:train:0", 3, "cross_entropy", False)
    first = asked.data[0]
    assert np.frombuffer(first.tokens, np.int32).tolist() == [5, 6, 7]
    assert np.frombuffer(first.inputs["target_tokens"].data, np.int64).tolist() == [6, 7, 8]
    assert (first.inputs["weights"].dtype, first.inputs["weights"].shape) == ("float32", (3,))


def test_logprobs_arrive_per_datum_whatever_their_lengths() -> None:
    rows = [np.arange(length, dtype=np.float32) for length in (3, 0, 5)]
    result = PassResult(logprobs=tuple(row.tobytes() for row in rows), metrics={"loss:sum": 2.5})
    output = deserialize_forward_backward_output(codec.write_pass(result))
    assert [one["logprobs"].data for one in output.loss_fn_outputs] == [row.tolist() for row in rows]
    assert output.metrics == {"loss:sum": 2.5}


def test_samples_arrive_in_order_with_their_stop_reasons() -> None:
    def sequence(token: int, reason: str) -> Sequence:
        tokens, logprobs = np.full(2, token, np.int32), np.full(2, -1.5, np.float32)
        return Sequence(tokens=tokens.tobytes(), logprobs=logprobs.tobytes(), stop_reason=reason)

    prompt = np.array([np.nan, -1, -2], np.float32).tobytes()
    result = SampleResult(sequences=(sequence(4, "stop"), sequence(5, "length")), version=1, prompt_logprobs=prompt)
    response = deserialize_sample_response(codec.write_sample(result, last_n=1))
    assert [one.tokens for one in response.sequences] == [[4, 4], [5, 5]]
    assert [one.stop_reason for one in response.sequences] == ["stop", "length"]
    assert response.prompt_logprobs == [None, None, -2.0]


def test_compressed_bodies_are_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    body = pass_body("m", 1)
    assert codec.decompressed(zstandard.compress(body), "zstd") == body
    monkeypatch.setattr(codec, "MAX_BODY_BYTES", 2**20)
    with pytest.raises(InvalidData, match="too large"):
        codec.decompressed(zstandard.compress(bytes(2**21)), "zstd")
    with pytest.raises(InvalidData, match="not valid zstd"):
        codec.decompressed(b"nonsense", "zstd")
    with pytest.raises(InvalidData, match="gzip"):
        codec.decompressed(b"", "gzip")


def test_a_broken_body_still_gives_its_model_and_number() -> None:
    body = pass_body("session:train:0", 300)
    assert codec.address_of(body[:-1]) == ("session:train:0", 300)
    assert codec.address_of(b"nonsense") is None
    assert bodies.address_of(b'{"model_id": "m", "seq_id": 2, "path": 5}') == ("m", 2)
    assert bodies.address_of(b"[1]") is None


def test_images_and_unknown_dtypes_are_flaws_of_the_request_not_of_the_wire() -> None:
    message = tinker_public_pb2.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    message.data.add().model_input.add().image.data = b"x"
    asked = codec.read_pass(message.SerializeToString())
    assert asked.flaw is not None
    assert "image" in asked.flaw.sentence
    message.data[0].model_input[0].encoded_text.tokens = bytes(4)
    message.data[0].loss_fn_inputs["weights"].dense = bytes(4)
    asked = codec.read_pass(message.SerializeToString())
    assert asked.flaw is not None
    assert "dtype" in asked.flaw.sentence


def test_null_means_absent_and_unknown_fields_are_ignored() -> None:
    body = b'{"sampling_session_id":"s","seq_id":1,"prompt":{"chunks":[{"tokens":[1]}],"new":1},"num_samples":null,'
    asked = bodies.read(body + b'"sampling_params":{"temperature":null,"stop":null}}', bodies.Sample)
    assert (asked.num_samples, asked.sampling_params.temperature, asked.prompt.chunks[0].type) == (
        1,
        1.0,
        "encoded_text",
    )


@pytest.mark.parametrize(
    "body", [b'{"path": 3, "x": NaN}', b'{"path": 3, "x": "\\ud800"}', b"[" * 20_000, b'{"a":' * 5_000, b"", b"\xff"]
)
def test_a_body_that_cannot_be_read_is_the_callers_error(body: bytes) -> None:
    with pytest.raises(InvalidData, match="The body "):
        bodies.read(body, bodies.WeightsInfo)
    assert bodies.address_of(body) is None
