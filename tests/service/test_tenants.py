"""Two tenants on one service: what is the other's looks as if it had never been (we chose it)."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from contract.requirements import proves

from halteres.models import TINY
from halteres.service.keys import KeyFile
from halteres.service.wire import tinker_public_pb2 as pb

from .live_service import LiveService, serving

PROTOBUF = "application/x-protobuf"
RUN = "alices-run"


@dataclass(frozen=True, slots=True)
class Person:
    """One who asks with a key."""

    scene: LiveService
    key: str

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        """Status and text."""
        headers = {"X-API-Key": self.key}
        sent: dict[str, Any] = {} if body is None else {"json": body}
        if isinstance(body, bytes):
            headers["Content-Type"], sent = PROTOBUF, {"data": body}
        async with self.scene.http.request(
            method, f"{self.scene.url}{path}", headers=headers, **sent
        ) as response:
            return response.status, (await response.read()).decode(errors="replace")

    async def do(self, name: str, **body: Any) -> dict[str, Any]:
        """POST to the Tinker API; a future is redeemed."""
        status, text = await self.ask("POST", f"/api/v1/{name}", body)
        assert status == 200, text
        answer = json.loads(text)
        if "request_id" in answer and name != "asample":
            status, text = await self.ask(
                "POST", "/api/v1/retrieve_future", {"request_id": answer["request_id"]}
            )
            assert status == 200, text
            return {**answer, **json.loads(text)}
        return answer

    async def session(self, **metadata: str) -> str:
        return (await self.do("create_session", tags=[], user_metadata=metadata))["session_id"]

    async def model(self, session: str) -> str:
        body = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": TINY,
            "lora_config": {"rank": 4, "seed": 1},
        }
        return (await self.do("create_model", **body))["model_id"]


@dataclass(frozen=True, slots=True)
class Town:
    """A service, what Alice made on it, and Bob, who has a session and nothing else."""

    scene: LiveService
    alice: Person
    bob: Person
    things: Mapping[str, str]  # Alice's, by kind
    bobs_session: str


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[Town]:
    keys = KeyFile(tmp_path)
    async with serving(tmp_path) as scene:
        alice, bob = (Person(scene, keys.create(name).text) for name in ("alice", "bob"))
        yield Town(scene, alice, bob, await settled(alice), await bob.session())


async def settled(alice: Person) -> dict[str, str]:
    """One thing of each kind."""
    session = await alice.session(halteres_run=RUN)
    model = await alice.model(session)
    named = await alice.do("save_weights_for_sampler", model_id=model, seq_id=1, path="named")
    kept = await alice.do("save_weights", model_id=model, seq_id=2, path="kept")
    unnamed = await alice.do(
        "save_weights_for_sampler", model_id=model, seq_id=3, sampling_session_seq_id=0
    )
    sampler = unnamed["sampling_session_id"]
    future = await alice.do("asample", **sample(sampler))
    return {
        "session": session,
        "model": model,
        "path": kept["path"],
        "weights": named["path"],
        "sampler": sampler,
        "promise": future["request_id"],
        "run": RUN,
    }


def sample(sampler: str, seq: int = 1) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
    return {
        "sampling_session_id": sampler,
        "seq_id": seq,
        "prompt": prompt,
        "sampling_params": {"max_tokens": 2, "seed": 1},
    }


def never_were() -> dict[str, str]:
    """Things of the same form that nobody ever made."""
    session = str(uuid.uuid4())
    model = f"{session}:train:0"
    return {
        "session": session,
        "model": model,
        "path": f"tinker://{model}/weights/kept",
        "weights": f"tinker://{model}/sampler_weights/named",
        "sampler": f"{session}:sample:0",
        "promise": uuid.uuid4().hex,
        "run": "nobodys-run",
    }


PROJECT = {"project_id": "p"}
CHECKPOINT = "/api/v1/training_runs/{model}/checkpoints/weights/kept"
CALLS: list[tuple[str, str, Any]] = [
    ("POST", "/api/v1/get_info", {"model_id": "{model}"}),
    ("POST", "/api/v1/optim_step", {"model_id": "{model}", "seq_id": 4, "adam_params": {}}),
    ("POST", "/api/v1/optim_step", {"model_id": "{model}", "seq_id": 4, "adam_params": 5}),
    ("POST", "/api/v1/forward_backward", b""),
    ("POST", "/api/v1/save_weights", {"model_id": "{model}", "seq_id": 4, "path": "x"}),
    ("POST", "/api/v1/save_weights", {"model_id": "{model}", "seq_id": 2, "path": "kept"}),
    ("POST", "/api/v1/save_weights_for_sampler", {"model_id": "{model}", "seq_id": 4, "path": "x"}),
    ("POST", "/api/v1/save_weights_external", {"model_id": "{model}", "seq_id": 4, "path": "x"}),
    ("POST", "/api/v1/load_weights", {"model_id": "{model}", "seq_id": 4, "path": "{path}"}),
    (
        "POST",
        "/api/v1/load_weights",
        {"session_id": "{session}", "model_seq_id": 0, "path": "{path}"},
    ),
    (
        "POST",
        "/api/v1/create_model",
        {"session_id": "{session}", "model_seq_id": 0, "base_model": TINY},
    ),
    (
        "POST",
        "/api/v1/create_model",
        {"session_id": "{session}", "model_seq_id": 9, "base_model": TINY},
    ),
    ("POST", "/api/v1/session_heartbeat", {"session_id": "{session}"}),
    ("POST", "/api/v1/sessions/{session}/finish", {"reason": {"type": "errored"}}),
    ("GET", "/api/v1/sessions/{session}", None),
    ("GET", "/api/v1/sessions/{session}/trace_export", None),
    ("PUT", "/api/v1/sessions/{session}/project", PROJECT),
    (
        "POST",
        "/api/v1/create_sampling_session",
        {"session_id": "{session}", "sampling_session_seq_id": 0, "base_model": TINY},
    ),
    (
        "POST",
        "/api/v1/create_sampling_session",
        {"session_id": "{own}", "sampling_session_seq_id": 0, "model_path": "{weights}"},
    ),
    (
        "POST",
        "/api/v1/create_sampling_session",
        {"session_id": "{own}", "sampling_session_seq_id": 1, "model_path": "{path}"},
    ),
    ("GET", "/api/v1/samplers/{sampler}", None),
    ("POST", "/api/v1/join_sampling_session", {"sampling_session_id": "{sampler}"}),
    ("POST", "/api/v1/asample", sample("{sampler}")),
    ("POST", "/api/v1/asample", sample("{sampler}", 7)),
    ("POST", "/api/v1/retrieve_future", {"request_id": "{promise}"}),
    ("POST", "/api/v1/retrieve_future", {"request_id": "{promise}", "allow_metadata_only": True}),
    ("POST", "/api/v1/cancel_future", {"request_id": "{promise}"}),
    ("GET", "/api/v1/training_runs/{model}", None),
    ("GET", "/api/v1/training_runs/{model}/checkpoints", None),
    ("GET", "/api/v1/models/{model}/checkpoints", None),
    ("POST", f"{CHECKPOINT}/publish", {}),
    ("DELETE", f"{CHECKPOINT}/publish", None),
    ("PUT", f"{CHECKPOINT}/ttl", {"ttl_seconds": 3600}),
    ("GET", f"{CHECKPOINT}/external_weights_urls", None),
    ("GET", f"{CHECKPOINT}/archive", None),
    ("DELETE", CHECKPOINT, None),
    ("POST", "/api/v1/weights_info", {"tinker_path": "{path}"}),
    ("POST", "/api/v1/copy_weights", {"source_path": "{path}", "destination_project_id": "p"}),
    (
        "POST",
        "/api/v1/copy_weights",
        {"source_path": "{path}", "session_id": "{own}", "model_seq_id": 5},
    ),
    ("GET", "/runs/{run}/health", None),
    ("GET", "/runs/{run}/v1/models", None),
    ("POST", "/runs/{run}/generate", {"input_ids": [5, 6]}),
    ("POST", "/runs/{run}/generate", {"input_ids": [5, 6], "model": "{weights}"}),
    ("POST", "/runs/{run}/v1/completions", {"prompt": "a", "model": "{weights}"}),
]


def filled(value: Any, things: Mapping[str, str]) -> Any:
    """The value, with things put in where it names them."""
    if isinstance(value, bytes):
        return pb.ForwardBackwardRequest(model_id=things["model"], seq_id=4).SerializeToString()
    text = json.dumps(value)
    for kind, name in things.items():
        text = text.replace(f"{{{kind}}}", name)
    return json.loads(text)


async def outcome(
    person: Person, call: tuple[str, str, Any], things: Mapping[str, str]
) -> tuple[int, str]:
    """What comes of a call, with the things that were asked for named by their kinds."""
    method, path, body = call
    status, text = await person.ask(method, filled(path, things), filled(body, things))
    for kind in ("path", "weights", "sampler", "model", "session", "promise", "run"):
        text = text.replace(things[kind], kind)
    return status, text


@proves("keys:isolation")
async def test_what_is_anothers_is_answered_as_what_never_was(town: Town) -> None:
    """Every call with Alice's names and with names of nothing; afterwards all of hers is as it
    was.
    """
    for call in CALLS:
        hers = await outcome(town.bob, call, {**town.things, "own": town.bobs_session})
        nothing = await outcome(town.bob, call, {**never_were(), "own": town.bobs_session})
        assert hers == nothing, call
        assert hers[0] in (204, 400, 404, 410, 503), (call, hers)
    await everything_is_as_it_was(town)


async def everything_is_as_it_was(town: Town) -> None:
    alice, things = town.alice, town.things
    assert (
        await alice.ask("POST", "/api/v1/session_heartbeat", {"session_id": things["session"]})
    )[0] == 200
    _, listed = await alice.ask("GET", f"/api/v1/training_runs/{things['model']}/checkpoints")
    kinds = {
        (one["checkpoint_id"], one["public"], one["expires_at"])
        for one in json.loads(listed)["checkpoints"]
    }
    assert kinds == {("weights/kept", False, None), ("sampler_weights/named", False, None)}
    assert (await alice.ask("POST", "/api/v1/retrieve_future", {"request_id": things["promise"]}))[
        0
    ] == 200
    assert (await alice.ask("GET", f"/runs/{RUN}/health"))[0] == 200
    # 4 was not burnt
    saved = await alice.do("save_weights", model_id=things["model"], seq_id=4, path="after")
    assert saved["path"].endswith("/after")


@proves("keys:isolation")
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/api/v1/sessions", None),
        ("GET", "/api/v1/training_runs", None),
        ("GET", "/api/v1/checkpoints", None),
        ("POST", "/api/v1/sessions/search", {}),
        ("GET", "/halteres/v1/info", None),
        ("GET", "/api/v1/audit", None),
        ("GET", "/api/v1/billing/usage/events", None),
        ("GET", "/api/v1/billing/usage/checkpoints/current", None),
        ("GET", "/v1/models", None),
    ],
)
async def test_lists_hold_nothing_of_another(town: Town, method: str, path: str, body: Any) -> None:
    _, bobs = await town.bob.ask(method, path, body)
    assert not [thing for thing in town.things.values() if thing in bobs]


@proves("keys:isolation")
async def test_the_owner_finds_in_the_lists_what_is_hers(town: Town) -> None:
    for path, thing in (
        ("sessions", "session"),
        ("training_runs", "model"),
        ("checkpoints", "path"),
    ):
        assert town.things[thing] in (await town.alice.ask("GET", f"/api/v1/{path}"))[1]
    assert RUN in (await town.alice.ask("GET", "/halteres/v1/info"))[1]


async def test_loading_anothers_weights_fails_as_loading_what_never_was(town: Town) -> None:
    """Into a model of one's own the request is accepted: the failure is its future's."""
    model = await town.bob.model(town.bobs_session)
    outcomes: list[str] = []
    for seq, things in enumerate((town.things, never_were()), 1):
        failed = await town.bob.do("load_weights", model_id=model, seq_id=seq, path=things["path"])
        assert failed["category"] == "user"
        outcomes.append(failed["error"].replace(things["path"], "path"))
    assert outcomes[0] == outcomes[1]


async def test_a_published_checkpoint_is_everybodys_to_read_and_its_owners_to_change(
    town: Town,
) -> None:
    call = ("POST", "/api/v1/weights_info", {"tinker_path": town.things["path"]})
    assert (await town.bob.ask(*call))[0] == 404
    checkpoint = filled(CHECKPOINT, town.things)
    assert (await town.alice.ask("POST", f"{checkpoint}/publish", {}))[0] == 204
    assert (await town.bob.ask(*call))[0] == 200
    status, refusal = await town.bob.ask("DELETE", checkpoint)
    assert (status, "only its owner" in refusal) == (403, True)
    assert (await town.bob.ask("DELETE", f"{checkpoint}/publish"))[0] == 403
    assert (await town.alice.ask("DELETE", f"{checkpoint}/publish"))[0] == 204
    assert (await town.bob.ask(*call))[0] == 404


async def test_two_runs_of_one_name_are_two_policies(town: Town) -> None:
    session = await town.bob.session(halteres_run=RUN)
    model = await town.bob.model(session)
    assert (await town.bob.ask("GET", f"/runs/{RUN}/health"))[0] == 503
    body = {"model_id": model, "seq_id": 1, "path": "mine"}
    await town.bob.do("save_weights_for_sampler", **body)
    assert (await town.bob.ask("GET", f"/runs/{RUN}/health"))[0] == 200


async def test_keys_of_one_tenant_share_what_is_theirs_and_it_outlives_a_key(
    town: Town, tmp_path: Path
) -> None:
    keys = KeyFile(tmp_path)
    laptop = Person(town.scene, keys.create("laptop", tenant="alice").text)
    keys.revoke(next(key.id for key in keys.read() if key.name == "alice"))
    assert (await town.alice.ask("GET", "/api/v1/sessions"))[0] == 401
    assert town.things["session"] in (await laptop.ask("GET", "/api/v1/sessions"))[1]


async def test_one_idempotency_key_of_two_tenants_makes_two_copies(town: Town) -> None:
    model = await town.bob.model(town.bobs_session)
    bobs = (await town.bob.do("save_weights", model_id=model, seq_id=1, path="kept"))["path"]
    copies: list[str] = []
    for person, path in ((town.alice, town.things["path"]), (town.bob, bobs)):
        body = {"source_path": path, "destination_project_id": "p"}
        headers = {"X-API-Key": person.key, "X-Idempotency-Key": "same"}
        async with town.scene.http.post(
            f"{town.scene.url}/api/v1/copy_weights", json=body, headers=headers
        ) as made:
            text = await made.text()
            assert made.status == 200, text
            copies.append(text)
    assert copies[0] != copies[1]
    assert not [thing for thing in town.things.values() if thing in copies[1]]


async def test_no_two_tenants_have_a_key_of_the_journal_in_common(town: Town) -> None:
    """The same numbers for both: each row is its tenant's own."""
    model = await town.bob.model(town.bobs_session)
    for seq, name in ((1, "x"), (2, "y")):
        await town.bob.do("save_weights", model_id=model, seq_id=seq, path=name)
    rows = town.scene.rows("select key, tenant, subject from requests")
    assert {tenant for _, tenant, _ in rows} == {"alice", "bob"}
    owners = {"alice": town.things["session"], "bob": town.bobs_session}
    assert all(key.startswith(owners[tenant]) for key, tenant, _ in rows)
