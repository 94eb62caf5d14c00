"""docs/tutorial.md, typed as it stands into a fresh folder; only what takes long is shortened."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.runs

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()

CHANGED = {
    ". .venv/bin/activate": "true",  # the test's own environment is on PATH
    "total_steps=40": "total_steps=1 --set eval_tasks=8 --set eval_samples=1 --set batch_size=32",
    "vllm serve ./merged": "test -s merged/model.safetensors",  # vLLM is not here
}


def typed() -> str:
    """What a reader types, as one script; a file is written where the page says so."""
    lines = ["set -e"]
    for before, language, block in re.findall(
        r"((?:(?!```).)*)```(sh|python)\n(.*?)```", PAGE, re.DOTALL
    ):
        if language == "python":
            file = re.findall(r"Write this into `(\w+\.py)`", before)[-1]
            lines.append(f"cat > {file} <<'END'\n{block}END")
            lines += re.findall(r"run `(python \w+\.py)`", before)
        else:
            lines.append(block)
    script = "\n".join(lines)
    for words, others in CHANGED.items():
        assert words in script, f"the page says no more: {words}"
        script = script.replace(words, others)
    return script


def test_the_environment_has_no_more_than_30_lines() -> None:
    (environment,) = re.findall(r"`problems\.py`:\n\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(environment.splitlines()) <= 30


@pytest.mark.timeout(900)
def test_the_tutorial_leads_from_a_file_of_questions_to_an_exported_model_that_answers(
    tmp_path: Path,
) -> None:
    """By our choice; two trainings of one step, on the built-in model."""
    home = tmp_path / "home"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "HALTERES_HOME": str(home), "PATH": path}
    try:
        told = subprocess.run(
            ["bash", "-c", typed()],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=840,
        )
    finally:
        for name in ("first", "second"):  # nothing is left behind where a command failed under way
            stop = [sys.executable, "-m", "halteres", "runs", "stop", name]
            subprocess.run(stop, env=variables, capture_output=True, timeout=60)
    assert told.returncode == 0, f"{told.stdout}\n{told.stderr}"
    assert "environment_working" in told.stdout and "delta=" in told.stdout
    assert {file.name for file in (tmp_path / "tutorial").iterdir()} >= {
        "problems.py",
        "adapter",
        "merged",
    }
    assert told.stdout.splitlines()[-1].strip(), "the exported model says something"
