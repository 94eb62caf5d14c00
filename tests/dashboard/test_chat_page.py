"""The chat of a run in a real browser (make test-browser): with the built-in model, and with a
service that says what it is told to.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from agent import run_fixtures, run_results
from agent.run_fixtures import RUN
from runs.run_fixtures import wait_for_end

from halteres.config.resolution import resolve_settings
from halteres.runs import servers
from halteres.runs.directory import RunDirectory
from halteres.runs.kept_service import ServiceSearch
from halteres.runs.planning.plan import plan_run
from halteres.runs.servers import Server, end_kept
from halteres.runs.start import start_run

from .conftest import HOSTILE, Visiting, expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    from .browser import Visit

pytestmark = pytest.mark.browser

EDITS = (
    "env.group_size=4",
    "env.batch_size=16",
    "env.eval_tasks=4",
    "env.eval_samples=1",
    "trainer.eval_every=0",
    "trainer.checkpoint_every=1",
    "trainer.total_steps=2",
)
TRAINS_WITHIN_S, STARTS_WITHIN_MS = 240.0, 180_000
NARROW = {"width": 390, "height": 844}


def question(page: Page) -> Locator:
    return page.get_by_role("textbox", name="Question")


def answers(page: Page) -> Locator:
    return page.get_by_label("Answer", exact=True)


def is_idle(page: Page) -> Locator:
    """The button, once every column has its answer."""
    return page.get_by_role("button", name="Ask", disabled=False)


@pytest.fixture
def trained(home: Path) -> Iterator[RunDirectory]:
    """A run of the built-in model, whose service a chat may leave behind."""
    run = start_run(plan_run(resolve_settings("arithmetic", None, list(EDITS))))
    assert wait_for_end(run, TRAINS_WITHIN_S).status == "completed"
    yield run
    end_kept(run)


@pytest.mark.timeout(900)
def test_a_run_and_its_base_model_answer_side_by_side(
    trained: RunDirectory, visit: Visit, capsys: pytest.CaptureFixture[str]
) -> None:
    page = visit.enter(f"#/runs/{trained.run_id}")
    page.get_by_role("link", name="Chat").click()
    expect(question(page)).to_be_focused()
    page.get_by_label("Left model").select_option("step 1")
    question(page).fill("What is 3 * 4?")
    question(page).press("Enter")
    abouts = page.locator(".turn p")
    expect(abouts.first).to_contain_text("a service starts")
    expect(is_idle(page)).to_be_visible(timeout=STARTS_WITHIN_MS)
    expect(abouts).to_have_count(2)
    expect(abouts.nth(0)).to_contain_text("step 1 · ")
    expect(abouts.nth(1)).to_contain_text("newest: step 2 · ")
    for text in answers(page).all_text_contents():
        assert text.strip()

    page.get_by_label("Left model").select_option("base: halteres/tiny")
    question(page).fill(HOSTILE)
    began = time.monotonic()
    question(page).press("Enter")
    expect(is_idle(page)).to_be_visible(timeout=STARTS_WITHIN_MS)
    seconds = time.monotonic() - began
    with capsys.disabled():
        print(f"\nsecond question, both columns: {seconds:.1f} s")  # noqa: T201 - the figure
    expect(page.get_by_role("heading", name=HOSTILE)).to_be_visible()
    expect(abouts.nth(2)).to_contain_text("base: halteres/tiny · ")
    assert page.evaluate("window.owned") is None


@pytest.fixture
def run(home: Path) -> RunDirectory:
    """A run that has ended, with a checkpoint, named so that a page might take it for markup."""
    run = run_fixtures.make_run(name=HOSTILE)
    (run.path / "config.yaml").write_text("env: {}")
    run_results.add_checkpoint(run, 4, "final")
    return run


class Scripted:
    """What a service streams: hostile text; after `hangs` is set, a beginning and no end."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.hangs = False
        self.left = threading.Event()

    async def stream(
        self, _: Server, __: str, body: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        self.asked.append(body)
        yield {"choices": [{"index": 0, "text": HOSTILE}]}
        if self.hangs:
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()
        yield {"choices": [{"index": 0, "text": " end", "finish_reason": "length"}]}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    scripted = Scripted()
    monkeypatch.setattr(servers, "stream", scripted.stream)
    monkeypatch.setattr(ServiceSearch, "look", lambda _: Server(url="http://service"))
    return scripted


def test_hostile_answers_stay_text_and_are_history_until_they_are_cleared(
    run: RunDirectory, service: Scripted, visiting: Visiting
) -> None:
    with visiting(viewport=NARROW) as visit:
        page = visit.enter(f"#/chat/{RUN}")
        expect(page.get_by_role("heading", name=HOSTILE)).to_be_visible()
        for number in (1, 2):
            question(page).fill(f"question {number}")
            question(page).press("Enter")
            expect(answers(page)).to_have_count(2 * number)
            expect(is_idle(page)).to_be_visible()
        assert answers(page).all_text_contents() == [f"{HOSTILE} end"] * 4
        expect(page.locator(".turn p").first).to_contain_text("cut off at 128 tokens")
        roles = [[one["role"] for one in body["messages"]] for body in service.asked]
        assert roles == [["user"]] * 2 + [["user", "assistant", "user"]] * 2
        assert page.evaluate("window.owned") is None
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]

        page.get_by_role("button", name="Clear").click()
        expect(answers(page)).to_have_count(0)
        question(page).fill("question 3")
        question(page).press("Enter")
        expect(is_idle(page)).to_be_visible()
        assert len(service.asked[-1]["messages"]) == 1


def test_an_answer_is_stopped_by_its_button_and_by_leaving_the_view(
    run: RunDirectory, service: Scripted, visit: Visit
) -> None:
    service.hangs = True
    page = visit.enter(f"#/chat/{RUN}")
    question(page).fill("a question")
    question(page).press("Enter")
    expect(answers(page).first).to_have_text(HOSTILE)
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("Stopped.")).to_have_count(2)
    assert service.left.wait(10)

    service.left.clear()
    question(page).fill("another")
    question(page).press("Enter")
    expect(answers(page)).to_have_count(4)
    expect(answers(page).last).to_have_text(HOSTILE)
    page.get_by_role("link", name="The run").click()
    assert service.left.wait(10)


def test_an_error_says_what_to_do_and_the_next_question_can_be_asked(
    run: RunDirectory, service: Scripted, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = visit.enter(f"#/chat/{RUN}")
    expect(question(page)).to_be_focused()
    (run.path / "checkpoints.jsonl").write_text("")
    question(page).fill("a question")
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_text("has no weights to sample from")).to_be_visible()
    expect(answers(page).first).to_have_text(f"{HOSTILE} end")
    expect(question(page)).to_be_focused()
    expect(is_idle(page)).to_be_visible()
    assert len(visit.complaints) == 1 and "404" in visit.complaints.pop()
