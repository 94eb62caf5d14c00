"""Who is let to the page, and how."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent import control, run_fixtures

from halteres.agent.transports.access import TICKET_S, Tickets, page_key, proof, ticket, token
from halteres.standalone_page import STATIC

from .conftest import HOST, Client

GUARDED = [
    ("GET", "/api/events"),
    ("GET", "/api/runs"),
    ("GET", "/api/runs/3fa9c1d2"),
    *[
        ("GET", f"/api/runs/3fa9c1d2/{what}")
        for what in ("metrics", "settings", "evals", "usage", "status", "results")
    ],
    ("GET", "/api/runs/3fa9c1d2/groups"),
    ("GET", "/api/runs/3fa9c1d2/groups/1/0"),
    ("GET", "/api/runs/3fa9c1d2/logs"),
    ("GET", "/api/compare?ids=3fa9c1d2"),
    ("GET", "/api/runs/3fa9c1d2/chat"),
    ("POST", "/api/runs/3fa9c1d2/chat"),
    ("POST", "/api/runs/3fa9c1d2/stop"),
    ("POST", "/api/runs/3fa9c1d2/notes"),
    ("GET", "/api/runs/3fa9c1d2/origin"),
    ("GET", "/api/environments"),
    *[("POST", f"/api/drafts/1/{what}") for what in ("select", "settings", "start")],
]
NOW = 1_800_000_000.0


def test_a_ticket_opens_once(home: Path) -> None:
    tickets, given = Tickets(), ticket(NOW)
    assert tickets.admits(given, NOW)
    assert not tickets.admits(given, NOW)
    assert tickets.admits(ticket(NOW), NOW), "another one does"


def test_a_ticket_runs_out(home: Path) -> None:
    given = ticket(NOW)
    assert not Tickets().admits(given, NOW + TICKET_S + 1)
    assert Tickets().admits(given, NOW + TICKET_S - 1)


def test_a_ticket_cannot_be_prolonged_or_made_up(home: Path) -> None:
    expiry, nonce, signature = ticket(NOW).split(".")
    assert not Tickets().admits(f"{int(expiry) + 900}.{nonce}.{signature}", NOW)
    for made_up in (
        "",
        ".",
        "..",
        "x",
        f"{expiry}.{nonce}.",
        page_key(),
        proof("x" * 16),
        "9" * 40,
        "ü.ü.ü",
    ):
        assert not Tickets().admits(made_up, NOW), made_up


def test_a_new_token_ends_tickets_and_cookies(home: Path) -> None:
    given, key = ticket(NOW), page_key()
    (home / "token").unlink()
    assert not Tickets().admits(given, NOW)
    assert page_key() != key


def test_the_token_itself_opens_as_often_as_it_is_shown(home: Path) -> None:
    tickets = Tickets()
    assert tickets.admits(token(), NOW)
    assert tickets.admits(token(), NOW)


async def test_without_a_cookie_the_page_says_how_to_open_it(stranger: Client) -> None:
    async with stranger() as http:
        answer = await http.get("/")
    assert (answer.status_code, answer.headers["cache-control"]) == (401, "no-store")
    assert "<code>halteres ui</code>" in answer.text
    assert "www-authenticate" not in answer.headers, "a browser would ask for a password"


async def test_a_ticket_becomes_a_cookie_that_scripts_and_other_sites_cannot_use(
    stranger: Client,
) -> None:
    async with stranger() as http:
        admitted = await http.post("/api/session", json={"token": ticket()})
        assert admitted.status_code == 204
        cookie = admitted.headers["set-cookie"]
        assert cookie.startswith(f"halteres-8080={page_key()};")
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {
            part.strip() for part in cookie.split(";")
        }
        assert token() not in cookie
        page = await http.get("/")
        assert page.status_code == 200
        assert '<main id="main"' in page.text
        assert (await http.get("/api/runs")).json()["runs"] == []


@pytest.mark.parametrize(
    "body", [{}, {"token": None}, {"token": ""}, {"token": ["x"]}, {"token": "x" * 43}]
)
async def test_what_is_no_ticket_opens_nothing(stranger: Client, body: dict[str, object]) -> None:
    async with stranger() as http:
        answer = await http.post("/api/session", json=body)
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert "halteres ui" in answer.json()["next"]


@pytest.mark.parametrize(("method", "path"), GUARDED)
async def test_every_route_of_the_page_wants_cookie_or_token(
    stranger: Client, page: Client, method: str, path: str
) -> None:
    async with stranger() as http:
        answer = await http.request(method, path)
        assert answer.status_code == 401
        assert "www-authenticate" not in answer.headers
    async with stranger(cookie="halteres-8080=wrong") as http:
        assert (await http.request(method, path)).status_code == 401
    if path == "/api/events":
        return  # an answer without an end: `test_changes`
    run_fixtures.make_run()
    for admitted in (page(origin=f"http://{HOST}"), control.client()):
        async with admitted as http:
            assert (await http.request(method, path)).status_code in (200, 400, 404)


async def test_the_cookie_of_the_page_opens_no_tool(page: Client) -> None:
    async with page(origin=f"http://{HOST}") as http:
        for path in ("/api/tools", "/openapi.json"):
            assert (await http.get(path)).status_code == 401
        assert (await http.post("/api/tools/rl_list_runs")).status_code == 401


async def test_a_cookie_of_another_port_is_not_taken(page: Client) -> None:
    async with page(cookie=f"halteres-9090={page_key()}") as http:
        assert (await http.get("/api/runs")).status_code == 401


@pytest.mark.parametrize(
    "foreign",
    [
        {"origin": "http://127.0.0.1:9999"},  # the same site to a browser, and sent the cookie
        {"origin": "http://localhost:8080"},
        {"origin": f"https://{HOST}"},
        {"origin": "null"},
        {"origin": f"http://{HOST}", "sec-fetch-site": "same-site"},
        {"origin": f"http://{HOST}", "sec-fetch-site": "cross-site"},
        {},
    ],
)
async def test_another_page_cannot_stop_a_run(page: Client, foreign: dict[str, str]) -> None:
    run = run_fixtures.make_run()
    with run_fixtures.supervised(run):
        async with page(**foreign) as http:
            answer = await http.post("/api/runs/3fa9c1d2/stop", json={"mode": "now"})
    assert answer.status_code == 403
    assert not (run.path / "control" / "stop.json").exists()


@pytest.mark.parametrize("foreign", [{"origin": "http://127.0.0.1:9999"}, {"origin": "null"}, {}])
async def test_another_page_cannot_write_notes(page: Client, foreign: dict[str, str]) -> None:
    run = run_fixtures.make_run()
    wanted = {"tags": ["theirs"], "note": "", "revision": 0}
    async with page(**foreign) as http:
        answer = await http.post("/api/runs/3fa9c1d2/notes", json=wanted)
    assert answer.status_code == 403
    assert not (run.path / "notes.json").exists()


@pytest.mark.parametrize("foreign", [{"origin": "http://127.0.0.1:9999"}, {"origin": "null"}, {}])
@pytest.mark.parametrize("what", ["select", "start"])
async def test_another_page_starts_nothing(
    page: Client, home: Path, foreign: dict[str, str], what: str
) -> None:
    async with page(**foreign) as http:
        wanted = {"name": "arithmetic"} if what == "select" else {"environment": "arithmetic"}
        answer = await http.post(f"/api/drafts/1/{what}", json=wanted)
    assert answer.status_code == 403
    assert not (home / "drafts").exists() and not (home / "runs").exists()


async def test_another_page_of_this_machine_reads_nothing(page: Client) -> None:
    async with page(**{"sec-fetch-site": "same-site"}) as http:
        assert (await http.get("/api/runs")).status_code == 403


@pytest.mark.parametrize(
    "path",
    ["/", "/ui/main.js", "/api/runs", "/api/session?nonce=0123456789abcdef", "/api/runs/none"],
)
async def test_every_answer_forbids_scripts_from_elsewhere_frames_and_guessing(
    page: Client, path: str
) -> None:
    async with page() as http:
        headers = (await http.get(path)).headers
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    "path", ["/ui/../routes.py", "/ui/%2e%2e/routes.py", "/ui//etc/passwd", "/ui/..%2froutes.py"]
)
async def test_nothing_beside_the_page_is_served(stranger: Client, path: str) -> None:
    assert (STATIC.parent / "routes.py").exists()
    async with stranger() as http:
        assert (await http.get(path)).status_code == 404


async def test_only_a_nonce_is_signed(stranger: Client) -> None:
    async with stranger() as http:
        assert (await http.get("/api/session?nonce=" + "n" * 16)).json()["proof"] == proof("n" * 16)
        for other in ("", "short", "n" * 65, "page%0A" + "n" * 16):
            assert (await http.get(f"/api/session?nonce={other}")).status_code == 400
