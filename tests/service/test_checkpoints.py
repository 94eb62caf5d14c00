"""Checkpoints through the real SDK: listed, published, given a time to live, copied, deleted."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import tinker
from contract.requirements import proves
from tinker import types
from yarl import URL

from halteres.engine.folders import size_of
from halteres.errors import NotFound
from halteres.service.checkpoint_folders import LONGEST_S, SHORTEST_S, parse
from halteres.service.keys import LOCAL, KeyFile

from .live_service import DATA, KEY, STEP, LiveService, closing, prompt, serving, trainer

ONE = types.SamplingParams(max_tokens=1)


@pytest.fixture
async def training(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return await trainer(client)


@pytest.fixture
async def rest(scene: LiveService) -> tinker.RestClient:
    return await rest_of(scene)


async def rest_of(scene: LiveService, key: str = KEY) -> tinker.RestClient:
    """A client without a session; it blocks while it connects."""
    return await asyncio.to_thread(lambda: tinker.RestClient(base_url=scene.url, api_key=key))


async def stepped(training: tinker.TrainingClient) -> None:
    """Move its version on."""
    await training.forward_backward(DATA, "cross_entropy")
    await training.optim_step(STEP)


async def listed(rest: tinker.RestClient, run: str) -> dict[str, types.Checkpoint]:
    """The checkpoints of a run, by id."""
    found = (await rest.list_checkpoints(run)).checkpoints
    return {checkpoint.checkpoint_id: checkpoint for checkpoint in found}


def api_of(path: str) -> str:
    """The route of a tinker:// path."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    return f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"


async def answered(
    scene: LiveService, method: str, path: str, key: str = KEY, **body: Any
) -> tuple[int, str]:
    """Status and text of any request."""
    content = {"json": body} if body else {}
    async with scene.http.request(
        method,
        URL(scene.url + path, encoded=True),
        headers={"X-API-Key": key},
        allow_redirects=False,
        **content,
    ) as response:
        return response.status, await response.text()


# Listing


@proves("records:checkpoints")
async def test_all_three_kinds_are_listed_with_what_is_known_of_them(
    training: tinker.TrainingClient, rest: tinker.RestClient, scene: LiveService
) -> None:
    await stepped(training)
    await training.save_state("a", ttl_seconds=7200, user_metadata={"eval": "0.5"})
    await training.save_weights_for_sampler("b")
    await training.save_weights_external("c")
    found = await listed(rest, training.model_id)
    assert {name: one.checkpoint_type for name, one in found.items()} == {
        "weights/a": "training",
        "sampler_weights/b": "sampler",
        "external_weights/c": "external",
    }
    assert found["weights/a"].user_metadata == {"eval": "0.5"}
    expires = found["weights/a"].expires_at
    assert expires is not None
    assert abs(expires.timestamp() - time.time() - 7200) < 60
    assert found["sampler_weights/b"].expires_at is None
    exported = scene.service.checkpoints.folder(parse(found["external_weights/c"].tinker_path))
    assert found["external_weights/c"].size_bytes == size_of(exported) > 0
    everything = await rest.list_user_checkpoints(limit=2)
    assert [one.checkpoint_id for one in everything.checkpoints] == [
        "external_weights/c",
        "sampler_weights/b",
    ]
    assert everything.cursor is not None
    assert everything.cursor.total_count == 3


@proves("checkpoint:overwrite")
async def test_overwriting_replaces_the_weights_and_what_was_known_of_them(
    training: tinker.TrainingClient, rest: tinker.RestClient, scene: LiveService
) -> None:
    path = (await training.save_state("a", ttl_seconds=7200, user_metadata={"step": "0"})).path
    await rest.publish_checkpoint_from_tinker_path(path)
    await stepped(training)
    with pytest.raises(tinker.RequestFailedError, match="overwrite=True"):  # it is public
        await training.save_state("a")
    await training.save_state("a", overwrite=True, user_metadata={"note": "one step"})
    found = (await listed(rest, training.model_id))["weights/a"]
    assert (found.user_metadata, found.expires_at, found.public) == (
        {"note": "one step"},
        None,
        False,
    )
    assert scene.service.checkpoints.find(path, LOCAL).version == 1


