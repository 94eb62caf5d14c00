"""Every route of the original answers in its exact shape (spec §1 to §3)."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import httpx
import pytest
from isal import isal_zlib

from halteres.trajectories.http import MOST_MEMBERS, BadBody, TooLarge, inflate
from halteres.trajectories.options import Gzip, Options

from .server_fixtures import ENV, TRAINER, Json, ServerFixture, group, opened

KEYS = {
    "tokens",
    "masks",
    "scores",
    "advantages",
    "ref_logprobs",
    "messages",
    "generation_params",
    "inference_logprobs",
    "overrides",
    "group_overrides",
    "images",
    "env_id",
    "distill_token_ids",
    "distill_logprobs",
}
NAN = float("nan")
NOT_REGISTERED = {
    "status": "error",
    "message": "Trainer not registered. Call /register first.",
    "batch": [],
}


async def test_the_root_names_the_original(scene: ServerFixture) -> None:
    assert await scene.get("/") == {"message": "AtroposLib API"}


async def test_before_a_trainer_registers_everything_answers(scene: ServerFixture) -> None:
    assert await scene.get("/batch") == NOT_REGISTERED
    assert await scene.get("/info") == {"batch_size": -1, "max_token_len": -1}
    assert await scene.get("/wandb_info") == {"group": None, "project": None}
    assert await scene.get("/status") == {"current_step": 0, "queue_size": 0}
    assert await scene.post("/register-env", ENV) == {"status": "wait for trainer to start"}
    empty = await scene.get("/latest_example")
    assert set(empty) == KEYS - {
        "overrides",
        "group_overrides",
        "env_id",
        "distill_token_ids",
        "distill_logprobs",
    }
    assert all(value == [] for value in empty.values())


async def test_the_uuid_is_a_bare_integer_of_128_bits(scene: ServerFixture) -> None:
    uuids = [(await scene.register())["uuid"] for _ in range(8)]
    assert all(isinstance(uuid, int) for uuid in uuids)
    assert 2**64 < max(uuids) < 2**128
    assert len(set(uuids)) == 8


async def test_info_and_wandb_info_repeat_the_registration(scene: ServerFixture) -> None:
    await scene.register()
    assert await scene.get("/info") == {"batch_size": 4, "max_token_len": 64}
    assert await scene.get("/wandb_info") == {"group": "g", "project": "p"}


async def test_environments_wait_until_the_first_batch_is_asked_for(scene: ServerFixture) -> None:
    await scene.register(starting_step=3)
    assert await scene.post("/register-env", ENV) == {"status": "wait for trainer to start"}
    assert await scene.get("/batch") == {"batch": None}
    assert await scene.post("/register-env", ENV) == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "sums_0",
        "checkpoint_dir": "/ckpt",
        "starting_step": 3,
        "checkpoint_interval": 5,
        "num_steps": 10,
    }
    second = await scene.post("/register-env", ENV)
    assert (second["env_id"], second["wandb_name"]) == (1, "sums_1")


async def test_a_null_name_is_accepted(scene: ServerFixture) -> None:
    await scene.begin()
    assert (await scene.post("/register-env", {**ENV, "desired_name": None}))[
        "wandb_name"
    ] == "env_0"


async def test_disconnecting_fails_with_status_200(scene: ServerFixture) -> None:
    await scene.begin()
    env_id = await scene.register_env()
    assert await scene.post("/disconnect-env", {"env_id": env_id}) == {"status": "success"}
    answer = await scene.post("/disconnect-env", {"env_id": 99})
    assert answer["status"] == "failure" and "99" in answer["error"]


async def test_a_batch_carries_all_keys_and_nothing_else(scene: ServerFixture) -> None:
    await scene.begin(batch_size=2)
    await scene.send(group(2, unknown=1))
    answer = await scene.get("/batch")
    assert set(answer) == {"batch"}
    (element,) = answer["batch"]
    assert set(element) == KEYS
    assert {
        name: element[name] for name in ("tokens", "masks", "scores", "inference_logprobs")
    } == group(2)
    assert all(element[name] is None for name in KEYS - set(group()))


async def test_every_optional_field_comes_back_as_it_was_sent(scene: ServerFixture) -> None:
    await scene.begin(batch_size=1)
    extra = {
        "advantages": [[0.5, 0.5, 0.5]],
        "ref_logprobs": [[-1.0, -1.0, -1.0]],
        "messages": [[{"role": "user", "content": "1+1", "tool": {"x": None}}]],
        "generation_params": {"temperature": 0.5},
        "overrides": [{"set_advantage_to_zero": True}],
        "group_overrides": {"skip_teacher_top_k": True},
        "images": [None, {"any": "thing"}],
        "distill_token_ids": [[[1], [2], [3]]],
        "distill_logprobs": [[[-0.1], [-0.2], [-0.3]]],
        "policy_version": [[3, 4]],
    }
    await scene.send(group(1, **extra))
    (element,) = await scene.batch() or []
    assert {name: element[name] for name in extra} == extra


@pytest.mark.parametrize(
    "messages",
    [
        [
            {"role": "user", "content": "2+2", "reward": None},
            {"role": "assistant", "content": "4", "reward": 1.0},
        ],
        [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4", "reward": 0.0}],
        [
            {
                "role": "user",
                "content": "x",
                "unheard_of": {"nested": [1, {"deep": None}]},
                "flag": False,
            }
        ],
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "?"},
                    {"type": "image_url", "image_url": {"url": "d"}},
                ],
            }
        ],
        [
            {"role": "user", "content": {"text": "x", "numbers": [1, 2]}},
            {"role": "tool", "content": ["a", "list"]},
        ],
        [
            {"role": "dog", "content": "Woof"},
            {"role": "USER", "content": ""},
            {"role": "robot", "content": " "},
        ],
        [
            {"role": "user", "content": "👋 世界 مرحبا"},
            {"role": "assistant", "content": "\n\t\r \" ' \\ /"},
        ],
        [{"role": "user", "content": "A" * 10_000}],
    ],
)
async def test_messages_of_any_role_and_content_come_back_as_they_were_sent(
    scene: ServerFixture, messages: list[Json]
) -> None:
    """As the original's own tests of messages want them: a role and a content of any kind, whatever
    is beside them.
    """
    await scene.begin(batch_size=1)
    sent = group(1, messages=[messages], images=["base64"], scores=[1])
    assert await scene.post("/scored_data", sent) == {"status": "received"}
    latest = await scene.get("/latest_example")
    (element,) = await scene.batch() or []
    for told in (latest, element):
        assert {name: told[name] for name in sent} == sent


async def test_numeric_strings_and_integral_floats_are_coerced(scene: ServerFixture) -> None:
    await scene.post("/register", {**TRAINER, "batch_size": "2", "max_token_len": 64.0})
    assert await scene.get("/info") == {"batch_size": 2, "max_token_len": 64}
    await scene.get("/batch")
    await scene.send(
        {
            "tokens": [["1", 2.0], [3]],
            "masks": [[1, 2], [3]],
            "scores": ["0.5", True],
            "env_id": "0",
        }
    )
    (element,) = await scene.batch() or []
    assert (element["tokens"], element["scores"], element["env_id"]) == (
        [[1, 2], [3]],
        [0.5, 1.0],
        0,
    )


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/register", {"wandb_group": "g"}, ["body", "wandb_project"]),
        ("/register", {**TRAINER, "batch_size": "many"}, ["body", "batch_size"]),
        ("/register", {**TRAINER, "batch_size": 0}, ["body", "batch_size"]),
        ("/register-env", {"desired_name": "x"}, ["body", "max_token_length"]),
        ("/disconnect-env", {}, ["body", "env_id"]),
        ("/scored_data", {"tokens": [[1]], "masks": [[1]]}, ["body", "scores"]),
        ("/scored_data", {**group(), "tokens": [["a"]]}, ["body", "tokens", 0, 0]),
        (
            "/scored_data",
            {**group(1), "messages": [[{"role": "user"}]]},
            ["body", "messages", 0, "content"],
        ),
        (
            "/scored_data",
            {**group(1), "messages": [[{"content": "x"}]]},
            ["body", "messages", 0, "role"],
        ),
        ("/scored_data", b"{", ["body"]),
        ("/scored_data_list", [{"tokens": []}], ["body", 0, "masks"]),
        ("/scored_data_list", [group(), {"tokens": [], "scores": []}], ["body", 1, "masks"]),
        (
            "/scored_data_list",
            [group(scores=[NAN, NAN]), group(), {**group(), "tokens": 1}],
            ["body", 2, "tokens"],
        ),
        ("/scored_data_list", [5], ["body", 0]),
        ("/scored_data_list", {"tokens": []}, ["body"]),
    ],
)
async def test_a_body_that_does_not_fit_is_422_and_says_where(
    scene: ServerFixture, path: str, body: object, place: list[object]
) -> None:
    answer = await scene.raw_post(path, body)
    assert answer.status_code == 422
    (problem,) = answer.json()["detail"]
    assert problem["loc"] == place
    assert set(problem) == {"type", "loc", "msg"}


async def test_one_bad_group_refuses_the_whole_list(scene: ServerFixture) -> None:
    await scene.begin()
    assert (await scene.raw_post("/scored_data_list", [group(), {"tokens": 1}])).status_code == 422
    assert (await scene.get("/status"))["queue_size"] == 0


async def test_a_list_says_how_many_groups_it_had(scene: ServerFixture) -> None:
    await scene.begin(batch_size=8)
    assert await scene.post("/scored_data_list", [group(), group()]) == {
        "status": "received",
        "groups_processed": 2,
    }
    env_id = await scene.register_env(group_size=4)
    answer = await scene.post(
        "/scored_data_list", [group(1, env_id=env_id), group(4, env_id=env_id)]
    )
    assert answer == {
        "status": "received",
        "groups_processed": 2,
        "buffered": 1,
        "last_buffer_size": 1,
    }


async def test_status_counts_groups_and_deliveries(scene: ServerFixture) -> None:
    await scene.begin(starting_step=7)
    await scene.send(group(), group(), group())
    assert await scene.get("/status") == {"current_step": 7, "queue_size": 3}
    await scene.batch()
    assert await scene.get("/status") == {"current_step": 8, "queue_size": 1}


async def test_status_env_has_the_figures_of_the_original(scene: ServerFixture) -> None:
    await scene.begin(batch_size=16)
    one = await scene.register_env(group_size=4, weight=3.0)
    other = await scene.register_env(group_size=4, min_batch_allocation=0.25)
    await scene.send(group(4, env_id=one), group(4, env_id=other), group(4, env_id=other))
    status = await scene.status_env(one)
    assert status.pop("allowance") == 1
    assert status == {
        "current_step": 0,
        "queue_size": 2,  # 4 own, and of the other's 8 what exceeds its 16 * 0.25
        "unallocated_fraction": 0.75,
        "self_queue_size": 1,
        "max_group_size": 4,
        "env_weight": 0.75,
    }


async def test_a_weight_of_minus_one_is_ignored(scene: ServerFixture) -> None:
    await scene.begin()
    env_id = await scene.register_env(weight=-1.0)
    assert (await scene.status_env(env_id))["env_weight"] == 1.0


@pytest.mark.parametrize("env_id", [5, -1, 2**70])
async def test_an_unknown_environment_is_never_an_error(scene: ServerFixture, env_id: int) -> None:
    """An unmodified client dies of three failures in a row, so none may happen while a server
    restarts.
    """
    assert (await scene.status_env(env_id))["current_step"] == 0
    await scene.begin()
    assert (await scene.status_env(env_id))["env_weight"] == 1.0


async def test_an_unknown_environment_is_adopted_with_its_groups(scene: ServerFixture) -> None:
    await scene.begin()
    await scene.send(group(2, env_id=5))
    status = await scene.status_env(5)
    assert (status["self_queue_size"], status["allowance"]) == (1, 1)
    assert await scene.register_env() != 5


async def test_the_latest_example_is_the_newest_queued_group(scene: ServerFixture) -> None:
    await scene.begin(batch_size=2)
    env_id = await scene.register_env()
    await scene.send(group(2, mark=1), group(2, mark=2), group(1, mark=3, env_id=env_id))
    assert (await scene.get("/latest_example"))["tokens"][0][0] == 2
    await scene.batch()
    await scene.batch()
    assert (await scene.get("/latest_example"))["tokens"][0][0] == 2


async def test_a_reset_forgets_everything_but_the_ids_of_environments(scene: ServerFixture) -> None:
    await scene.begin()
    env_id = await scene.register_env()
    await scene.send(group(), group(), group())
    await scene.batch()
    answer = await scene.http.get("/reset_data")
    assert (answer.text, answer.headers["content-type"].split(";")[0]) == (
        "Reset successful",
        "text/plain",
    )
    assert await scene.get("/batch") == NOT_REGISTERED
    assert await scene.get("/info") == {"batch_size": -1, "max_token_len": -1}
    assert await scene.get("/status") == {"current_step": 0, "queue_size": 0}
    assert await scene.get("/wandb_info") == {"group": None, "project": None}
    assert (await scene.get("/latest_example"))["tokens"] == []
    assert (await scene.status_env(env_id))["allowance"] == 0
    await scene.begin()
    assert await scene.batch() is None
    assert await scene.register_env() == env_id + 1


async def test_groups_may_come_before_the_trainer(scene: ServerFixture) -> None:
    """The original is wedged for ever by this order."""
    await scene.send(group(mark=1), group(mark=2))
    await scene.register()
    assert len(await scene.batch() or []) == 2


@pytest.mark.parametrize(
    ("gzip_option", "client", "speaks"),
    [
        ("auto", "127.0.0.1", False),  # compressing would only cost
        ("auto", "::1", False),
        ("auto", "10.0.0.7", True),
        ("always", "127.0.0.1", True),
        ("never", "10.0.0.7", False),
    ],
)
async def test_gzip_is_understood_and_spoken(
    tmp_path: Path, gzip_option: Gzip, client: str, speaks: bool
) -> None:
    async with opened(
        tmp_path / "queue.sqlite", options=Options(database="", gzip=gzip_option)
    ) as scene:
        await scene.begin(batch_size=64)
        body = gzip.compress(json.dumps(group(64)).encode())
        assert await scene.post("/scored_data", body, content_encoding="gzip") == {
            "status": "received"
        }
        transport = httpx.ASGITransport(scene.app, client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
            plain = await http.get("/latest_example", headers={"accept-encoding": "identity"})
            assert "content-encoding" not in plain.headers
            small = await http.get("/info", headers={"accept-encoding": "gzip"})
            assert "content-encoding" not in small.headers
            answer = await http.get("/batch", headers={"accept-encoding": "gzip"})
        assert ("content-encoding" in answer.headers) is speaks
        assert len(answer.json()["batch"][0]["tokens"]) == 64


@pytest.mark.parametrize(
    "damage", [lambda body: body[:-9], lambda body: b"no gzip", lambda body: body[:2]]
)
async def test_a_broken_gzip_body_is_400_in_plain_text(
    scene: ServerFixture, damage: object
) -> None:
    assert callable(damage)
    body = damage(gzip.compress(json.dumps(group()).encode()))
    answer = await scene.raw_post("/scored_data", body, content_encoding="gzip")
    assert (answer.status_code, answer.text) == (400, "Invalid gzip payload")


@pytest.mark.parametrize(
    "encoding", ["gzip, identity", "identity, gzip", "deflate", "br", "", "none"]
)
async def test_a_plain_body_is_read_whatever_its_encoding_is_called(
    scene: ServerFixture, encoding: str
) -> None:
    body = json.dumps(group()).encode()
    assert await scene.post("/scored_data", body, content_encoding=encoding) == {
        "status": "received"
    }
    if "gzip" in encoding:
        packed = gzip.compress(body)
        assert await scene.post("/scored_data", packed, content_encoding=encoding) == {
            "status": "received"
        }
    else:
        assert (
            await scene.raw_post("/scored_data", b"\x03\x00", content_encoding=encoding)
        ).status_code == 422


@pytest.mark.parametrize("encoding", ["gzip", "identity", "br"])
async def test_an_empty_body_is_422_however_it_is_encoded(
    scene: ServerFixture, encoding: str
) -> None:
    answer = await scene.raw_post("/scored_data", b"", content_encoding=encoding)
    assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (422, ["body"])


@pytest.mark.parametrize(
    ("given", "weight", "group_size", "share"),
    [
        ({"weight": NAN}, 1.0, 2, None),
        ({"weight": float("inf")}, 1.0, 2, None),
        ({"weight": "-inf"}, 1.0, 2, None),
        ({"weight": 1e300}, 1e12, 2, None),
        ({"weight": -1e300}, -1e12, 2, None),
        ({"weight": True}, 1.0, 2, None),
        ({"weight": " 2.5 "}, 2.5, 2, None),
        ({"min_batch_allocation": NAN}, 1.0, 2, None),
        ({"min_batch_allocation": False}, 1.0, 2, 0.0),
        ({"min_batch_allocation": "0.5\n"}, 1.0, 2, 0.5),
        ({"group_size": 0}, 1.0, 1, None),
        ({"group_size": -1}, 1.0, 1, None),
        ({"group_size": True}, 1.0, 1, None),
        ({"group_size": 2**70}, 1.0, 2**31, None),
        ({"group_size": " 3 ", "max_token_length": True}, 1.0, 3, None),
        ({"max_token_length": 2**70}, 1.0, 2, None),
    ],
)
async def test_an_environment_registers_with_what_the_original_takes(
    scene: ServerFixture,
    given: dict[str, object],
    weight: float,
    group_size: int,
    share: float | None,
) -> None:
    """A 4xx there kills an unmodified client."""
    await scene.begin()
    env_id = await scene.register_env(**given)
    known = scene.app.state.context.service.state.envs.by_id[env_id].record.registration
    assert (known.weight, known.group_size, known.min_batch_allocation) == (
        weight,
        group_size,
        share,
    )
    assert 0.01 <= (await scene.status_env(env_id))["env_weight"] <= 1.0


@pytest.mark.parametrize(
    ("desired", "name"),
    [
        ("a\0b", "ab_0"),
        ("n" * 5000, "n" * 4096 + "_0"),
        ("\0", "env_0"),
        ("", "env_0"),
        ("\ud800x", "?x_0"),
    ],
)
async def test_a_name_is_brought_into_a_form_that_every_store_keeps(
    scene: ServerFixture, desired: str, name: str
) -> None:
    await scene.begin()
    answer = await scene.post("/register-env", {**ENV, "desired_name": desired})
    assert (answer["status"], answer["wandb_name"]) == ("success", name)


@pytest.mark.parametrize("env_id", [False, " 0", "0.0", 0.0, "+0"])
async def test_an_environment_is_known_by_every_spelling_of_its_id(
    scene: ServerFixture, env_id: object
) -> None:
    await scene.begin()
    assert await scene.register_env() == 0
    answer = await scene.http.request("GET", "/status-env", json={"env_id": env_id})
    assert (answer.status_code, answer.json().get("max_group_size")) == (
        200,
        (await scene.status_env(0))["max_group_size"],
    )
    assert await scene.post("/disconnect-env", {"env_id": env_id}) == {"status": "success"}


async def test_a_group_size_below_one_leaves_groups_whole(scene: ServerFixture) -> None:
    await scene.begin(batch_size=3)
    env_id = await scene.register_env(group_size=0)
    await scene.send(group(2, mark=1, env_id=env_id), group(1, mark=2, env_id=env_id))
    assert [len(each["tokens"]) for each in await scene.batch() or []] == [2, 1]


def test_inflating_stops_at_the_limit() -> None:
    bomb = gzip.compress(b"0" * 1_000_000)
    with pytest.raises(TooLarge):
        inflate(bomb, limit=100_000)
    assert inflate(bomb[:] + gzip.compress(b"1"), limit=1_000_001) == b"0" * 1_000_000 + b"1"
    with pytest.raises(BadBody):
        inflate(bomb + b"garbage", limit=2_000_000)


def test_a_gzip_bomb_of_many_members_is_refused_at_the_first_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every member copies what follows it; counted in members, not in seconds."""
    opened, real = [], isal_zlib.decompressobj
    monkeypatch.setattr(
        "halteres.trajectories.http.isal_zlib.decompressobj",
        lambda **k: opened.append(1) or real(**k),
    )
    member = gzip.compress(b"")
    assert inflate(member * (MOST_MEMBERS - 1) + gzip.compress(b"1")) == b"1"
    opened.clear()
    with pytest.raises(BadBody, match="more than 16 members"):
        inflate(member * 10_000)
    assert len(opened) == MOST_MEMBERS


