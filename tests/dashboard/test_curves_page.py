"""The curves of a run's page: nothing hides what was dropped, and each point can be seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from agent import run_fixtures, run_results
from agent.run_fixtures import RUN

from halteres.observe.metrics import append_row
from halteres.runs.directory import RunDirectory

from .conftest import HOSTILE, expect

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from .browser import Visit

pytestmark = pytest.mark.browser

LARGE = ".charts.large .plot"


def add_step(run: RunDirectory, step: int, all_: float, kept: float, **figures: Any) -> None:
    """The rows of a step whose groups were dropped in part."""
    trained = {"reward/mean": kept, "reward/success": kept, "kl_sample_train_v2": 0.0}
    append_row(run.path / "metrics.jsonl", {"step": step, "src": "trainer", **trained, **figures})
    counted = {"rollouts/score": all_, "train/percent_correct": all_, "groups/sent": 6}
    append_row(run.path / "metrics.jsonl", {"step": step, "src": "env", **counted, **figures})


def curves(page: Page) -> Any:
    """The section of the curves: the machine's charts have controls of their own."""
    return page.locator("section").filter(has=page.locator(".charts.large"))


def test_the_score_of_all_rollouts_stands_next_to_that_of_kept_groups(visit: Visit) -> None:
    run = run_fixtures.make_run(steps=0, step=2)
    add_step(run, 1, 0.25, 0.5, **{"groups/dropped/same_scores": 2})
    add_step(run, 2, 0.75, 0.5, **{"groups/dropped/same_scores": 18})
    page = visit.enter(f"#/runs/{RUN}")
    main = page.locator(LARGE)
    expect(main).to_have_attribute(
        "aria-label",
        "Reward: score, all rollouts 0.25 to 0.75, reward, groups kept for training 0.5 to 0.5. "
        "Arrow keys read values off, + and - zoom, 0 shows all.",
    )
    dropped = page.locator(".chart").filter(has_text="Dropped groups").locator(".plot")
    expect(dropped).to_have_attribute("aria-label", _begins("Dropped groups: same scores 0.25 to "))
    dropped.focus()
    page.keyboard.press("End")
    expect(page.locator(".tip:visible")).to_have_text("step 2same scores 0.75")


def test_without_dropped_groups_there_is_one_curve_and_no_chart_of_them(visit: Visit) -> None:
    run = run_fixtures.make_run(steps=0, step=2)
    add_step(run, 1, 0.5, 0.5)
    add_step(run, 2, 0.75, 0.75)
    page = visit.enter(f"#/runs/{RUN}")
    said = "Reward: reward, mean of the batch 0.5 to 0.75. Arrow"
    expect(page.locator(LARGE)).to_have_attribute("aria-label", _begins(said))
    expect(page.locator(".chart").filter(has_text="Dropped groups")).to_have_count(0)


def test_a_divergence_of_nothing_but_zeros_is_offered_and_not_shown(visit: Visit) -> None:
    run = run_fixtures.make_run(steps=0, step=2)
    add_step(run, 1, 0.5, 0.5)
    page = visit.enter(f"#/runs/{RUN}")
    expect(page.locator(LARGE)).to_be_visible()
    charts = page.locator(".chart figcaption b")
    expect(charts.filter(has_text="KL")).to_have_count(0)
    page.get_by_label("Add a curve").select_option("kl_sample_train_v2")
    expect(charts.filter(has_text="kl_sample_train_v2")).to_have_count(1)
    add_step(run, 2, 0.5, 0.5, kl_sample_train_v2=0.125)
    expect(charts.filter(has_text="KL, sampler against trainer")).to_have_count(1)


def test_smoothing_leaves_every_measured_point_and_can_be_switched_off(visit: Visit) -> None:
    run_results.trained(steps=60, created_at=100.0, ended_at=160.0)
    page = visit.enter(f"#/runs/{RUN}")
    lines = page.locator(".charts.large .chart").first.locator("path.line")
    expect(lines).to_have_count(2)
    raw = lines.first.get_attribute("d") or ""
    assert raw.count("L") == 59, "each step is a point of the curve that is not smoothed"
    curves(page).get_by_label("Smoothing", exact=True).select_option("none")
    expect(lines).to_have_count(1)
    assert lines.first.get_attribute("d") == raw
    curves(page).get_by_label("Smoothing", exact=True).select_option("25 points")
    expect(lines).to_have_count(2)


