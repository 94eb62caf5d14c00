"""Base models: their sizes without loading them, what fits this machine, which is proposed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halteres.cli.main import app
from halteres.config.settings import InferenceSettings
from halteres.errors import InvalidConfig
from halteres.models import TINY, builtin_path, model_folder
from halteres.models.shape import read_shape
from halteres.runs.planning import resources
from halteres.runs.planning.known_models import CATALOGUE, TYPICAL, known_models, proposed
from halteres.runs.planning.models import ModelMissing, own_model

PUBLISHED = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
}
"""Parameters, as the model cards of these models count them."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    return tmp_path


def tiny() -> Path:
    folder = builtin_path(TINY)
    assert folder is not None
    return folder


def shelve(home: Path, name: str, **config: object) -> Path:
    """A copy of the built-in model in the store."""
    folder = home / "models" / name
    shutil.copytree(tiny(), folder)
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, **config}))
    return folder


def with_memory(monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    memory = resources.Memory(total=free, free=free)
    monkeypatch.setattr(
        resources, "this_machine", lambda: resources.Machine(cores=2, memory=memory, gpu=None)
    )


def test_well_known_models_have_the_published_number_of_parameters() -> None:
    assert {name: shape.parameters for name, shape in CATALOGUE.items()} == PUBLISHED


def test_parameters_are_counted_in_the_headers_of_the_weights() -> None:
    shape = read_shape(tiny())
    assert shape.parameters == replace(shape, parameters=0).parameters == 873_856
    assert shape.size_bytes == (tiny() / "model.safetensors").stat().st_size


def test_an_8b_model_with_the_settings_of_document_000_fits_a_card_of_80_gb_in_16_bits() -> None:
    """Batch 128, groups of 16, 8,192 tokens, rank 32; in 32 bits it does not."""
    work = resources.Workload(
        rank=32,
        group_size=16,
        batch_size=128,
        rows=128,
        positions=8192,
        answer_tokens=4096,
        steps=100,
        cache_gb=20,
    )
    shape = CATALOGUE["Qwen/Qwen3-8B"]
    assert resources.need(shape, replace(work, weight_bytes=2), on_gpu=True).total < 80e9
    assert resources.need(shape, work, on_gpu=True).total > 80e9


def test_models_are_told_with_size_and_whether_they_fit_and_by_how_much(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_memory(monkeypatch, free=20_000_000_000)
    shelve(home, "mine")
    found = {model.name: model for model in known_models()}
    assert {TINY, "mine", *PUBLISHED} == found.keys()
    assert (found["mine"].folder, found["mine"].fits) == (home / "models" / "mine", "yes")
    large = found["Qwen/Qwen3-8B"]
    assert (large.present, large.fits) == (False, "no")
    assert large.size_gb == pytest.approx(16.4, abs=0.1), "in 16 bits"
    assert large.need_gb > 4 * 8.19, "the engine computes in 32"
    assert large.spare_gb == pytest.approx(20 - large.need_gb, abs=0.01)
    assert "halteres models add Qwen/Qwen3-8B" in large.note
    assert [model.parameters for model in known_models()] == sorted(
        model.parameters for model in known_models()
    )


@pytest.mark.parametrize(("free", "fits"), [(10**9, "no"), (None, "unknown"), (10**11, "yes")])
def test_the_smallest_model_that_is_here_is_proposed(
    home: Path, monkeypatch: pytest.MonkeyPatch, free: int | None, fits: str
) -> None:
    with_memory(monkeypatch, free)
    shelve(home, "mine")
    first = proposed()
    assert (first.name, first.present, first.fits) == (TINY, True, fits)


def test_need_grows_with_the_model_the_batch_and_the_length() -> None:
    small, large = CATALOGUE["Qwen/Qwen3-0.6B"], CATALOGUE["Qwen/Qwen3-1.7B"]
    usual = resources.need(small, TYPICAL)
    assert (
        resources.need(large, TYPICAL).total > usual.total > usual.weights == 4 * small.parameters
    )
    assert resources.need(small, replace(TYPICAL, rank=64)).total > usual.total
    assert resources.need(small, replace(TYPICAL, positions=32_768)).total > usual.total


def test_a_name_of_the_hub_means_the_folder_of_its_last_part_too(home: Path) -> None:
    folder = shelve(home, "Qwen3-0.6B")
    models_home = home / "models"
    assert (
        model_folder("Qwen/Qwen3-0.6B", models_home)
        == model_folder("Qwen3-0.6B", models_home)
        == folder
    )
    assert model_folder(str(folder), models_home) == folder
    assert model_folder("../models/Qwen3-0.6B", models_home) is None
    assert model_folder("", models_home) is None
    assert [model.name for model in known_models() if model.name.endswith("Qwen3-0.6B")] == [
        "Qwen3-0.6B"
    ]


def test_a_model_that_is_not_whole_is_told_so_and_refused(home: Path) -> None:
    folder = shelve(home, "half")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    found = {model.name: model for model in known_models()}["half"]
    assert found.fits == "no" and "cut off" in found.note
    assert proposed().name == TINY
    with pytest.raises(ModelMissing, match="is not whole"):
        own_model(InferenceSettings(model="half"))


def test_a_shard_that_is_missing_is_named(home: Path) -> None:
    folder = shelve(home, "sharded")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"weight_map": {"a": names[0], "b": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        ModelMissing, match=r"1 of its 2 weight files are missing, the first is model-00002"
    ):
        own_model(InferenceSettings(model="sharded"))


def test_what_is_no_causal_language_model_is_refused_by_name(home: Path) -> None:
    shelve(home, "strange", model_type="t5", architectures=["T5ForConditionalGeneration"])
    found = {model.name: model for model in known_models()}["strange"]
    assert found.fits == "no" and "'t5'" in found.note
    with pytest.raises(InvalidConfig, match="model_type 't5'"):
        own_model(InferenceSettings(model="strange"))


def test_a_file_that_is_no_model_is_a_sentence(home: Path) -> None:
    folder = shelve(home, "wrong", num_hidden_layers="four")
    with pytest.raises(ModelMissing, match="num_hidden_layers"):
        own_model(InferenceSettings(model="wrong"))
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelMissing, match="is not whole"):
        own_model(InferenceSettings(model="wrong"))


def test_a_model_that_is_not_there_offers_those_that_are(home: Path) -> None:
    with pytest.raises(ModelMissing) as refused:
        own_model(InferenceSettings(model="halteres/tinny"))
    assert refused.value.details["did_you_mean"] == TINY
    assert "`halteres models add`" in refused.value.next


def test_the_command_lists_them_for_people_and_for_programs(home: Path) -> None:
    shelve(home, "mine")
    listed = CliRunner().invoke(app, ["models", "list"]).output
    header, first, *_ = listed.splitlines()
    assert header.startswith("model ")
    assert first.startswith(TINY) and "<- proposed" in first
    assert "Qwen/Qwen3-8B *" in listed
    told = json.loads(CliRunner().invoke(app, ["models", "list", "--json"]).output)
    assert told["proposed"] == TINY
    assert {"name", "present", "parameters", "size_gb", "need_gb", "free_gb", "fits"} <= told[
        "models"
    ][0].keys()


def test_a_shape_without_a_tied_head_counts_both() -> None:
    shape = read_shape(tiny())
    untied = replace(shape, tied=False, parameters=0)
    assert untied.parameters - shape.parameters == shape.vocabulary * shape.width
