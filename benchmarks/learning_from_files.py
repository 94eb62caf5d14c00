"""Do held-out losses fall? A training by sft and one by dpo, on data that is made here.

    python benchmarks/learning_from_files.py                          # the built-in model
    python benchmarks/learning_from_files.py --model smollm2-135m --rows 240 --out DIR

The data are sums of two numbers of two digits, asked in words of our own and answered in one form
(sft), or answered plainly or evasively (dpo). Each method is one run as `halteres sft` and
`halteres dpo` make it. What is in --out is gone on with: a method that is done is not run again,
one that was interrupted goes on from its newest checkpoint. Written: OUT/learning_from_files.json,
a row for each method with held-out figures before and after. Exit code 1 where a held-out loss has
not fallen by more than its 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import machine

METHODS = ("sft", "dpo")
POLL_S, ENDS_WITHIN_S = 2.0, 6 * 3600.0


def main() -> int:
    options = parse()
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if options.home is not None:
        os.environ["HALTERES_HOME"] = str(options.home.absolute())
    else:
        os.environ.setdefault("HALTERES_HOME", str(out / "home"))
    found: list[dict[str, Any]] = []
    for method in options.methods:
        data = write_data(out / f"{method}.jsonl", method, options.rows)
        run_id = finished(out, method, data, options)
        found.append(row_of(run_id))
        print(json.dumps(found[-1]))
    facts = {"machine": machine(), "model": options.model, "rows": options.rows, "runs": found}
    (out / "learning_from_files.json").write_text(
        json.dumps(facts, indent=1) + "\n", encoding="utf-8"
    )
    return int(not all(row["certain"] and row["after"] < row["before"] for row in found))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="halteres/tiny")
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--set", action="append", default=[], dest="edits", metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, default=Path("learning-from-files"))
    parser.add_argument("--home", type=Path, help="HALTERES_HOME, where the model is")
    return parser.parse_args()


def write_data(file: Path, method: str, count: int) -> Path:
    """Rows that are the same every time."""
    generator = random.Random(f"{method} of files")
    lines: list[str] = []
    for a, b in generator.sample([(a, b) for a in range(10, 100) for b in range(10, 100)], count):
        asked = [{"role": "user", "content": f"Add {a} and {b}."}]
        plain = [{"role": "assistant", "content": f"{a} plus {b} makes {a + b}."}]
        evasive = [{"role": "assistant", "content": "That depends on how one looks at it."}]
        row = {"messages": [*asked, *plain]}
        if method == "dpo":
            row = {"prompt": asked, "chosen": plain, "rejected": evasive}
        lines.append(json.dumps(row) + "\n")
    if not file.exists():
        file.write_text("".join(lines), encoding="utf-8")
    return file


def finished(out: Path, method: str, data: Path, options: argparse.Namespace) -> str:
    """The run of this method, completed: the one that is there, gone on with, or a new one."""
    from halteres.runs.directory import find_run

    place = out / f"{method}.run"
    command = ["train", "--resume"]
    run_id = place.read_text(encoding="utf-8").strip() if place.exists() else None
    if run_id is not None:
        state = find_run(run_id).state()
        if not state.terminal:
            return wait(run_id)
        if state.status == "completed":
            return run_id
    if run_id is None or not find_run(run_id).state().resumable:
        edits = [word for edit in options.edits for word in ("--set", edit)]
        command = [method, str(data), "--model", options.model, *edits]
    else:
        command += [run_id]
    said = subprocess.run(
        [sys.executable, "-m", "halteres", *command, "--detach"],
        check=True,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    ).stdout
    run_id = said.split()[1]
    place.write_text(run_id + "\n", encoding="utf-8")
    return wait(run_id)


def wait(run_id: str) -> str:
    """Until it has ended. SystemExit where it has not completed."""
    from halteres.runs.directory import find_run

    run, ends = find_run(run_id), time.monotonic() + ENDS_WITHIN_S
    while not run.state().terminal:
        if time.monotonic() > ends:
            sys.exit(f"run {run_id} has not ended within {ENDS_WITHIN_S:.0f} s")
        time.sleep(POLL_S)
    state = run.state()
    if state.status != "completed":
        sys.exit(f"run {run_id}: {state.status}: {state.error or state.note}")
    return run_id


def row_of(run_id: str) -> dict[str, Any]:
    """What a run has come to."""
    from halteres.runs.directory import find_run
    from halteres.runs.reading.report import report_of

    report = report_of(find_run(run_id))
    gain = report.gain
    assert gain is not None, f"run {run_id} was evaluated once"
    figures = {
        name: [report.outcome.baseline.figures[name], value]  # type: ignore[union-attr]
        for name, value in report.outcome.evaluations[-1].figures.items()
        if not name.endswith("_stderr") and not name.startswith("eval/num_")
    }
    settings = report.run.settings().trainer
    return {
        "run_id": run_id,
        "kind": report.state.kind,
        "figure": gain.of,
        "before": gain.before,
        "after": gain.after,
        "ci95": gain.ci95,
        "certain": gain.certain,
        "steps": report.step,
        "learning_rate": settings.learning_rate,
        "rank": settings.lora_rank,
        "minutes": report.minutes,
        "step_s": report.progress.step_s,
        "engine_gb": report.metrics.get("engine_gb"),
        "figures": figures,
    }


if __name__ == "__main__":
    sys.exit(main())