@proves("records:weights-info")
async def test_weights_are_described_by_their_path(
    training: tinker.TrainingClient, rest: tinker.RestClient
) -> None:
    path = (await training.save_state("a")).path
    info = await rest.get_weights_info_by_tinker_path(path)
    assert (info.is_lora, info.lora_rank, info.train_unembed, info.optimizer_config.type) == (
        True,
        8,
        True,
        "adamw",
    )


# Deleting


@proves("checkpoint:delete")
async def test_a_deleted_checkpoint_is_gone_and_its_name_is_free(
    training: tinker.TrainingClient,
    rest: tinker.RestClient,
    client: tinker.ServiceClient,
    scene: LiveService,
) -> None:
    path = (await training.save_state("a")).path
    await rest.delete_checkpoint_from_tinker_path(path)
    assert await listed(rest, training.model_id) == {}
    assert list(scene.service.state.glob("checkpoints/*/weights/*")) == []
    assert list(scene.service.state.glob("trash/*")) == []
    assert scene.rows("SELECT path FROM checkpoints") == []
    with pytest.raises(tinker.NotFoundError, match=r"There are no weights"):
        await rest.delete_checkpoint_from_tinker_path(path)
    with pytest.raises(tinker.RequestFailedError, match="There are no weights"):
        await client.create_training_client_from_state(path)
    assert (await training.save_state("a")).path == path


async def test_a_sampler_of_deleted_weights_answers_until_the_engine_forgets_them_and_then_says_why(
    training: tinker.TrainingClient,
    rest: tinker.RestClient,
    client: tinker.ServiceClient,
    scene: LiveService,
) -> None:
    path = (await training.save_weights_for_sampler("a")).path
    sampler = await client.create_sampling_client(model_path=path)
    before = await sampler.compute_logprobs(prompt(5, 6))
    await rest.delete_checkpoint_from_tinker_path(path)
    assert await sampler.compute_logprobs(prompt(5, 6)) == before
    with pytest.raises(tinker.NotFoundError, match="There are no weights"):
        await client.create_sampling_client(model_path=path)
    await scene.host.die()
    with pytest.raises(tinker.RequestFailedError, match="was deleted"):
        await sampler.sample(prompt(5), 1, ONE)


async def test_a_sampler_never_moves_to_other_weights_that_are_saved_under_its_path(
    tmp_path: Path,
) -> None:
    """Also across a restart of the service, which knows samplers by their paths."""
    async with serving(tmp_path) as scene:
        run = await scene.model()
        path = await saved(scene, run, 1, "save_weights_for_sampler")
        sampler = {
            "session_id": run.split(":")[0],
            "sampling_session_seq_id": 0,
            "model_path": path,
        }
        _, made = await scene.post("create_sampling_session", sampler)
        assert (await answered(scene, "DELETE", api_of(path)))[0] == 204
        assert await saved(scene, run, 2, "save_weights_for_sampler") == path
    async with serving(tmp_path) as scene:
        asked = {"sampling_session_id": made["sampling_session_id"], "seq_id": 0}
        asked["prompt"] = {"chunks": [{"tokens": [5]}]}
        status, answer = await scene.post(
            "asample", {**asked, "sampling_params": {"max_tokens": 1}}
        )
        told = await scene.redeem(answer["request_id"]) if status == 200 else answer
        assert "was deleted or replaced" in str(told)


async def saved(
    scene: LiveService, run: str, seq: int, kind: str = "save_weights", **facts: Any
) -> str:
    """The path of weights named "a", saved by raw HTTP."""
    _, promised = await scene.post(kind, {"model_id": run, "seq_id": seq, "path": "a", **facts})
    return (await scene.redeem(promised["request_id"]))["path"]


async def test_what_the_end_of_a_service_left_of_a_deletion_is_no_checkpoint(
    tmp_path: Path,
) -> None:
    """A folder is renamed before its row goes; whichever was the last thing done, nothing half is
    left.
    """
    async with serving(tmp_path) as scene:
        path = await saved(scene, await scene.model(), 1)
        folder = scene.service.checkpoints.find(path, LOCAL).folder
    (tmp_path / "trash").mkdir()
    folder.rename(tmp_path / "trash" / "half")
    async with serving(tmp_path) as scene:
        assert scene.service.checkpoints.all() == []
        assert list((tmp_path / "trash").iterdir()) == []


