"""recipes/gsm8k_qwen: a dry run of each, on models of the right shape without weights."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from halteres.config.resolution import resolve_settings
from halteres.models import TINY, builtin_path
from halteres.models.shape import own_tensors
from halteres.process import Memory
from halteres.runs.planning import plan as planning
from halteres.runs.planning.known_models import CATALOGUE
from halteres.runs.planning.plan import plan_run
from halteres.runs.planning.resources import Gpu, Machine

RECIPES = Path(__file__).parents[2] / "recipes" / "gsm8k_qwen"
GB = 10**9
HERE = Machine(
    cores=8,
    memory=Memory(total=64 * GB, free=48 * GB),
    gpu=Gpu(name="one of 24 GB", memory=Memory(total=24 * GB, free=23 * GB)),
)


def hollow_model(name: str, folder: Path) -> Path:
    """A folder of this model's shape, whose weights are a hole in a file."""
    shape = CATALOGUE[name]
    tiny = builtin_path(TINY)
    assert tiny is not None
    shutil.copytree(tiny, folder)
    config = {
        "architectures": [f"{shape.family.capitalize()}ForCausalLM"],
        "model_type": shape.family,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.width,
        "intermediate_size": shape.feed,
        "vocab_size": shape.vocabulary,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, object] = {}
    end = 0
    for tensor, sizes in own_tensors(replace(shape), config):
        begin, end = end, end + 2 * math.prod(sizes)
        header[tensor] = {"dtype": "BF16", "shape": sizes, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as weights:
        weights.write(len(encoded).to_bytes(8, "little") + encoded)
        weights.truncate(8 + len(encoded) + end)
    return folder


@pytest.mark.parametrize(
    ("file", "model"),
    [
        ("qwen2.5-0.5b.yaml", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("qwen3-0.6b.yaml", "Qwen/Qwen3-0.6B"),
    ],
)
def test_a_recipe_fits_a_gpu_of_24_gb(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str, model: str
) -> None:
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    monkeypatch.setattr(planning.resources, "this_machine", lambda *_: HERE)
    hollow_model(model, tmp_path / "models" / model)
    questions = tmp_path / "questions"
    questions.mkdir()
    for split in ("train", "test"):
        row = {"question": "What is 3 + 4?", "answer": "#### 7"}
        (questions / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    resolved = resolve_settings(None, RECIPES / file, [f"env.dataset={questions}"])
    plan = plan_run(resolved)
    assert plan.refusal is None, plan.refusal
    assert plan.warnings == []
    bare = resolve_settings("gsm8k", None, [f"env.dataset={questions}", f"model={model}"])
    assert plan_run(bare).warnings == []
    assert bare.settings.trainer.learning_rate == 3e-4
    env = bare.environment_settings
    assert (env["batch_size"], env["group_size"]) == (64, 8)
    (memory,) = (check for check in plan.checks if check.name == "gpu memory")
    readme = (RECIPES / "README.md").read_text()
    assert memory.figures["need_gb"] < 24
    assert f"{memory.figures['need_gb']:.1f} GB" in readme
    assert "not been run yet" in readme and "Not run yet" in (RECIPES / file).read_text()
