"""What an engine held comes back: adapters, unnamed weights, requests under way. We chose it; no
protocol asks for it.

The scripted engine stands in for weights: its losses depend on the adapter's policy version alone,
so that a lost or a repeated step shows in every number.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import tinker
from contract.requirements import proves
from deadlines import until
from tinker import types

from halteres.errors import NotReady, ServerError, UserError
from halteres.service.durable.journal import MODELS
from halteres.service.sampling.snapshots import MAX_SPILLED
from halteres.service.service import Options

from .live_service import DATA, STEP, LiveService, closing, prompt, serving, trainer
from .test_order import passed, stepped

WAIT_S = 20
SEEDED = types.SamplingParams(max_tokens=4, seed=3)
AT_ONCE = Options(replay_s=0.0)  # a restore point after every step
NEVER = Options(replay_s=1e9)


async def version(training: tinker.TrainingClient) -> float:
    """The policy version after one more step."""
    passed = training.forward_backward(DATA, "cross_entropy")
    metrics = (await training.optim_step(STEP)).metrics
    await passed
    assert metrics is not None
    return metrics["policy_version:max"]


async def tokens(sampling: tinker.SamplingClient) -> list[list[int]]:
    drawn = await sampling.sample(prompt(5, 6), 2, SEEDED)
    return [list(sequence.tokens) for sequence in drawn.sequences]


@pytest.mark.parametrize("options", [AT_ONCE, NEVER], ids=["by restore points", "by replay"])
@proves("durable:kill-engine")
async def test_training_goes_on_after_the_engine_died_as_if_nothing_had_happened(
    tmp_path: Path, options: Options
) -> None:
    async with serving(tmp_path, options) as scene, closing(await scene.client()) as client:
        training = await trainer(client)
        assert [await version(training) for _ in range(3)] == [1, 2, 3]
        # its gradient waits when the engine dies
        await training.forward_backward(DATA, "cross_entropy")
        await scene.host.die()
        assert (await training.optim_step(STEP)).metrics["policy_version:max"] == 4
        assert await version(training) == 5


async def test_the_request_under_way_when_the_engine_dies_is_executed_once_more(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    undisturbed = (await training.forward_backward(DATA, "cross_entropy")).metrics["loss:sum"]
    for operation in ("forward_backward", "optim_step"):
        held = scene.engine.block(operation)
        under_way = training.forward_backward(DATA, "cross_entropy")
        step = training.optim_step(STEP)
        async with asyncio.timeout(WAIT_S):
            await held.inside()
            await scene.host.die()
            loss = (await under_way).metrics["loss:sum"]
            metrics = (await step).metrics
        if operation == "forward_backward":
            assert loss == undisturbed
    assert metrics["policy_version:max"] == 2


async def test_unnamed_weights_are_sampled_from_after_the_engine_died(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    first = await training.save_weights_and_get_sampling_client()
    await version(training)
    second = await training.save_weights_and_get_sampling_client()
    await version(training)
    before = [await tokens(first), await tokens(second)]
    assert before[0] != before[1]
    await scene.host.die()
    assert [await tokens(first), await tokens(second)] == before
    assert await version(training) == 3


async def test_a_restore_point_keeps_the_unnamed_weights_before_it(tmp_path: Path) -> None:
    async with serving(tmp_path, AT_ONCE) as scene, closing(await scene.client()) as client:
        training = await trainer(client)
        await version(training)
        sampling = await training.save_weights_and_get_sampling_client()
        before = await tokens(sampling)
        await version(training)
        await version(training)
        await scene.host.die()
        assert await tokens(sampling) == before
        # loaded from its folder: nothing had to be replayed
        assert scene.engine.calls["optim_step"] == 0


async def test_of_very_many_unnamed_weights_the_oldest_say_that_they_are_gone(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, AT_ONCE) as scene, closing(await scene.client()) as client:
        training = await trainer(client)
        sampling = await training.save_weights_and_get_sampling_client()
        for _ in range(MAX_SPILLED + 1):
            await version(training)
            await training.save_weights_and_get_sampling_client()
        await version(training)
        await scene.host.die()
        with pytest.raises(tinker.RequestFailedError, match="many newer ones took their place"):
            await sampling.sample(prompt(5), 1, SEEDED)


@proves("durable:kill-service")
async def test_after_a_restart_open_requests_are_executed_under_the_ids_that_were_given(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as scene:
        model = await scene.model()
        done = [await passed(scene, model, 1), await stepped(scene, model, 2)]
        outcomes = [await scene.redeem(request) for request in done]
        held = scene.engine.block("forward_backward")
        under_way = await passed(scene, model, 3)
        waiting = [await stepped(scene, model, 4), await stepped(scene, model, 6)]
        async with asyncio.timeout(WAIT_S):
            await held.inside()
    async with serving(tmp_path) as scene:
        async with asyncio.timeout(WAIT_S):
            assert [await scene.redeem(request) for request in done] == outcomes
            assert isinstance(await scene.redeem(under_way), bytes)
            assert (await scene.redeem(waiting[0]))["metrics"]["policy_version:max"] == 2
            assert await passed(scene, model, 3) == under_way
            await scene.redeem(await passed(scene, model, 5))
            assert (await scene.redeem(waiting[1]))["metrics"]["policy_version:max"] == 3
        # An answer may be read before its row is committed: a crash in between costs one more
        # execution, no result.
        await until(lambda: scene.rows("SELECT state FROM requests WHERE state != 'done'") == [])


@proves("durable:known-again")
async def test_after_a_restart_models_and_samplers_named_or_not_go_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as scene, closing(await scene.client(halteres_run="r1")) as client:
        training = await trainer(client)
        await version(training)
        sampling = await training.save_weights_and_get_sampling_client()
        before = await tokens(sampling)
        ids = training.model_id, sampling._sampling_session_id
    async with serving(tmp_path) as scene:
        body = {
            "prompt": {"chunks": [{"tokens": [5, 6]}]},
            "num_samples": 2,
            "sampling_session_id": ids[1],
        }
        body |= {"seq_id": 70, "sampling_params": {"max_tokens": 4, "seed": 3}}
        _, promised = await scene.post("asample", body)
        drawn = await scene.redeem(promised["request_id"])
        assert isinstance(drawn, bytes)
        assert sampled_tokens(drawn) == before
        assert (await scene.get("/halteres/v1/info"))[1]["policies"] == {"r1": 1}
        assert isinstance(await scene.redeem(await passed(scene, ids[0], 4)), bytes)
        assert (await scene.redeem(await stepped(scene, ids[0], 5)))["metrics"][
            "policy_version:max"
        ] == 2


@proves("durable:journal")
async def test_a_sample_is_drawn_again_with_the_same_bytes_after_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as scene:
        session = await scene.session()
        asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "halteres/tiny"}
        _, made = await scene.post("create_sampling_session", asked)
        body: dict[str, Any] = {"sampling_session_id": made["sampling_session_id"], "seq_id": 1}
        # no seed: one is drawn
        body |= {"prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {"max_tokens": 8}}
        _, promised = await scene.post("asample", body)
        drawn = await scene.redeem(promised["request_id"])
        held = scene.engine.block("sample")
        _, open_still = await scene.post("asample", {**body, "seq_id": 2})
        async with asyncio.timeout(WAIT_S):
            await held.inside()
    async with serving(tmp_path) as scene:
        assert await scene.redeem(promised["request_id"]) == drawn
        assert len(await scene.redeem(open_still["request_id"])) > 10
        assert (await scene.post("asample", body))[1]["request_id"] == promised["request_id"]


async def test_a_save_that_was_interrupted_after_its_folder_was_written_is_no_conflict_with_itself(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as scene:
        model = await scene.model()
        save = {"model_id": model, "seq_id": 1, "path": "a"}
        request = (await scene.post("save_weights", save))[1]["request_id"]
        outcome = await scene.redeem(request)
        scene.service.journal.post(
            lambda connection: connection.exec_driver_sql(
                "UPDATE requests SET state = 'accepted' WHERE seq = 1"
            )
        )
    async with serving(tmp_path) as scene:
        assert await scene.redeem(request) == outcome
        assert [one.path.name for one in scene.service.checkpoints.all()] == ["a"]


async def test_what_was_loaded_comes_back_though_its_path_now_holds_other_weights(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    await version(training)
    path = (await training.save_state("a")).path
    other = await client.create_training_client_from_state_with_optimizer(path)
    assert [await version(training) for _ in range(3)] == [2, 3, 4]
    await training.save_state("a", overwrite=True)
    await scene.host.die()
    assert await version(other) == 2


async def test_a_request_under_which_engines_keep_dying_fails_and_the_model_goes_on(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    held = scene.engine.block("forward_backward")
    poison = training.forward_backward([*DATA, *DATA], "cross_entropy")
    async with asyncio.timeout(WAIT_S):
        for _ in range(3):
            await held.inside()
            await scene.host.die()
            held = scene.engine.block("forward_backward")
        held.release()
    with pytest.raises(tinker.RequestFailedError, match="died 3 times") as caught:
        await poison
    assert caught.value.category is types.RequestErrorCategory.Server
    assert await version(training) == 1


async def test_a_failed_pass_is_not_replayed_and_a_refused_step_is(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    scene.engine.fail_next("forward_backward", UserError("no such datum"))
    with pytest.raises(tinker.RequestFailedError):
        await training.forward_backward(DATA, "cross_entropy")
    with pytest.raises(tinker.RequestFailedError, match="no gradient"):
        await training.optim_step(STEP)
    assert await version(training) == 1
    await scene.host.die()
    assert await version(training) == 2
    assert scene.engine.calls["forward_backward"] == 2
    assert scene.engine.calls["optim_step"] == 3


@proves("sample:inflight", "sample:snapshot")
async def test_weights_in_flight_move_and_a_snapshot_does_not(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    session = client.holder.get_session_id()
    training = await trainer(client)
    save = {"model_id": training.model_id, "sampling_session_seq_id": 50, "kind": "inflight"}
    _, promised = await scene.post("save_weights_for_sampler", {**save, "seq_id": 1})
    sampler = (await scene.redeem(promised["request_id"]))["sampling_session_id"]
    assert sampler == f"{session}:sample:50"
    drawn = [await drawn_by(scene, sampler, 1)]
    for seq in (2, 3):
        await scene.redeem(await (passed, stepped)[seq - 2](scene, training.model_id, seq))
    drawn.append(await drawn_by(scene, sampler, 2))
    _, promised = await scene.post(
        "save_weights_for_sampler", {**save, "seq_id": 4, "sampling_session_seq_id": 51}
    )
    await scene.redeem(promised["request_id"])
    drawn.append(await drawn_by(scene, sampler, 3))
    assert drawn[0] == drawn[1] != drawn[2]


@proves("session:finish")
async def test_adapters_of_a_finished_session_leave_the_engine_and_come_back_when_they_are_asked_for(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as scene:
        session = await scene.session()
        model = await scene.model(session)
        await scene.redeem(await passed(scene, model, 1))
        await scene.redeem(await stepped(scene, model, 2))
        await scene.post(f"sessions/{session}/finish", {})
        assert scene.engine.calls["drop"] >= 1
        assert model not in scene.engine._adapters
        await scene.redeem(await passed(scene, model, 3))
        assert (await scene.redeem(await stepped(scene, model, 4)))["metrics"][
            "policy_version:max"
        ] == 2


async def test_settled_requests_before_the_restore_point_are_forgotten_in_time(
    tmp_path: Path,
) -> None:
    options = Options(replay_s=0.0, keep_requests_s=0.0, reap_s=1e9)
    async with serving(tmp_path, options) as scene:
        model = await scene.model()
        for seq in (1, 3):
            await scene.redeem(await passed(scene, model, seq))
            await scene.redeem(await stepped(scene, model, seq + 1))
        last = await passed(scene, model, 5)
        await scene.redeem(last)
        await scene.service.reap(time.time() + 60)
        assert [seq for (seq,) in scene.rows("SELECT seq FROM requests")] == [5]
        assert [place.name for place in (tmp_path / "points").glob("*/*")] == ["4"]
    async with serving(tmp_path, options) as scene:
        assert (await scene.redeem(await stepped(scene, model, 6)))["metrics"][
            "policy_version:max"
        ] == 3


async def test_a_wall_clock_that_jumps_by_days_takes_no_restore_point_from_a_live_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        serving(tmp_path, Options(replay_s=0.0, reap_s=0.01)) as scene,
        asyncio.timeout(WAIT_S),
    ):
        model = await scene.model()
        await scene.redeem(await passed(scene, model, 1))
        await scene.redeem(await stepped(scene, model, 2))
        looks, reap = 0, scene.service.reap

        async def counted(now: float) -> None:
            nonlocal looks
            await reap(now)
            looks += 1

        monkeypatch.setattr(scene.service, "reap", counted)
        ahead = time.time() + 2 * 86400
        monkeypatch.setattr(time, "time", lambda: ahead)
        await until(lambda: looks > 2)
        assert list((tmp_path / "points").glob("*/*"))
        await scene.redeem(await passed(scene, model, 3))
        assert (await scene.redeem(await stepped(scene, model, 4)))["metrics"][
            "policy_version:max"
        ] == 2


async def test_an_adapter_leaves_the_engine_in_an_earlier_look_than_it_is_forgotten(
    tmp_path: Path,
) -> None:
    """A service that was itself stopped for days finds every client silent, and has not read what
    they sent.
    """
    async with serving(tmp_path, AT_ONCE) as scene:
        model = await scene.model()
        await scene.redeem(await passed(scene, model, 1))
        await scene.redeem(await stepped(scene, model, 2))
        found = scene.service.models.of_id(model)
        assert found is not None
        await until(lambda: found.queue.idle)
        await scene.service.reap(time.time() + 3 * 86400)
        await scene.redeem(await passed(scene, model, 3))
        assert (await scene.redeem(await stepped(scene, model, 4)))["metrics"][
            "policy_version:max"
        ] == 2


@proves("session:silent")
async def test_an_adapter_that_nobody_asked_for_in_days_is_forgotten_and_says_so(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, AT_ONCE) as scene:
        model = await scene.model()
        await scene.redeem(await passed(scene, model, 1))
        await scene.redeem(await stepped(scene, model, 2))
        found = scene.service.models.of_id(model)
        assert found is not None
        await until(lambda: found.queue.idle)
        for _ in range(2):  # it leaves the engine, then it is forgotten
            await scene.service.reap(time.time() + 3 * 86400)
        assert scene.rows("SELECT seq FROM requests") == []
        assert not list((tmp_path / "points").glob("*/*"))
        assert (
            "Resume from a checkpoint"
            in (await scene.redeem(await passed(scene, model, 3)))["error"]
        )
    async with serving(tmp_path, AT_ONCE) as scene, asyncio.timeout(WAIT_S):
        assert (
            "Resume from a checkpoint"
            in (await scene.redeem(await passed(scene, model, 4)))["error"]
        )


async def test_a_journal_of_another_version_is_refused_with_a_sentence(tmp_path: Path) -> None:
    async with serving(tmp_path) as scene:
        scene.service.journal.post(
            lambda connection: connection.exec_driver_sql("PRAGMA user_version = 1")
        )
    with pytest.raises(Exception, match="another version of Halteres"):
        async with serving(tmp_path):
            pass


async def test_an_outcome_that_could_not_be_recorded_at_once_is_not_lost_to_a_replay(
    scene: LiveService, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = await trainer(client)
    await training.forward_backward(DATA, "cross_entropy")
    record, refusals = scene.service.journal._record_ended, 0

    async def refused() -> None:
        nonlocal refusals
        refusals += 1
        if refusals == 1:
            raise NotReady("The disk is full.")
        await record()

    monkeypatch.setattr(scene.service.journal, "_record_ended", refused)
    await training.optim_step(STEP)
    await scene.host.die()
    assert await version(training) == 2
    assert refusals > 1


async def test_a_load_that_fails_half_way_leaves_the_adapter_as_it_was(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    assert await version(training) == 1
    path = (await training.save_state("one")).path
    assert await version(training) == 2
    scene.engine.fail_next("save", ServerError("no room"))
    with pytest.warns(FutureWarning), pytest.raises(tinker.RequestFailedError, match="no room"):
        await training.load_state_with_optimizer(path)
    assert await version(training) == 3


async def test_a_load_whose_restore_point_is_recorded_and_not_its_outcome_is_done_again(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as scene:
        model = await scene.model()
        await scene.redeem(await passed(scene, model, 1))
        await scene.redeem(await stepped(scene, model, 2))
        save = {"model_id": model, "seq_id": 3, "path": "a"}
        path = (await scene.redeem((await scene.post("save_weights", save))[1]["request_id"]))[
            "path"
        ]
        load = {"model_id": model, "seq_id": 4, "path": path, "optimizer": True}
        request = (await scene.post("load_weights", load))[1]["request_id"]
        outcome = await scene.redeem(request)
        await scene.service.journal.flush()
        scene.service.journal.post(
            lambda connection: connection.exec_driver_sql(
                "UPDATE requests SET state = 'accepted' WHERE seq = 4"
            )
        )
    async with serving(tmp_path) as scene, asyncio.timeout(WAIT_S):
        assert await scene.redeem(request) == outcome
        await scene.redeem(await passed(scene, model, 5))
        assert (await scene.redeem(await stepped(scene, model, 6)))["metrics"][
            "policy_version:max"
        ] == 2


async def test_a_custom_loss_of_an_earlier_version_is_named_where_it_cannot_be_taken_again(
    tmp_path: Path,
) -> None:
    """The rest of the service goes on."""
    datum_of_json = {
        "model_input": {"chunks": [{"tokens": [5, 6]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": [6, 7], "dtype": "int64"},
            "weights": {"data": [1.0, 1.0], "dtype": "float32"},
        },
    }
    async with serving(tmp_path, NEVER) as scene:
        model, other = await scene.model(), await scene.model()
        body = {
            "model_id": model,
            "seq_id": 1,
            "forward_backward_input": {"data": [datum_of_json], "loss_fn": "cross_entropy"},
        }
        status, promised = await scene.post("forward_backward", body)
        assert status == 200, promised
        assert isinstance(await scene.redeem(promised["request_id"]), bytes)
        await scene.redeem(await stepped(scene, model, 2))
        await scene.service.journal.flush()
        scene.service.journal.post(
            lambda connection: connection.exec_driver_sql(
                "UPDATE requests SET body = CAST(REPLACE(CAST(body AS TEXT), 'cross_entropy', "
                "'custom') AS BLOB) WHERE kind = 'forward_backward'"
            )
        )
    async with serving(tmp_path, NEVER) as scene:
        outcome = await scene.redeem(await stepped(scene, model, 3))
        assert outcome["category"] == "server"
        assert all(
            part in outcome["error"] for part in (model, "request 1", "custom", "save_state")
        )
        assert isinstance(await scene.redeem(await passed(scene, other, 1)), bytes)
        assert "metrics" in await scene.redeem(await stepped(scene, other, 2))


@pytest.mark.parametrize("who_dies", ["engine", "service"])
async def test_a_restore_point_whose_replacement_was_killed_between_the_renames_is_put_back(
    tmp_path: Path, who_dies: str
) -> None:
    """As if a load was executed once more, and its process killed while it wrote the point anew."""

    def points() -> list[Path]:
        return list((tmp_path / "points").glob("*/*"))

    def move_away() -> None:
        (point,) = points()
        away = point.parent / ".old-1"
        away.mkdir()
        point.rename(away / point.name)

    async def second_step(scene: LiveService, model: str) -> int:
        await scene.redeem(await passed(scene, model, 3))
        answer = await scene.redeem(await stepped(scene, model, 4))
        return answer["metrics"]["policy_version:max"]

    options = Options(replay_s=0.0)
    async with serving(tmp_path, options) as scene:
        model = await scene.model()
        await scene.redeem(await passed(scene, model, 1))
        await scene.redeem(await stepped(scene, model, 2))
        await until(lambda: len(points()) == 1, within_s=WAIT_S)
        if who_dies == "engine":
            move_away()
            await scene.host.die()
            assert await second_step(scene, model) == 2
    if who_dies == "service":
        move_away()
        async with serving(tmp_path, options) as scene:
            assert await second_step(scene, model) == 2


async def test_the_restore_point_of_a_load_is_written_once(tmp_path: Path) -> None:
    async with serving(tmp_path, Options(replay_s=0.0)) as scene:
        model = await scene.model()
        save = {"model_id": model, "seq_id": 1, "path": "a"}
        request = (await scene.post("save_weights", save))[1]["request_id"]
        path = (await scene.redeem(request))["path"]
        load = {"model_id": model, "seq_id": 2, "path": path, "optimizer": True}
        before = scene.engine.calls["save"]
        await scene.redeem((await scene.post("load_weights", load))[1]["request_id"])
        await scene.redeem(await passed(scene, model, 3))
        assert scene.engine.calls["save"] == before + 1


async def test_a_step_that_came_too_late_is_not_executed_when_the_adapter_comes_back(
    scene: LiveService,
) -> None:
    model = await scene.model()
    # its number is used up
    await scene.post("optim_step", {"model_id": model, "seq_id": 2, "adam_params": 5})
    await scene.redeem(await passed(scene, model, 1))
    await scene.redeem(await passed(scene, model, 3))
    assert "too late" in (await scene.redeem(await stepped(scene, model, 2)))["error"]
    await scene.host.die()
    assert (await scene.redeem(await stepped(scene, model, 4)))["metrics"][
        "policy_version:max"
    ] == 1


async def test_a_broken_repetition_of_a_request_that_runs_or_waits_uses_up_nothing(
    scene: LiveService,
) -> None:
    model = await scene.model()
    held = scene.engine.block("forward_backward")
    first, third = await passed(scene, model, 1), await passed(scene, model, 3)
    async with asyncio.timeout(WAIT_S):
        await held.inside()
        for seq in (1, 3):
            await scene.post("optim_step", {"model_id": model, "seq_id": seq, "adam_params": 5})
        second = await passed(scene, model, 2)
        held.release()
        assert [isinstance(await scene.redeem(one), bytes) for one in (first, second, third)] == [
            True
        ] * 3


async def test_a_full_lane_lets_in_the_request_that_the_others_wait_for(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halteres.service.training_runs.MAX_WAITING", 2)
    model = await scene.model()
    waiting = [await passed(scene, model, seq) for seq in (2, 3)]
    status, answer = await scene.post(
        "optim_step", {"model_id": model, "seq_id": 4, "adam_params": {}}
    )
    assert (status, "Request 1 has not arrived" in answer["detail"]) == (503, True)
    assert await passed(scene, model, 3) == waiting[1]
    first = await passed(scene, model, 1)
    async with asyncio.timeout(WAIT_S):
        assert all([isinstance(await scene.redeem(one), bytes) for one in (first, *waiting)])


async def test_whatever_goes_wrong_after_a_request_stops_neither_its_lane_nor_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Path) -> None:
        raise ValueError("unforeseen")

    monkeypatch.setattr("halteres.service.execution._keep_only", broken)
    async with serving(tmp_path, AT_ONCE) as scene, closing(await scene.client()) as client:
        training = await trainer(client)
        assert [await version(training) for _ in range(2)] == [1, 2]


async def test_an_adapter_that_was_forgotten_and_loaded_again_is_forgotten_whole(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, AT_ONCE) as scene:
        model = await scene.model()
        found = scene.service.models.of_id(model)
        assert found is not None
        save = {"model_id": model, "seq_id": 1, "path": "a"}
        path = (await scene.redeem((await scene.post("save_weights", save))[1]["request_id"]))[
            "path"
        ]
        for days in (3, 6):
            await until(lambda: found.queue.idle)
            for _ in range(2):
                await scene.service.reap(time.time() + days * 86400)
            seq = 2 if days == 3 else 5
            if days == 3:
                load = {"model_id": model, "seq_id": seq, "path": path, "optimizer": True}
                await scene.redeem((await scene.post("load_weights", load))[1]["request_id"])
                await scene.redeem(await passed(scene, model, 3))
                await scene.redeem(await stepped(scene, model, 4))
        assert (
            "Resume from a checkpoint"
            in (await scene.redeem(await passed(scene, model, 5)))["error"]
        )


async def test_a_training_run_in_use_keeps_its_adapter_though_its_session_says_nothing(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, Options(silent_s=100, keep_points_s=100)) as scene:
        model = await scene.model()
        await scene.redeem(await passed(scene, model, 1))
        session = scene.service.sessions.of_model(model.split(":")[0])
        session.last_seen -= 1000
        await scene.service.reap(time.time())
        assert (await scene.redeem(await stepped(scene, model, 2)))["metrics"][
            "policy_version:max"
        ] == 1
        assert scene.engine.calls["drop"] == 1  # before it was made


async def test_passes_without_a_step_make_a_restore_point_too_and_are_forgotten(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, Options(replay_s=0.0, keep_requests_s=0.0)) as scene:
        session = await scene.session()
        model = await scene.model(session)
        found = scene.service.models.of_id(model)
        assert found is not None
        save = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
        await scene.redeem((await scene.post("save_weights_for_sampler", save))[1]["request_id"])
        await until(lambda: found.queue.idle)
        await scene.service.reap(time.time() + 10)
        assert scene.rows("SELECT seq FROM requests") == []


async def test_a_thousand_training_runs_are_no_hindrance_to_clearing_away(tmp_path: Path) -> None:
    async with serving(tmp_path) as scene:
        values = [
            {
                "id": f"m{n}",
                "session_id": "s",
                "tenant": "local",
                "base_model": "b",
                "lora": {},
                "user_metadata": {},
            }
            | {"created_at": 0.0, "point": 1, "covered": 1}
            for n in range(1200)
        ]
        await scene.service.journal.transact(
            lambda connection: connection.execute(MODELS.insert(), values)
        )
        assert await scene.service.journal.forget(time.time()) == 0


async def test_what_a_forgotten_training_run_published_without_a_name_goes_with_it(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, AT_ONCE) as scene:
        session = await scene.session()
        model = await scene.model(session)
        for seq in range(1, 9, 3):
            await scene.redeem(await passed(scene, model, seq))
            await scene.redeem(await stepped(scene, model, seq + 1))
            save = {"model_id": model, "seq_id": seq + 2, "sampling_session_seq_id": seq}
            await scene.redeem(
                (await scene.post("save_weights_for_sampler", save))[1]["request_id"]
            )
        found = scene.service.models.of_id(model)
        assert found is not None
        await until(lambda: found.queue.idle)
        assert list((tmp_path / "spill").iterdir())
        for _ in range(2):
            await scene.service.reap(time.time() + 3 * 86400)
        assert not list((tmp_path / "spill").iterdir())
        assert scene.rows("SELECT count(*) FROM samplers") == [(0,)]


async def test_a_sample_of_weights_in_flight_is_drawn_again_from_the_weights_it_was_drawn_from(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as scene:
        model = await scene.model()
        save = {"model_id": model, "kind": "inflight"}
        _, promised = await scene.post(
            "save_weights_for_sampler", {**save, "seq_id": 1, "sampling_session_seq_id": 0}
        )
        sampler = (await scene.redeem(promised["request_id"]))["sampling_session_id"]
        body = {
            "prompt": {"chunks": [{"tokens": [5]}]},
            "sampling_session_id": sampler,
            "seq_id": 1,
        }
        body |= {"sampling_params": {"max_tokens": 6}}
        sample = (await scene.post("asample", body))[1]["request_id"]
        drawn = await scene.redeem(sample)
        await scene.redeem(await passed(scene, model, 2))
        await scene.redeem(await stepped(scene, model, 3))
        _, promised = await scene.post(
            "save_weights_for_sampler", {**save, "seq_id": 4, "sampling_session_seq_id": 1}
        )
        await scene.redeem(promised["request_id"])
        assert (await drawn_by(scene, sampler, 2)) != sampled_tokens(drawn)
    async with serving(tmp_path) as scene:
        assert await scene.redeem(sample) == drawn


async def test_requests_behind_one_that_never_arrives_say_so_and_are_given_up(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halteres.service.training_runs.GAP_S", 0.05)
    model = await scene.model()
    waiting = [await passed(scene, model, seq) for seq in (2, 3)]
    async with asyncio.timeout(WAIT_S):
        for request in waiting:
            outcome = await scene.redeem(request)
            assert (
                outcome["category"],
                "Request 1 of this model never arrived" in outcome["error"],
            ) == ("user", True)
        assert isinstance(await scene.redeem(await passed(scene, model, 4)), bytes)


async def test_a_request_that_waits_for_one_that_has_not_arrived_says_so_in_words_that_the_sdk_shows(
    scene: LiveService,
) -> None:
    scene.service.futures.poll_s = 0.01
    model = await scene.model()
    waiting = await passed(scene, model, 2)
    status, place = await scene.post("retrieve_future", {"request_id": waiting})
    assert (status, place["queue_state"]) == (408, "paused_capacity")
    assert "request 1 of this model comes first, and has not arrived" in place["queue_state_reason"]
    held = scene.engine.block("forward_backward")
    await passed(scene, model, 1)
    async with asyncio.timeout(WAIT_S):
        await held.inside()
    status, place = await scene.post("retrieve_future", {"request_id": waiting})
    assert (place["queue_state"], place["queue_state_reason"]) == (
        "active",
        "request 1 of this model is executed first",
    )
    held.release()


async def drawn_by(scene: LiveService, sampler: str, seq: int) -> Any:
    body = {
        "prompt": {"chunks": [{"tokens": [5, 6]}]},
        "sampling_session_id": sampler,
        "seq_id": seq,
    }
    body |= {"sampling_params": {"max_tokens": 4, "seed": 3}}
    _, promised = await scene.post("asample", body)
    return sampled_tokens(await scene.redeem(promised["request_id"]))


def sampled_tokens(body: bytes) -> list[list[int]]:
    from tinker.proto import tinker_public_pb2 as pb

    message = pb.SampleResponse()
    message.ParseFromString(body)
    return [list(memoryview(sequence.tokens).cast("i")) for sequence in message.sequences]
