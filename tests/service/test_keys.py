"""Keys over real HTTP: who is let in, and that no key is kept or told anywhere (we chose it)."""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import tinker
from contract.requirements import proves

from halteres.errors import InvalidConfig, NotFound
from halteres.service.keys import LOCAL, KeyFile, KeyRefused, Keys, lifetime_s
from halteres.service.service import Options

from .live_service import LiveService, serving


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path)


@pytest.fixture
async def keyed(keys: KeyFile, tmp_path: Path) -> AsyncIterator[tuple[LiveService, str]]:
    """A service with one key, and that key."""
    made = keys.create("alice")
    async with serving(tmp_path) as scene:
        yield scene, made.text


async def asked(scene: LiveService, **headers: str) -> tuple[int, str]:
    """Status and text of the answer to a request with these headers."""
    async with scene.http.get(f"{scene.url}/api/v1/sessions", headers=headers) as response:
        if response.status == 401:
            assert response.headers["WWW-Authenticate"] == "Bearer"
        return response.status, await response.text()


@proves("keys:needed-beyond-loopback")
async def test_a_service_without_keys_takes_any_key(scene: LiveService) -> None:
    for headers in ({}, {"X-API-Key": "tml-anything"}, {"Authorization": "Bearer x"}):
        assert (await asked(scene, **headers))[0] == 200


async def test_a_service_with_keys_takes_a_known_one_in_either_header(
    keyed: tuple[LiveService, str],
) -> None:
    scene, key = keyed
    assert (await asked(scene, **{"X-API-Key": key}))[0] == 200
    assert (await asked(scene, Authorization=f"Bearer {key}"))[0] == 200
    assert (await asked(scene, Authorization=f"bearer  {key}"))[0] == 200


@proves("keys:needed-beyond-loopback")
async def test_others_are_answered_401_with_a_sentence_that_says_how_to_make_one(
    keyed: tuple[LiveService, str],
) -> None:
    scene, key = keyed
    wrong = (
        key[:-1] + ("a" if key[-1] != "a" else "b"),
        key + "a",
        "tml-x",
        "",
        "tml-00000000-x",
        key.upper(),
    )
    for headers in ({}, *({"X-API-Key": one} for one in wrong), {"Authorization": f"Basic {key}"}):
        status, text = await asked(scene, **headers)
        assert status == 401
        assert "halteres keys create" in text
        assert key not in text


async def test_health_needs_no_key_and_nothing_else_does_without(
    keyed: tuple[LiveService, str],
) -> None:
    scene, _ = keyed
    assert (await scene.get("/api/v1/healthz"))[0] == 200
    for route in scene_paths(scene):
        for method in ("GET", "POST", "PUT", "DELETE"):
            async with scene.http.request(method, f"{scene.url}{route}", json={}) as response:
                assert response.status == 401, (method, route)


def scene_paths(scene: LiveService) -> list[str]:
    """One path of every route but healthz and signed files, from the app itself; and paths that are
    none.
    """
    from halteres.service.server import create_app

    paths = {
        getattr(route, "path", "/") for route in create_app(scene.service, scene.gateway).routes
    }
    known = [path.replace("{", "").replace("}", "").replace(":path", "") for path in paths]
    keyless = ("/api/v1/healthz", "/halteres/v1/files/")
    none = [
        "/",
        "/nothing",
        "/api/v1/healthz/",
        "/api/v1//healthz",
        "/halteres/v1/files",
        "/api/v1/healthz/x",
    ]
    return [path for path in known if not path.startswith(keyless)] + none


async def test_signed_downloads_are_left_to_their_signature(keyed: tuple[LiveService, str]) -> None:
    scene, _ = keyed
    assert (await scene.get("/halteres/v1/files/no-such-signature"))[0] in (403, 404)