def test_a_stretch_is_drawn_over_all_charts_by_pointer_or_keys(visit: Visit) -> None:
    run_results.trained(steps=60, created_at=100.0, ended_at=160.0)
    page = visit.enter(f"#/runs/{RUN}")
    main = page.locator(LARGE).first
    first = main.locator(".across").first
    expect(first).to_have_text("0")
    box = main.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.5, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, middle)
    expect(page.locator(".selection")).to_be_visible()
    page.mouse.up()
    expect(page.locator(".selection")).to_have_count(0)
    every = page.locator(".plot svg")
    starts = [every.nth(at).locator(".across").first for at in range(every.count())]
    assert len(starts) > 2
    for start in starts:
        expect(start).to_have_text(_from(25, 40))
    main.focus()
    page.keyboard.press("Home")
    expect(page.locator(".tip:visible")).to_contain_text(_from(25, 40))
    page.keyboard.press("0")
    expect(first).to_have_text("0")
    for _ in range(2):
        curves(page).get_by_label("Zoom in").click()
    expect(first).to_have_text(_from(20, 30))
    curves(page).get_by_label("Show the whole axis").click()
    expect(first).to_have_text("0")


def test_a_stretch_of_a_long_run_is_drawn_step_by_step(visit: Visit) -> None:
    run = run_fixtures.make_run(steps=0, step=2000, total_steps=2000)
    rows = [f'{{"step": {step}, "reward/mean": {step % 2}}}\n' for step in range(1, 2001)]
    (run.path / "metrics.jsonl").write_text("".join(rows))
    page = visit.enter(f"#/runs/{RUN}")
    main = page.locator(LARGE).first
    expect(main).to_have_attribute(
        "aria-label", _begins("Reward: reward, mean of the batch (means of 4")
    )
    for _ in range(4):
        curves(page).get_by_label("Zoom in").click()
    expect(main).to_have_attribute("aria-label", _begins("Reward: reward, mean of the batch 0 to"))


def test_what_each_process_takes_is_drawn_over_time_and_grows(visit: Visit) -> None:
    run = run_fixtures.make_run(steps=2, step=2)
    page = visit.enter(f"#/runs/{RUN}")
    machine = page.locator(".usage")
    expect(page.locator(LARGE).first).to_be_visible()
    expect(machine).to_be_hidden()
    for t, cores in ((100.0, 1.0), (105.0, 1.5), (110.0, 0.5)):
        cpu = {"engine": cores, "env": 0.25, HOSTILE: 0.125}
        memory = {"engine": 2 * 10**9, "env": 10**8}
        row = {"t": t, "cpu": cpu, "memory": memory, "busy": 1.75, "cores": 4}
        append_row(run.path / "usage.jsonl", row)
    run_fixtures.add_step(run, 3)
    expect(machine).to_contain_text("The machine has 4 cores.")
    cores = machine.locator(".plot").first
    expect(cores).to_have_attribute("aria-label", _begins("CPU, cores: engine 1 to 0.5, env 0.25"))
    expect(machine.locator(".key").nth(2)).to_have_text(HOSTILE)
    cores.focus()
    page.keyboard.press("End")
    expect(page.locator(".tip:visible")).to_contain_text("10 sengine 0.5")
    expect(machine.locator(".plot").nth(1)).to_have_attribute(
        "aria-label", _begins("Memory, GB: engine 2 to 2, env 0.1 to 0.1")
    )
    assert page.evaluate("window.owned") is None


def _begins(text: str) -> Any:
    import re

    return re.compile(f"^{re.escape(text)}")


def _from(low: int, high: int) -> Any:
    """A text with a number between these."""
    import re

    return re.compile(rf"(?<!\d)({'|'.join(map(str, range(low, high + 1)))})(?!\d)")
