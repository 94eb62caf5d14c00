"""What a RestClient and an AdminClient ask: runs, sessions, projects, books; by the real SDK
0.38.0.
"""

from __future__ import annotations

from typing import Any

import pytest
import tinker
from contract.requirements import proves
from tinker import types

from .live_service import LiveService, closing, trainer

# the SDK says so of its search
EXPERIMENTAL = pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning")


async def named(
    scene: LiveService, name: str | None, project: str | None = None, **metadata: str
) -> str:
    body = {
        "tags": [],
        "user_metadata": metadata,
        "display_name": name,
        "project_id": project,
        "sdk_version": "x",
    }
    return (await scene.post("create_session", body))[1]["session_id"]


async def search(scene: LiveService, **asked: Any) -> tuple[list[str], Any]:
    status, answer = await scene.post("sessions/search", asked)
    assert status == 200, answer
    return [one["session_id"] for one in answer["sessions"]], answer["next_cursor"]


@proves("records:search")
async def test_sessions_are_found_by_what_is_known_of_them(scene: LiveService) -> None:
    red = await named(scene, "The Red one", "p1", run="r1", seed="3")
    blue = await named(scene, "a blue One", run="r1")
    bare = await named(scene, None)
    await scene.post(f"sessions/{blue}/finish", {"reason": {"type": "errored"}})
    every = [bare, blue, red]  # newest first
    for asked, expected in (
        ({}, every),
        ({"display_name": "one"}, [blue, red]),
        ({"display_name": "RED one"}, [red]),
        ({"display_name": "one missing"}, []),
        ({"session_id": bare}, [bare]),
        ({"session_id": bare, "display_name": "red"}, [bare, red]),
        ({"user_metadata": {"run": "r1"}}, [blue, red]),
        ({"user_metadata": {"run": "r1", "seed": "3"}}, [red]),
        ({"project_ids": ["p1"]}, [red]),
        ({"project_ids": ["default", "p1"]}, every),
        ({"project_ids": []}, []),
        ({"statuses": [{"type": "active"}]}, [bare, red]),
        ({"statuses": [{"type": "client_finished"}]}, [blue]),
        ({"statuses": [{"type": "client_finished", "reasons": ["success"]}]}, []),
        (
            {"statuses": [{"type": "client_finished", "reasons": ["errored"]}, {"type": "failed"}]},
            [blue],
        ),
        ({"owner": {"type": "accessible"}}, every),
        ({"owner": {"type": "user", "owner_urns": ["local"]}}, every),
        ({"owner": {"type": "user", "owner_urns": ["somebody"]}}, []),
    ):
        assert (await search(scene, **asked))[0] == expected, asked


