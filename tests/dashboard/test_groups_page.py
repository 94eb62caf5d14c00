"""Groups of rollouts in a real browser: on a run's page, and in a file of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from agent import run_fixtures, run_results
from agent.run_fixtures import RUN

from halteres.groups.group import ScoredGroup
from halteres.groups.page import Entry, Standing, render
from halteres.models import TINY, builtin_path
from halteres.observe.metrics import append_row
from halteres.runs.directory import RunDirectory
from halteres.tokenizer import load_tokenizer

from .conftest import HOSTILE, Visiting, expect

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from .browser import Visit

pytestmark = pytest.mark.browser

NUM_GROUPS, GROUP_SIZE, NUM_TOKENS = 16, 16, 200
ON_SCREEN_WITHIN_MS = 300
"""The aim; a machine that is busy with other tests is given ten times as long."""


def answer(text: str, score: float, **more: Any) -> dict[str, Any]:
    """A completion with tokens: its words, and one that ends it."""
    words = re.findall(r"\S+\s*", text)
    made = run_results.completion(text, score, tokens=len(words) + 1)
    tokens = {
        "ids": [*range(10, 10 + len(words)), 2],
        "logprobs": [*(-0.01 - 3.0 * (at % 3 == 1) for at in range(len(words))), 0.0],
        "lengths": [*map(len, words), 0],
    }
    return {**made, **tokens, **more}


def add_group(run: RunDirectory, number: int, *answers: dict[str, Any], **line: Any) -> None:
    run_results.add_group(run, 1, *answers, group=number, **{"id": f"id{number}", **line})


def train(run: RunDirectory, step: int, number: int, *advantages: list[float]) -> None:
    row = {"id": f"id{number}", "advantages": advantages}
    append_row(run.path / "rollouts" / f"advantages_{step}.jsonl", row)


@pytest.fixture
def run(home: Path) -> RunDirectory:
    """Three groups of one step: one that was trained on, one that was dropped, one that failed."""
    made = run_fixtures.make_run(steps=1)
    right = answer("It is forty two.", 1.0, rewards={"exact": 1.0, "length": 0.2})
    wrong = answer("It is seven.", 0.0, rewards={"exact": 0.0, "length": 0.9})
    add_group(made, 0, right, {**wrong, "outcome": "failure", "finish": "length"})
    train(made, 1, 0, [0.7], [-0.7])
    alike = answer("No idea.", 0.0)
    add_group(made, 1, alike, alike, item="sums", dropped={"code": "same_scores"})
    failure = {"code": "env_error", "why": "score raised KeyError."}
    add_group(made, 2, item="odd", prompt="", failures=[failure])
    return made


def opened(visit: Visit) -> Page:
    """A run's page, scrolled to its rollouts: tokens are drawn where they are seen."""
    page = visit.enter(f"#/runs/{RUN}")
    expect(page.locator(".group-line[open]")).to_have_count(1)
    page.evaluate("document.querySelector('.rollouts').scrollIntoView()")
    return page


def look_again(page: Page, run: RunDirectory, step: int) -> None:
    """A step of the run ends, and the page reads its rollouts anew."""
    page.wait_for_timeout(3_000)  # it looks no sooner
    run_fixtures.add_step(run, step)


def test_a_step_shows_all_its_groups_and_what_became_of_each(
    run: RunDirectory, visit: Visit
) -> None:
    page = opened(visit)
    lines = page.locator(".group-line > summary")
    expect(lines).to_have_count(3)
    expect(page.locator(".state")).to_have_text(["trained", "dropped same scores", "failed"])
    expect(lines.nth(0)).to_contain_text("6 * 7")
    expect(lines.nth(0).locator(".strip")).to_have_attribute("aria-label", "scores 1 0")
    expect(lines.nth(0).locator(".mean")).to_have_text("0.5 ± 0.5")
    said = page.locator(".rollouts > .quiet")
    expect(said).to_contain_text("4 rollouts in 3 groups · mean score 0.5")
    expect(said).to_contain_text("mean score of all that was sampled 0.25")
    lines.nth(2).click()
    expect(page.locator(".group-line").nth(2)).to_contain_text("env_error: score raised KeyError.")
    lines.nth(1).click()
    expect(page.locator(".group-line").nth(1)).to_contain_text("nothing can be learnt from them")