@proves("keys:hashed")
async def test_a_revoked_or_expired_key_is_refused_at_the_next_request(
    keyed: tuple[LiveService, str], keys: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, key = keyed
    made = keys.create("bob", lifetime_s=3600)
    assert (await asked(scene, **{"X-API-Key": made.text}))[0] == 200
    keys.revoke(keys.read()[0].id)
    status, text = await asked(scene, **{"X-API-Key": key})
    assert (status, "is revoked" in text) == (401, True)
    later = time.time() + 3601
    monkeypatch.setattr("halteres.service.keys.time.time", lambda: later)
    status, text = await asked(scene, **{"X-API-Key": made.text})
    assert (status, "is expired" in text) == (401, True)


async def test_a_key_made_while_a_service_runs_closes_it_and_a_lost_file_does_not_open_it(
    scene: LiveService, keys: KeyFile
) -> None:
    assert (await asked(scene))[0] == 200
    made = keys.create("alice")
    assert (await asked(scene))[0] == 401
    assert (await asked(scene, **{"X-API-Key": made.text}))[0] == 200
    keys.path.unlink()
    assert (await asked(scene))[0] == 401
    assert (await asked(scene, **{"X-API-Key": made.text}))[0] == 401


async def test_the_last_key_revoked_leaves_the_service_closed_also_in_its_next_life(
    tmp_path: Path, keys: KeyFile
) -> None:
    keys.revoke(keys.create("alice").key.id)
    for _ in range(2):
        async with serving(tmp_path) as scene:
            assert (await asked(scene))[0] == 401


async def test_keys_that_cannot_be_read_let_nobody_in(
    keyed: tuple[LiveService, str], keys: KeyFile
) -> None:
    scene, key = keyed
    good = keys.path.read_bytes()
    keys.path.write_text("{")
    status, text = await asked(scene, **{"X-API-Key": key})
    assert (status, str(keys.path) in text) == (503, False)
    keys.path.write_bytes(good)
    assert (await asked(scene, **{"X-API-Key": key}))[0] == 200


async def test_required_keys_are_asked_for_before_there_is_one(
    tmp_path: Path, keys: KeyFile
) -> None:
    async with serving(tmp_path, Options(require_keys=True)) as scene:
        assert (await asked(scene, **{"X-API-Key": "tml-x"}))[0] == 401
        assert (await asked(scene, **{"X-API-Key": keys.create("alice").text}))[0] == 200


async def test_the_sdk_works_with_its_key_and_says_what_is_wrong_without(
    keyed: tuple[LiveService, str],
) -> None:
    scene, key = keyed

    def capabilities(key: str) -> tinker.types.GetServerCapabilitiesResponse:
        return tinker.RestClient(base_url=scene.url, api_key=key).get_server_capabilities().result()

    assert (await asyncio.to_thread(capabilities, key)).supported_models
    with pytest.raises(tinker.AuthenticationError, match="halteres keys create"):
        await asyncio.to_thread(capabilities, "tml-unknown")


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://evil.example:8001", "["])
async def test_pages_of_other_origins_are_refused_with_a_key_too(
    keyed: tuple[LiveService, str], origin: str
) -> None:
    scene, key = keyed
    assert (await asked(scene, **{"X-API-Key": key, "Origin": origin}))[0] == 403


async def test_with_keys_a_server_may_be_called_by_any_name(keyed: tuple[LiveService, str]) -> None:
    scene, key = keyed
    named = {"X-API-Key": key, "Host": "tinker.example:8001"}
    assert (await asked(scene, **named))[0] == 200
    assert (await asked(scene, **named, Origin="https://tinker.example:8001"))[0] == 200
    assert (await asked(scene, **named, Origin="http://localhost:3000"))[0] == 200
    assert (await asked(scene, Host="tinker.example:8001"))[0] == 401


@proves("keys:hashed")
async def test_no_key_is_written_anywhere(
    keyed: tuple[LiveService, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not into its own file, the journal, the log, or an error; nor is the secret's half of it."""
    scene, key = keyed
    caplog.set_level(0)
    headers = {"X-API-Key": key, "Authorization": f"Bearer {key}"}
    _, made = await scene.post("create_session", {}, **headers)
    body = {"session_id": made["session_id"], "model_seq_id": 0, "base_model": "halteres/tiny"}
    _, promised = await scene.post("create_model", body, **headers)
    await scene.post("retrieve_future", {"request_id": promised["request_id"]}, **headers)
    await scene.post("create_model", b"{", **headers)
    await asked(scene, **{"X-API-Key": key + "x"})
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {file.name for file in files} >= {"keys.json", "journal.sqlite"}
    secret = key.split("-", 2)[2].encode()
    assert not [file for file in files if secret in file.read_bytes()]
    assert secret.decode() not in caplog.text


# The file


def test_the_state_directory_that_the_first_key_makes_is_its_owners_alone(tmp_path: Path) -> None:
    KeyFile(tmp_path / "state").create("alice")
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700


@proves("keys:hashed")
def test_the_file_holds_hashes_and_is_its_owners_alone(keys: KeyFile) -> None:
    made = keys.create("alice", tenant="team", note="laptop")
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
    assert made.text not in keys.path.read_text()
    assert made.text.startswith(f"tml-{made.key.id}-")
    assert len(made.text.split("-", 2)[2]) == 43
    keys.path.chmod(0o644)
    keys.revoke(made.key.id)
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
    assert keys.read() == [replace(made.key, revoked_at=keys.read()[0].revoked_at)]


def test_changes_from_several_places_at_once_are_all_kept(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as threads:
        made = list(
            threads.map(lambda number: KeyFile(tmp_path).create(f"k{number}").key, range(40))
        )
        list(threads.map(lambda key: KeyFile(tmp_path).revoke(key.id), made[::2]))
    known = {key.id: key.state(time.time()) for key in KeyFile(tmp_path).read()}
    assert known == {
        key.id: "valid" if number % 2 else "revoked" for number, key in enumerate(made)
    }
    assert [file.name for file in tmp_path.iterdir()] == ["keys.json"]


def test_revoking_twice_changes_nothing_and_an_unknown_id_is_a_sentence(keys: KeyFile) -> None:
    made = keys.create("alice").key
    assert keys.revoke(made.id) == keys.revoke(made.id)
    with pytest.raises(NotFound, match="halteres keys list"):
        keys.revoke("nothing")


@pytest.mark.parametrize("name", ["", "a b", "../x", "-x", "é", "x" * 65, "a/b"])
def test_impossible_names_are_refused(keys: KeyFile, name: str) -> None:
    with pytest.raises(InvalidConfig, match="cannot name"):
        keys.create(name)
    with pytest.raises(InvalidConfig, match="cannot name"):
        keys.create("good", tenant=name)
    assert keys.read() == []


@pytest.mark.parametrize(
    ("text", "seconds"), [("30d", 2592000), ("12h", 43200), ("1.5m", 90), ("2w", 1209600)]
)
def test_lifetimes(text: str, seconds: float) -> None:
    assert lifetime_s(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "0d", "-1d", "d", "1y", "99999999w"])
def test_what_is_no_lifetime_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="no lifetime"):
        lifetime_s(text)


@pytest.mark.parametrize(
    ("text", "why"), [("soon", "one of s, m, h, d, w"), ("99999999999d", "300 years"), ("0s", "0")]
)
def test_a_lifetime_is_refused_for_what_is_wrong_with_it(text: str, why: str) -> None:
    with pytest.raises(InvalidConfig, match=why):
        lifetime_s(text)


def test_a_key_in_bytes_that_are_no_text_is_unknown(tmp_path: Path, keys: KeyFile) -> None:
    keys.create("alice")
    with pytest.raises(KeyRefused, match="not known"):
        Keys(tmp_path).tenant("tml-\udcff-\x00")


OWN = "tml-run-0123456789abcdef"


async def test_a_key_of_its_own_makes_its_bearer_the_one_tenant_and_others_are_told_whose_it_is(
    tmp_path: Path,
) -> None:
    """What was made without keys stays reachable with it: both are the tenant `local`."""
    async with serving(tmp_path, options=Options(own_key=OWN)) as scene:
        for headers in ({"X-API-Key": OWN}, {"Authorization": f"Bearer {OWN}"}):
            assert (await asked(scene, **headers))[0] == 200
        for headers in (
            {},
            {"X-API-Key": "tml-local"},
            {"X-API-Key": OWN + "0"},
            {"X-API-Key": "tml-ü"},
        ):
            status, text = await asked(scene, **headers)
            assert (status, "halteres runs connect" in text, OWN in text) == (401, True, False)
    assert Keys(tmp_path, own=OWN).tenant(OWN) == LOCAL
    assert "own" not in repr(Options(own_key=OWN))
