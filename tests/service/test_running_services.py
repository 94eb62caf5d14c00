"""Which training services of a user run: those that were started for their own sake."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from deadlines import wait_until
from typer.testing import CliRunner

from halteres.cli import serve
from halteres.cli.main import app
from halteres.errors import NotFound
from halteres.process import Lifeline, identity
from halteres.service.running_services import (
    Card,
    newest_live,
    read_cards,
    registered_card,
    state_folders,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    monkeypatch.delenv("HALTERES_LIFELINE_FD", raising=False)
    return tmp_path


@contextmanager
def other_process() -> Iterator[subprocess.Popen[bytes]]:
    """One that runs until the block ends."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process:
        try:
            yield process
        finally:
            process.kill()


def written(home: Path, name: str, pid: int, since: float, state: Path | None = None) -> None:
    """The card of another service."""
    card = Card(
        url=f"http://127.0.0.1/{name}",
        state=str(state or name),
        since=since,
        process=identity(pid),
    )
    (home / "services").mkdir(exist_ok=True)
    (home / "services" / f"{name}.json").write_bytes(msgspec.json.encode(card))


def test_the_newest_service_that_runs_is_named_whatever_its_state(home: Path) -> None:
    assert newest_live() is None
    with other_process() as one, other_process() as another:
        written(home, "older", one.pid, 1.0)
        written(home, "newer", another.pid, 2.0)
        assert newest_live() == msgspec.json.decode(
            (home / "services" / "newer.json").read_bytes(), type=Card
        )
        another.send_signal(signal.SIGKILL)
        another.wait()
        assert (card := newest_live()) is not None and card.state == "older"


def test_a_state_that_cannot_be_looked_at_hides_no_other_and_keeps_no_service_from_a_card(
    home: Path,
) -> None:
    """A name that is too long fails as a network disk that is gone does: by an OSError."""
    (home / "mine").mkdir()
    with other_process() as gone:
        written(home, "gone", gone.pid, 1.0, state=home / ("x" * 300))
    with registered_card("http://127.0.0.1/mine", home / "mine"):
        assert state_folders() == [home / "mine"]


def test_a_card_outlives_its_service_as_long_as_the_state_is_there(home: Path) -> None:
    (home / "elsewhere").mkdir()
    with other_process() as gone:
        written(home, "gone", gone.pid, 3.0)
        written(home, "before", gone.pid, 2.0, state=home / "elsewhere")
        written(home, "other", gone.pid, 1.0, state=home)
    (home / "services" / "damaged.json").write_text("{")
    with registered_card("http://127.0.0.1:7", home / "elsewhere"):
        card = newest_live()
        assert card is not None and (card.url, card.state) == (
            "http://127.0.0.1:7",
            str(home / "elsewhere"),
        )
    assert {card.state for card in read_cards()} == {str(home / "elsewhere"), str(home)}
    assert (home / "services" / "damaged.json").exists()
    assert state_folders() == [home / "elsewhere", home]


def test_a_second_service_on_a_state_takes_the_place_of_the_first_ones_card(home: Path) -> None:
    for port in (7, 8):
        with registered_card(f"http://127.0.0.1:{port}", home):
            pass
    (card,) = read_cards()
    assert card.url == "http://127.0.0.1:8"


def test_the_state_that_is_taken_by_default_is_looked_at_without_a_card(home: Path) -> None:
    assert state_folders() == []
    (home / "service").mkdir()
    assert state_folders() == [home / "service"]


def test_a_service_that_one_of_our_processes_started_leaves_no_card(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Lifeline.open()
    monkeypatch.setenv("HALTERES_LIFELINE_FD", str(line.read_end))
    with registered_card("http://127.0.0.1:7", home):
        assert newest_live() is None
    line.close()


def test_a_service_that_is_just_starting_is_waited_for(home: Path) -> None:
    with other_process() as process:
        leaving = threading.Timer(0.2, written, (home, "late", process.pid, 1.0))
        leaving.start()
        card = newest_live(within_s=20)
        leaving.join()
    assert card is not None and card.state == "late"


def test_a_home_that_takes_no_card_hinders_no_service(home: Path) -> None:
    (home / "services").write_text("a file")
    with registered_card("http://127.0.0.1:7", home):
        assert newest_live() is None


def test_without_a_service_there_is_nothing_to_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "STARTS_WITHIN_S", 0.0)
    asked = CliRunner().invoke(app, ["variables"])
    assert asked.exit_code == 1 and asked.output == ""
    assert isinstance(asked.exception, NotFound)


@pytest.mark.runs
def test_a_service_with_a_state_of_its_own_is_the_one_to_export(home: Path) -> None:
    words = (
        "serve",
        "--port",
        "0",
        "--engine",
        "scripted",
        "--threads",
        "1",
        "--state",
        str(home / "elsewhere"),
    )
    command = [sys.executable, "-c", "from halteres.cli.main import main; main()", *words]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as service:
        try:
            card = wait_until(newest_live, within_s=100)
            assert card is not None and card.process["pid"] == service.pid
            assert (
                f"export TINKER_BASE_URL={card.url} "
                in CliRunner().invoke(app, ["variables"]).output
            )
            health = f"{card.url}/api/v1/healthz"
            wait_until(lambda: httpx.get(health, timeout=20).status_code == 200, within_s=60)
            service.send_signal(signal.SIGTERM)
            service.wait(20)
        finally:
            service.kill()
    assert newest_live() is None and state_folders() == [home / "elsewhere"]
