"""Bodies of very many small parts: refused before they are decoded, in a time in which others are
served.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from contract.requirements import proves

from halteres.errors import InvalidData
from halteres.service.inference.fields import COMPLETIONS
from halteres.service.inference.fields import read as read_fields
from halteres.service.inference.openai import ChatCompletions, Completions
from halteres.service.wire import bodies
from halteres.service.wire import tinker_public_pb2 as pb
from halteres.service.wire.parts import MOST_PARTS, check_json, check_protobuf
from halteres.service.wire.training import read_json_pass, read_pass

from .live_service import LiveService
from .test_order import PROTO, stepped

WAIT_S = 20
MANY = MOST_PARTS + 1


def repeated(item: bytes, count: int = MANY) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


def decoded(kind: type) -> Any:
    return lambda body: bodies.read(body, kind)


FLOODS: dict[str, tuple[Any, bytes]] = {
    "chunks": (decoded(bodies.Sample), b'{"prompt": {"chunks": ' + repeated(b"{}") + b"}}"),
    "messages": (
        lambda body: read_fields(body, ChatCompletions),
        b'{"messages": ' + repeated(b"{}") + b"}",
    ),
    "prompts": (
        lambda body: read_fields(body, Completions, COMPLETIONS),
        b'{"prompt": ' + repeated(b"[]") + b"}",
    ),
    "metadata": (
        decoded(bodies.CreateModel),
        b'{"user_metadata": {"a": ' + repeated(b"[]") + b"}}",
    ),
    "json datums": (
        lambda body: read_json_pass(body, forward_only=False),
        b'{"model_id": "m", "seq_id": 1, "forward_backward_input": {"data": '
        + repeated(b"{}")
        + b"}}",
    ),
    "protobuf datums": (read_pass, bytes([3 << 3 | 2, 0]) * MANY),
    "protobuf fields": (read_pass, bytes([6 << 3, 1]) * (8 * MANY)),
    "protobuf in a group": (read_pass, bytes([9 << 3 | 3]) + bytes([3 << 3 | 2, 0]) * MANY),
    "an array's shape": (
        read_pass,
        pb.ForwardBackwardRequest(
            data=[pb.Datum(loss_fn_inputs={"weights": pb.Tensor(shape=[1] * (8 * MANY))})]
        ).SerializeToString(),
    ),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_body_of_too_many_parts_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    read, body = FLOODS[name]

    def undecoded(*_: object, **__: object) -> Any:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(msgspec.json, "decode", undecoded)
    monkeypatch.setattr(msgspec, "convert", undecoded)
    with pytest.raises(InvalidData, match="too many parts"):
        read(body)


def test_a_text_that_looks_like_very_many_parts_is_none() -> None:
    for text in (
        "{[" * MOST_PARTS,
        '\\"{' * MOST_PARTS,
        "\\\\{" * MOST_PARTS,
        '{"a": [1]}' * MOST_PARTS,
    ):
        body = msgspec.json.encode({"prompt": [text, "a"]})
        check_json(body)
        assert bodies.read(body, dict[str, Any])["prompt"][0] == text


def test_parts_between_texts_are_counted_however_the_texts_are_escaped() -> None:
    for text in (b'"\\"{"', b'"\\\\"', b'"\\\\\\""', b'""'):
        flood = b'{"a": [' + (text + b",{},") * MANY + b"1]}"
        with pytest.raises(InvalidData, match="too many parts"):
            check_json(flood)


def test_as_many_parts_as_are_allowed_are_read() -> None:
    chunks = (
        b'{"prompt": {"chunks": '
        + repeated(b"{}", MOST_PARTS - 3)
        + b'}, "sampling_session_id": "s", "seq_id": 1}'
    )
    assert len(bodies.read(chunks, bodies.Sample).prompt.chunks) == MOST_PARTS - 3


def test_a_large_pass_as_clients_send_it_is_read() -> None:
    """1,024 datums are the most that the SDK sends at once."""
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, dense=bytes(400), shape=[100])
    inputs = dict.fromkeys(("target_tokens", "logprobs", "advantages"), tensor)
    datum = pb.Datum(
        model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=bytes(400)))],
        loss_fn_inputs=inputs,
    )
    body = pb.ForwardBackwardRequest(
        model_id="m", seq_id=1, data=[datum] * 1024
    ).SerializeToString()
    check_protobuf(body, pb.ForwardBackwardRequest.DESCRIPTOR)
    assert len(read_pass(body).data) == 1024


def test_what_is_no_protobuf_is_left_to_the_parser() -> None:
    for garbage in (
        b"\xff" * MANY,
        b"\x80" * MANY,
        b"\x1a\xff\xff\xff\x7f" + bytes(MANY),
        b"\x07" * MANY,
    ):
        with pytest.raises(InvalidData, match="not a ForwardBackwardRequest"):
            read_pass(garbage)


@proves("order:burnt-number")
@pytest.mark.parametrize("headers", [PROTO, {"Content-Type": "application/json"}])
async def test_a_pass_of_too_many_parts_uses_up_its_number(
    scene: LiveService, headers: dict[str, str]
) -> None:
    model = await scene.model()
    body = b'{"model_id": "%s", "seq_id": 1, "data": ' % model.encode() + repeated(b"{}") + b"}"
    if headers is PROTO:
        head = pb.ForwardBackwardRequest(model_id=model, seq_id=1).SerializeToString()
        body = head + bytes([3 << 3 | 2, 0]) * MANY
    status, refusal = await scene.post("forward_backward", body, **headers)
    assert (status, "too many parts" in refusal["detail"]) == (400, True)
    async with asyncio.timeout(WAIT_S):
        assert "no gradient" in (await scene.redeem(await stepped(scene, model, 2)))["error"], (
            "it had its turn"
        )
