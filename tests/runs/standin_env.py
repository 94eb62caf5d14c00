"""An environment file as the supervisor knows one: describe, serve, evaluate; it starts fast."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml

DEFAULTS: dict[str, Any] = {
    "group_size": 2,
    "batch_size": 4,
    "max_token_length": 64,
    "difficulty": 1,
    "temperature": 1.0,
    "stuck_s": 1.0,
}
TYPES: dict[str, Any] = {
    "group_size": {"type": "integer"},
    "batch_size": {"type": "integer"},
    "temperature": {"anyOf": [{"type": "number"}, {"type": "null"}]},
}


def config(path: str) -> dict[str, Any]:
    return yaml.safe_load(Path(path).read_text())["env"] or {}


def describe(given: dict[str, Any]) -> None:
    wiring = {
        "tokenizer_name",
        "rollout_server_url",
        "total_steps",
        "steps_per_eval",
        "seed",
        "use_wandb",
    }
    known = {**DEFAULTS, **dict.fromkeys(wiring), "wandb_name": None, "run_dir": None}
    problems = [
        {"field": name, "got": value, "rule": "there is no such setting", "did_you_mean": None}
        for name, value in given.items()
        if name not in known
    ]
    problems += [
        {"field": name, "got": given[name], "rule": "must be a valid integer", "did_you_mean": None}
        for name in ("group_size", "batch_size")
        if not isinstance(given.get(name, 1), int)
    ]
    effective = {**DEFAULTS, **{k: v for k, v in given.items() if k in known}}
    schema = {"properties": {name: TYPES.get(name, {}) for name in known}}
    answer = {"name": "standin_env", "class_name": "Standin", "description": "", "schema": schema}
    sys.stdout.write(json.dumps({**answer, "config": effective, "problems": problems}) + "\n")


def serve(given: dict[str, Any]) -> None:
    behaviour = os.environ.get("STANDIN_ENV", "")
    # the stand-in asks for no token
    url = "http://" + given["rollout_server_url"].rpartition("@")[2] + "/register-env"
    request = urllib.request.Request(url, data=b"{}")  # noqa: S310 - ours
    urllib.request.urlopen(request, timeout=30).read()  # noqa: S310 - ours
    if behaviour == "dies":
        sys.stderr.write("error: The environment gave up. It was told to.\n")
        sys.exit(3)
    if behaviour == "gives up":
        words = {
            "role": "env",
            "code": "env_gave_up",
            "what": "8 groups failed.",
            "why": "The last: TypeError: no str.",
        }
        Path(given["run_dir"], "control", "failure.json").write_text(json.dumps(words))
        sys.exit(1)
    if behaviour == "hangs":
        beats = Path(os.environ["HALTERES_HEARTBEAT"].partition(":")[2])
        beats.write_text('{"draw_step": 2, "ordinal": 1, "drawing": false}\n')
        where = f'File "{__file__}", line 7 in score'
        sys.stderr.write(f"Timeout (0:00:01)!\nThread 1 (most recent call first):\n  {where}\n")
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
        time.sleep(600)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "leaves a session":
        left = subprocess.Popen(
            [sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True
        )
        Path(given["run_dir"], "left").write_text(str(left.pid))
    while True:
        signal.pause()


def evaluate(given: dict[str, Any], options: dict[str, str]) -> None:
    if os.environ.get("STANDIN_EVALUATE") == "dies":
        sys.stderr.write("error: All 3 held-out tasks failed. They are too hard.\n")
        sys.exit(4)
    if os.environ.get("STANDIN_EVALUATE") == "has none":
        sys.stderr.write("error: standin cannot be evaluated. Its class has no evaluate.\n")
        sys.exit(3)
    if os.environ.get("STANDIN_EVALUATE") == "leaves a child":
        subprocess.Popen(["sleep", "987"])
    time.sleep(float(os.environ.get("STANDIN_EVALUATE_S", "0")))
    folder = Path(options["--env.data_dir_to_save_evals"])
    snapshot = options["--openai.model_name"]
    score = 0.0 if snapshot.endswith("step-000000") else 1.0
    if os.environ.get("STANDIN_EVALUATE") == "says NaN":
        score = math.nan
    rows = [{"prompt": f"question {i}", "completion": snapshot, "score": score} for i in range(3)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = {"eval/percent_correct": score, "eval/num_tasks": 3}
    if os.environ.get("STANDIN_EVALUATE") == "has a panel":
        spreads = {"eval/reward/total_std": 1.0, "eval/panel/other_std": 1.0}
        figures |= {"eval/reward/total": 2 * score, "eval/panel/other": score, **spreads}
    sys.stdout.write(json.dumps(figures) + "\n")


def main() -> None:
    verb, *rest = sys.argv[1:]
    options = dict(zip(rest[::2], rest[1::2], strict=True))
    given = config(options["--config"])
    if verb == "describe":
        describe(given)
    elif verb == "serve":
        serve(given)
    else:
        evaluate(given, options)


if __name__ == "__main__":
    main()
