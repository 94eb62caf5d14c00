"""Exports: files for others, their encryption, and the URLs that need no key."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyrage
import pytest
import tinker
from contract.requirements import proves
from safetensors.numpy import load_file

from halteres.service.keys import LOCAL
from halteres.service.routes.checkpoints import VALID_S

from .live_service import LiveService, trainer
from .test_checkpoints import answered, api_of, rest_of, two_tenants

FILES = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture
async def training(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return await trainer(client)


async def fetched(scene: LiveService, url: str, **headers: str) -> tuple[int, bytes]:
    """What somebody without a key gets."""
    async with scene.http.get(url, headers=headers) as response:
        return response.status, await response.read()


async def files_at(scene: LiveService, path: str) -> dict[str, bytes]:
    """Every file of an export, downloaded."""
    urls = (await (await rest_of(scene)).get_external_weights_urls(path)).urls
    found = {name: await fetched(scene, url) for name, url in urls.items()}
    assert {status for status, _ in found.values()} == {200}
    return {name: content for name, (_, content) in found.items()}


async def exported(scene: LiveService, run: str, seq: int, name: str = "x", **facts: Any) -> Any:
    """The outcome of an export by raw HTTP."""
    _, promised = await scene.post(
        "save_weights_external", {"model_id": run, "seq_id": seq, "path": name, **facts}
    )
    return await scene.redeem(promised["request_id"])


# Files


@proves("export:external")
async def test_an_export_is_an_adapter_and_nothing_else(
    scene: LiveService, training: tinker.TrainingClient
) -> None:
    path = (await training.save_weights_external("x")).path
    files = await files_at(scene, path)
    assert set(files) == FILES
    config = json.loads(files["adapter_config.json"])
    assert (config["r"], config["lora_alpha"]) == (8, 32)
    found = scene.service.checkpoints.readable(path, LOCAL)
    assert found.size_bytes == sum(map(len, files.values()))
    assert load_file(found.folder / "adapter_model.safetensors")


async def test_its_size_is_told_with_its_path(scene: LiveService) -> None:
    outcome = await exported(scene, await scene.model(), 1)
    assert (
        outcome["size_bytes"]
        == scene.service.checkpoints.readable(outcome["path"], LOCAL).size_bytes
    )


async def test_an_export_is_not_trained_from_nor_sampled(
    client: tinker.ServiceClient, training: tinker.TrainingClient
) -> None:
    path = (await training.save_weights_external("x")).path
    with pytest.raises(tinker.BadRequestError, match="an export for others"):
        await client.create_sampling_client(model_path=path)
    with pytest.raises(tinker.RequestFailedError, match="an export for others"):
        await client.create_training_client_from_state(path)


async def test_an_engine_that_dies_within_an_export_is_asked_again(
    scene: LiveService, training: tinker.TrainingClient
) -> None:
    held = scene.engine.block("save")
    under_way = training.save_weights_external("x")
    await held.inside()
    await scene.host.die()
    assert set(await files_at(scene, (await under_way).path)) == FILES
    assert not list(scene.service.state.glob("checkpoints/*/external_weights/.new-*"))


# Encryption


@pytest.fixture(scope="module")
def ssh_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("ssh") / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True)
    return file


@proves("export:age")
async def test_every_recipient_decrypts_an_export_and_nobody_else(
    scene: LiveService, training: tinker.TrainingClient, ssh_key: Path
) -> None:
    native, stranger = pyrage.x25519.Identity.generate(), pyrage.x25519.Identity.generate()
    keys = [str(native.to_public()), ssh_key.with_suffix(".pub").read_text()]
    plain = await files_at(scene, (await training.save_weights_external("plain")).path)
    path = (await training.save_weights_external("secret", age_encryption_recipients=keys)).path
    sealed = await files_at(scene, path)
    assert set(sealed) == {f"{name}.age" for name in FILES}
    for name, content in sealed.items():
        assert content.startswith(b"age-encryption.org/v1\n")
        for identity in (native, pyrage.ssh.Identity.from_buffer(ssh_key.read_bytes())):
            assert pyrage.decrypt(content, [identity]) == plain[name.removesuffix(".age")]
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(content, [stranger])
    folder = scene.service.checkpoints.readable(path, LOCAL).folder
    assert {file.name for file in folder.rglob("*")} == set(sealed)


GOOD = str(pyrage.x25519.Identity.generate().to_public())


@pytest.mark.parametrize(
    "keys",
    [
        ["age1nonsense"],
        [GOOD, GOOD[:-1] + ("q" if GOOD[-1] != "q" else "p")],
        ["ssh-ed25519 AAAA"],
        ["-----BEGIN OPENSSH PRIVATE KEY-----"],
        [""],
        ["\0"],
        ["ü" * 10_000],
        [],
        [GOOD] * 11,
    ],
)
@proves("export:age")
async def test_a_malformed_recipient_is_refused_and_nothing_is_written(
    scene: LiveService, keys: list[str]
) -> None:
    outcome = await exported(scene, await scene.model(), 1, age_encryption_recipients=keys)
    assert outcome["category"] == "user"
    assert "recipient" in outcome["error"]
    assert scene.service.checkpoints.all() == []
    assert not list(scene.service.state.glob("checkpoints/*/external_weights/*"))


async def test_a_private_key_sent_by_mistake_is_not_repeated(scene: LiveService) -> None:
    secret = str(pyrage.x25519.Identity.generate())
    outcome = await exported(scene, await scene.model(), 1, age_encryption_recipients=[secret])
    assert secret not in outcome["error"]


async def test_without_pyrage_an_encrypted_export_is_refused_and_a_plain_one_is_not(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyrage", None)
    run = await scene.model()
    outcome = await exported(scene, run, 1, age_encryption_recipients=[GOOD])
    assert (outcome["category"], "halteres[age]" in outcome["error"]) == ("user", True)
    assert (await exported(scene, run, 2))["size_bytes"] > 0


# URLs


@proves("export:external")
async def test_a_url_needs_no_key_and_tells_when_it_ends(tmp_path: Path) -> None:
    async with two_tenants(tmp_path) as (scene, ann, _, (key, _bobs)):
        path = (await (await trainer(ann)).save_weights_external("x")).path
        told = await (await rest_of(scene, key)).get_external_weights_urls(path)
        assert told.expires.timestamp() == pytest.approx(time.time() + VALID_S, abs=60)
        for url in told.urls.values():
            assert (await fetched(scene, url))[0] == 200
        assert (await answered(scene, "GET", f"{api_of(path)}/external_weights_urls", "tml-none"))[
            0
        ] == 401


async def test_a_part_of_a_file_is_sent(scene: LiveService) -> None:
    urls = await signed(scene)
    whole = (await fetched(scene, urls["adapter_config.json"]))[1]
    assert await fetched(scene, urls["adapter_config.json"], Range="bytes=2-5") == (206, whole[2:6])


async def test_a_url_opens_its_own_file_alone(
    scene: LiveService, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = await signed(scene)
    config, weights = urls["adapter_config.json"], urls["adapter_model.safetensors"]
    path, query = urlsplit(config).path, urlsplit(config).query
    last = query[-1]
    wrong = (
        config[:-1] + ("0" if last != "0" else "1"),
        config.replace("expires=", "expires=1"),
        config.split("?")[0],
        f"{scene.url}{urlsplit(weights).path}?{query}",
        f"{scene.url}{path.replace('/exports/', '/archives/').rsplit('/', 1)[0]}?{query}",
        f"{scene.url}{path.replace('external_weights/x', 'external_weights/y')}?{query}",
        config.replace("signature=", "signature=ü"),
        config.replace("expires=", "expires=%D9%A1"),
    )
    for url in wrong:
        status, content = await fetched(scene, url)
        assert (status, b"opens nothing" in content) == (403, True), url
    late = time.time() + VALID_S + 1
    monkeypatch.setattr("halteres.service.routes.checkpoints.time.time", lambda: late)
    status, content = await fetched(scene, config)
    assert (status, b"Its time is over" in content) == (403, True)


@pytest.mark.parametrize(
    "file", ["..%2F..%2F..%2Fsigning.key", "%2e%2e", "%2Fetc%2Fpasswd", "%00", "state.json"]
)
async def test_no_url_leads_out_of_an_export(scene: LiveService, file: str) -> None:
    """Not even a signed one: the file is looked for among those that the folder has."""
    url = (await signed(scene))["adapter_config.json"]
    status, _ = await fetched(scene, url.replace("adapter_config.json", file))
    assert status in (403, 404)


async def test_the_url_of_a_deleted_export_opens_nothing_even_if_its_name_is_used_again(
    scene: LiveService,
) -> None:
    run = await scene.model()
    path = (await exported(scene, run, 1))["path"]
    url = (await (await rest_of(scene)).get_external_weights_urls(path)).urls["adapter_config.json"]
    assert (await answered(scene, "DELETE", api_of(path)))[0] == 204
    assert (await fetched(scene, url))[0] == 403
    assert (await exported(scene, run, 2))["path"] == path
    assert (await fetched(scene, url))[0] == 403


async def signed(scene: LiveService) -> dict[str, str]:
    """The URLs of a new export's files."""
    path = (await exported(scene, await scene.model(), 1))["path"]
    return (await (await rest_of(scene)).get_external_weights_urls(path)).urls


