"""The page in a real browser (make test-browser)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from agent import fake_trajectory_server, run_fixtures, run_results
from agent.run_fixtures import RUN
from runs.run_fixtures import settings, start_standins, survivors, wait

from halteres.agent.transports.access import link
from halteres.next_step import NextStep, Remedy
from halteres.observe.metrics import append_row
from halteres.runs.directory import stop_run

from .conftest import HOSTILE, Visiting, expect

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from .browser import Visit

pytestmark = pytest.mark.browser

NUM_RUNS, LOADS_WITHIN_S = 200, 5.0


def stays(page: Page) -> Callable[[], bool]:
    """Whether the page is still the one it was: it was not loaded again."""
    page.evaluate("window.was = 'here'")
    return lambda: page.evaluate("window.was") == "here"


def test_a_link_opens_the_page_once_and_leaves_nothing_in_the_address(
    visiting: Visiting, url: str
) -> None:
    address = link(url)
    with visiting() as first:
        first.page.goto(address)
        expect(first.page.locator("h1")).to_have_text("Runs")
        assert first.page.url == f"{url}/"
        (cookie,) = first.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert (
            first.page.evaluate(
                "document.cookie + JSON.stringify(localStorage) + JSON.stringify(sessionStorage)"
            )
            == "{}{}"
        )
        first.page.reload()
        expect(first.page.locator("h1")).to_have_text("Runs")
        assert not [asked for asked in first.asked if "token" in asked]
    with visiting() as second:
        second.page.goto(address)
        expect(second.page.locator("#said")).to_contain_text("was used before")


def test_without_a_link_the_page_says_how_to_get_one_and_takes_it(visit: Visit) -> None:
    assert (answer := visit.page.goto(visit.url))
    assert answer.status == 401
    expect(visit.page.locator("main")).to_contain_text("halteres ui")
    visit.page.goto(link(visit.url))  # in the same window: its address changes behind the # alone
    expect(visit.page.locator("h1")).to_have_text("Runs")


def test_no_runs_yet_says_how_to_start_one(visit: Visit) -> None:
    page = visit.enter()
    expect(page.get_by_role("status").filter(has_text="No runs yet")).to_contain_text(
        "halteres quickstart"
    )


def test_a_reward_training_tells_its_accuracy_and_nothing_of_a_policy(visit: Visit) -> None:
    run = run_fixtures.make_run(
        kind="reward", environment="reward-model", processes={"trainer": {"exit": 0}}
    )
    append_row(run.path / "metrics.jsonl", {"step": 1, "accuracy": 0.875})
    append_row(run.path / "metrics.jsonl", {"step": 1, "eval_accuracy": 0.84})
    page = visit.enter()
    expect(page.locator(".run .labelled").first).to_have_text("accuracy0.875")
    page = visit.enter(f"#/runs/{RUN}")
    facts = page.locator(".facts")
    expect(facts).to_contain_text("Accuracy88 %")
    expect(facts).to_contain_text("Held out84 %")
    expect(facts).not_to_contain_text("KL")
    expect(page.get_by_role("heading", name="Rollouts")).to_be_hidden()
    expect(page.locator(".processes dt")).to_have_text(["trainer"])


def test_runs_appear_and_change_in_the_list_without_a_reload(
    visit: Visit, alive: Callable[..., Any]
) -> None:
    run_results.trained("aaaa1111", steps=20, created_at=100.0, ended_at=160.0)
    page = visit.enter()
    still = stays(page)
    expect(page.locator(".run")).to_have_count(1)
    expect(page.locator(".run")).to_contain_text("completed")
    expect(page.locator(".run .spark polyline")).to_have_count(1)
    run = run_fixtures.make_run(steps=3)
    alive(run, step=3)
    expect(page.locator(".run").first).to_contain_text(f"gsm8k-{RUN}")
    expect(page.locator(".run").first).to_contain_text("3 / 50")
    run_fixtures.add_step(run, 4)
    run_fixtures.change(run, step=4)
    expect(page.locator(".run").first).to_contain_text("4 / 50")
    expect(page.locator(".run").first.locator(".figure").first).to_have_text("0.22")
    page.get_by_role("searchbox").fill("completed")
    expect(page.locator(".run:visible")).to_have_count(1)
    assert still()


def test_a_curve_grows_while_one_looks(visit: Visit, alive: Callable[..., Any]) -> None:
    run = run_fixtures.make_run(steps=3)
    alive(run, step=3)
    page = visit.enter(f"#/runs/{RUN}")
    still = stays(page)
    line = page.locator(".charts.large path.line").first
    expect(page.locator(".charts.large .plot").first).to_have_attribute(
        "aria-label", _says("0.19 to 0.21")
    )
    before = len(line.get_attribute("d") or "")
    run_fixtures.add_step(run, 4)
    run_fixtures.add_step(run, 5)
    expect(page.locator(".charts.large .plot").first).to_have_attribute(
        "aria-label", _says("0.19 to 0.23")
    )
    assert len(line.get_attribute("d") or "") > before
    expect(page.locator(".points circle")).to_have_count(0)
    run_results.evaluate(run, 0, 0.0)
    expect(page.locator(".charts.large .points circle")).to_have_count(2)
    expect(page.locator(".charts.large .points .margin")).to_have_count(2)
    assert still()


def _says(text: str) -> Any:
    import re

    return re.compile(re.escape(text))


def test_an_alert_appears_with_a_remedy_to_copy(
    visiting: Visiting, alive: Callable[..., Any]
) -> None:
    run = run_fixtures.make_run(steps=8)
    alive(run, step=8)
    remedy = Remedy((NextStep("rl_get_results", {"run_id": RUN}),), "then longer answers.")
    with visiting(permissions=["clipboard-read", "clipboard-write"]) as visit:
        page = visit.enter(f"#/runs/{RUN}")
        expect(page.locator(".facts")).to_contain_text("healthy")
        run_fixtures.add_alert(run, step=8, remedy=remedy)
        alert = page.locator(".trouble.alert.current")
        expect(alert).to_contain_text("truncation")
        expect(alert).to_contain_text("41 % of the answers were cut off.")
        expect(page.locator(".charts.large .mark")).to_have_count(1)
        alert.get_by_role("button").click()
        copied = page.evaluate("navigator.clipboard.readText()")
        assert copied == f"halteres rl get-results {RUN}"
        expect(alert).to_contain_text("then longer answers.")


def test_a_failed_run_says_why_and_what_to_do(visit: Visit) -> None:
    sentence = "Trainer ran out of GPU memory at step 7. Lower batch_size, then resume."
    run = run_fixtures.make_run(
        steps=7,
        status="failed",
        error=sentence,
        code="gpu_oom",
        exit={"process": "trainer", "code": 1},
        resumable=True,
    )
    (run.path / "logs" / "trainer.log").write_text("CUDA out of memory\n")
    page = visit.enter(f"#/runs/{RUN}")
    trouble = page.get_by_role("alert")
    expect(trouble).to_contain_text(sentence)
    expect(trouble).to_contain_text(f"halteres rl start-training --resume-from {RUN}")
    trouble.locator("summary").click()
    expect(trouble.locator("pre")).to_have_text("CUDA out of memory")
    expect(page.get_by_role("button", name="Stop", exact=True)).to_have_count(0)


def test_a_run_that_stands_still_says_why_until_it_goes_on(
    visit: Visit, alive: Callable[..., Any]
) -> None:
    run = run_fixtures.make_run(steps=3, step_s=2.0)
    fake_trajectory_server.quiet_for(run, 60)
    with fake_trajectory_server.trajectory_server() as trajectories:
        alive(run, step=3, urls={"api": trajectories.url})
        page = visit.enter(f"#/runs/{RUN}")
        sentence = page.get_by_text(f"No batch yet: {fake_trajectory_server.WHY}")
        expect(sentence).to_be_visible()
        run_fixtures.add_step(run, 4, step_s=2.0)
        expect(sentence).to_be_hidden()
    visit.check()


def test_texts_of_others_are_shown_and_never_run(visit: Visit, alive: Callable[..., Any]) -> None:
    failed = run_fixtures.make_run(
        "bbbb2222",
        status="failed",
        name=HOSTILE,
        environment=HOSTILE,
        base_model=HOSTILE,
        error=HOSTILE,
        note=HOSTILE,
    )
    (failed.path / "logs" / "supervisor.log").write_text(f"{HOSTILE}\n")
    run = run_fixtures.make_run(steps=2, name=HOSTILE, environment=HOSTILE, base_model=HOSTILE)
    run_fixtures.add_alert(run, rule=HOSTILE, step=2, evidence=HOSTILE, remedy=HOSTILE)
    run_results.add_group(
        run, 1, run_results.completion(HOSTILE, 1.0), prompt=HOSTILE, item=HOSTILE
    )
    for step in (0, 2):
        run_results.evaluate(run, step, step / 4, tasks=[HOSTILE, f"{HOSTILE}?"])
    (run.path / "logs" / "trainer.log").write_text(f"{HOSTILE}\n")
    (run.path / "config.resolved.json").write_text(
        f'{{"env.{HOSTILE}": {{"value": "{HOSTILE}", "source": "edit"}}}}'
    )
    append_row(run.path / "metrics.jsonl", {"step": 2, HOSTILE: 1.0, f"eval/{HOSTILE}": 1.0})
    alive(run, step=2, processes={HOSTILE: {"pid": 1, "state": HOSTILE}})
    page = visit.enter()
    expect(page.locator(".run .name").first).to_have_text(HOSTILE)
    for place in ("bbbb2222", RUN):
        page.goto(f"{visit.url}/#/runs/{place}")
        expect(page.locator("h1")).to_have_text(HOSTILE)
        expect(page.locator(".log")).to_have_text(HOSTILE)
    expect(page.locator(".completion")).to_have_text(HOSTILE)
    expect(page.locator(".trouble.alert p").first).to_have_text(HOSTILE)
    expect(page.locator("tr.set td").first).to_have_text(HOSTILE)
    page.locator("select[aria-label='Add a curve']").select_option(HOSTILE)
    expect(page.locator(".charts:not(.large) figcaption").filter(has_text=HOSTILE)).to_have_count(1)
    page.get_by_text("Held-out tasks, before and after").click()
    expect(page.locator(".example .prompt").first).to_contain_text(HOSTILE)
    assert page.evaluate("window.owned") is None
    assert page.locator("main img, main script").count() == 0


def test_the_policy_refuses_scripts_even_if_a_text_became_markup(visit: Visit) -> None:
    page = visit.enter()
    refused = page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>'; } catch (e) { return e.name; } }"
    )
    assert refused == "TypeError"
    handler = (
        "() => { try { document.body.setAttribute('onclick', 'window.owned=1'); } catch (e) "
        "{ return e.name; } }"
    )
    assert page.evaluate(handler) == "TypeError"
    page.locator("body").click()
    assert page.evaluate("window.owned") is None
    assert visit.complaints, "the browser tells of what it refused"
    visit.complaints.clear()


def test_stop_asks_first_and_stops(visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_STEPS", "2")
    run = start_standins(settings())
    try:
        page = visit.enter()
        page.locator(".run").click()
        expect(page.locator(".head .badge")).to_have_text("running")
        expect(page.locator(".facts")).to_contain_text("2 / 4")
        page.get_by_role("button", name="Stop", exact=True).click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_role("button", name="Let it run").click()
        expect(dialog).to_be_hidden()
        assert not run.state().terminal
        page.get_by_role("button", name="Stop", exact=True).click()
        dialog.get_by_role("button", name="Stop now").click()
        expect(dialog).to_contain_text(f"Stopped training run '{run.run_id}'")
        expect(page.locator(".head .badge")).to_have_text("stopped")
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Stop", exact=True)).to_have_count(0)
        assert run.state().status == "stopped"
    finally:
        stop_run(run)
    assert not survivors(run.state())


def test_a_run_that_goes_on_is_followed_to_its_end(visit: Visit) -> None:
    page = visit.enter()
    still = stays(page)
    run = start_standins(settings())
    page.locator(".run").click()
    expect(page.locator(".head .badge")).to_have_text("completed")
    wait(run, lambda state: state.terminal)
    expect(page.locator(".facts")).to_contain_text("4 / 4")
    expect(page.locator(".gains")).to_contain_text("+100 points")
    expect(page.locator(".timeline")).to_contain_text("completed")
    expect(page.locator(".processes")).to_contain_text("exited (0)")
    assert still()


def test_results_tell_the_gain_with_its_interval_and_where_the_weights_are(visit: Visit) -> None:
    run = run_results.trained(created_at=time.time() - 900, ended_at=time.time() - 60)
    page = visit.enter(f"#/runs/{RUN}")
    gain = page.locator(".gains li").first
    expect(gain).to_contain_text("held-out tasks solved: +")
    expect(gain).to_contain_text("(95 %: +")
    expect(gain).to_contain_text("better")
    expect(page.locator(".paths")).to_contain_text(str(run.path / "adapter"))
    expect(page.locator(".paths")).to_contain_text("/sampler_weights/final")


def test_logs_and_settings_are_read(visit: Visit) -> None:
    run = run_fixtures.make_run(steps=1)
    (run.path / "logs" / "trainer.log").write_text("step 1\n")
    (run.path / "logs" / "env.log").write_text("ready\nscored 3\n")
    (run.path / "config.resolved.json").write_text(
        '{"trainer.total_steps": {"value": 25, "source": "edit"}, "env.seed": {"value": 7, '
        '"source": "default"}}'
    )
    page = visit.enter(f"#/runs/{RUN}")
    expect(page.locator(".log")).to_have_text("step 1")
    page.get_by_label("Process").select_option("env")
    expect(page.locator(".log")).to_have_text("ready\nscored 3")
    page.get_by_label("Only lines with").fill("scored")
    page.keyboard.press("Enter")
    expect(page.locator(".log")).to_have_text("scored 3")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_label("show all").check()
    expect(page.locator("tbody")).to_contain_text("env.seed7")


def test_everything_is_reached_by_keyboard(visit: Visit) -> None:
    run_results.trained(steps=20, created_at=100.0, ended_at=160.0)
    page = visit.enter()
    expect(page.locator(".run")).to_have_count(1)
    _tab_to(page, "a.run")
    page.keyboard.press("Enter")
    expect(page.locator(".charts.large .plot svg").first).to_be_visible()
    _tab_to(page, ".plot")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".tip").first).to_contain_text("step 20")
    page.keyboard.press("Home")
    expect(page.locator(".tip").first).to_contain_text("step 1")
    page.locator(".charts.large .plot").first.hover(position={"x": 300, "y": 100})
    expect(page.locator(".tip").first).to_contain_text("reward, mean of the batch 0.")


def _tab_to(page: Page, selector: str) -> None:
    """Tab until it has the focus."""
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    raise AssertionError(f"Tab does not lead to {selector}")


def test_a_run_that_is_not_there_offers_the_one_that_was_meant(visit: Visit) -> None:
    run_fixtures.make_run()
    page = visit.enter("#/runs/3fa9c1d3")
    visit.complaints.clear()
    page.get_by_role("link", name=f"Open {RUN}").click()
    expect(page.locator("h1")).to_have_text(f"gsm8k-{RUN}")
    visit.complaints[:] = [said for said in visit.complaints if "404 (Not Found)" not in said]


@pytest.mark.parametrize("place", ["", f"#/runs/{RUN}"], ids=["list", "run"])
def test_the_page_fits_a_narrow_window(
    visiting: Visiting, alive: Callable[..., Any], place: str
) -> None:
    run = run_results.trained(steps=20, environment="a-name-that-is-long-" * 4, status="running")
    run_fixtures.add_alert(
        run, step=18, remedy=Remedy((NextStep("rl_get_results", {"run_id": "x" * 90}),))
    )
    run_results.add_group(run, 1, run_results.completion("word" * 90, 1.0))
    alive(run, step=20)
    with visiting(viewport={"width": 400, "height": 800}) as visit:
        page = visit.enter(place)
        expect(page.locator(".completion" if place else ".run")).to_have_count(1)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert page.locator(".plot svg").first.bounding_box() if place else True
        if place:
            page.get_by_role("button", name="Stop", exact=True).click()
            expect(page.get_by_role("button", name="Let it run")).to_be_in_viewport()


def test_it_is_dark_for_those_who_prefer_that(visiting: Visiting) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        with visiting(color_scheme=scheme) as visit:
            grounds.append(
                visit.enter().evaluate("getComputedStyle(document.body).backgroundColor")
            )
    assert grounds == ["rgb(246, 247, 249)", "rgb(20, 22, 26)"]


def test_the_end_of_the_server_is_said_and_what_was_told_stays(
    chromium: Browser, home: Path
) -> None:
    from .browser import serving, visiting

    run_fixtures.make_run(steps=2)
    with ExitStack() as server:
        url = server.enter_context(serving())
        with visiting(chromium, url) as visit:
            page = visit.enter()
            expect(page.locator(".run")).to_have_count(1)
            server.close()
            expect(page.locator("#connection")).to_contain_text("No connection")
            expect(page.locator(".run")).to_have_count(1)
            visit.complaints[:] = [said for said in visit.complaints if "net::ERR_" not in said]


def test_two_hundred_runs_are_there_at_once(visit: Visit) -> None:
    for number in range(NUM_RUNS):
        run = run_fixtures.make_run(
            f"{number:08x}", created_at=1000.0 + number, ended_at=2000.0 + number
        )
        rows = [
            f'{{"step": {step}, "src": "trainer", "reward/mean": {step / 50}}}\n'
            for step in range(1, 51)
        ]
        (run.path / "metrics.jsonl").write_text("".join(rows))
    visit.enter()
    began = time.monotonic()
    visit.page.reload()
    expect(visit.page.locator(".run")).to_have_count(NUM_RUNS)
    took_s = time.monotonic() - began
    assert took_s < LOADS_WITHIN_S
    expect(visit.page.locator(".run .name").first).to_have_text("gsm8k-000000c7")
