"""The process that scores for a tool: `python -m halteres.agent.judging.reward_evaluator FOLDER --lock-fd N`.

Owns: loading the model; that a result is left however it goes.
Never: answers anybody.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from halteres import process
from halteres.agent.judging.reward_models import RewardRequest, request_in
from halteres.agent.trial.folder import TestFolder
from halteres.config import environ
from halteres.errors import HalteresError, ServerError, boundary
from halteres.redaction import Redactor
from halteres.rewards import report
from halteres.rewards.evaluation import evaluate
from halteres.rewards.model_folder import read_reward_file
from halteres.rewards.preferences import read_preferences
from halteres.rewards.scorer import comparable_units, open_scorer, score_once
from halteres.runs import lock
from halteres.scores import Scorable, best_first

WITHIN_S = 3600
"""How long it may take."""


def main() -> int:
    """Score, and write the result. Exit code 0, or 1 where it failed."""
    parser = argparse.ArgumentParser(prog="python -m halteres.agent.judging.reward_evaluator")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lock-fd", type=int, help="descriptor of the folder's lock, taken already")
    options = parser.parse_args()
    environ.stay_offline()
    process.begin("evaluator", torch=True, threads=environ.threads() or max(1, process.usable_cores() - 1))
    folder = TestFolder(options.folder)
    if options.lock_fd is None:
        lock.take(folder.lock)
    signal.signal(signal.SIGALRM, lambda *_: _end_late(folder))
    signal.alarm(WITHIN_S)
    try:
        with boundary(ServerError, "Scoring"):
            result = {"status": "done", **asyncio.run(_result(request_in(folder)))}
    except HalteresError as error:
        result = {"status": "failed", "error": error.sentence, "code": error.code}
        sys.stderr.write(f"error: {Redactor.of_this_process().text(error.sentence)}\n")
    folder.write("result.json", Redactor.of_this_process().json(result))
    return 0 if result["status"] == "done" else 1


def _end_late(folder: TestFolder) -> None:
    """Leave a result and end at once: the thread that computes cannot be interrupted."""
    late = ServerError("Scoring took too long.", f"It had {WITHIN_S} s.", "Give it fewer texts, or a smaller model.")
    folder.write("result.json", {"status": "failed", "error": late.sentence, "code": late.code})
    os._exit(1)


async def _result(request: RewardRequest) -> dict[str, Any]:
    scorer = open_scorer(request.model, output=comparable_units(request.model))
    if request.data is not None:
        stored = read_reward_file(Path(request.model)) if Path(request.model).is_dir() else None
        try:
            return report.as_json(await evaluate(scorer, read_preferences(request.data), stored=stored, probe=False))
        finally:
            await scorer.close()
    texts = [Scorable(prompt=request.prompt, completion=completion) for completion in request.completions]
    values = [None if score is None else score.value for score in await score_once(scorer, texts)]
    return {"order": best_first(values), "scores": values}


if __name__ == "__main__":
    sys.exit(main())
