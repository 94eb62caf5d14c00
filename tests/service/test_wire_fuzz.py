"""Bodies that nobody means: random, torn, absurd. Each is refused with a sentence or fails its
future; all goes on.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import zstandard
from contract.requirements import proves

from halteres.models import TINY

from .live_service import LiveService
from .test_order import PROTO, pass_body

SEED, ROUNDS, WAIT_S = 20250, 12, 60

RUN, SESSION, SAMPLER = "RUN", "SESSION", "SAMPLER"  # stand for the ids of the scene
NEXT = 987654321  # stands for the number that is the model's next

BODIES: dict[str, dict[str, Any]] = {
    "create_session": {
        "tags": ["a"],
        "user_metadata": {"a": "b"},
        "sdk_version": "x",
        "display_name": "n",
    },
    "create_model": {
        "session_id": SESSION,
        "model_seq_id": 5,
        "base_model": TINY,
        "lora_config": {"rank": 4},
    },
    "get_info": {"model_id": RUN},
    "forward_backward": {
        "model_id": RUN,
        "seq_id": NEXT,
        "forward_backward_input": {
            "data": [
                {
                    "model_input": {"chunks": [{"tokens": [5, 6], "type": "encoded_text"}]},
                    "loss_fn_inputs": {
                        "target_tokens": {"data": [6, 7], "dtype": "int64", "shape": [2]},
                        "weights": {"data": [1.0, 0.5], "dtype": "float32", "shape": [2]},
                    },
                }
            ],
            "loss_fn": "cross_entropy",
            "loss_fn_config": {"beta": 1.0},
        },
    },
    "optim_step": {
        "model_id": RUN,
        "seq_id": NEXT,
        "adam_params": {"learning_rate": 1e-3, "beta1": 0.9},
    },
    "save_weights": {
        "model_id": RUN,
        "seq_id": NEXT,
        "path": "a",
        "ttl_seconds": 3600,
        "user_metadata": {"a": "b"},
    },
    "save_weights_for_sampler": {
        "model_id": RUN,
        "seq_id": NEXT,
        "sampling_session_seq_id": 3,
        "kind": "snapshot",
    },
    "save_weights_external": {
        "model_id": RUN,
        "seq_id": NEXT,
        "path": "a",
        "age_encryption_recipients": ["age1x"],
    },
    "load_weights": {
        "session_id": SESSION,
        "model_seq_id": 9,
        "path": "tinker://x/weights/y",
        "optimizer": True,
    },
    "create_sampling_session": {
        "session_id": SESSION,
        "sampling_session_seq_id": 7,
        "base_model": TINY,
    },
    "join_sampling_session": {"sampling_session_id": SAMPLER},
    "asample": {
        "sampling_session_id": SAMPLER,
        "seq_id": 1,
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [5, 6, 7]}]},
        "sampling_params": {
            "max_tokens": 2,
            "seed": 1,
            "stop": ["a"],
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.5,
        },
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
        "target_prompt_logprobs": {"data": [6, 7], "dtype": "int64", "shape": [2, 1]},
        "prompt_alt_tokens_k": 1,
        "prompt_logprobs_last_n": 1,
    },
    "retrieve_future": {"request_id": "x", "allow_metadata_only": True},
    "cancel_future": {"request_id": "x"},
    "sessions/search": {
        "user_metadata": {},
        "owner": {"type": "own"},
        "limit": 5,
        "statuses": [{"type": "active"}],
    },
    "session_heartbeat": {"session_id": SESSION},
    "copy_weights": {
        "source_path": "tinker://x/weights/y",
        "session_id": SESSION,
        "model_seq_id": 901,
    },
    "weights_info": {"tinker_path": "tinker://x/weights/y"},
    "unload_model": {"model_id": RUN},
}

_PASS = BODIES["forward_backward"]
BODIES["forward"] = {
    "model_id": RUN,
    "seq_id": NEXT,
    "forward_input": _PASS["forward_backward_input"],
}

ABSURD: list[str] = [
    "null",
    "true",
    "-1",
    "0",
    "1e400",
    "1e308",
    "NaN",
    "-Infinity",
    str(2**31),
    str(2**63),
    str(-(2**63) - 1),
    "9" * 400,
    "9" * 5000,
    '""',
    '"\\ud800"',
    '"\\u0000"',
    '"../../../etc/passwd"',
    json.dumps("x" * 5000),
    "[]",
    "{}",
    "[[[[[]]]]]",
    '{"a": {"a": NaN}}',
    "[" * 400 + "]" * 400,
]


def spoiled(body: Any, value: str, at: list[int]) -> str:
    """The body as text, with one of its values, chosen by `at`, replaced."""
    if isinstance(body, dict | list) and body:
        names = list(body) if isinstance(body, dict) else list(range(len(body)))
        chosen = names[at.pop() % len(names)] if at else None
        parts = [
            (name, spoiled(body[name], value, at) if name == chosen else json.dumps(body[name]))
            for name in names
        ]
        if isinstance(body, dict):
            return "{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in parts) + "}"
        return "[" + ", ".join(text for _, text in parts) + "]"
    return value


def broken(path: str, body: dict[str, Any], dice: random.Random) -> Iterator[bytes]:
    """Ways in which a body may be broken."""
    text = json.dumps(body).encode()
    for _ in range(ROUNDS):
        yield dice.randbytes(dice.randrange(200))
        yield text[: dice.randrange(len(text))]
        flipped = bytearray(text)
        flipped[dice.randrange(len(text))] = dice.randrange(256)
        yield bytes(flipped)
    for value in ABSURD:
        yield spoiled(
            body, value, [dice.randrange(100) for _ in range(dice.randrange(1, 7))]
        ).encode()
        yield value.encode()


async def scene_ids(scene: LiveService) -> dict[str, str]:
    session = await scene.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": TINY}
    sampler = (await scene.post("create_sampling_session", body))[1]["sampling_session_id"]
    return {RUN: await scene.model(session), SESSION: session, SAMPLER: sampler}


async def never_a_500(scene: LiveService, run: str, path: str, body: bytes, **headers: str) -> int:
    """The status: it is refused with a sentence, or accepted and executed in its turn."""
    model = scene.service.models.of_id(run)
    assert model is not None
    number = model.queue._next
    body = body.replace(str(NEXT).encode(), str(number).encode())
    status, answer = await scene.post(path, body, **{"Content-Type": "application/json", **headers})
    assert status < 500, (path, body[:300], answer)
    if status >= 400 and status != 408:
        assert len(answer["detail"]) > 15, (path, body[:300])
    elif status == 200 and "request_id" in answer:
        future = scene.service.futures.find(answer["request_id"], "local")
        while (
            future and future.outcome is None and (future.seq == number or future.kind == "sample")
        ):
            await scene.post("retrieve_future", {"request_id": answer["request_id"]})
    return status


@proves("wire:nothing-breaks-it", "error:sentence")
@pytest.mark.parametrize("path", BODIES)
async def test_json_that_nobody_means_never_breaks_anything(scene: LiveService, path: str) -> None:
    ids, dice = await scene_ids(scene), random.Random(SEED)
    scene.service.futures.poll_s = 0.01
    text = json.dumps(BODIES[path])
    for name, known in ids.items():
        text = text.replace(f'"{name}"', json.dumps(known))
    async with asyncio.timeout(WAIT_S):
        said = [
            await never_a_500(scene, ids[RUN], path, body)
            for body in broken(path, json.loads(text), dice)
        ]
        assert 400 in said
        await goes_on(scene)


@proves("wire:nothing-breaks-it", "wire:zstd")
async def test_protobuf_that_nobody_means_never_breaks_anything(scene: LiveService) -> None:
    model, dice = await scene.model(), random.Random(SEED)
    scene.service.futures.poll_s = 0.01
    await scene.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": 5})
    run = scene.service.models.of_id(model)
    assert run is not None
    for _ in range(120):
        whole = pass_body(model, run.queue._next)
        packed = zstandard.compress(whole)
        flipped = bytearray(whole)
        for _ in range(dice.randrange(1, 4)):
            flipped[dice.randrange(len(model) + 8, len(whole))] = dice.randrange(256)
        torn = bytearray(packed)
        torn[dice.randrange(len(packed))] ^= 1 << dice.randrange(8)
        for body, encoding in (
            (bytes(flipped), {}),
            (whole[: dice.randrange(len(whole))], {}),
            (dice.randbytes(dice.randrange(300)), {}),
            (bytes(torn), {"Content-Encoding": "zstd"}),
            (packed[: dice.randrange(len(packed))], {"Content-Encoding": "zstd"}),
        ):
            await never_a_500(scene, model, "forward_backward", body, **PROTO, **encoding)
    bomb = zstandard.compress(bytes(2**29))
    await never_a_500(
        scene, model, "forward_backward", bomb, **PROTO, **{"Content-Encoding": "zstd"}
    )
    assert scene.engine.calls["forward_backward"] > 10
    await goes_on(scene)


async def goes_on(scene: LiveService) -> None:
    """Whatever is open ends, no future by our own fault; the engine never died; the next client
    trains.
    """
    scene.service.futures.poll_s = WAIT_S
    model = await scene.model()
    _, promised = await scene.post("forward_backward", pass_body(model, 1), **PROTO)
    assert isinstance(await scene.redeem(promised["request_id"]), bytes)
    assert scene.host.restarts == 0
    assert scene.rows("SELECT body, outcome FROM requests WHERE state = 'failed_server'") == []
