"""Training runs of Tinker scripts, as the page's server reads them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from agent import run_fixtures
from agent.run_fixtures import RUN
from deadlines import until
from service.live_service import DATA, STEP, LiveService, closing, serving, trainer

from halteres.dashboard.events import SERVICES, stamps
from halteres.dashboard.training_runs import rows_of_training_runs, training_metrics
from halteres.errors import NotFound
from halteres.service import running_services
from halteres.service.running_services import registered_card
from halteres.service.training_metrics import metrics_file
from halteres.service.training_run_records import JournalUnreadable

from .conftest import HOSTILE, Client


@pytest.fixture(autouse=True)
def quiet(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No telemetry, no hub; services leave their cards in this home."""
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HALTERES_LIFELINE_FD", raising=False)


@pytest.fixture
async def scene(home: Path) -> AsyncIterator[LiveService]:
    """A service on the state that `halteres serve` takes by default."""
    async with serving(home / "service") as scene:
        yield scene


async def trained(scene: LiveService, steps: int = 3, **user_metadata: str) -> str:
    """The id of a training run that a script made; its session goes on."""
    async with closing(await scene.client(**user_metadata)) as client:
        return await trained_by(scene, client, steps)


async def trained_by(scene: LiveService, client: tinker.ServiceClient, steps: int = 3) -> str:
    training = await trainer(client, rank=4)
    for _ in range(steps):
        await training.forward_backward(DATA, "cross_entropy")
        await training.optim_step(STEP)
    await training.save_state("last")
    name = training.get_info().model_id
    file = metrics_file(scene.service.state, name)
    await until(lambda: file.exists() and file.read_bytes().count(b"\n") == steps)
    return name


async def got(page: Client, path: str, status: int = 200) -> dict[str, Any]:
    async with page() as http:
        answer = await http.get(path)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_a_script_of_the_sdk_is_listed_next_to_runs(scene: LiveService, page: Client) -> None:
    run_fixtures.make_run(created_at=1.0, ended_at=2.0)
    async with closing(await scene.client(experiment="one")) as client:
        name = await trained_by(scene, client)
        ours, script = (await got(page, "/api/runs"))["runs"]
        assert ours["run_id"] == RUN
        assert (script["run_id"], script["kind"]) == (name, "script")
        assert (script["status"], script["ended_at"], script["step"]) == ("running", None, 3)
        assert len(script["curve"]) == 3 and script["reward"] == pytest.approx(
            script["curve"][-1], rel=1e-3
        )
        assert script["model"] == "rank 4 · experiment: one"
        assert (await got(page, f"/api/runs?ids={RUN}"))["runs"] == [ours]
        assert (await got(page, f"/api/runs?ids={SERVICES}"))["runs"][0]["run_id"] == name
    await until(lambda: rows_of_training_runs()[0]["status"] == "completed")


async def test_one_has_its_checkpoints_and_its_curves(scene: LiveService, page: Client) -> None:
    name = await trained(scene, steps=4)
    view = await got(page, f"/api/training_runs/{name}")
    assert (view["step"], view["rank"], view["owner"]) == (4, 4, None)
    assert view["folder"] == str(scene.service.state)
    assert view["created_at"] <= view["last_request_at"] <= view["now"]
    (saved,) = view["checkpoints"]
    assert (saved["path"], saved["version"]) == (f"tinker://{name}/weights/last", 4)
    curves = await got(page, f"/api/training_runs/{name}/metrics?names=train/loss_per_token")
    assert curves["columns"]["step"] == [1, 2, 3, 4]
    assert all(value > 0 for value in curves["columns"]["train/loss_per_token"])
    assert "train/grad_norm" in curves["names"]
    part = f"/api/training_runs/{name}/metrics?names=train/loss&first=2&last=3"
    assert (await got(page, part))["columns"]["step"] == [2, 3]


