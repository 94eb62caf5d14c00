"""Starting from the page: by the tools' own checks, what was checked, once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml
from agent import run_fixtures
from agent.run_fixtures import RUN
from agent.started_runs import begun_by_standins, runs
from runs.run_fixtures import ENVIRONMENT, settings, start_standins, wait_for_end

from halteres.agent import drafts
from halteres.agent.call import call
from halteres.agent.tool import Caller
from halteres.agent.transports.command_line import for_person
from halteres.runs.directory import RunDirectory, find_run

from .conftest import HOST, HOSTILE, Client, Visiting, expect

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    from .browser import Visit

pytestmark = pytest.mark.runs

SCRIPTED = "inference.engine=scripted"
CHECKED_WITHIN_MS = 60_000


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from begun_by_standins(tmp_path, monkeypatch)


def ended(*edits: str) -> RunDirectory:
    """A run that has done its four steps."""
    run = start_standins(settings(SCRIPTED, *edits))
    wait_for_end(run)
    return run


def policy(home: Path, **fields: Any) -> None:
    (home / "policy.yaml").write_text(yaml.safe_dump(fields))


async def sent(http: httpx.AsyncClient, what: str, draft: str = "1", **body: Any) -> dict[str, Any]:
    """The answer of the page's draft; its status is in it."""
    answer = await http.post(f"/api/drafts/{draft}/{what}", json=body)
    return {**answer.json(), "http": answer.status_code}


def opened(page: Client) -> httpx.AsyncClient:
    return page(origin=f"http://{HOST}")


FEW: dict[str, Any] = {"total_steps": "4", "checkpoint_every": "2", "inference.engine": "scripted"}


async def test_a_view_has_a_draft_of_its_own(page: Client, home: Path) -> None:
    agents = Caller()
    await call("rl_select_environment", {"name": "arithmetic", "changes": {"seed": 5}}, agents)
    before = drafts.load_draft(agents, None)
    async with opened(page) as http:
        for draft in ("1", "2"):
            answer = await sent(http, "select", draft, name=ENVIRONMENT, changes=FEW)
            assert (answer["http"], answer["draft"]) == (200, f"page-{draft}")
        named = {"name": "arithmetic", "draft": "default"}
        answer = (await http.post("/api/drafts/1/select", json=named)).json()
        assert answer["draft"] == "page-1", "whatever a request names"
    assert drafts.load_draft(agents, None) == before
    assert {file.stem for file in drafts.drafts_folder().glob("*.json")} == {
        "default",
        "page-1",
        "page-2",
    }


async def test_what_was_typed_is_read_by_its_settings_type(page: Client) -> None:
    typed = {"learning_rate": "2e-3", "tags": "[a, 01]", "stop_when": "null", "name": "#3: yes"}
    async with opened(page) as http:
        assert (await sent(http, "select", name="arithmetic", changes=typed))["http"] == 200
        found = await sent(http, "settings")
    values = {row["name"]: row["current_value"] for row in found["configurable_fields"]}
    assert (values["learning_rate"], values["tags"]) == (0.002, ["a", "01"])
    assert (values["stop_when"], values["name"]) == (None, "#3: yes")


async def test_settings_are_the_tools_answer_and_whole(page: Client) -> None:
    async with opened(page) as http:
        await sent(http, "select", name="arithmetic")
        short = await sent(http, "settings")
        prompt = "Think. " * 5000
        await sent(http, "select", name="arithmetic", changes={"system_prompt": prompt})
        whole = await sent(http, "settings")
    arguments = {"detail": "full", "draft": "page-1"}
    caller = Caller(write=for_person, takes_all=True)
    assert {**(await call("rl_get_current_config", arguments, caller)).body, "http": 200} == whole
    assert "shortened" not in whole
    assert len(whole["configurable_fields"]) == len(short["configurable_fields"]) > 90
    assert prompt in [row["current_value"] for row in whole["configurable_fields"]]
    cut = (await call("rl_get_current_config", arguments, Caller())).body
    assert "shortened" in cut, "an agent's answer is no longer than its context bears"


async def test_a_bad_value_is_refused_by_the_tools_with_its_setting(page: Client) -> None:
    wrong = {"learning_rate": "much", "total_steps": "0"}
    async with opened(page) as http:
        await sent(http, "select", name="arithmetic", changes={"seed": "3"})
        answer = await sent(http, "select", name="arithmetic", changes=wrong)
        held = await sent(http, "settings")
    assert (answer["http"], answer["code"]) == (400, "invalid_config")
    assert {problem["field"] for problem in answer["problems"]} == set(wrong)
    assert {"seed": 3}.items() <= {
        row["name"]: row["current_value"] for row in held["configurable_fields"]
    }.items()