@EXPERIMENTAL
@proves("records:search")
async def test_a_search_goes_on_where_its_page_ended(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    for index in range(4):
        await named(scene, f"many {index}")
    rest = tinker.RestClient(client.holder)
    seen: list[str | None] = []
    asked = types.SessionSearchRequest(display_name="many", limit=3)
    while True:
        page = await rest.search_sessions(asked)
        seen += [one.display_name for one in page.sessions]
        if page.next_cursor is None:
            break
        asked = asked.model_copy(update={"cursor": page.next_cursor})
    assert seen == [f"many {index}" for index in (3, 2, 1, 0)]


@EXPERIMENTAL
@proves("records:search", "records:zones")
async def test_the_sdk_reads_a_summary(scene: LiveService) -> None:
    async with closing(await scene.client(run="r7", seed="3")) as client:
        training = await trainer(client)
        await training.save_state("a")
        rest, session = tinker.RestClient(client.holder), client.holder.get_session_id()
        (found,) = (
            await rest.search_sessions(types.SessionSearchRequest(session_id=session))
        ).sessions
        assert (found.owner, found.project_id, found.checkpoints_count) == ("local", "default", 1)
        assert found.status is not None
        assert (found.status.type, found.created_at.tzinfo is not None) == ("active", True)
        assert found.checkpoint_storage_bytes
        assert found.checkpoint_storage_bytes > 0
        await rest.assign_session_project(session, "p2")
        (found,) = (
            await rest.search_sessions(types.SessionSearchRequest(project_ids=["p2"]))
        ).sessions
        assert found.project_id == "p2"
        assert (await rest.list_training_runs(project_id="p2")).training_runs[
            0
        ].training_run_id == training.model_id
        assert (await rest.list_training_runs(project_id="p1")).training_runs == []


@pytest.mark.parametrize(
    "asked",
    [
        {"limit": 0},
        {"limit": 201},
        {"owner": {"type": "nobody"}},
        {"statuses": [{"type": "odd"}]},
        {"cursor": {"last_created_at": "2030-01-01T00:00:00", "last_session_id": "x"}},
        {"cursor": {"last_created_at": "soon", "last_session_id": "x"}},
        {"user_metadata": {"a": 1}},
    ],
)
async def test_a_search_that_does_not_fit_is_refused(
    scene: LiveService, asked: dict[str, Any]
) -> None:
    status, refusal = await scene.post("sessions/search", asked)
    assert (status, "$." in refusal["detail"]) == (400, True)


@proves("records:runs", "records:zones")
async def test_training_runs_are_listed_newest_first_and_described(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    first, second = await trainer(client), await trainer(client, rank=4)
    rest = tinker.RestClient(client.holder)
    page = await rest.list_training_runs(limit=1, access_scope="accessible")
    assert [run.training_run_id for run in page.training_runs] == [second.model_id]
    assert (page.cursor.total_count, page.cursor.limit, page.cursor.offset) == (2, 1, 0)
    run = await rest.get_training_run(first.model_id)
    assert (run.model_owner, run.is_lora, run.lora_rank, run.corrupted) == ("local", True, 8, False)
    assert run.last_request_time.tzinfo is not None
    with pytest.raises(tinker.NotFoundError, match="Did you mean"):
        await rest.get_training_run(first.model_id + "x")
    for query in ("limit=x", "offset=-1"):
        assert (await scene.get(f"/api/v1/training_runs?{query}"))[0] == 400


@proves("records:sessions", "records:samplers")
async def test_a_session_names_its_runs_and_samplers(scene: LiveService) -> None:
    session = await named(scene, "shown", run="r1")
    model = await scene.model(session)
    body = {
        "session_id": session,
        "sampling_session_seq_id": 4,
        "base_model": (await scene.get("/halteres/v1/info"))[1],
    }
    body["base_model"] = body["base_model"]["model"]["name"]
    sampler = (await scene.post("create_sampling_session", body))[1]["sampling_session_id"]
    assert (await scene.get(f"/api/v1/sessions/{session}"))[1] == {
        "training_run_ids": [model],
        "sampler_ids": [sampler],
        "user_metadata": {"run": "r1"},
        "display_name": "shown",
    }
    assert (await scene.get(f"/api/v1/samplers/{sampler}"))[1]["base_model"] == body["base_model"]
    assert (await scene.get("/api/v1/sessions"))[1] == {"sessions": [session]}
    assert (await scene.get("/api/v1/sessions/x"))[0] == 404


@proves("records:administration")
async def test_the_books_are_empty_but_for_storage(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    await training.save_state("a")
    admin = tinker.AdminClient(client.holder)
    assert (await admin.get_audit_log()).entries == []
    usage = await admin.get_billing_usage("2030-01-01T00:00:00Z", "2030-01-02T00:00:00Z")
    assert (usage.data, usage.sessions) == ([], {})
    (stored,) = (await admin.get_current_checkpoint_storage_usage()).data
    assert (stored.checkpoint_count, stored.project_id, stored.user_name) == (1, None, "local")
    assert stored.size_gigabytes == stored.size_bytes / 1e9 > 0
    assert (await admin.get_current_checkpoint_storage_usage("p9")).data == []


async def test_a_trace_is_refused_with_what_there_is(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    with pytest.raises(RuntimeError, match=r"records no traces.*journal\.sqlite"):
        await tinker.RestClient(client.holder).export_session_trace(client.holder.get_session_id())


async def test_an_unknown_training_run_is_told_in_a_sentence_however_many_there_are(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await scene.model()
    known = [scene.service.models.find(run, "local")] * 5000
    monkeypatch.setattr(type(scene.service.models), "all", lambda *_: known)
    status, refusal = await scene.get("/api/v1/training_runs/nope")
    assert (
        status,
        "and 4995 more" in refusal["detail"],
        "list_training_runs" in refusal["detail"],
    ) == (
        404,
        True,
        True,
    )
    assert len(str(refusal)) < 1500
