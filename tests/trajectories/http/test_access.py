"""Who comes in: by which name, from which page, with which token (spec §4, defect 19)."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import httpx
import pytest

from halteres.access_policy import AccessPolicy, own_names
from halteres.trajectories.options import Options
from trajectories.server_fixtures import ServerFixture, opened

TOKEN = "correct-horse:battery@staple"
EVERYWHERE = "0.0.0.0"


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


async def status(scene: ServerFixture, **headers: str) -> int:
    """Of an answer to a request with these headers."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return (await scene.http.get("/info", headers=named)).status_code


def guarded(
    folder: Path, address: str = "127.0.0.1", **options: object
) -> AbstractAsyncContextManager[ServerFixture]:
    """A server with these options, as if it listened there."""
    return opened(folder / "queue.sqlite", options=Options(database="", **options), address=address)  # type: ignore[arg-type]


@pytest.fixture
async def beyond(tmp_path: Path) -> AsyncIterator[ServerFixture]:
    """A server that other machines reach, without a token."""
    async with guarded(
        tmp_path, EVERYWHERE, insecure=True, allowed_hosts=frozenset({"gpu7.lan"})
    ) as scene:
        yield scene


@pytest.fixture
async def locked(tmp_path: Path) -> AsyncIterator[ServerFixture]:
    """A server with a token."""
    async with guarded(tmp_path, token=TOKEN) as scene:
        yield scene


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "[::1]:8000", "LOCALHOST"]
)
async def test_on_the_loopback_its_names_pass(scene: ServerFixture, host: str) -> None:
    assert await status(scene, host=host) == 200
    assert await status(scene, host=host, origin=f"http://{host}") == 200
    assert await status(scene, origin="http://localhost:3000") == 200


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:8000", "192.168.1.7", "localhost@evil.example", "", "["]
)
async def test_on_the_loopback_no_other_name_and_no_other_page_passes(
    scene: ServerFixture, name: str
) -> None:
    assert await status(scene, host=name) == 403
    assert await status(scene, origin=f"http://{name}") == 403


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "HEAD", "DELETE"])
async def test_no_answer_says_that_other_pages_may_read_it(
    scene: ServerFixture, method: str
) -> None:
    for headers in ({}, {"origin": "http://evil.example"}, {"origin": "http://localhost"}):
        answer = await scene.http.request(method, "/batch", headers=headers)
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("path", ["/reset_data", "/batch", "/"])
async def test_an_address_embedded_in_a_foreign_page_does_nothing(
    scene: ServerFixture, path: str
) -> None:
    """`<img src="http://127.0.0.1:8000/reset_data">` has no Origin, and the right Host."""
    await scene.begin()
    embedded = {
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": "no-cors",
        "sec-fetch-dest": "image",
    }
    assert (await scene.http.get(path, headers=embedded)).status_code == 403
    assert (await scene.get("/info"))["batch_size"] == 4
    for site in ("none", "same-origin", "same-site"):
        assert (await scene.http.get("/info", headers={"sec-fetch-site": site})).status_code == 200
    assert (
        await scene.http.get("/info", headers={**embedded, "origin": "http://localhost:3000"})
    ).status_code == 200


@pytest.mark.parametrize("path", ["/reset_data", "/batch"])
async def test_a_page_that_only_its_referer_tells_of_is_known_too(
    scene: ServerFixture, path: str
) -> None:
    """Without TLS browsers send neither Sec-Fetch-Site nor, for an image, Origin."""
    await scene.begin()
    for page in (
        "http://evil.example/",
        "http://evil.example",
        "https://evil.example/127.0.0.1/",
        "evil",
        "",
    ):
        assert (await scene.http.get(path, headers={"referer": page})).status_code == 403
    assert (await scene.get("/info"))["batch_size"] == 4
    assert (
        await scene.http.get("/info", headers={"referer": "http://127.0.0.1:8000/docs?x"})
    ).status_code == 200


async def test_a_second_host_or_origin_does_not_hide_the_first() -> None:
    keeper, ours, theirs = AccessPolicy(), (b"host", b"127.0.0.1"), (b"host", b"evil.example")
    assert keeper.refusal([ours]) is None
    assert keeper.refusal([ours, theirs]) is not None
    assert keeper.refusal([]) is not None
    assert (
        keeper.refusal(
            [ours, (b"origin", b"http://localhost"), (b"origin", b"http://evil.example")]
        )
        is not None
    )


@pytest.mark.parametrize(
    "host", ["10.0.0.7:8000", "[fd00::7]:8000", "127.0.0.1", "gpu7.lan:8000", "GPU7.LAN"]
)
async def test_beyond_it_addresses_and_allowed_names_pass(beyond: ServerFixture, host: str) -> None:
    assert await status(beyond, host=host) == 200
    assert await status(beyond, host=host, origin=f"http://{host}") == 200


async def test_beyond_it_other_names_and_pages_are_refused_and_told_the_flag(
    beyond: ServerFixture,
) -> None:
    answer = await beyond.http.get("/info", headers={"host": "evil.example"})
    assert answer.status_code == 403
    assert (
        "Host names 'evil.example'." in answer.json()["detail"]
        and "--allow-host NAME" in answer.json()["detail"]
    )
    assert await status(beyond, host="10.0.0.7", origin="http://10.0.0.8") == 403
    assert await status(beyond, host="10.0.0.7", origin="null") == 403
    assert await status(beyond, host="10.0.0.7", sec_fetch_site="cross-site") == 403