async def test_what_the_policy_locks_is_locked_here_too(page: Client, home: Path) -> None:
    run = ended("trainer.learning_rate=0.01")
    policy(home, lock={"trainer": {"learning_rate": 4e-5}})
    async with opened(page) as http:
        like = {"name": ENVIRONMENT, "settings_of": run.run_id}
        assert (await sent(http, "select", **like))["differs"] == {"learning_rate": [0.01, 4e-5]}
        (locked,) = [
            row
            for row in (await sent(http, "settings"))["locked_fields"]
            if row["name"] == "learning_rate"
        ]
        refused = await sent(http, "select", **like, changes={"learning_rate": "1e-3"})
        resumed = await sent(
            http, "start", resume_from=run.run_id, changes={"learning_rate": "1e-3"}, dry_run=True
        )
    assert locked["locked_value"] == 4e-5 and "policy" in locked["why"]
    assert refused["code"] == resumed["code"] == "locked_field"
    assert refused["field"] == "learning_rate"


async def test_what_a_dry_run_refuses_is_not_started(page: Client) -> None:
    async with opened(page) as http:
        await sent(http, "select", name=ENVIRONMENT, changes={**FEW, "model": "Qwen/Qwen3-8B"})
        answer = await sent(http, "start", dry_run=True)
        assert (answer["ok"], answer["field"], answer["http"]) == (False, "inference.model", 200)
        assert "plan" not in answer
        refused = await sent(http, "start", checked="a-b-c-d")
    assert (refused["code"], refused["http"]) == ("preflight_failed", 404)
    assert runs() == []


async def test_two_clicks_are_one_run(page: Client) -> None:
    async with opened(page) as http:
        await sent(http, "select", name=ENVIRONMENT, changes=FEW)
        plan = (await sent(http, "start", dry_run=True))["plan"]
        click: dict[str, Any] = {"checked": plan, "idempotency_key": f"page-1-{plan}"}
        both = await asyncio.gather(*(sent(http, "start", **click) for _ in range(2)))
    (run_id,) = runs()
    assert [answer["run_id"] for answer in both] == [run_id, run_id]
    assert wait_for_end(find_run(run_id)).status == "completed"


async def test_what_changed_since_it_was_checked_is_not_started(page: Client, home: Path) -> None:
    async with opened(page) as http:
        await sent(http, "select", name=ENVIRONMENT, changes=FEW)
        plan = (await sent(http, "start", dry_run=True))["plan"]
        policy(home, caps={"max_steps": 50})
        answer = await sent(http, "start", checked=plan)
    assert (answer["http"], answer["code"]) == (422, "plan_changed")
    assert answer["changed"] == ["operator's policy"]
    assert runs() == []


async def test_a_run_on_a_file_is_not_started_from_here(page: Client) -> None:
    run_fixtures.make_run(kind="sft", environment="sft:rows", status="completed")
    async with page() as http:
        answer = await http.get(f"/api/runs/{RUN}/origin")
        view = (await http.get(f"/api/runs/{RUN}")).json()
    assert (answer.status_code, view["can_go_on"]) == (400, False)
    assert "trains on a file" in answer.json()["error"]


async def test_environments_come_with_their_variants(page: Client) -> None:
    async with page() as http:
        rows = (await http.get("/api/environments")).json()["environments"]
    named = {row["name"]: row for row in rows}
    assert named["arithmetic"]["variants"] == []
    game = named["game"]
    assert game["description"].startswith("Text games")
    assert len(game["variants"]) > 10 and game["variants"][0].startswith("game:")


# In the browser

OF_ANOTHER = f"""
from halteres.environments.base import BaseEnv


class Mine(BaseEnv):
    \'\'\'{HOSTILE.replace("'", '"')}\'\'\'

    name = "mine"
"""


def setting(page: Page, name: str) -> Locator:
    return page.get_by_label(name, exact=True)


def check(page: Page) -> None:
    page.get_by_role("button", name="Check").click()
    expect(page.get_by_role("heading", name="Checks")).to_be_visible(timeout=CHECKED_WITHIN_MS)


