"""The service as a process that others may reach: where it listens, what it asks for, what it says
of itself.
"""

from __future__ import annotations

import json
import ssl
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from contract.requirements import proves

from halteres.service.keys import KeyFile

from .test_process import SERVICE, running, started

pytestmark = pytest.mark.runs

REACHABLE = """
import sys
from halteres.service import server as service
service.is_loopback = lambda address: False
sys.exit(service.main())
"""
"""A service that takes its address for one that others reach; it still listens on the loopback
alone.
"""


@proves("keys:needed-beyond-loopback")
def test_an_address_that_others_reach_is_refused_without_keys_and_the_sentence_says_how_to_make_one(
    tmp_path: Path,
) -> None:
    for address in ("0.0.0.0", "::", "192.0.2.1"):
        code, said = started("--state", str(tmp_path), "--port", "0", "--host", address)
        assert code == 1
        assert f"{address} is no address of the loopback." in said
        assert f"halteres keys create NAME --state {tmp_path}" in said


def test_with_a_key_the_address_is_taken(tmp_path: Path) -> None:
    """192.0.2.1 is nobody's (RFC 5737): that it is not this machine's is the only complaint
    left.
    """
    KeyFile(tmp_path).create("alice")
    code, said = started("--state", str(tmp_path), "--port", "0", "--host", "192.0.2.1")
    assert (code, "Port 0 of 192.0.2.1 cannot be used." in said) == (1, True)


@proves("keys:needed-beyond-loopback")
async def test_whom_others_reach_asks_for_a_key_even_before_there_is_one_and_warns(
    tmp_path: Path,
) -> None:
    with running(tmp_path, "--require-keys", program=("-c", REACHABLE)) as process:
        async with aiohttp.ClientSession(process.url) as http:
            async with http.get("/halteres/v1/info") as response:
                assert response.status == 401
            headers = {"X-API-Key": KeyFile(tmp_path).create("alice").text}
            async with http.get("/halteres/v1/info", headers=headers) as response:
                assert response.status == 200
        process.popen.terminate()
        said = process.popen.stderr.read() if process.popen.stderr else ""
    assert "No key of" in said
    assert "readable on the way" in said
    assert headers["X-API-Key"] not in said


async def test_without_keys_but_reached_by_others_it_asks_all_the_same(tmp_path: Path) -> None:
    with running(tmp_path, program=("-c", REACHABLE)) as process:
        async with (
            aiohttp.ClientSession(process.url) as http,
            http.get("/halteres/v1/info") as response,
        ):
            assert response.status == 401


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1 and its key."""
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        str(key),
        "-out",
        str(chain),
    ]
    subprocess.run(
        [*command, "-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return chain, key


async def test_with_a_certificate_it_speaks_tls_and_its_card_says_so(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    chain, key = certificate
    state = tmp_path / "state"
    made = KeyFile(state).create("alice")
    arguments = (
        "--certificate",
        str(chain),
        "--certificate-key",
        str(key),
        "--sample-logprobs",
        "tempered",
    )
    with running(state, *arguments, program=SERVICE) as process:
        trusted = ssl.create_default_context(cafile=str(chain))
        url = f"https://{urlsplit(process.url).netloc}"
        async with aiohttp.ClientSession(url, headers={"X-API-Key": made.text}) as http:
            async with http.get("/halteres/v1/info", ssl=trusted) as response:
                assert response.status == 200
            async with http.post("/api/v1/create_session", json={}, ssl=trusted) as response:
                assert "temperature they were drawn at" in (await response.json())["info_message"]
        assert json.loads((state / "service.json").read_text())["url"] == url


@pytest.mark.parametrize("broken", ["missing", "garbage", "alone"])
def test_a_certificate_that_cannot_be_used_is_a_sentence(
    tmp_path: Path, certificate: tuple[Path, Path], broken: str
) -> None:
    chain, key = certificate
    if broken == "garbage":
        key.write_text("nothing")
    first = tmp_path / "no.pem" if broken == "missing" else chain
    second = () if broken == "alone" else ("--certificate-key", str(key))
    code, said = started(
        "--state", str(tmp_path / "s"), "--port", "0", "--certificate", str(first), *second
    )
    assert code == 1
    assert said.startswith("error: ")
    assert "certificate" in said


def test_a_wrong_limit_and_a_broken_file_of_keys_are_one_sentence_each(tmp_path: Path) -> None:
    code, said = started("--state", str(tmp_path), "--port", "0", "--limit", "model=3")
    assert (code, "Did you mean 'models'?" in said) == (1, True)
    KeyFile(tmp_path).path.write_text("{")
    code, said = started("--state", str(tmp_path), "--port", "0")
    assert (code, "The keys of this service cannot be read." in said) == (1, True)