async def test_a_service_that_ended_keeps_its_training_runs(home: Path) -> None:
    for state in (home / "service", home / "elsewhere"):
        with registered_card("http://127.0.0.1:7", state):
            async with serving(state) as scene:
                model = await scene.model()
                assert rows_of_training_runs()[0]["status"] == "running"
        newest = rows_of_training_runs()[0]
        assert (newest["run_id"], newest["status"]) == (model, "service ended")
    assert len(rows_of_training_runs()) == 2


async def test_what_a_run_of_ours_has_trained_is_not_listed_twice(scene: LiveService) -> None:
    run_fixtures.make_run(RUN)
    for run in (RUN, "ffff9999"):
        session = await scene.session(halteres_run=run)
        await scene.model(session)
    (row,) = rows_of_training_runs()
    assert row["model"] == "rank 4 · halteres_run: ffff9999"


async def test_one_that_its_script_left_is_idle_after_a_while(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    await scene.model()
    monkeypatch.setattr("halteres.dashboard.training_runs.IDLE_S", 0.0)
    (row,) = rows_of_training_runs()
    assert row["status"] == "idle" and row["ended_at"] is not None


async def test_a_damaged_folder_is_said_and_hides_no_other(
    scene: LiveService, home: Path, page: Client
) -> None:
    name = await trained(scene)
    damaged = home / HOSTILE.replace("/", "-")
    damaged.mkdir()
    (damaged / "journal.sqlite").write_bytes(b"no database" * 500)
    with registered_card("http://127.0.0.1:7", damaged):
        first, second = rows_of_training_runs()
        assert (first["status"], second["run_id"]) == ("unreadable", name)
        assert "cannot be read" in first["error"]
        assert (await got(page, f"/api/training_runs/{name}"))["id"] == name
        answer = await got(page, "/api/training_runs/none", 500)
        assert answer["code"] == JournalUnreadable.code


async def test_damaged_metrics_leave_the_rest_to_see(scene: LiveService) -> None:
    name = await trained(scene)
    file = metrics_file(scene.service.state, name)
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([lines[0], b"{", b"\xff\x00", b'{"step": "x"}', b"[1]\n"]))
    (row,) = rows_of_training_runs()
    assert (row["step"], len(row["curve"])) == (3, 1)  # the checkpoint's
    curves = training_metrics(name, ["train/loss"], (0, 99))
    assert curves["columns"]["step"] == [1]


async def test_a_file_that_was_made_shorter_is_read_anew(scene: LiveService) -> None:
    name = await trained(scene, steps=6)
    file = metrics_file(scene.service.state, name)
    assert training_metrics(name, ["train/loss"], (0, 99))["columns"]["step"] == [1, 2, 3, 4, 5, 6]
    kept = file.with_suffix(".new")
    kept.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[1::2]))
    kept.replace(file)
    assert training_metrics(name, ["train/loss"], (0, 99))["columns"]["step"] == [2, 4, 6]


async def test_no_secret_of_a_script_is_shown(scene: LiveService, page: Client) -> None:
    name = await trained(scene, wandb_api_key="0123456789abcdef0123")
    body = str(await got(page, "/api/runs")) + str(await got(page, f"/api/training_runs/{name}"))
    assert "wandb_api_key: ***" in body and "0123456789abcdef" not in body


async def test_one_that_is_not_there_is_not_found(scene: LiveService, page: Client) -> None:
    assert (await got(page, "/api/training_runs/none", 404))["code"] == NotFound.code


async def test_only_the_page_is_answered(scene: LiveService, stranger: Client) -> None:
    for path in ("", "/metrics"):
        await got(stranger, f"/api/training_runs/none{path}", 401)


async def test_news_of_a_service_are_told(scene: LiveService, home: Path) -> None:
    before = stamps()[SERVICES]
    assert before == stamps()[SERVICES]
    await scene.model()
    assert (after := stamps()[SERVICES]) != before
    with registered_card("http://127.0.0.1:7", home / "service"):
        assert (live := stamps()[SERVICES]) != after
        (card,) = running_services.read_cards()
        assert card.is_live
    assert live != before