async def test_urls_are_for_exports(scene: LiveService, training: tinker.TrainingClient) -> None:
    path = (await training.save_state("a")).path
    status, text = await answered(scene, "GET", f"{api_of(path)}/external_weights_urls")
    assert (status, "save_weights_external" in text) == (400, True)


# Archives


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
@proves("export:archive")
async def test_an_archive_is_a_tar_of_the_adapter(
    scene: LiveService, training: tinker.TrainingClient, kind: str
) -> None:
    """As SDKs up to 0.35 download them: redirected, with the mark of a whole checkpoint at the
    end.
    """
    saves = {"weights": training.save_state, "sampler_weights": training.save_weights_for_sampler}
    path = (await saves.get(kind, training.save_weights_external)("a")).path
    async with scene.http.get(
        f"{scene.url}{api_of(path)}/archive", allow_redirects=False
    ) as response:
        assert (response.status, "Expires" in response.headers) == (302, True)
        url = response.headers["Location"]
    async with scene.http.get(url) as response:
        content = await response.read()
        assert response.headers["Content-Length"] == str(len(content))
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}
    folder = scene.service.checkpoints.readable(path, LOCAL).folder
    assert members == {
        **{name: (folder / name).read_bytes() for name in FILES},
        "checkpoint_complete": b"",
    }


async def test_the_archive_of_a_deleted_checkpoint_is_refused(
    scene: LiveService, training: tinker.TrainingClient
) -> None:
    path = (await training.save_state("a")).path
    async with scene.http.get(
        f"{scene.url}{api_of(path)}/archive", allow_redirects=False
    ) as response:
        url = response.headers["Location"]
    assert (await answered(scene, "DELETE", api_of(path)))[0] == 204
    assert (await fetched(scene, url))[0] == 403


async def test_the_secret_of_urls_is_its_owners_alone(scene: LiveService) -> None:
    assert (scene.service.state / "signing.key").stat().st_mode & 0o077 == 0
