"""Runs side by side on the page, and what a person writes about one."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from agent import run_fixtures, run_results
from agent.run_fixtures import RUN, told

from halteres.observe.metrics import append_row
from halteres.runs.notes import change_notes, read_notes

from .conftest import HOSTILE, Visiting, expect

if TYPE_CHECKING:
    from .browser import Visit

pytestmark = pytest.mark.browser

ONE, TWO = "aaaa1111", "bbbb2222"


def two_runs() -> None:
    run_results.trained(ONE, steps=40, skill=0.05, created_at=100.0, ended_at=160.0)
    run_results.trained(TWO, steps=60, skill=0.4, created_at=200.0, ended_at=290.0)
    slow = {"total_steps": 60, "learning_rate": 2e-5}
    run_results.configure(run_fixtures.RunDirectory(run_fixtures.runs_home() / TWO), trainer=slow)


def tools_answer(*run_ids: str) -> dict[str, Any]:
    """In a thread of its own: the browser's loop is this one's."""
    asked = told("rl_compare_runs", run_ids=[*run_ids], plot=False)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, asked).result(30)


def test_runs_that_are_ticked_are_compared_in_the_tools_own_words(visit: Visit) -> None:
    two_runs()
    page = visit.enter()
    boxes = page.get_by_role("checkbox")
    boxes.nth(0).check()
    expect(page.locator(".chosen")).to_contain_text("Tick another run")
    boxes.nth(1).check()
    expect(page.locator(".chosen code")).to_have_text(
        f"halteres runs report {TWO} {ONE} --out report.html"
    )
    page.get_by_role("link", name="Compare 2 runs").click()
    best = tools_answer(TWO, ONE)["best"]
    assert best["certain"]
    verdict = page.locator(".comparison section").first
    expect(verdict).to_contain_text(best["why"])
    expect(verdict.locator(".verdict")).to_have_text("certain")
    rows = page.locator(".comparison tbody").first.locator("tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text(TWO)
    differing = page.locator(".comparison section").last
    expect(differing).to_contain_text("trainer.learning_rate0.000020.00004")
    page.get_by_role("link", name="← All runs").click()
    expect(page.get_by_role("checkbox", checked=True)).to_have_count(2)


def test_curves_share_a_chart_over_steps_time_or_tokens(visit: Visit) -> None:
    two_runs()
    page = visit.enter(f"#/compare/{ONE},{TWO}")
    chart = page.locator(".chart").filter(has_text="Reward, mean of the batch")
    expect(chart.locator(".key")).to_have_text([ONE, TWO])
    expect(chart.locator(".across").last).to_have_text("60")
    chart.locator(".plot").focus()
    page.keyboard.press("End")
    expect(page.locator(".tip:visible")).to_contain_text("step 60")
    over = page.get_by_label("Draw the curves over")
    over.select_option("time of the steps")
    expect(chart.locator(".across").last).to_have_text("60 s")  # of 60 steps of 1.28 s
    over.select_option("tokens trained on")
    expect(chart.locator(".across").last).to_have_text("250K")  # of 60 steps of 4718 tokens
    held = page.locator(".chart").filter(has_text="Held-out tasks solved")
    expect(held.locator(".points .margin")).to_have_count(3 + 4)
    page.locator("select[aria-label='Add a curve']").select_option("train/completion_lengths")
    expect(page.locator(".chart b").filter(has_text="train/completion_lengths")).to_have_count(1)


def test_eight_runs_at_most_are_ticked(visit: Visit) -> None:
    for number in range(9):
        run_fixtures.make_run(f"{number:08x}", created_at=1000.0 + number, ended_at=2000.0)
    page = visit.enter()
    for number in range(8):
        page.get_by_role("checkbox").nth(number).check()
    expect(page.get_by_role("checkbox").nth(8)).to_be_disabled()
    page.get_by_role("button", name="Clear").click()
    expect(page.get_by_role("checkbox").nth(8)).to_be_enabled()
    expect(page.locator(".chosen")).to_be_hidden()


def test_a_run_that_is_not_there_is_said_next_to_the_others(visit: Visit) -> None:
    two_runs()
    page = visit.enter(f"#/compare/{ONE},ffff9999,{TWO}")
    expect(page.locator("tr").filter(has_text="ffff9999")).to_contain_text("not found")
    expect(page.locator(".chart").first.locator(".key")).to_have_count(2)


def test_tags_and_a_note_are_written_and_the_list_is_filtered_by_tag(visit: Visit) -> None:
    run = run_results.trained(steps=20, created_at=100.0, ended_at=160.0)
    run_fixtures.make_run("eeee5555", created_at=50.0, ended_at=60.0)
    page = visit.enter(f"#/runs/{RUN}")
    page.get_by_role("button", name="Tags and note").click()
    page.get_by_label("Tags, with commas between").fill("best, lr sweep ,best")
    page.get_by_label("Note", exact=True).fill("First line\nsecond")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".notes .tag")).to_have_text(["best", "lr sweep"])
    expect(page.locator(".own-note")).to_have_text("First line\nsecond")
    assert read_notes(run).tags == ("best", "lr sweep")
    page.goto(f"{visit.url}/#/")
    page.get_by_label("Only runs with the tag").select_option("best")
    expect(page.locator(".run:visible")).to_have_count(1)
    expect(page.locator(".run:visible .tag")).to_have_text(["best", "lr sweep"])
    change_notes(run, tags=["other"])
    expect(page.locator(".run:visible")).to_have_count(2)


def test_what_cannot_be_saved_stays_in_the_form(visit: Visit) -> None:
    run = run_results.trained(steps=20, created_at=100.0, ended_at=160.0)
    page = visit.enter(f"#/runs/{RUN}")
    page.get_by_role("button", name="Tags and note").click()
    page.get_by_label("Note", exact=True).fill("mine")
    change_notes(run, note="theirs")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator(".notes-form [role=status]")).to_contain_text("were changed meanwhile")
    expect(page.get_by_label("Note", exact=True)).to_have_value("mine")
    assert read_notes(run).note == "theirs"
    page.keyboard.press("Escape")
    expect(page.locator(".own-note")).to_have_text("theirs")
    visit.complaints[:] = [said for said in visit.complaints if "422" not in said]


def test_hostile_names_tags_notes_and_settings_stay_text(visit: Visit) -> None:
    for run_id in (ONE, TWO):
        run = run_results.trained(run_id, steps=20, name=HOSTILE + run_id, environment=HOSTILE)
        settings = {"env": {HOSTILE: f"{HOSTILE}{run_id}"}}
        run_results.configure(run, **settings)
        append_row(run.path / "metrics.jsonl", {"step": 3, HOSTILE: 1.0})
        (run.path / "notes.json").write_text(
            run_fixtures.json.dumps({"tags": [HOSTILE], "note": HOSTILE, "revision": 1})
        )
    page = visit.enter()
    expect(page.locator(".run .tag").first).to_have_text(HOSTILE)
    page.get_by_label("Only runs with the tag").select_option(HOSTILE)
    page.goto(f"{visit.url}/#/compare/{ONE},{TWO}")
    expect(page.locator(".comparison th a").first).to_have_text(f"{HOSTILE}{ONE} ({ONE})")
    expect(page.locator(".comparison section").last).to_contain_text(f"{HOSTILE}{TWO}")
    page.locator("select[aria-label='Add a curve']").select_option(HOSTILE)
    expect(page.locator(".chart b").filter(has_text=HOSTILE)).to_have_count(1)
    page.goto(f"{visit.url}/#/runs/{ONE}")
    expect(page.locator(".own-note")).to_have_text(HOSTILE)
    assert page.evaluate("window.owned") is None
    assert page.locator("main img, main script").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_comparison_fits_a_narrow_window(visiting: Visiting, scheme: str) -> None:
    two_runs()
    with visiting(viewport={"width": 390, "height": 800}, color_scheme=scheme) as visit:
        page = visit.enter(f"#/compare/{ONE},{TWO}")
        expect(page.locator(".comparison tbody")).to_have_count(2)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.goto(f"{visit.url}/#/")
        page.get_by_role("checkbox").first.check()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_comparison_is_made_by_keyboard(visit: Visit) -> None:
    two_runs()
    page = visit.enter()
    for number in (0, 1):
        page.get_by_role("checkbox").nth(number).focus()
        page.keyboard.press("Space")
    page.get_by_role("link", name="Compare 2 runs").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".comparison .plot").first).to_be_visible()
    page.locator(".comparison .plot").first.focus()
    page.keyboard.press("+")
    expect(page.get_by_label("Show the whole axis")).to_be_enabled()
    page.keyboard.press("Escape")
    expect(page.get_by_label("Show the whole axis")).to_be_disabled()
