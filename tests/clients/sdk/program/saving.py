"""Steps: named state, loading it with and without optimiser, new clients from it, exports."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import urllib.request

from .connection import Connection, refused, scores, step, unique, wait
from .steps import Facts, Step, all_close, close_to, differ

NOBODYS_KEY = "age1vhj9gjnkupn4u5c33pmf8l6nvd5a823ts0f6lp8jpw8us7d94d4svjkm4c"
"""An age recipient whose identity does not exist."""


def save_state(scene: Connection) -> Facts:
    trainer = scene.trainer()
    name = unique("state")
    path = wait(trainer.save_state(name)).path
    assert path == f"tinker://{trainer.model_id}/weights/{name}", path
    return {}


def load_state(scene: Connection) -> Facts:
    trainer = scene.trainer()
    step(trainer)
    path, kept = wait(trainer.save_state(unique("load"))).path, scores(trainer)
    step(trainer, learning_rate=0.1)
    differ(scores(trainer), kept, "training went on")
    wait(trainer.load_state(path))
    all_close(scores(trainer), kept, "the weights of the checkpoint are back", 1e-6)
    return {}


def load_with_optimizer(scene: Connection) -> Facts:
    """The next step after loading is the next step that was taken after saving."""
    trainer = scene.trainer()
    step(trainer)
    path = wait(trainer.save_state(unique("resume"))).path
    step(trainer)
    expected = scores(trainer)
    wait(trainer.load_state_with_optimizer(path))
    step(trainer)
    all_close(scores(trainer), expected, "the same next step", 1e-6)
    return {}


def from_state(scene: Connection) -> Facts:
    trainer = scene.trainer()
    step(trainer)
    path, kept = wait(trainer.save_state(unique("from"))).path, scores(trainer)
    other = scene.made(scene.service.create_training_client_from_state(path))
    assert other.model_id != trainer.model_id
    info = other.get_info()
    assert info.lora_rank == 4 and info.model_data.model_name == scene.model, info
    all_close(scores(other), kept, "the weights of the checkpoint", 1e-6)
    return {"lora_rank": info.lora_rank}


def from_state_with_optimizer(scene: Connection) -> Facts:
    trainer = scene.trainer()
    step(trainer)
    path = wait(trainer.save_state(unique("both"))).path
    step(trainer)
    expected = step(trainer)
    other = scene.made(scene.service.create_training_client_from_state_with_optimizer(path))
    step(other)
    close_to(step(other), expected, "the next loss but one", 1e-6)
    return {"loss": expected}


def saved_again(scene: Connection) -> Facts:
    """A name that is saved again holds the newer state; the older one has a number behind it."""
    trainer = scene.trainer()
    name = unique("again")
    path = wait(trainer.save_state(name)).path
    before = scores(trainer)
    step(trainer, learning_rate=0.1)
    after = scores(trainer)
    assert wait(trainer.save_state(name)).path == path
    for held, expected in ((f"{path}.1", before), (path, after)):
        wait(trainer.load_state(held))
        all_close(scores(trainer), expected, held, 1e-6)
    return {}


def overwrite(scene: Connection) -> Facts:
    """Overwriting leaves the newer state alone."""
    trainer = scene.trainer()
    name = unique("twice")
    path = wait(trainer.save_state(name)).path
    step(trainer, learning_rate=0.1)
    after = scores(trainer)
    assert wait(trainer.save_state(name, overwrite=True)).path == path
    wait(trainer.load_state(path))
    all_close(scores(trainer), after, "the later state replaced the earlier", 1e-6)
    assert "There are no weights" in refused(lambda: wait(trainer.load_state(f"{path}.1")))
    return {}


def external(scene: Connection) -> Facts:
    """Files for others: each behind a URL that needs no key."""
    trainer = scene.trainer()
    step(trainer)
    path = wait(trainer.save_weights_external(unique("export"), ttl_seconds=3600)).path
    assert "/external_weights/" in path, path
    found = wait(scene.rest.get_external_weights_urls(path))
    files = {name: fetched(url) for name, url in found.urls.items()}
    return {"files": sorted(files), "tensors": check_adapter(files)}


def encrypted(scene: Connection) -> Facts:
    """Every file is an age file where recipients are named."""
    trainer = scene.trainer()
    saved = trainer.save_weights_external(
        unique("age"), ttl_seconds=3600, age_encryption_recipients=[NOBODYS_KEY]
    )
    found = wait(scene.rest.get_external_weights_urls(wait(saved).path))
    assert found.urls and all(name.endswith(".age") for name in found.urls), found.urls
    for name, url in found.urls.items():
        assert fetched(url).startswith(b"age-encryption.org/v1\n-> X25519 "), name
    return {"files": sorted(found.urls)}


def archive(scene: Connection) -> Facts:
    """Up to 0.35: a tar behind a URL."""
    trainer = scene.trainer()
    path = wait(trainer.save_weights_for_sampler(unique("tar"))).path
    found = wait(scene.rest.get_checkpoint_archive_url_from_tinker_path(path))
    with tarfile.open(fileobj=io.BytesIO(fetched(found.url))) as tar:
        members = {
            member.name: tar.extractfile(member) for member in tar.getmembers() if member.isfile()
        }
        files = {
            name.rpartition("/")[2]: opened.read() for name, opened in members.items() if opened
        }
    return {"files": sorted(files), "tensors": check_adapter(files)}


def fetched(url: str) -> bytes:
    """What a plain GET of the URL answers."""
    with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - the service's own address
        return answer.read()


def check_adapter(files: dict[str, bytes]) -> int:
    """A PEFT adapter: its rank, its alpha, and a lora_A for every lora_B. Returns the number of
    tensors.
    """
    config = json.loads(files["adapter_config.json"])
    assert config["r"] == 4 and config["lora_alpha"] > 0, config
    held = files["adapter_model.safetensors"]
    (length,) = struct.unpack("<Q", held[:8])
    names = [name for name in json.loads(held[8 : 8 + length]) if name != "__metadata__"]
    ends = [name.replace("lora_B", "lora_A") for name in names if "lora_B" in name]
    assert ends and set(ends) <= set(names), names[:8]
    assert all(name.startswith("base_model.model.") for name in names), names[:8]
    return len(names)


STEPS = (
    Step("save_state", save_state),
    Step("load_state", load_state, proves=("checkpoint:weights-alone",)),
    Step(
        "load_state_with_optimizer", load_with_optimizer, since=(0, 9), proves=("checkpoint:exact",)
    ),
    Step("create_training_client_from_state", from_state, proves=("checkpoint:new-client",)),
    Step(
        "create_training_client_from_state_with_optimizer",
        from_state_with_optimizer,
        since=(0, 9),
        proves=(
            "checkpoint:new-client",
            "checkpoint:exact",
        ),
    ),
    Step("save_state, twice under a name", saved_again, proves=("checkpoint:saved-again",)),
    Step("save_state, overwrite", overwrite, since=(0, 22), proves=("checkpoint:overwrite",)),
    Step("save_weights_external", external, since=(0, 28, 1), proves=("export:external",)),
    Step("save_weights_external, encrypted", encrypted, since=(0, 33), proves=("export:age",)),
    Step("get_checkpoint_archive_url", archive, until=(0, 36), proves=("export:archive",)),
)