def test_answers_stand_side_by_side_with_scores_components_and_tinted_tokens(
    run: RunDirectory, visit: Visit
) -> None:
    page = opened(visit)
    first, second = page.locator(".answer").nth(0), page.locator(".answer").nth(1)
    expect(first.locator("header")).to_contain_text("score 1")
    expect(first.locator(".advantage")).to_have_text("advantage +0.7")
    expect(first.locator(".component")).to_have_text(["exact 1", "length 0.2"])
    expect(second.locator("header")).to_contain_text("failure · cut off")
    boxes = [one.bounding_box() for one in (first, second)]
    assert boxes[0] and boxes[1] and boxes[0]["y"] == boxes[1]["y"]
    tokens = first.locator(".completion span")
    expect(tokens).to_have_text(["It ", "is ", "forty ", "two.", ""])
    expect(tokens.nth(1)).to_have_attribute("title", "4.9\u00a0%, token 11")
    expect(tokens.nth(1)).to_have_class("p2")
    ground = "one => getComputedStyle(one).backgroundColor"
    by_probability = tokens.nth(1).evaluate(ground)
    assert by_probability != tokens.nth(0).evaluate(ground)
    page.get_by_role("button", name="advantage").click()
    assert tokens.nth(1).evaluate(ground) == tokens.nth(0).evaluate(ground)
    grounds = [one.locator(".completion").evaluate(ground) for one in (first, second)]
    assert len({*grounds, by_probability}) == 3


def test_turns_are_apart_and_what_was_given_is_grey(visit: Visit) -> None:
    run = run_fixtures.make_run(steps=1)
    turns = [
        {**answer("Up.", 0.0), "observation": "Higher.", "reward": 0.0},
        {**answer("Nine.", 1.0), "observation": "", "reward": 1.0},
    ]
    add_group(run, 0, {**run_results.completion("Up.Nine.", 1.0), "turns": turns})
    train(run, 1, 0, [0.5, -0.25])
    page = opened(visit)
    expect(page.locator(".answer pre")).to_have_text(["Up.", "Higher.", "Nine."])
    expect(page.locator(".answer .part p")).to_have_text(["reward 0", "reward 1"])
    expect(page.locator(".answer .completion").nth(0)).to_have_class("completion up3")
    expect(page.locator(".answer .completion").nth(1)).to_have_class("completion down3")
    colour = "one => getComputedStyle(one).color"
    seen = page.locator(".answer .observed").evaluate(colour)
    assert seen != page.locator(".answer .completion").first.evaluate(colour)


def test_groups_and_answers_are_searched_and_filtered(run: RunDirectory, visit: Visit) -> None:
    page = opened(visit)
    lines, answers = page.locator(".group-line"), page.locator(".answer")
    expect(answers).to_have_count(2)
    search = page.get_by_label("Search in texts")
    search.fill("FORTY")
    search.press("Enter")
    expect(lines).to_have_count(1)
    expect(answers).to_have_count(1)
    expect(answers).to_contain_text("It is forty two.")
    expect(page.locator(".opened")).to_contain_text("1 answer does not match.")
    search.fill("")
    search.press("Enter")
    expect(lines).to_have_count(3)
    page.get_by_label("What became of a group").select_option("dropped")
    expect(lines).to_have_count(1)
    page.get_by_label("What became of a group").select_option("")
    page.get_by_label("Outcome of a rollout").select_option("cut off")
    expect(answers).to_have_count(1)
    expect(answers).to_contain_text("It is seven.")
    page.get_by_label("Outcome of a rollout").select_option("")
    page.get_by_label("A value of a rollout").select_option("length")
    page.get_by_label("Value from").fill("0.5")
    expect(lines).to_have_count(1)
    expect(answers).to_have_count(1)
    expect(answers).to_contain_text("It is seven.")


