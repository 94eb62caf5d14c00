"""Adapters that somebody else made: put into a service's state, trained on and sampled from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tinker
from safetensors.numpy import save_file

from halteres.engine.protocol import LoraConfig
from halteres.errors import Conflict, HalteresError, InvalidData, NotFound
from halteres.models import TINY
from halteres.service.checkpoint_folders import add_adapter
from halteres.service.keys import LOCAL, KeyFile

from .live_service import BASE, DATA, STEP, LiveService, prompt, serving, trainer
from .test_checkpoints import answered, api_of, rest_of

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


def plain_adapter(folder: Path, **settings: object) -> Path:
    """A PEFT folder as peft writes it: one adapted projection of the built-in model."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    tensors = {
        "lora_A": np.full((4, 128), 0.01, np.float32),
        "lora_B": np.full((128, 4), 0.02, np.float32),
    }
    save_file(
        {f"{MODULE}.{part}.weight": values for part, values in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


async def test_an_added_adapter_is_trained_on_and_sampled_from_by_a_service_that_was_running(
    scene: LiveService, client: tinker.ServiceClient, tmp_path: Path
) -> None:
    path = str(add_adapter(plain_adapter(tmp_path / "mine"), "mine", scene.service.state))
    assert path == "tinker://added/weights/mine"
    training = await client.create_training_client_from_state(path)
    await training.forward_backward(DATA, "cross_entropy")
    await training.optim_step(STEP)
    model = scene.service.models.of_id(training.model_id)
    assert model is not None
    assert model.lora == LoraConfig(rank=4, alpha=8.0, train_mlp=False, train_unembed=False)
    sampling = await client.create_sampling_client(model_path=path)
    assert await sampling.compute_logprobs(prompt(5, 6))


async def test_it_is_listed_described_and_deleted_like_any_other(
    scene: LiveService, tmp_path: Path
) -> None:
    path, rest = (
        str(add_adapter(plain_adapter(tmp_path / "mine"), "mine", scene.service.state)),
        await rest_of(scene),
    )
    (listed,) = (await rest.list_user_checkpoints()).checkpoints
    assert (listed.tinker_path, listed.checkpoint_type) == (path, "training")
    assert (await rest.list_checkpoints("added")).checkpoints == [listed]
    info = await rest.get_weights_info_by_tinker_path(path)
    assert (info.base_model, info.lora_rank, info.train_attn, info.train_mlp) == (
        TINY,
        4,
        True,
        False,
    )
    run = await rest.get_training_run("added")
    assert (run.lora_rank, run.last_checkpoint) == (4, listed)
    await rest.set_checkpoint_ttl_from_tinker_path(path, 7200)
    await rest.delete_checkpoint_from_tinker_path(path)
    assert (await rest.list_user_checkpoints()).checkpoints == []
    assert (await answered(scene, "DELETE", api_of(path)))[0] == 404


async def test_a_service_that_starts_later_knows_it(tmp_path: Path) -> None:
    state = tmp_path / "state"
    add_adapter(plain_adapter(tmp_path / "mine"), "mine", state)
    for _ in range(2):
        async with serving(state) as scene:
            (found,) = scene.service.checkpoints.all()
            assert (found.version, found.tenant) == (0, LOCAL)
            assert found.lora == LoraConfig(rank=4, alpha=8.0, train_mlp=False, train_unembed=False)


async def test_a_checkpoint_of_ours_is_added_with_its_optimiser(
    scene: LiveService, client: tinker.ServiceClient, tmp_path: Path
) -> None:
    training = await trainer(client)
    await training.forward_backward(DATA, "cross_entropy")
    await training.optim_step(STEP)
    saved = scene.service.checkpoints.find((await training.save_state("a")).path, LOCAL)
    state = tmp_path / "another"
    path = add_adapter(saved.folder, "theirs", state)
    async with serving(state) as other:
        found = other.service.checkpoints.find(str(path), LOCAL)
        assert (found.version, found.lora) == (1, saved.lora)
        assert (found.folder / "optimizer.safetensors").is_file()


async def test_where_there_are_keys_it_belongs_to_the_tenant_that_is_named(tmp_path: Path) -> None:
    keys = {name: KeyFile(tmp_path).create(name).text for name in ("ann", "bob")}
    folder = plain_adapter(tmp_path / "mine")
    path = str(add_adapter(folder, "anns", tmp_path, tenant="ann"))
    add_adapter(folder, "nobodys", tmp_path)
    async with serving(tmp_path) as scene:
        listed = {
            name: await (await rest_of(scene, key)).list_user_checkpoints()
            for name, key in keys.items()
        }
        assert [one.tinker_path for one in listed["ann"].checkpoints] == [path]
        assert listed["bob"].checkpoints == []
        assert (await answered(scene, "DELETE", api_of(path), keys["bob"]))[0] == 404


@pytest.mark.parametrize(
    ("name", "settings", "kind", "says"),
    [
        ("../x", {}, InvalidData, "cannot name a checkpoint"),
        ("a/b", {}, InvalidData, "cannot name a checkpoint"),
        ("ok", {"use_dora": True}, InvalidData, "use_dora"),
        ("ok", {"r": 0}, InvalidData, "'r' is 0"),
        ("taken", {}, Conflict, "exists"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_copied(
    tmp_path: Path, name: str, settings: dict[str, object], kind: type[HalteresError], says: str
) -> None:
    add_adapter(plain_adapter(tmp_path / "other"), "taken", tmp_path / "state")
    with pytest.raises(kind, match=says):
        add_adapter(plain_adapter(tmp_path / "mine", **settings), name, tmp_path / "state")
    assert [folder.name for folder in tmp_path.glob("state/checkpoints/added/weights/*")] == [
        "taken"
    ]


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no PEFT folder"):
        add_adapter(BASE.folder, "x", tmp_path)


async def test_a_folder_whose_card_names_another_path_is_not_taken_for_it(tmp_path: Path) -> None:
    """As when somebody copies a folder by hand."""
    state = tmp_path / "state"
    first = add_adapter(plain_adapter(tmp_path / "mine"), "mine", state).folder(state)
    first.rename(first.with_name("renamed"))
    async with serving(state) as scene:
        assert scene.service.checkpoints.all() == []
        with pytest.raises(NotFound):
            scene.service.checkpoints.find("tinker://added/weights/renamed", LOCAL)
