"""Which folders become a model: whole ones, of the families computed here and of those that
transformers computes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from halteres.engine.torch.loading import load_base, main
from halteres.errors import InvalidConfig

SMALL: dict[str, Any] = {
    "vocab_size": 700,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]

CHANGES: dict[str, tuple[Change, str]] = {
    "no head": (
        lambda found: {n: t for n, t in found.items() if n != "lm_head.weight"},
        "lm_head.weight",
    ),
    "a prefix": (lambda found: {f"_orig_mod.{n}": t for n, t in found.items()}, "lm_head.weight"),
    "half of the layers": (
        lambda found: {n: t for n, t in found.items() if ".layers.1." not in n},
        "model.layers.1.input_layernorm.weight",
    ),
}


@pytest.fixture(params=["qwen3", "mistral", "qwen3_moe"])
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A random model: one that is computed here, one by transformers, one whose tensors it joins
    when it loads.
    """
    extra: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    config = hf.AutoConfig.for_model(
        request.param,
        **SMALL,
        **(extra if request.param == "qwen3_moe" else {}),
        head_dim=16,
        tie_word_embeddings=False,
    )
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(folder: Path) -> Any:
    return load_base(folder, torch.float32, torch.device("cpu"))


def printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What the check prints that reads no weight."""
    capsys.readouterr()
    main(str(folder))
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("case", CHANGES)
def test_what_a_folder_lacks_is_never_random(
    family: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(family).num_parameters
    assert printed(family, capsys) == {}
    change, first = CHANGES[case]
    file = family / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    with pytest.raises(InvalidConfig, match="not whole") as refused:
        load(family)
    assert first in refused.value.why
    assert printed(family, capsys)["why"] == refused.value.why


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_found_at_load_and_named(
    family: Path, value: float, dtype: torch.dtype
) -> None:
    file, name = family / "model.safetensors", "model.layers.1.self_attn.o_proj.weight"
    tensors = load_file(file)
    tensors[name][-1, -1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InvalidConfig) as refused:
        load_base(family, dtype, torch.device("cpu"))
    assert name in refused.value.why


@pytest.mark.parametrize(
    "changed", [{"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}]
)
def test_layers_that_config_json_leaves_out_are_not_left_out_in_silence(
    model_folder: Path, tmp_path: Path, changed: dict[str, Any]
) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "a"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(InvalidConfig) as refused:
        load(folder)
    assert "model.layers.2." in refused.value.why


def test_a_tied_head_is_nothing_that_a_folder_lacks(model_folder: Path) -> None:
    assert "lm_head.weight" not in load_file(model_folder / "model.safetensors")
    assert load(model_folder).vocabulary == 672


@pytest.mark.parametrize(
    "changed",
    [
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {
            "auto_map": {"AutoModelForCausalLM": "code.Model", "AutoConfig": "code.Config"},
            "model_type": "own",
        },
        {"num_hidden_layers": "four"},
    ],
)
def test_a_config_that_cannot_be_computed_is_refused_and_runs_no_code(
    model_folder: Path, tmp_path: Path, changed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "a"))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(InvalidConfig):
        load(folder)
    assert printed(folder, capsys)["code"] == "invalid_config"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("generation", "special", "ends"),
    [({"eos_token_id": None}, None, (2,)), (None, {"eos_token": "<|endoftext|>"}, (0,))],
)
def test_answers_end_where_the_tokenizer_says_where_no_setting_does(
    model_folder: Path, tmp_path: Path, generation: Any, special: Any, ends: tuple[int, ...]
) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "a"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    (folder / "generation_config.json").unlink()
    for name, content in (
        ("generation_config.json", generation),
        ("special_tokens_map.json", special),
    ):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    assert load(folder).eos_tokens == ends