def test_rollouts_are_read_by_step_and_an_open_place_stays_open(visit: Visit) -> None:
    run = run_fixtures.make_run(steps=2)
    for step in (1, 2):
        told = [answer(f"score {score} of step {step}", score) for score in (0.25, 0.5)]
        run_results.add_group(run, step, *told, prompt="What is 6 * 7?", id=f"of {step}")
    page = opened(visit)
    expect(page.locator(".opened .prompt")).to_have_text("What is 6 * 7?")
    expect(page.locator(".completion").first).to_have_text("score 0.25 of step 2")
    page.get_by_role("button", name="Step before").click()
    expect(page.locator(".completion").first).to_have_text("score 0.25 of step 1")


def test_groups_that_come_to_the_newest_step_are_added_and_an_open_one_stays(
    run: RunDirectory, visit: Visit, alive: Callable[..., Any]
) -> None:
    alive(run, step=1)
    page = opened(visit)
    page.locator(".answer").first.evaluate("one => (one.was = 'here')")
    page.locator(".group-line > summary").first.focus()
    add_group(run, 3, answer("Late.", 1.0), answer("Later.", 0.0))
    look_again(page, run, 2)
    expect(page.locator(".group-line")).to_have_count(4)
    assert page.locator(".answer").first.evaluate("one => one.was") == "here"
    expect(page.locator(".group-line > summary").first).to_be_focused()


def test_a_step_that_is_over_is_read_once_more_with_its_advantages(
    run: RunDirectory, visit: Visit, alive: Callable[..., Any]
) -> None:
    """Its reader stays with it while the run goes on."""
    add_group(run, 3, answer("Late.", 1.0), answer("Later.", 0.0))
    alive(run, step=1)
    page = opened(visit)
    expect(page.locator(".group-line .state").last).to_have_text("waiting")
    train(run, 1, 3, [0.5], [-0.5])
    for step in (2, 3):
        run_results.add_group(run, step, answer("New.", 1.0), id=f"of {step}")
    look_again(page, run, 3)
    expect(page.locator(".group-line .state").last).to_have_text("trained")
    expect(page.get_by_label("Step", exact=True)).to_have_value("1")


def test_the_end_of_a_run_decides_what_became_of_its_last_groups(
    run: RunDirectory, visit: Visit, alive: Callable[..., Any]
) -> None:
    add_group(run, 3, answer("Late.", 1.0), answer("Later.", 0.0))
    alive(run, step=1)
    page = opened(visit)
    expect(page.locator(".group-line .state").last).to_have_text("waiting")
    run_fixtures.change(run, status="completed")
    expect(page.locator(".group-line .state").last).to_have_text("unused")


def test_a_step_of_many_groups_lists_the_first_until_all_are_asked_for(visit: Visit) -> None:
    """What is below them stays within reach. Filters and orders are of all of them."""
    made = run_fixtures.make_run(steps=1)
    for number in range(126):
        add_group(made, number, answer("One.", number / 126), answer("Two.", 0.0))
    train(made, 1, 40, [0.1], [-0.1])
    page = opened(visit)
    lines = page.locator(".group-line")
    expect(lines).to_have_count(32)
    page.get_by_label("Order").select_option("best first")
    expect(page.locator(".group-line .label-of").first).to_have_text("125")
    page.get_by_label("Order").select_option("in order")
    page.get_by_role("button", name="Show all 126 groups").click()
    expect(lines).to_have_count(126)
    expect(lines.nth(32).locator("summary")).to_be_focused()
    expect(page.get_by_role("button", name="Show all")).to_be_hidden()


