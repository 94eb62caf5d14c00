"""Metrics of training runs: a row for each optimiser step, whatever dies in between."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import tinker
from deadlines import until
from tinker import types

from halteres.observe.metrics import read_rows
from halteres.service import training_metrics
from halteres.service.training_metrics import metrics_file

from .live_service import DATA, STEP, LiveService, closing, datum, serving, trainer

WEIGHT = 3 + 5
"""Of both datums of DATA: as many targets, each of weight 1."""


async def rows_of(state: Path, training: tinker.TrainingClient, num: int) -> list[dict[str, Any]]:
    """The rows, once there are so many: they are written soon after the answer."""
    file = metrics_file(state, training.get_info().model_id)
    await until(lambda: len(read_rows(file)) >= num)
    return read_rows(file)


async def test_a_row_has_all_passes_since_the_step_before(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    losses = [
        (await training.forward_backward([one], "cross_entropy")).metrics["loss:sum"]
        for one in DATA
    ]
    await training.forward(DATA, "cross_entropy")  # changes no gradient
    await training.optim_step(STEP)
    await training.forward_backward(DATA, "cross_entropy")
    await training.optim_step(types.AdamParams(learning_rate=5e-4))
    first, second = await rows_of(scene.service.state, training, 2)
    assert (first["step"], second["step"], first["src"]) == (1, 2, "service")
    assert first["train/loss"] == pytest.approx(sum(losses))
    assert first["train/loss_per_token"] == pytest.approx(sum(losses) / WEIGHT)
    assert (first["sequences/trained"], second["sequences/trained"]) == (2, 2)
    assert (first["train/learning_rate"], second["train/learning_rate"]) == (1e-3, 5e-4)
    assert "time/step" not in first and second["time/step"] >= second["time/train"] > 0
    assert {type(value) for name, value in first.items() if name != "src"} <= {int, float}


async def test_the_loss_is_divided_by_the_weights_whatever_their_scale(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    await training.forward_backward([datum([5, 6, 7], [0.125, 0.125])], "cross_entropy")
    await training.optim_step(STEP)
    (row,) = await rows_of(scene.service.state, training, 1)
    assert row["train/loss_per_token"] == pytest.approx(row["train/loss"] / 0.25)


async def test_weights_of_both_signs_are_a_gradient_and_no_loss(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    await training.forward_backward([datum([5, 6, 7], [1.0, -0.5])], "cross_entropy")
    await training.optim_step(STEP)
    (row,) = await rows_of(scene.service.state, training, 1)
    assert "train/loss" in row and "train/loss_per_token" not in row


async def test_a_row_is_whole_though_the_engine_died_after_a_pass(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    passed = await training.forward_backward(DATA, "cross_entropy")
    await scene.host.die()
    await training.optim_step(STEP)
    (row,) = await rows_of(scene.service.state, training, 1)
    assert row["train/loss"] == pytest.approx(passed.metrics["loss:sum"])
    assert row["sequences/trained"] == 2


async def test_a_restart_goes_on_with_the_file_and_with_the_pass_before_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as scene:
        model = await scene.model()
        await passed(scene, model, 1)
        await stepped(scene, model, 2)
        await passed(scene, model, 3)
    async with serving(tmp_path) as scene:
        await stepped(scene, model, 4)
    rows = read_rows(metrics_file(tmp_path, model))
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["sequences/trained"] == 1


async def passed(scene: LiveService, model: str, seq: int) -> None:
    """A forward-backward of one datum by raw HTTP, which needs no session that goes on."""
    chunk = {"type": "encoded_text", "tokens": [5, 6]}
    tensors = {
        "target_tokens": {"data": [6, 7], "dtype": "int64", "shape": [2]},
        "weights": {"data": [1.0, 1.0], "dtype": "float32", "shape": [2]},
    }
    data = [{"model_input": {"chunks": [chunk]}, "loss_fn_inputs": tensors}]
    body = {"data": data, "loss_fn": "cross_entropy"}
    await settled(scene, "forward_backward", {"forward_backward_input": body}, model=model, seq=seq)


async def stepped(scene: LiveService, model: str, seq: int) -> None:
    await settled(scene, "optim_step", {"adam_params": {}}, model=model, seq=seq)


async def settled(
    scene: LiveService, path: str, body: dict[str, Any], *, model: str, seq: int
) -> None:
    status, promised = await scene.post(path, {**body, "model_id": model, "seq_id": seq})
    assert status == 200, promised
    await scene.redeem(promised["request_id"])


async def test_loaded_weights_take_the_passes_before_them_along(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    path = (await training.save_state("start")).path
    await training.forward_backward(DATA, "cross_entropy")
    with pytest.warns(FutureWarning):
        loading = training.load_state(path)
    await loading
    await training.forward_backward(DATA[:1], "cross_entropy")
    await training.optim_step(STEP)
    (row,) = await rows_of(scene.service.state, training, 1)
    assert row["sequences/trained"] == 1


async def test_a_file_that_grows_too_large_keeps_every_second_row(
    scene: LiveService, client: tinker.ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_metrics, "MOST_BYTES", 2000)
    training = await trainer(client)
    for _ in range(20):
        await training.forward_backward(DATA, "cross_entropy")
        await training.optim_step(STEP)
    file = metrics_file(scene.service.state, training.get_info().model_id)
    await until(lambda: [row["step"] for row in read_rows(file)][-1:] == [20])
    steps = [row["step"] for row in read_rows(file)]
    assert steps == sorted(set(steps)) and 3 < len(steps) < 20
    assert file.stat().st_size < 3000


async def test_files_of_training_runs_that_are_gone_go_too(tmp_path: Path) -> None:
    async with serving(tmp_path) as scene, closing(await scene.client()) as client:
        training = await trainer(client)
        await training.forward_backward(DATA, "cross_entropy")
        await training.optim_step(STEP)
        await rows_of(tmp_path, training, 1)
        kept = metrics_file(tmp_path, training.get_info().model_id)
    gone = metrics_file(tmp_path, "gone:train:0")
    gone.write_bytes(kept.read_bytes())
    async with serving(tmp_path):
        assert kept.exists() and not gone.exists()


async def test_of_too_many_files_the_oldest_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as scene:
        models = [await scene.model() for _ in range(3)]
        for model in models:
            await passed(scene, model, 1)
            await stepped(scene, model, 2)
    for at, model in enumerate(models):
        os.utime(metrics_file(tmp_path, model), (at, at))
    monkeypatch.setattr(training_metrics, "MOST_FILES", 2)
    async with serving(tmp_path):
        there = [metrics_file(tmp_path, model).exists() for model in models]
    assert there == [False, True, True]


async def test_a_step_does_not_fail_because_its_row_cannot_be_written(
    scene: LiveService, client: tinker.ServiceClient, caplog: pytest.LogCaptureFixture
) -> None:
    (scene.service.state / "metrics").write_text("no folder")
    training = await trainer(client)
    for _ in range(2):
        await training.forward_backward(DATA, "cross_entropy")
        await training.optim_step(STEP)

    def said() -> list[str]:
        texts = [record.message for record in caplog.records]
        return [text for text in texts if "Metrics of training runs" in text]

    await until(said)
    await training.forward_backward(DATA, "cross_entropy")
    await training.optim_step(STEP)
    await until(lambda: not scene.service.metrics.is_writing)
    assert len(said()) == 1


async def test_only_the_services_user_may_read_them(
    scene: LiveService, client: tinker.ServiceClient
) -> None:
    training = await trainer(client)
    await training.forward_backward(DATA, "cross_entropy")
    await training.optim_step(STEP)
    await rows_of(scene.service.state, training, 1)
    assert (scene.service.state / "metrics").stat().st_mode & 0o077 == 0