def refused_quietly(visit: Visit) -> None:
    """The browser tells of every answer that is an error."""
    visit.complaints[:] = [said for said in visit.complaints if "Failed to load" not in said]


@pytest.mark.browser
def test_a_run_is_started_again_with_changes_once_it_was_checked(visit: Visit) -> None:
    run = ended()
    page = visit.enter(f"#/runs/{run.run_id}")
    page.get_by_role("button", name="Start again with changes").click()
    expect(page.locator("h1")).to_have_text(f"Start again: {run.state().name}")
    expect(setting(page, "total_steps")).to_have_value("4")
    start = page.get_by_role("button", name="Start", exact=True)
    expect(start).to_be_disabled()
    setting(page, "learning_rate").fill("2e-3")
    setting(page, "total_steps").fill("6")
    expect(page.locator(".plan li")).to_have_text(
        ["total_steps 4 → 6", "learning_rate 0.0015 → 2e-3"]
    )
    expect(page.locator("label.changed")).to_have_count(2)
    check(page)
    expect(page.locator(".plan")).to_contain_text("Ready to start.")
    expect(page.locator(".plan")).to_contain_text("Takes ")
    assert runs() == [run.run_id]
    setting(page, "total_steps").fill("5")
    expect(start).to_be_disabled()
    check(page)
    start.dblclick()
    expect(page.locator(".head h1")).to_be_visible()
    (new,) = set(runs()) - {run.run_id}
    assert page.url.endswith(f"#/runs/{new}")
    expect(page.locator(".facts")).to_contain_text("/ 5")
    held = find_run(new).settings()
    assert (held.trainer.total_steps, held.trainer.learning_rate) == (5, 0.002)
    assert held.inference.engine == "scripted", "what was not changed is that run's"
    refused_quietly(visit)


@pytest.mark.browser
def test_a_run_is_resumed_with_more_steps(visit: Visit) -> None:
    run = ended()
    page = visit.enter(f"#/runs/{run.run_id}")
    page.get_by_role("button", name="Resume", exact=True).click()
    check(page)
    expect(page.locator(".plan")).to_contain_text("The run cannot start.")
    problem = page.locator("label").filter(has_text="nothing is left to do")
    expect(problem.locator("input")).to_have_attribute("aria-label", "total_steps")
    expect(setting(page, "total_steps")).to_be_focused()
    setting(page, "total_steps").fill("6")
    check(page)
    expect(page.locator(".plan")).to_contain_text("Training goes on after step 4")
    page.get_by_role("button", name="Start", exact=True).click()
    expect(page.get_by_role("link", name=run.run_id)).to_be_visible()
    (new,) = set(runs()) - {run.run_id}
    assert find_run(new).state().resumed_from == run.run_id
    assert wait_for_end(find_run(new)).step == 6


@pytest.mark.browser
def test_a_bad_value_is_said_at_its_setting(visit: Visit) -> None:
    page = visit.enter("#/new/arithmetic")
    page.locator("summary").click()
    setting(page, "warmup_steps").fill("-1")
    setting(page, "learning_rate").fill("much")
    page.locator("summary").click()
    page.get_by_role("button", name="Check").click()
    places = page.locator("label").filter(has=page.locator(".problem").filter(has_text="must be"))
    expect(places).to_have_count(2)
    expect(places.locator("input").last).to_have_attribute("aria-invalid", "true")
    expect(setting(page, "warmup_steps")).to_be_visible()
    expect(setting(page, "learning_rate")).to_be_focused()
    expect(page.get_by_role("button", name="Start", exact=True)).to_be_disabled()
    refused_quietly(visit)


@pytest.mark.browser
def test_what_was_typed_is_kept_until_it_starts_and_checked_anew_once_it_changes(
    visit: Visit,
) -> None:
    page = visit.enter("#/new/arithmetic")
    expect(page).to_have_title("New run arithmetic · Halteres")
    setting(page, "total_steps").fill("7")
    check(page)
    setting(page, "total_steps").fill("8")
    expect(page.locator(".plan .example")).to_have_text("Changed since the check: check again.")
    expect(page.get_by_role("button", name="Start", exact=True)).to_be_disabled()
    page.get_by_role("link", name="All runs").click()
    page.go_back()
    expect(page.locator(".plan li")).to_have_text(["total_steps 40 → 8"])
    page.reload()
    expect(setting(page, "total_steps")).to_have_value("40")