def test_a_run_of_an_older_version_shows_its_texts(visit: Visit) -> None:
    run = run_fixtures.make_run(steps=1)
    run_results.add_group(run, 1, run_results.completion("forty two", 1.0))
    page = opened(visit)
    expect(page.locator(".state")).to_have_text("sent")
    expect(page.locator(".completion")).to_have_text("forty two")
    expect(page.locator(".completion span")).to_have_count(0)


def test_texts_of_others_in_groups_are_shown_and_never_run(visit: Visit) -> None:
    run = run_fixtures.make_run(steps=1)
    hostile = answer(HOSTILE, 1.0, outcome=HOSTILE, rewards={HOSTILE: 0.5})
    turn = {**answer(HOSTILE, 0.0), "observation": HOSTILE}
    of_turns = {**answer("", 0.0), "turns": [turn, turn]}
    failure = {"code": HOSTILE, "why": HOSTILE}
    dropped = {"code": HOSTILE, "why": HOSTILE}
    facts: dict[str, Any] = {"prompt": HOSTILE, "item": {"question": HOSTILE, HOSTILE: 1}}
    left_out: dict[str, Any] = {"left_out": [HOSTILE], "left_out_by": HOSTILE}
    add_group(run, 0, hostile, of_turns, failures=[failure], dropped=dropped, **facts, **left_out)
    page = opened(visit)
    expect(page.locator(".task")).to_have_text(HOSTILE)
    expect(page.locator(".answer .completion").first).to_have_text(HOSTILE)
    expect(page.locator(".answer .component")).to_contain_text(HOSTILE)
    expect(page.locator(".answer .observed").first).to_have_text(HOSTILE)
    for summary in page.locator(".opened details summary").all():
        summary.click()
    expect(page.locator(".failed li")).to_have_text(f"{HOSTILE} {HOSTILE}")
    page.get_by_label("A value of a rollout").select_option(HOSTILE)
    page.get_by_label("Outcome of a rollout").select_option(HOSTILE)
    expect(page.locator(".answer")).to_have_count(1)
    assert page.evaluate("window.owned") is None
    assert page.locator("main img, main script").count() == 0


def test_groups_are_reached_by_keyboard_and_fit_a_narrow_window(
    run: RunDirectory, visiting: Visiting
) -> None:
    add_group(run, 3, answer("word" * 90, 1.0), answer("a " * 300, 0.0), item="x" * 300)
    with visiting(viewport={"width": 390, "height": 800}) as visit:
        page = opened(visit)
        page.locator(".group-line > summary").nth(2).focus()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator(".answer")).to_have_count(4)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


# -- speed


def many(step: int, num_groups: int, group_size: int) -> None:
    """One step of so many groups, each rollout of NUM_TOKENS tokens; their ids name the step."""
    run = RunDirectory(run_fixtures.runs_home() / RUN)
    for number in range(num_groups):
        text = " ".join(f"word{(at * 7 + number) % 97}" for at in range(NUM_TOKENS - 1))
        answers = [answer(f"{at} {text}", at % 2) for at in range(group_size)]
        for one in answers:
            one["ids"] = [1000 * step + at for at in range(NUM_TOKENS + 1)]
        run_results.add_group(run, step, *answers, group=number, id=f"{step} {number}")
        advantages = [[0.5 - at % 2] for at in range(group_size)]
        row = {"id": f"{step} {number}", "advantages": advantages}
        append_row(run.path / "rollouts" / f"advantages_{step}.jsonl", row)


TOOK_MS = """async ([click, until]) => {
    const began = performance.now();
    document.querySelector(click).click();
    while (!document.querySelector(until)) await new Promise(requestAnimationFrame);
    await new Promise((painted) => requestAnimationFrame(() => requestAnimationFrame(painted)));
    return performance.now() - began;
}"""
"""Milliseconds from a click until something is there and was painted."""


