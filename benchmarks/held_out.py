"""A run's first and last weights on held-out tasks: by its environment's own `evaluate`, and a
service on the run's own state.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENDS_WITHIN_S = 3600.0  # one evaluation
FIRST, LAST = "step-000000", "final"  # checkpoints


def evaluate_ends(
    run: Any,
    arguments: Sequence[str],
    folder: Path | None = None,
    ends: Sequence[str] = (FIRST, LAST),
) -> list[dict[str, float]]:
    """The metrics of the checkpoints `ends`.

    Args:
        run: the directory of a completed run.
        arguments: of the environment, e.g. ["--env.eval_tasks", "512"].
        folder: where samples go, in a folder for each checkpoint; None: nowhere.
    """
    from halteres.runs.servers import served

    paths = {row["name"]: row["sampler_path"] for row in run.checkpoints()}
    found: list[dict[str, float]] = []
    with served(run.state().base_model, run) as service:
        for name in ends:
            asked = [*arguments]
            if folder is not None:
                asked += ["--env.data_dir_to_save_evals", str(folder / name)]
            found.append(_evaluate(run, service.url, paths[name], asked))
    return found


def _evaluate(run: Any, url: str, sampler_path: str, arguments: Sequence[str]) -> dict[str, float]:
    state = run.state()
    command = [state.interpreter, state.environment_file, "evaluate"]
    command += ["--config", str(run.path / "config.yaml")]
    command += ["--openai.base_url", f"{url}/runs/{run.run_id}/v1"]
    command += ["--openai.model_name", sampler_path, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=ENDS_WITHIN_S, encoding="utf-8"
    )
    if done.returncode:
        raise SystemExit(f"Evaluating {sampler_path} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
