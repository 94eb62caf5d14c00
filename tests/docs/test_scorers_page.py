"""docs/scorers.md: its environment scores what a model wrote, in processes of its own; its tables
name what there is.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from environments.fakes import Inference, inference_server, run, write_config

from halteres.environments.cage import cage_missing
from halteres.environments.config import BaseEnvConfig
from halteres.observe.metrics import read_rows

PAGE = (Path(__file__).parents[2] / "docs" / "scorers.md").read_text()

ANSWERS = (
    "def f(n):\n    return n * n",
    "def f(n):\n    return n + n",
    "import os\nos._exit(0)",
    "def f(n):\n    while True:\n        pass",
    "f = open('/etc/shadow')",
)


async def processed(inference: Inference, folder: Path, cage: str) -> tuple[list[float], set[str]]:
    """The scores of the page's environment, and the names of its failures."""
    (text,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    file = folder / "squares.py"
    file.write_text(text)
    given = {
        "cage": cage,
        "scorer_timeout_s": 1,
        "total_steps": 2,
        "rollout_retries": 20,
        "run_dir": str(folder / "run"),
        "data_path_to_save_groups": str(folder / "groups.jsonl"),
    }
    config = write_config(folder, inference, **given)
    ended = await run(file, "process", "--config", str(config), within_s=60)
    assert ended.code == 0, ended.stderr
    scores = [s for group in read_rows(folder / "groups.jsonl") for s in group["scores"]]
    rows = read_rows(folder / "run" / "rollouts" / "step_1.jsonl")
    codes = Counter(failure["code"] for row in rows for failure in row["failures"])
    return scores, set(codes)


@pytest.mark.skipif(cage_missing() is not None, reason=cage_missing() or "")
async def test_the_pages_environment_pays_right_code_and_outlives_the_rest(tmp_path: Path) -> None:
    async with inference_server() as inference:
        inference.answer = lambda prompt, digest: ANSWERS[digest % len(ANSWERS)]
        scores, codes = await processed(inference, tmp_path, "on")
    assert len(scores) == 8
    assert set(scores) == {1.0, 0.2}
    assert codes == {"scorer_exited", "scorer_timeout", "scorer_error"}


def test_its_defaults_are_the_settings() -> None:
    made = BaseEnvConfig()
    assert f"`env.scorer_timeout_s` ({made.scorer_timeout_s:g})" in PAGE
    assert f"`env.scorer_memory_mb` ({made.scorer_memory_mb}" in PAGE
    assert f"`{made.cage}` (the default)" in PAGE
