"""Runs as one HTML file that makes no request: what their pages show, and what they were made of.

The file holds what the server would have answered to the page's own modules, which show it
(`report_file.js`). Nothing in it names a folder of this machine, but for what the run was set to
and what its texts say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import halteres
from halteres.dashboard.curves import Curves
from halteres.dashboard.rollout_groups import sampled_groups
from halteres.dashboard.runs import evaluations_of, settings_of, view_of
from halteres.engine.folders import digest_of
from halteres.files import sha256_of
from halteres.next_step import NextStep
from halteres.redaction import Redactor
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.usage import usage_columns
from halteres.runs.servers import redactor_of
from halteres.runs.state import RunState
from halteres.standalone_page import standalone_page

MOST_RUNS = 8
MOST_GROUPS = 8  # of each run, with every answer
MOST_POINTS = 1000  # of a curve
MODEL_FILES = ("config.json", "tokenizer.json", "*.safetensors")

Answer = Mapping[str, Any]


def report_file(
    runs: Sequence[RunDirectory],
    results: Sequence[Answer],
    comparison: Answer | None,
    write: Callable[[NextStep], str],
) -> str:
    """The whole HTML document.

    Args:
        runs: each once.
        results: of each run, what `rl_get_results` answers.
        comparison: what `rl_compare_runs` answers for them; None of a single run.
        write: a call as a person types it.

    Raises:
        RunUnreadable: a run's state is damaged.
    """
    answers: dict[str, Any] = {}
    states = [run.state() for run in runs]
    # what is sent to others holds no secret of any of the runs
    redactor = Redactor(secret for run in runs for secret in redactor_of(run).secrets)
    for run, result in zip(runs, results, strict=True):
        path = f"/api/runs/{run.run_id}"
        answers[path] = {**view_of(run, write), "folder": None}
        answers[f"{path}/metrics"] = Curves(run.path / "metrics.jsonl").columns(["*"], MOST_POINTS)
        answers[f"{path}/settings"] = {"settings": _settings(run)}
        answers[f"{path}/evals"] = evaluations_of(run)
        answers[f"{path}/usage"] = usage_columns(run)
        answers[f"{path}/results"] = _without_places(result)
    if comparison is not None:
        answers["/api/compare"] = comparison
    data = {
        "written": time.time(),
        "version": halteres.__version__,
        "runs": [run.run_id for run in runs],
        "answers": answers,
        "groups": {run.run_id: sampled_groups(run, MOST_GROUPS, redactor) for run in runs},
        "sources": {state.run_id: sources_of(state) for state in states},
    }
    title = ", ".join(state.name for state in states)
    return standalone_page("report_file.js", redactor.json(data), title=redactor.text(title))


def _settings(run: RunDirectory) -> list[dict[str, Any]]:
    """Every setting but the folders and addresses that the run filled in."""
    return [one for one in settings_of(run)["settings"] if one["source"] != "wiring"]


def _without_places(result: Answer) -> dict[str, Any]:
    """A run's results without the folders of this machine, which say nothing elsewhere."""
    shown = {name: value for name, value in result.items() if name != "plot"}
    weights = dict(result.get("weights") or {})
    for name in ("peft_dir", "reward_model", "use", "base"):
        weights.pop(name, None)
    return {**shown, "weights": weights}


def sources_of(state: RunState) -> dict[str, Any]:
    """What a run was made of, by SHA-256: {environment, environment_sha256, is_as_run, model,
    model_sha256}.

    The environment's file is hashed as the run begins; of a run of an earlier version it is hashed
    now (`is_as_run` is false). The model is hashed now: its files do not change. None: the files
    are not there any more, or only a service elsewhere has them.
    """
    environment = state.environment_sha256
    if environment is None:
        environment = sha256_of(Path(state.environment_file))
    return {
        "environment": state.environment,
        "environment_sha256": environment,
        "is_as_run": state.environment_sha256 is not None,
        "model": state.base_model,
        "model_sha256": model_sha256(Path(state.tokenizer)),
    }


def model_sha256(folder: Path) -> str | None:
    """Of the names and contents of a model's weights, config and tokenizer; None where the folder
    has none of them, or they cannot be read.
    """
    hashes: dict[str, bytes] = {}
    for pattern in MODEL_FILES:
        for file in folder.glob(pattern):
            found = sha256_of(file)
            if found is None:
                return None
            hashes[file.name] = bytes.fromhex(found)
    if not hashes:
        return None
    return digest_of(hashes)