async def test_a_batch_size_beyond_reason_is_refused_with_a_sentence(scene: ServerFixture) -> None:
    answer = await scene.raw_post("/register", {**TRAINER, "batch_size": 2**31})
    assert answer.status_code == 422
    (problem,) = answer.json()["detail"]
    assert problem["loc"] == ["body", "batch_size"]
    assert problem["msg"] == "A batch has at most 1048576 sequences, not 2147483648."
    assert await scene.get("/info") == {"batch_size": -1, "max_token_len": -1}


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example:8000"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"host": "["},
    ],
)
async def test_pages_of_other_origins_are_refused(
    scene: ServerFixture, headers: dict[str, str]
) -> None:
    await scene.begin()
    assert (await scene.http.get("/reset_data", headers=headers)).status_code == 403
    assert (await scene.get("/info"))["batch_size"] == 4


@pytest.mark.parametrize(
    "path", ["/register", "/register-env", "/scored_data", "/scored_data_list", "/disconnect-env"]
)
async def test_a_body_nested_too_deeply_is_the_callers_error(
    scene: ServerFixture, path: str
) -> None:
    for body in (b"[" * 20_000, b'{"tokens":' * 20_000):
        assert (await scene.http.post(path, content=body)).status_code == 422


async def test_an_unknown_route_is_404(scene: ServerFixture) -> None:
    assert (await scene.http.get("/nope")).json() == {"detail": "Not Found"}
    assert (await scene.http.get("/register")).status_code == 405


async def test_the_server_describes_itself(scene: ServerFixture) -> None:
    described = await scene.get("/openapi.json")
    assert set(described["components"]["schemas"]) >= {"Registration", "ScoredData"}
    page = (await scene.http.get("/docs")).text
    assert all(path in page for path in described["paths"])


async def test_random_groups_come_back_number_for_number(scene: ServerFixture) -> None:
    draw = random.Random(3)
    await scene.begin(batch_size=3)
    sent = group(3)
    sent["inference_logprobs"] = [
        [1.0, -draw.random() * 1e-7, -draw.random() * 30] for _ in range(3)
    ]
    await scene.send(sent)
    (element,) = await scene.batch() or []
    assert element["inference_logprobs"] == sent["inference_logprobs"]