@pytest.mark.parametrize(
    ("num_groups", "group_size"), [(NUM_GROUPS, GROUP_SIZE), (1, NUM_GROUPS * GROUP_SIZE)]
)
def test_256_rollouts_with_tokens_are_on_screen_at_once(
    num_groups: int, group_size: int, visit: Visit
) -> None:
    """A step and its open group after one click, in a page that is warm."""
    run_fixtures.make_run(steps=2)
    many(1, num_groups, group_size)
    many(2, num_groups, group_size)
    page = opened(visit)
    page.locator(".answer .completion span").first.wait_for()
    took: list[float] = []
    for _ in range(4):
        for button, step in (("before", 1), ("after", 2)):
            click = f"[aria-label='Step {button}']"
            until = f".answer .completion span[title*='token {step}000']"
            took.append(page.evaluate(TOOK_MS, [click, until]))
            expect(page.locator(".group-line")).to_have_count(num_groups)
    expect(page.locator(".answer")).to_have_count(group_size)
    figures = [round(one) for one in sorted(took)]
    print(f"\n{num_groups} groups of {group_size}: {figures} ms from click to screen")  # noqa: T201
    assert figures[0] < 10 * ON_SCREEN_WITHIN_MS


# -- a file


def test_a_file_of_groups_asks_for_nothing_and_shows_them_as_the_page_does(
    chromium: Browser, tmp_path: Path
) -> None:
    folder = builtin_path(TINY)
    assert folder is not None
    tokenizer = load_tokenizer(str(folder))
    prompt = tokenizer.encode("What is 3 + 4? ")
    said = [tokenizer.encode(text) for text in ("It is 7.", HOSTILE)]
    group = ScoredGroup(
        tokens=[[*prompt, *one] for one in said],
        masks=[[*[-100] * len(prompt), *one] for one in said],
        scores=[1.0, 0.0],
        advantages=[[0.5] * len([*prompt, *one]) for one in said],
        inference_logprobs=[[*[1.0] * len(prompt), *[-3.0] * len(one)] for one in said],
    )
    standing = Standing(place="set_aside", why=HOSTILE, version="version 3", received="14:03:21")
    entries = [
        Entry.of(group, tokenizer, id=1, owner="sums_0 (0)"),
        Entry.of(group, None, id=2, owner=HOSTILE, standing=standing),
        Entry.of(ScoredGroup(scores=[]), None, id=3, owner="gone", size=2),
    ]
    file = tmp_path / "groups.html"
    file.write_text(render(entries, HOSTILE), encoding="utf-8")
    context = chromium.new_context(offline=True)
    page = context.new_page()
    asked, complaints = list[str](), list[str]()
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    try:
        page.goto(file.as_uri())
        expect(page.locator("h1")).to_have_text("Groups")
        lines = page.locator(".group-line > summary")
        expect(lines.locator(".label-of")).to_have_text(["3", "2", "1"])
        expect(page.locator(".opened").first).to_contain_text("no tokens are kept of them")
        expect(lines.nth(1)).to_contain_text(HOSTILE)
        expect(lines.nth(1).locator(".state")).to_have_text("set aside")
        lines.nth(2).click()
        last = page.locator(".group-line").nth(2)
        expect(last.locator(".prompt")).to_have_text("What is 3 + 4?")
        expect(last.locator(".completion").nth(0)).to_have_text("It is 7.")
        expect(last.locator(".completion").nth(1)).to_have_text(HOSTILE)
        expect(last.locator(".completion span.p2").first).to_be_visible()
        page.get_by_label("Search in texts").fill("it is 7")
        page.keyboard.press("Enter")
        expect(page.locator(".group-line")).to_have_count(1)
        expect(last.or_(page.locator(".group-line")).locator(".answer")).to_have_count(1)
        assert page.evaluate("window.owned") is None
        assert (asked, complaints) == ([file.as_uri()], [])
    finally:
        context.close()
