"""The model card of exported weights: what is known of them, and nothing that is not."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from agent.run_fixtures import add_evaluation, make_run

from halteres.config.file_training import FileTraining
from halteres.observe.metrics import append_row
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.model_card import Export, Form, model_card
from halteres.runs.reading.named_weights import Adapter

BASE = "Qwen/Qwen3-0.6B"
PROMPTS = hashlib.sha256(b"1 + 1\n2 + 2").hexdigest()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the export; its home is next to it."""
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "home"))
    out = tmp_path / "sums"
    out.mkdir()
    (out / "adapter_config.json").write_text(json.dumps({"r": 32}))
    return out


def run_on(environment: Path) -> RunDirectory:
    """A run of ten steps, evaluated three times, whose settings name a file and a secret."""
    run = make_run(steps=10, environment_file=str(environment))
    for step, share in ((0, 0.25), (5, 0.5), (10, 0.75)):
        add_evaluation(run, step, share)
    samples = run.path / "evals" / "step_0" / "samples.jsonl"
    samples.parent.mkdir(parents=True)
    for prompt in ("2 + 2", "1 + 1", "1 + 1"):
        append_row(samples, {"prompt": prompt, "completion": "4", "score": 1.0})
    resolved = {
        "trainer.loss": {"value": "ppo", "source": "default"},
        "trainer.total_steps": {"value": 10, "source": "edit"},
        "env.tasks": {"value": str(environment.parent / "questions.jsonl"), "source": "edit"},
        "env.stuck_s": {"value": 120.0, "source": "default"},
    }
    (run.path / "config.resolved.json").write_text(json.dumps(resolved))
    return run


def card(folder: Path, form: Form = "peft", **adapter: Any) -> str:
    weights = Adapter(folder, BASE, **adapter)
    return model_card(
        Export(adapter=weights, base=BASE, base_folder=None, folder=folder, form=form)
    )


def front_matter(text: str) -> dict[str, Any]:
    return yaml.safe_load(text.split("---\n")[1])


def test_it_says_on_what_how_and_with_what_gain_the_weights_were_trained(
    folder: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "sums_env.py"
    environment.write_text("reward = 1\n")
    text = card(folder, run=run_on(environment))
    assert front_matter(text) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "base_model": BASE,
        "tags": ["lora", "reinforcement-learning", "halteres"],
    }
    assert "| correct, T = 1 | 25.0% | 75.0% | +50.0 points |" in text
    assert "before (step 0) | after (step 10)" in text
    assert "| `trainer.loss` | `ppo` |" in text and "| `trainer.total_steps` | `10` |" in text
    assert "env.stuck_s" not in text
    # a path of this machine would help nobody, and tells who lives here
    assert "| `env.tasks` | `questions.jsonl` |" in text and str(tmp_path) not in text
    assert hashlib.sha256(b"reward = 1\n").hexdigest() in text
    assert f"2 different ones, sorted | `{PROMPTS}`" in text
    assert "vllm serve Qwen/Qwen3-0.6B" in text and "--max-lora-rank 32" in text
    assert "license is not known here" in text


def test_of_a_checkpoint_it_has_the_figures_that_its_weights_had(
    folder: Path, tmp_path: Path
) -> None:
    run = run_on(tmp_path / "gone.py")
    text = card(folder, run=run, step=7)
    assert "7 of 50 steps" in text and "after (step 5)" in text and "75.0%" not in text
    first = card(folder, run=run, step=0)
    assert "say nothing of a gain" in first


def test_of_an_adapter_that_no_run_here_trained_it_says_no_more_than_how_it_is_loaded(
    folder: Path,
) -> None:
    text = card(folder)
    assert "Nothing is known here of its training." in text
    assert "## Held-out tasks" not in text and "## Training" not in text
    assert "PeftModel.from_pretrained" in text


def test_a_base_whose_name_no_hub_has_is_loaded_from_its_folder(folder: Path) -> None:
    name = "smollm2-135m"
    weights = Adapter(folder, name)
    text = model_card(
        Export(adapter=weights, base=name, base_folder=None, folder=folder, form="peft")
    )
    assert f'base = "/path/to/{name}"' in text
    assert front_matter(text)["base_model"] == name


def test_other_forms_are_loaded_otherwise_and_a_license_is_the_base_models(folder: Path) -> None:
    assert "llama-cli -m model.gguf" in card(folder, "gguf")
    assert 'AutoModelForCausalLM.from_pretrained("sums")' in card(folder, "merged")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# Base\n")
    weights = Adapter(folder, BASE)
    text = model_card(
        Export(adapter=weights, base=str(folder), base_folder=folder, folder=folder, form="merged")
    )
    assert front_matter(text)["license"] == "mit"
    assert front_matter(text)["base_model"] == "sums"


def test_a_training_on_a_file_is_named_by_its_method_and_file(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "answers.jsonl"
    run = make_run(steps=10, environment_file=str(data), kind="sft")
    FileTraining(method="sft", data=str(data), digest="0" * 64).write(run.path)
    text = card(folder, run=run)
    assert front_matter(text)["tags"] == ["lora", "sft", "halteres"]
    assert "trained by supervised fine-tuning on the file `answers.jsonl`" in text
