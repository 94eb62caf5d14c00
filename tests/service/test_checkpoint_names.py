"""A second save under a name of one's own training run: the name holds the newer weights, the older
ones get a number.

Our choice: the SDK says only what `overwrite` does. The script of GEM saves its last state under a
number that it may have saved before.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import tinker
from contract.requirements import proves
from tinker import types

from halteres.engine.protocol import Weights
from halteres.service import checkpoints as store
from halteres.service.checkpoint_folders import parse
from halteres.service.checkpoints import Checkpoints
from halteres.service.durable.journal import Journal
from halteres.service.keys import LOCAL
from halteres.service.limits import Allowances, Limits
from halteres.service.sampling.sessions import Samplers
from halteres.service.service import Options

from .live_service import DATA, STEP, LiveService, closing, prompt, serving, trainer
from .test_checkpoints import listed, rest_of, stepped
from .test_durability import sampled_tokens
from .test_order import passed
from .test_order import stepped as stepped_raw

WAIT_S = 20
SEEDED = types.SamplingParams(max_tokens=8, seed=3)

Kind = Literal["weights", "sampler_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights")
ROUTES = {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}


async def saved(training: tinker.TrainingClient, kind: Kind, name: str) -> str:
    """The path of weights saved under a name."""
    save = training.save_state if kind == "weights" else training.save_weights_for_sampler
    return (await save(name)).path


async def drawn(sampling: tinker.SamplingClient) -> list[int]:
    return list((await sampling.sample(prompt(5, 6), 1, SEEDED)).sequences[0].tokens)


def versions(scene: LiveService) -> dict[str, int]:
    """Kind and name of every checkpoint, with the optimiser steps in it, oldest first."""
    return {
        f"{one.path.kind}/{one.path.name}": one.version for one in scene.service.checkpoints.all()
    }


@pytest.mark.parametrize("kind", KINDS)
@proves("checkpoint:saved-again")
async def test_a_name_saved_again_holds_the_newer_weights_and_the_older_are_numbered_in_the_order_of_saving(
    scene: LiveService, client: tinker.ServiceClient, kind: Kind
) -> None:
    training, rest = await trainer(client), await rest_of(scene)
    paths: list[str] = []
    for _ in range(3):
        paths.append(await saved(training, kind, "a"))
        await stepped(training)
    assert len(set(paths)) == 1
    assert versions(scene) == {f"{kind}/a.1": 0, f"{kind}/a.2": 1, f"{kind}/a": 2}
    assert list(await listed(rest, training.model_id)) == [
        f"{kind}/a.1",
        f"{kind}/a.2",
        f"{kind}/a",
    ]
    older = await client.create_training_client_from_state(f"{paths[0]}.2")
    assert older.get_info().lora_rank == 8
    await rest.delete_checkpoint_from_tinker_path(f"{paths[0]}.1")
    await saved(training, kind, "a")
    assert versions(scene) == {f"{kind}/a.2": 1, f"{kind}/a.3": 2, f"{kind}/a": 3}


@pytest.mark.parametrize("kind", KINDS)
async def test_state_that_was_saved_again_is_resumed_as_it_was(
    scene: LiveService, client: tinker.ServiceClient, kind: Kind
) -> None:
    training = await trainer(client)
    await stepped(training)
    path = await saved(training, kind, "a")
    loss = (await training.forward(DATA, "cross_entropy")).metrics["loss:sum"]
    await stepped(training)
    await saved(training, kind, "a")
    newer = (await training.forward(DATA, "cross_entropy")).metrics["loss:sum"]
    for name, expected in ((f"{path}.1", loss), (path, newer)):
        resumed = await client.create_training_client_from_state(name)
        assert (await resumed.forward(DATA, "cross_entropy")).metrics["loss:sum"] == expected
    assert loss != newer


@pytest.mark.parametrize("kind", KINDS)
async def test_a_number_that_is_taken_is_skipped(
    scene: LiveService, client: tinker.ServiceClient, kind: Kind
) -> None:
    training = await trainer(client)
    for name in ("a", "a.1", "a"):
        await saved(training, kind, name)
        await stepped(training)
    assert versions(scene) == {f"{kind}/a.2": 0, f"{kind}/a.1": 1, f"{kind}/a": 2}


@pytest.mark.parametrize("kind", KINDS)
@proves("checkpoint:saved-again", "sample:snapshot")
async def test_sampling_sessions_keep_the_weights_they_were_opened_with(
    scene: LiveService, client: tinker.ServiceClient, kind: Kind
) -> None:
    training = await trainer(client)
    used = await client.create_sampling_client(model_path=await saved(training, kind, "a"))
    before = await drawn(used)
    unused = await client.create_sampling_client(
        model_path=await saved(training, "sampler_weights", "b")
    )
    await stepped(training)
    newer = await client.create_sampling_client(model_path=await saved(training, kind, "a"))
    await saved(training, "sampler_weights", "b")
    await scene.host.die()  # what the engine held is loaded again from where it lies
    assert await drawn(used) == await drawn(unused) == before
    assert await drawn(newer) != before


async def test_overwriting_still_replaces(scene: LiveService, client: tinker.ServiceClient) -> None:
    training = await trainer(client)
    await saved(training, "weights", "a")
    await stepped(training)
    await training.save_state("a", overwrite=True)
    assert versions(scene) == {"weights/a": 1}


@pytest.mark.parametrize("kind", KINDS)
@proves("checkpoint:saved-again", "retry:no-lasting-409")
async def test_a_name_that_a_publication_an_export_or_somebody_elses_file_holds_is_refused(
    scene: LiveService, client: tinker.ServiceClient, kind: Kind
) -> None:
    training, rest = await trainer(client), await rest_of(scene)
    public = await saved(training, kind, "public")
    await rest.publish_checkpoint_from_tinker_path(public)
    foreign = parse(public.replace("public", "foreign")).folder(scene.service.state)
    shutil.copytree(scene.service.checkpoints.find(public, LOCAL).folder, foreign)
    # known by its folder alone
    assert scene.service.checkpoints.at(public.replace("public", "foreign"))
    await training.save_weights_external("export")
    for name in ("public", "foreign"):
        with pytest.raises(tinker.RequestFailedError, match=r"exists.*Choose another name"):
            await saved(training, kind, name)
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        await training.save_weights_external("export")
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        await saved(training, kind, "public")  # one refusal does not free it
    assert sorted(versions(scene)) == [
        "external_weights/export",
        f"{kind}/foreign",
        f"{kind}/public",
    ]
    assert await saved(training, kind, "free")


async def test_weights_published_while_newer_ones_are_being_saved_stay_where_they_are(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training, rest = await trainer(client), await rest_of(scene)
    path = await saved(training, "weights", "a")
    held = scene.engine.block("save")
    again = training.save_state("a")
    async with asyncio.timeout(WAIT_S):
        await held.inside()
        await rest.publish_checkpoint_from_tinker_path(path)
        held.release()
        with pytest.raises(tinker.RequestFailedError, match="exists"):
            await again
    assert versions(scene) == {"weights/a": 0}
    assert [one.name for one in parse(path).folder(scene.service.state).parent.iterdir()] == ["a"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_save_that_fails_changes_no_name(
    scene: LiveService, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    training = await trainer(client)
    path = await saved(training, kind, "a")

    async def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(scene.engine, "save" if kind == "weights" else "save_snapshot", full)
        with pytest.raises(tinker.RequestFailedError, match="No space left"):
            await saved(training, kind, "a")
    assert versions(scene) == {f"{kind}/a": 0}
    assert await saved(training, kind, "a") == path
    assert versions(scene) == {f"{kind}/a.1": 0, f"{kind}/a": 0}


async def test_older_weights_count_towards_a_tenants_storage(tmp_path: Path) -> None:
    async with serving(tmp_path / "free") as scene, closing(await scene.client()) as client:
        size = scene.service.checkpoints.find(
            await saved(await trainer(client), "weights", "a"), LOCAL
        ).size_bytes
    room = Options(limits=Allowances(default=Limits(checkpoint_bytes=int(2.5 * size))))
    async with serving(tmp_path / "full", room) as scene, closing(await scene.client()) as client:
        training = await trainer(client)
        for _ in range(2):
            await saved(training, "weights", "a")
        with pytest.raises(tinker.RequestFailedError, match="no room"):
            await saved(training, "weights", "a")
        await training.save_state("a", overwrite=True)
        assert len(versions(scene)) == 2


async def test_a_name_too_long_for_a_number_is_refused(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    await saved(training, "weights", "a" * 128)
    with pytest.raises(tinker.RequestFailedError, match="exists"):
        await saved(training, "weights", "a" * 128)


@proves("checkpoint:saved-again")
async def test_a_loop_whose_last_state_has_the_number_of_a_step_before_keeps_all_of_it(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    """Seed 003's loop: state before step s where save_every divides s, sampler weights every step,
    state at the end.
    """
    training, max_steps, save_every, sampled = await trainer(client), 3, 1, list[list[int]]()
    for step in range(max_steps):
        if step and step % save_every == 0:
            await saved(training, "weights", f"{step:06d}")
        sampling = await client.create_sampling_client(
            model_path=await saved(training, "sampler_weights", f"{step:06d}")
        )
        sampled.append(await drawn(sampling))
        await training.forward_backward(DATA, "cross_entropy")
        await training.optim_step(STEP)
    last = await saved(training, "weights", f"{max_steps - 1:06d}")
    assert last.endswith("/weights/000002")
    assert versions(scene) == {
        "sampler_weights/000000": 0,
        "weights/000001": 1,
        "sampler_weights/000001": 1,
        "weights/000002.1": 2,
        "sampler_weights/000002": 2,
        "weights/000002": 3,
    }


# What kill -9 leaves: the state directory, copied at an instant


def _after(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch, Callable[[], None]], None]:
    """What makes a copy of the disk right after a step that is awaited."""

    def arrange(patch: pytest.MonkeyPatch, copy: Callable[[], None]) -> None:
        original = getattr(owner, name)

        async def step(*arguments: Any, **options: Any) -> Any:
            made = await original(*arguments, **options)
            copy()
            return made

        patch.setattr(owner, name, step)

    return arrange


def _after_call(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch, Callable[[], None]], None]:
    def arrange(patch: pytest.MonkeyPatch, copy: Callable[[], None]) -> None:
        original = getattr(owner, name)

        def step(*arguments: Any, **options: Any) -> None:
            original(*arguments, **options)
            copy()

        patch.setattr(owner, name, step)

    return arrange


INSTANTS = {
    "the older one's new row": _after(Journal, "put"),
    "its folder": _after_call(store, "copy_linked"),
    "its samplers": _after(Samplers, "rename"),
    "the newer one's folder": _after_call(store, "put"),
    "the newer one's row": _after(Checkpoints, "add"),
}


@asynccontextmanager
async def copied_at(
    scene: LiveService, instant: str, monkeypatch: pytest.MonkeyPatch, copy: Path
) -> AsyncIterator[None]:
    """The state directory is copied when that was done for the first time inside the block."""

    def once() -> None:
        if not copy.exists():
            shutil.copytree(scene.service.state, copy)

    with monkeypatch.context() as patch:
        INSTANTS[instant](patch, once)
        yield
    assert copy.exists()


@pytest.mark.parametrize("instant", INSTANTS)
@pytest.mark.parametrize("kind", KINDS)
@proves("checkpoint:saved-again", "checkpoint:whole")
async def test_a_save_that_was_killed_after_any_of_its_steps_is_done_again_and_names_move_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, instant: str
) -> None:
    async with serving(tmp_path / "first") as scene:
        run = await scene.model()
        path = await _saved(scene, kind, run, 1)
        sampler = {
            "session_id": run.split(":")[0],
            "sampling_session_seq_id": 0,
            "model_path": path,
        }
        session = (await scene.post("create_sampling_session", sampler))[1]["sampling_session_id"]
        before = await _sampled(scene, session, 0)
        await scene.redeem(await passed(scene, run, 2))
        await scene.redeem(await stepped_raw(scene, run, 3))
        await scene.service.journal.flush()
        async with copied_at(scene, instant, monkeypatch, tmp_path / "killed"):
            assert await _saved(scene, kind, run, 4) == path
        undisturbed = versions(scene)
        assert undisturbed == {f"{kind}/a.1": 0, f"{kind}/a": 1}
    async with serving(tmp_path / "killed") as scene:
        assert await _saved(scene, kind, run, 4) == path  # the same request: its first answer
        await scene.service.journal.flush()
        assert scene.rows("SELECT state FROM requests WHERE state != 'done'") == []
        assert versions(scene) == undisturbed
        folder = parse(path).folder(scene.service.state).parent
        assert sorted(place.name for place in folder.iterdir()) == ["a", "a.1"]
        assert await _sampled(scene, session, 1) == before
        for name, version in (("a", 1), ("a.1", 0)):
            assert (
                await scene.engine.hold(
                    "look", Weights(name="", version=0, folder=str(folder / name))
                )
                == version
            )


@pytest.mark.parametrize("kind", KINDS)
async def test_saves_executed_again_after_a_restart_move_no_name_again(
    tmp_path: Path, kind: Kind
) -> None:
    async with serving(tmp_path) as scene:
        run = await scene.model()
        for seq in (1, 2):
            await _saved(scene, kind, run, seq)
        undisturbed = versions(scene)
        await scene.service.journal.transact(
            lambda connection: connection.exec_driver_sql(
                f"UPDATE requests SET state = 'accepted' WHERE kind = '{ROUTES[kind]}'"  # noqa: S608 - our own text
            )
        )
    async with serving(tmp_path) as scene:
        paths = {await _saved(scene, kind, run, seq) for seq in (1, 2)}
        assert paths == {f"tinker://{run}/{kind}/a"}
        assert versions(scene) == undisturbed == {f"{kind}/a.1": 0, f"{kind}/a": 0}


async def _saved(scene: LiveService, kind: Kind, run: str, seq: int) -> str:
    """The path of weights named "a", saved by raw HTTP."""
    _, promised = await scene.post(ROUTES[kind], {"model_id": run, "seq_id": seq, "path": "a"})
    return (await scene.redeem(promised["request_id"]))["path"]


async def _sampled(scene: LiveService, session: str, seq: int) -> list[list[int]]:
    asked: dict[str, Any] = {
        "sampling_session_id": session,
        "seq_id": seq,
        "prompt": {"chunks": [{"tokens": [5]}]},
    }
    _, promised = await scene.post(
        "asample", {**asked, "sampling_params": {"max_tokens": 8, "seed": 3}}
    )
    return sampled_tokens(await scene.redeem(promised["request_id"]))