@pytest.mark.browser
def test_an_environment_of_ones_own_is_opened_by_its_file_and_a_broken_one_is_named(
    visit: Visit, home: Path
) -> None:
    folder = home / "environments"
    folder.mkdir()
    (folder / "broken.py").write_text("class Broken(:\n", encoding="utf-8")
    page = visit.enter("#/new/")
    expect(page.locator(".problem")).to_contain_text("broken.py is broken: line 1")
    page.get_by_label("A file of your own").fill("/nowhere/mine.py")
    page.get_by_role("button", name="Open").click()
    expect(page.locator("h1")).to_have_text("New run /nowhere/mine.py")
    expect(page.locator("article > [role=status]")).to_contain_text("/nowhere/mine.py")
    refused_quietly(visit)


@pytest.mark.browser
def test_a_locked_setting_says_why_and_cannot_be_changed(visit: Visit, home: Path) -> None:
    policy(home, lock={"trainer": {"learning_rate": 4e-5}})
    page = visit.enter("#/new/arithmetic")
    expect(setting(page, "learning_rate")).to_be_disabled()
    expect(setting(page, "learning_rate")).to_have_value("0.00004")
    label = page.locator("label").filter(has=setting(page, "learning_rate"))
    expect(label).to_contain_text("Locked: ")
    expect(label).to_contain_text("policy")


@pytest.mark.browser
def test_a_change_after_the_check_is_said_and_nothing_is_started(visit: Visit, home: Path) -> None:
    run = ended()
    page = visit.enter(f"#/again/{run.run_id}")
    setting(page, "total_steps").fill("6")
    check(page)
    policy(home, caps={"max_steps": 50})
    page.get_by_role("button", name="Start", exact=True).click()
    expect(page.locator(".plan .problem")).to_contain_text("Changed since: the operator's policy.")
    expect(page.get_by_role("button", name="Start", exact=True)).to_be_disabled()
    assert runs() == [run.run_id]
    refused_quietly(visit)


@pytest.mark.browser
def test_values_and_names_of_others_stay_texts(visit: Visit, home: Path) -> None:
    folder = home / "environments"
    folder.mkdir()
    (folder / "mine.py").write_text(OF_ANOTHER)
    run = ended(f"run.tags={json.dumps([HOSTILE])}")
    run_fixtures.change(run, name=HOSTILE)
    page = visit.enter(f"#/again/{run.run_id}")
    expect(page.locator("h1")).to_have_text(f"Start again: {HOSTILE}")
    expect(setting(page, "tags")).to_have_value(json.dumps([HOSTILE]))
    setting(page, "learning_rate").fill(HOSTILE)
    expect(page.locator(".plan li")).to_have_text(f"learning_rate 0.0015 → {HOSTILE}")
    page.get_by_role("button", name="Check").click()
    expect(page.locator(".plan .problem")).to_contain_text("<script>")
    page.goto(f"{visit.url}/#/new/")
    expect(page.locator("dd").filter(has_text="<script>")).to_have_text(HOSTILE.replace("'", '"'))
    page.goto(f"{visit.url}/#/new/{HOSTILE.replace('/', '%2F')}")
    expect(page.locator("main > article > p[role=status]")).to_contain_text("not found")
    assert page.evaluate("window.owned") is None
    assert page.locator("main img, main script").count() == 0
    refused_quietly(visit)


@pytest.mark.browser
def test_a_new_run_is_chosen_checked_and_started_by_keyboard_in_a_narrow_window(
    visiting: Visiting,
) -> None:
    with visiting(viewport={"width": 390, "height": 844}) as visit:
        page = visit.enter()
        page.get_by_role("link", name="New run").focus()
        page.keyboard.press("Enter")
        page.get_by_role("link", name="arithmetic", exact=True).focus()
        page.keyboard.press("Enter")
        setting(page, "total_steps").focus()
        page.keyboard.press("ControlOrMeta+a")
        page.keyboard.type("4")
        page.locator("summary").click()
        setting(page, "engine").select_option("scripted")
        setting(page, "total_steps").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name="Checks")).to_be_visible(timeout=CHECKED_WITHIN_MS)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        expect(setting(page, "total_steps")).to_be_focused()
        page.get_by_role("button", name="Check").focus()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator(".facts")).to_contain_text("/ 4")
    (run_id,) = runs()
    assert find_run(run_id).state().environment == "arithmetic"