@pytest.mark.parametrize("host", ["trajectories:8000", "trainer", "GPU7", "[fd00::7]"])
async def test_beyond_it_names_without_a_dot_pass(beyond: ServerFixture, host: str) -> None:
    """Services and machines of a cluster are called so, and no page of the Internet is."""
    assert await status(beyond, host=host) == 200
    assert await status(beyond, host=host, origin="http://evil.example") == 403
    assert await status(beyond, host=host, sec_fetch_site="cross-site") == 403


async def test_on_the_loopback_they_do_not(scene: ServerFixture) -> None:
    assert await status(scene, host="trajectories:8000") == 403


async def test_beyond_it_the_machines_own_names_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "GPU8.lan")
    monkeypatch.setattr(socket, "getfqdn", lambda: "GPU8.rack.example")
    async with guarded(tmp_path, EVERYWHERE, insecure=True) as scene:
        assert await status(scene, host="gpu8.rack.example:8000") == 200
        assert await status(scene, host="gpu8.lan") == 200
        assert await status(scene, host="gpu9.lan") == 403


def test_a_resolver_that_does_not_answer_delays_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(socket, "getfqdn", lambda: str(answered.wait(30)))
    try:
        assert own_names(0.01) == {socket.gethostname().lower()}
    finally:
        answered.set()


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[ServerFixture]:
    """A server with a token that other machines reach."""
    async with guarded(tmp_path, EVERYWHERE, token=TOKEN) as scene:
        yield scene


@pytest.mark.parametrize(
    "host", ["trajectories.default.svc.cluster.local:8000", "gpu9.lan", "10.0.0.7", "trainer"]
)
async def test_who_knows_the_token_may_call_the_server_as_it_likes(
    kept: ServerFixture, host: str
) -> None:
    assert await status(kept, host=host, authorization=f"Bearer {TOKEN}") == 200
    assert await status(kept, host=host, authorization=basic("x", TOKEN)) == 200


async def test_a_page_may_not_though_its_browser_knows_the_token(kept: ServerFixture) -> None:
    login, host = f"Bearer {TOKEN}", "evil.example:8000"
    assert await status(kept, host=host, authorization=login, origin=f"http://{host}") == 403
    assert await status(kept, host=host, authorization=login, sec_fetch_site="same-origin") == 403
    assert await status(kept, host=host, authorization=f"{login}x") == 403
    assert await status(kept, host="10.0.0.7", authorization=f"{login}x") == 401
    answer = await kept.http.get("/info", headers={"host": host})
    assert "who sends its token may use any name" in answer.json()["detail"]


@pytest.mark.parametrize(
    "login",
    [
        f"Bearer {TOKEN}",
        f"bearer  {TOKEN} ",
        basic("x", TOKEN),
        basic("", TOKEN),
        basic("x", TOKEN).lower()[:6] + basic("x", TOKEN)[6:],
    ],
)
async def test_the_token_passes_as_bearer_and_as_anybodys_password(
    locked: ServerFixture, login: str
) -> None:
    assert await status(locked, authorization=login) == 200


@pytest.mark.parametrize(
    "login",
    [
        None,
        "",
        "Bearer",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Digest {TOKEN}",
        TOKEN,
        basic("x", ""),
        basic(TOKEN, ""),
        basic("x", TOKEN.split(":")[0]),
        "Basic ===",
        "Basic \xff\xfe",
        "Bearer " + "ü" * 30,
        "Basic " + "A" * 5000,
    ],
)
async def test_anything_else_is_401_with_a_sentence(
    locked: ServerFixture, login: str | None
) -> None:
    headers = {} if login is None else {b"authorization": login.encode("latin-1")}
    answer = await locked.http.get("/info", headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic")
    assert "This server asks for a token." in answer.json()["detail"]
    assert TOKEN not in answer.text


async def test_every_route_wants_the_token(locked: ServerFixture) -> None:
    paths = ["/", "/docs", "/openapi.json", "/metrics", "/v1/groups", "/nope", "/reset_data"]
    assert {(await locked.http.get(path)).status_code for path in paths} == {401}
    assert {
        (await locked.raw_post(path, b"{}")).status_code for path in ("/register", "/scored_data")
    } == {401}


async def test_a_token_does_not_open_the_door_to_a_foreign_page(locked: ServerFixture) -> None:
    """A browser that knows the password sends it for any page."""
    assert (
        await status(locked, authorization=f"Bearer {TOKEN}", origin="http://evil.example") == 403
    )
    assert await status(locked, authorization=f"Bearer {TOKEN}", sec_fetch_site="cross-site") == 403


async def test_the_token_in_the_url_is_understood(locked: ServerFixture) -> None:
    """As aiohttp, requests and httpx send it; the unmodified clients have nothing but a URL."""
    url = "http://x:correct-horse%3Abattery%40staple@127.0.0.1:8000"
    transport = locked.http._transport  # the app itself
    async with httpx.AsyncClient(transport=transport) as client:
        assert (await client.get(f"{url}/info")).status_code == 200
        assert (await client.get("http://x:wrong@127.0.0.1:8000/info")).status_code == 401


@pytest.mark.parametrize(
    "path", ["/batch", "/", "/status", "/reset_data", "/v1/groups", "/scored_data"]
)
async def test_head_serves_nothing(scene: ServerFixture, path: str) -> None:
    await scene.begin(batch_size=2)
    await scene.send({"tokens": [[1], [2]], "masks": [[1], [2]], "scores": [0, 1]})
    assert (await scene.http.head(path)).status_code == 405
    assert await scene.get("/status") == {"current_step": 0, "queue_size": 1}