async def test_weights_that_are_deleted_while_they_are_being_saved_are_not_listed(
    training: tinker.TrainingClient,
    rest: tinker.RestClient,
    scene: LiveService,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save = scene.engine.save

    async def save_and_lose(adapter: str, folder: str, optimizer: bool) -> Any:
        done = await save(adapter, folder, optimizer)
        shutil.rmtree(folder)
        return done

    monkeypatch.setattr(scene.engine, "save", save_and_lose)
    with pytest.raises(tinker.RequestFailedError, match="deleted while it was being saved"):
        await training.save_state("a")
    assert await listed(rest, training.model_id) == {}


# Time to live


@proves("checkpoint:ttl")
async def test_an_expired_checkpoint_is_gone_at_once_and_removed_at_the_next_look(
    training: tinker.TrainingClient,
    rest: tinker.RestClient,
    scene: LiveService,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = (await training.save_state("a", ttl_seconds=SHORTEST_S)).path
    stays = (await training.save_state("b")).path
    folder, later = scene.service.checkpoints.find(path, LOCAL).folder, time.time() + SHORTEST_S + 1
    monkeypatch.setattr("halteres.service.checkpoints.time.time", lambda: later)
    with pytest.raises(NotFound):
        scene.service.checkpoints.find(path, LOCAL)
    assert list(await listed(rest, training.model_id)) == ["weights/b"]
    await scene.service.reap(later)
    assert not folder.exists()
    assert scene.rows("SELECT path FROM checkpoints") == [(stays,)]


async def test_the_name_of_an_expired_checkpoint_is_free_before_anybody_looked(
    training: tinker.TrainingClient, scene: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = (await training.save_state("a", ttl_seconds=SHORTEST_S)).path
    later = time.time() + SHORTEST_S + 1
    monkeypatch.setattr("halteres.service.checkpoints.time.time", lambda: later)
    assert (await training.save_state("a")).path == path
    await scene.service.reap(later)
    assert scene.service.checkpoints.find(path, LOCAL).folder.is_dir()


@proves("checkpoint:ttl")
async def test_a_time_to_live_is_changed_and_taken_back(
    training: tinker.TrainingClient, rest: tinker.RestClient, scene: LiveService
) -> None:
    path = (await training.save_state("a")).path
    await rest.set_checkpoint_ttl_from_tinker_path(path, SHORTEST_S)
    expires = (await listed(rest, training.model_id))["weights/a"].expires_at
    assert expires is not None
    assert abs(expires.timestamp() - time.time() - SHORTEST_S) < 60
    await rest.set_checkpoint_ttl_from_tinker_path(path, None)
    assert (await listed(rest, training.model_id))["weights/a"].expires_at is None
    status, text = await answered(scene, "PUT", f"{api_of(path)}/ttl", other=1)
    assert (status, "no ttl_seconds" in text) == (400, True)


@pytest.mark.parametrize("ttl_s", [SHORTEST_S - 1, LONGEST_S + 1, 0, -5])
async def test_a_time_to_live_that_is_out_of_range_is_refused_and_nothing_is_saved(
    training: tinker.TrainingClient, rest: tinker.RestClient, ttl_s: int
) -> None:
    for save in (
        training.save_state,
        training.save_weights_for_sampler,
        training.save_weights_external,
    ):
        with pytest.raises(tinker.RequestFailedError, match="ttl_seconds is 3600") as caught:
            await save("a", ttl_seconds=ttl_s)
        assert caught.value.category is types.RequestErrorCategory.User
    assert await listed(rest, training.model_id) == {}
    path = (await training.save_state("b")).path
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds is 3600"):
        await rest.set_checkpoint_ttl_from_tinker_path(path, ttl_s)


# Names


NAMES = (
    ".",
    "..",
    "../x",
    "a/b",
    "/etc/passwd",
    "",
    "ä",
    "a b",
    "a\0b",
    "-a",
    ".a",
    "a" * 129,
    "a\n",
    "%2e%2e",
)


@pytest.mark.parametrize("name", NAMES)
@proves("id:path")
async def test_a_name_that_could_mean_another_place_is_refused(
    training: tinker.TrainingClient, rest: tinker.RestClient, scene: LiveService, name: str
) -> None:
    for save in (
        training.save_state,
        training.save_weights_for_sampler,
        training.save_weights_external,
    ):
        with pytest.raises(tinker.RequestFailedError, match="cannot name a checkpoint") as caught:
            await save(name)
        assert caught.value.category is types.RequestErrorCategory.User
    assert await listed(rest, training.model_id) == {}
    status, _ = await scene.post(
        "weights_info", {"tinker_path": f"tinker://{training.model_id}/weights/{name}"}
    )
    assert status in (400, 404)


@pytest.mark.parametrize("name", [name for name in NAMES if name])
async def test_a_route_with_such_a_name_is_refused(scene: LiveService, name: str) -> None:
    """Percent-encoded, so that no client resolves it before it is sent."""
    route = (
        f"/api/v1/training_runs/r/checkpoints/weights/{quote(name, safe='').replace('.', '%2E')}"
    )
    for method, end in (("DELETE", ""), ("POST", "/publish"), ("PUT", "/ttl"), ("GET", "/archive")):
        status, text = await answered(scene, method, route + end, ttl_seconds=7200)
        assert status in (400, 404), text


# Copies


@proves("checkpoint:copy")
async def test_a_copy_is_a_checkpoint_of_its_own(
    training: tinker.TrainingClient,
    rest: tinker.RestClient,
    client: tinker.ServiceClient,
    scene: LiveService,
) -> None:
    await stepped(training)
    path = (await training.save_state("a", user_metadata={"k": "v"})).path
    copy = await rest.copy_weights(path, "archive", ttl_seconds=7200)
    await rest.delete_checkpoint_from_tinker_path(path)
    run, kind, name = copy.removeprefix("tinker://").split("/")
    assert (kind, name) == ("weights", "a")
    found = (await listed(rest, run))["weights/a"]
    assert found.user_metadata == {"k": "v"}
    assert found.expires_at is not None
    assert (await rest.get_training_run(run)).lora_rank == 8
    resumed = await client.create_training_client_from_state_with_optimizer(copy)
    await stepped(resumed)
    assert scene.service.checkpoints.find((await resumed.save_state("b")).path, LOCAL).version == 2


@proves("retry:copy")
async def test_a_repeated_copy_is_made_once(scene: LiveService) -> None:
    run = await scene.model()
    path = await saved(scene, run, 1)
    asked = {"source_path": path, "destination_project_id": "p"}
    answers = [scene.post("copy_weights", asked, **{"X-Idempotency-Key": "k1"}) for _ in range(3)]
    first, *others = await asyncio.gather(*answers)
    assert others == [first, first]
    assert await scene.post("copy_weights", asked, **{"X-Idempotency-Key": "k2"}) != first
    assert len(scene.service.checkpoints.all()) == 3


async def test_a_copy_goes_into_a_free_training_run_of_a_session(scene: LiveService) -> None:
    run = await scene.model()
    path = await saved(scene, run, 1)
    session = run.split(":")[0]
    asked = {"source_path": path, "session_id": session, "model_seq_id": 4}
    assert await scene.post("copy_weights", asked) == (
        200,
        {"tinker_path": f"tinker://{session}:train:4/weights/a"},
    )
    for wrong, status, says in (
        (asked, 422, "is in use"),
        ({"source_path": path}, 400, "no destination"),
        ({"source_path": path, "session_id": "none", "model_seq_id": 1}, 404, "no session"),
        ({"source_path": "tinker://r/weights/x", "destination_project_id": "p"}, 404, "no weights"),
        ({**asked, "model_seq_id": 5, "ttl_seconds": 5}, 400, "ttl_seconds is"),
        (
            {**asked, "model_seq_id": 5, "weights_access_token": "t"},
            400,
            "no weights access tokens",
        ),
    ):
        got, answer = await scene.post("copy_weights", wrong)
        assert (got, says in answer["detail"]) == (status, True), answer


async def test_an_access_token_is_refused_with_the_way_that_works(
    training: tinker.TrainingClient, rest: tinker.RestClient
) -> None:
    path = (await training.save_state("a")).path
    with pytest.raises(tinker.BadRequestError, match="publish"):
        await rest.copy_weights(path, "p", weights_access_token="secret")


# Tenants


@asynccontextmanager
async def two_tenants(
    state: Path,
) -> AsyncIterator[tuple[LiveService, tinker.ServiceClient, tinker.ServiceClient, list[str]]]:
    """A service with keys, its two clients, and their keys."""
    keys = [KeyFile(state).create(name).text for name in ("ann", "bob")]
    async with serving(state) as scene, AsyncExitStack() as opened:
        clients: list[tinker.ServiceClient] = []
        for key in keys:
            made = await asyncio.to_thread(_connected, scene.url, key)
            clients.append(await opened.enter_async_context(closing(made)))
        yield scene, clients[0], clients[1], keys


def _connected(url: str, key: str) -> tinker.ServiceClient:
    client = tinker.ServiceClient(base_url=url, api_key=key)
    assert client.holder.get_session_id()
    return client


@proves("keys:isolation")
async def test_another_tenants_checkpoint_is_not_there(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as (scene, ann, bob, (_, key)):
        training, rest = await trainer(ann), await rest_of(scene, key)
        path = (await training.save_state("a")).path
        exported = (await training.save_weights_external("x")).path
        for method, route in (
            ("DELETE", api_of(path)),
            ("POST", f"{api_of(path)}/publish"),
            ("DELETE", f"{api_of(path)}/publish"),
            ("PUT", f"{api_of(path)}/ttl"),
            ("GET", f"{api_of(path)}/archive"),
            ("GET", f"{api_of(exported)}/external_weights_urls"),
            ("GET", f"/api/v1/training_runs/{training.model_id}/checkpoints"),
        ):
            assert (await answered(scene, method, route, key, ttl_seconds=7200))[0] == 404, route
        for call in (rest.get_weights_info_by_tinker_path(path), rest.copy_weights(path, "p")):
            with pytest.raises(tinker.NotFoundError):
                await call
        with pytest.raises(tinker.RequestFailedError, match="There are no weights"):
            await bob.create_training_client_from_state(path)
        assert (await rest.list_user_checkpoints()).checkpoints == []
        alias = path.replace(":train:", "_train_")  # the same folder by another name
        assert (await answered(scene, "DELETE", api_of(alias), key))[0] == 404


@proves("checkpoint:publish")
async def test_a_public_checkpoint_is_loaded_and_described_by_everybody_and_changed_by_its_owner(
    tmp_path: Path,
) -> None:
    async with two_tenants(tmp_path) as (scene, ann, bob, (anns, key)):
        path = (await (await trainer(ann)).save_state("a")).path
        owner, rest = await rest_of(scene, anns), await rest_of(scene, key)
        for _ in range(2):  # it is no error that it is public already
            await owner.publish_checkpoint_from_tinker_path(path)
        assert (await rest.get_weights_info_by_tinker_path(path)).lora_rank == 8
        assert await (await bob.create_sampling_client(model_path=path)).compute_logprobs(
            prompt(5, 6)
        )
        theirs = await bob.create_training_client_from_state_with_optimizer(path)
        await stepped(theirs)
        for method, end in (
            ("DELETE", ""),
            ("POST", "/publish"),
            ("DELETE", "/publish"),
            ("PUT", "/ttl"),
        ):
            status, refusal = await answered(
                scene, method, api_of(path) + end, key, ttl_seconds=7200
            )
            assert (status, "only its owner" in str(refusal)) == (403, True)
        copy = await rest.copy_weights(path, "p")
        assert [one.tinker_path for one in (await rest.list_user_checkpoints()).checkpoints] == [
            copy
        ]
        await owner.unpublish_checkpoint_from_tinker_path(path)
        with pytest.raises(tinker.NotFoundError):
            await rest.get_weights_info_by_tinker_path(path)


async def test_only_weights_of_the_same_training_run_are_proposed(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    first, second = await trainer(client), await trainer(client, seed=1)
    saved = (await first.save_state("c9")).path
    says = {
        f"{saved.removesuffix('c9')}c8": f"Did you mean {saved}?",
        f"tinker://{first.model_id}/weights/{'x' * 60}": f"Did you mean {saved}?",
        saved.replace(first.model_id, second.model_id): "Its training run has none.",
    }
    for path, told in says.items():
        status, refusal = await scene.post("weights_info", {"tinker_path": path})
        assert (status, told in refusal["detail"]) == (404, True), refusal
        assert (first.model_id in refusal["detail"]) == (first.model_id in path)
