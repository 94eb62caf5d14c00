"""What another process reads of a service's journal, and that it leaves nothing there."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deadlines import until

from halteres.models import TINY
from halteres.service.durable.journal import FILE
from halteres.service.training_run_records import JournalUnreadable, read_training_runs

from .live_service import DATA, STEP, LiveService, closing, serving, trainer


async def test_a_running_service_is_read_while_it_writes(scene: LiveService) -> None:
    before = time.time()
    async with closing(await scene.client(experiment="one")) as client:
        training = await client.create_lora_training_client(
            TINY, rank=4, user_metadata={"note": "warm"}
        )
        await training.forward_backward(DATA, "cross_entropy")
        await training.optim_step(STEP)
        path = (await training.save_state("state")).path
        await training.save_weights_for_sampler("weights", ttl_seconds=3600)
        (run,) = read_training_runs(scene.service.state)
        assert run.finished is None
    assert (run.id, run.base_model, run.rank) == (training.get_info().model_id, TINY, 4)
    assert (run.tenant, run.session_metadata["experiment"]) == ("local", "one")
    assert run.user_metadata["note"] == "warm"
    assert before <= run.created_at < run.last_request_at <= time.time()
    state, weights = run.checkpoints
    assert (state.path, state.version, state.public, state.expires_at) == (path, 1, False, None)
    assert state.size_bytes > weights.size_bytes > 0
    assert weights.expires_at == pytest.approx(time.time() + 3600, abs=60)

    async def finished() -> bool:
        return read_training_runs(scene.service.state)[0].finished == "success"

    await until(finished)


async def test_one_that_is_named_is_read_alone(scene: LiveService) -> None:
    models = [await scene.model() for _ in range(2)]
    assert [run.id for run in read_training_runs(scene.service.state)] == models
    assert [run.id for run in read_training_runs(scene.service.state, models[1])] == models[1:]
    assert read_training_runs(scene.service.state, "none") == []


async def test_a_service_that_has_ended_is_read_without_a_trace(tmp_path: Path) -> None:
    async with serving(tmp_path) as scene:
        model = await scene.model()
    before = sorted(file.name for file in tmp_path.iterdir())
    assert f"{FILE}-wal" not in before
    assert [run.id for run in read_training_runs(tmp_path)] == [model]
    assert sorted(file.name for file in tmp_path.iterdir()) == before


KILLED = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("UPDATE models SET base_model = 'written last'")
connection.commit()
os._exit(9)
"""


async def test_what_a_killed_service_wrote_last_is_read_of_its_log(tmp_path: Path) -> None:
    async with serving(tmp_path) as scene:
        await scene.model()
    command = [sys.executable, "-c", KILLED, str(tmp_path / FILE)]
    killed = await asyncio.to_thread(subprocess.run, command, check=False)
    assert killed.returncode == 9 and (tmp_path / f"{FILE}-wal").stat().st_size > 0
    assert [run.base_model for run in read_training_runs(tmp_path)] == ["written last"]


async def test_checkpoints_whose_time_is_over_are_left_out(tmp_path: Path) -> None:
    async with serving(tmp_path) as scene, closing(await scene.client()) as client:
        training = await trainer(client)
        await training.save_state("kept")
        await training.save_state("over", ttl_seconds=3600)
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("UPDATE checkpoints SET expires_at = 1 WHERE expires_at IS NOT NULL")
    connection.close()
    (run,) = read_training_runs(tmp_path)
    assert [one.path.rpartition("/")[2] for one in run.checkpoints] == ["kept"]


def test_a_folder_without_a_journal_has_none(tmp_path: Path) -> None:
    assert read_training_runs(tmp_path) == []
    assert read_training_runs(tmp_path / "nowhere") == []


async def test_a_journal_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    async with serving(tmp_path / "one") as scene:
        await scene.model()
    shutil.copytree(tmp_path / "one", tmp_path / "other version")
    with sqlite3.connect(tmp_path / "other version" / FILE) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(JournalUnreadable, match="layout 99"):
        read_training_runs(tmp_path / "other version")
    content = (tmp_path / "one" / FILE).read_bytes()
    (tmp_path / "one" / FILE).write_bytes(content[:3000] + b"?" * (len(content) - 3000))
    with pytest.raises(JournalUnreadable):
        read_training_runs(tmp_path / "one")
