"""Runs as one file: it holds what their pages show, asks for nothing, and is nobody's script."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from agent import run_fixtures, run_results
from agent.run_fixtures import told

from halteres.agent.transports.command_line import for_person
from halteres.dashboard.report_file import model_sha256, report_file, sources_of
from halteres.observe.metrics import append_row
from halteres.runs.directory import RunDirectory
from halteres.runs.notes import change_notes

from .conftest import HOSTILE, expect

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ONE, TWO = "aaaa1111", "bbbb2222"
SECRET = "sk-planted-0123456789"


def two_runs(**state: Any) -> list[RunDirectory]:
    runs = [
        run_results.trained(ONE, steps=40, skill=0.05, created_at=100.0, ended_at=160.0, **state),
        run_results.trained(TWO, steps=60, skill=0.4, created_at=200.0, ended_at=290.0, **state),
    ]
    for run in runs:
        run_results.add_group(
            run, 40, run_results.completion("42", 1.0), run_results.completion("41", 0.0)
        )
        wiring = {"value": str(run.path), "source": "wiring"}
        given = {"trainer.total_steps": {"value": 40, "source": "edit"}, "env.run_dir": wiring}
        (run.path / "config.resolved.json").write_text(json.dumps(given))
        usage = {"cpu": {"engine": 1.5}, "memory": {"engine": 10**9}, "busy": 2.0, "cores": 4}
        for t in (100.0, 105.0):
            append_row(run.path / "usage.jsonl", {"t": t, **usage})
    return runs


async def report_of(runs: list[RunDirectory]) -> tuple[str, dict[str, Any]]:
    """The file, and the comparison that it holds."""
    ids = [run.run_id for run in runs]
    results = [await told("rl_get_results", run_id=run_id) for run_id in ids]
    comparison = await told("rl_compare_runs", run_ids=ids, plot=False)
    return report_file(runs, results, comparison, for_person), comparison


async def test_a_report_holds_the_answers_and_no_folder_of_the_machine(home: Path) -> None:
    runs = two_runs()
    page, comparison = await report_of(runs)
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert data["runs"] == [ONE, TWO]
    assert data["answers"]["/api/compare"] == comparison
    for run in runs:
        path = f"/api/runs/{run.run_id}"
        assert data["answers"][path]["step"] == run.state().step
        assert "reward/mean" in data["answers"][f"{path}/metrics"]["columns"]
        assert data["answers"][f"{path}/usage"]["cpu"] == {"engine": [1.5, 1.5]}
        assert len(data["answers"][f"{path}/settings"]["settings"]) == 1
        assert len(data["groups"][run.run_id][0]["rollouts"]) == 2
    assert str(home) not in page


async def test_a_report_holds_no_secret(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", SECRET)
    run, other = two_runs(name=f"run {SECRET}")
    change_notes(run, note=f"The key is {SECRET}.")
    run_results.add_group(run, 40, run_results.completion(SECRET, 1.0), prompt=SECRET, item=SECRET)
    page, _ = await report_of([run, other])
    assert SECRET not in page and "***" in page


async def test_a_report_holds_no_secret_of_the_runs_own_files(home: Path) -> None:
    """They are in no variable of the process that writes it. Tokens would tell them, too."""
    run, other = two_runs()
    server, judge, login = "tml-run-0123456789abcdef", "jk-0123456789", "login-0123456789"
    (run.path / "wiring.json").write_text(json.dumps({"api_key": server}))
    run_fixtures.change(run, urls={"service": "http://127.0.0.1:1"})
    settings = {"judge_key": judge, "rollout_server_url": f"http://run:{login}@127.0.0.1:2"}
    (run.path / "config.yaml").write_text(json.dumps({"env": settings}))
    for secret in (server, judge, login):
        tokens = {"ids": [31_337], "logprobs": [-1.0], "lengths": [len(secret)]}
        told_all = {**run_results.completion(secret, 1.0), **tokens}
        run_results.add_group(run, 40, told_all, prompt=secret, item=secret)
    page, _ = await report_of([other, run])
    for secret in (server, judge, login):
        assert secret not in page
    assert "***" in page and "31337" not in page


def test_what_a_run_was_made_of_is_named_by_hashes(home: Path, tmp_path: Path) -> None:
    environment, model = tmp_path / "env.py", tmp_path / "model"
    environment.write_text("x = 1\n")
    model.mkdir()
    for name in ("config.json", "model.safetensors", "README.md"):
        (model / name).write_text(name)
    run = run_fixtures.make_run(environment_file=str(environment), tokenizer=str(model))
    found = sources_of(run.state())
    assert found["environment_sha256"] == hashlib.sha256(b"x = 1\n").hexdigest()
    assert not found["is_as_run"], "an earlier version did not write it down"
    run_fixtures.change(run, environment_sha256="ab" * 32)
    found = sources_of(run.state())
    assert (found["environment_sha256"], found["is_as_run"]) == ("ab" * 32, True)
    whole = found["model_sha256"]
    (model / "README.md").write_text("else")
    assert model_sha256(model) == whole
    (model / "model.safetensors").write_text("else")
    assert model_sha256(model) not in (whole, None)
    assert model_sha256(tmp_path / "none") is None


@contextmanager
def opened(chromium: Browser, file: Path, **options: Any) -> Iterator[Page]:
    """The file in a browser without a network; at the end, whether it asked for anything or
    complained.
    """
    context = chromium.new_context(offline=True, **options)
    page, asked, complaints = context.new_page(), list[str](), list[str]()
    context.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text))
    try:
        page.goto(file.as_uri())
        yield page
        assert asked == [file.as_uri()]
        assert not complaints
    finally:
        context.close()


def written(runs: list[RunDirectory], file: Path) -> dict[str, Any]:
    """Write the report; the comparison that it holds. In a thread: the browser's loop is this
    one's.
    """
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        page, comparison = thread.submit(asyncio.run, report_of(runs)).result(30)
    file.write_text(page)
    return comparison


@pytest.mark.browser
def test_a_report_is_read_offline_with_the_tools_figures(
    chromium: Browser, home: Path, tmp_path: Path
) -> None:
    change_notes(two_runs()[1], tags=["best"], note="Half the rate.")
    runs = [RunDirectory(home / "runs" / run_id) for run_id in (ONE, TWO)]
    comparison = written(runs, tmp_path / "report.html")
    with opened(chromium, tmp_path / "report.html") as page:
        expect(page.locator(".comparison section").first).to_contain_text(comparison["best"]["why"])
        rows = page.locator(".comparison tbody").first.locator("tr")
        expect(rows).to_have_count(2)
        for at, row in enumerate(comparison["runs"]):
            held = row["eval/percent_correct"]
            expect(rows.nth(at)).to_contain_text(f"{held['last']:.3g}")
            expect(rows.nth(at)).to_contain_text(f"gain +{held['gain']:.3g} (95 %: ")
        two = page.locator(f"[id='/runs/{TWO}']")
        expect(two.locator(".charts.large .plot svg").first).to_be_visible()
        expect(two.locator(".gains li").first).to_contain_text("held-out tasks solved: +")
        expect(two.locator(".own-note")).to_have_text("Half the rate.")
        expect(two.locator(".usage .plot").first).to_have_attribute(
            "aria-label", _has("engine 1.5")
        )
        expect(two.locator(".group-list")).to_contain_text("What is 6 * 7?")
        expect(page.get_by_role("button", name="Stop", exact=True)).to_have_count(0)
        expect(page.get_by_role("button", name="Tags and note")).to_have_count(0)
        two.get_by_label("Add a curve").select_option("tokens/action")
        expect(two.locator(".chart b").filter(has_text="tokens/action")).to_have_count(1)
        page.get_by_role("link", name=TWO).click()
        expect(two.locator("h1")).to_be_in_viewport()


@pytest.mark.browser
def test_hostile_texts_of_a_report_stay_text(chromium: Browser, home: Path, tmp_path: Path) -> None:
    runs = two_runs(name=HOSTILE, environment=HOSTILE, base_model=HOSTILE)
    for run in runs:
        run_results.configure(run, env={HOSTILE: f"{HOSTILE}{run.run_id}"})
        append_row(run.path / "metrics.jsonl", {"step": 2, HOSTILE: 1.0})
        roles = {"t": 110.0, "cpu": {HOSTILE: 1.0}, "memory": {HOSTILE: 1}}
        append_row(run.path / "usage.jsonl", roles)
        run_results.add_group(
            run, 40, run_results.completion(HOSTILE, 1.0), prompt=HOSTILE, item=HOSTILE
        )
        notes = {"tags": [HOSTILE], "note": HOSTILE, "revision": 1}
        (run.path / "notes.json").write_text(json.dumps(notes))
    written(runs, tmp_path / "report.html")
    with opened(chromium, tmp_path / "report.html") as page:
        expect(page.locator(".own-note").first).to_have_text(HOSTILE)
        expect(page.locator(".usage .key").filter(has_text=HOSTILE).first).to_be_visible()
        expect(page.locator(".comparison section").last).to_contain_text(f"{HOSTILE}{TWO}")
        assert page.evaluate("window.owned") is None
        assert page.locator("main img, main script").count() == 0


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_fits_a_narrow_window(
    chromium: Browser, home: Path, tmp_path: Path, scheme: Any
) -> None:
    written(two_runs(environment_sha256="ab" * 32), tmp_path / "report.html")
    narrow = {"width": 390, "height": 800}
    with opened(chromium, tmp_path / "report.html", viewport=narrow, color_scheme=scheme) as page:
        expect(page.locator(".charts.large .plot svg").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def _has(text: str) -> Any:
    import re

    return re.compile(re.escape(text))
