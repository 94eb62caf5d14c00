"""Takes every step that this interpreter's SDK has, and writes one JSON report."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

STEP_S = 75.0
"""A step that takes longer hangs."""


def main() -> int:
    """Exit code 0 where every step is ok."""
    options = _arguments()
    warnings.simplefilter("ignore")
    # torch, which most SDKs can do without and their environments lack
    sys.path.extend(options.also)
    from .catalogue import STEPS  # after the path, for tinker looks for torch when it is imported
    from .connection import Connection
    from .steps import version_of_sdk

    sdk = version_of_sdk()
    scene = Connection(sdk=sdk, model=options.model, folder=options.folder)
    taken: list[dict[str, Any]] = []
    for step in STEPS:
        if step.exists_in(sdk) and (not options.only or options.only in step.name):
            taken.append(_taken(step, scene))
            _tell(taken[-1])
    told = {"sdk": ".".join(map(str, sdk)), "python": sys.version.split()[0], "steps": taken}
    Path(options.report).write_text(json.dumps(told, indent=1, default=str))
    return 0 if all(step["ok"] for step in taken) else 1


def _taken(step: Any, scene: Any) -> dict[str, Any]:
    """One step's outcome; in a thread, so that one that hangs is left behind."""
    outcome: dict[str, Any] = {
        "name": step.name,
        "ok": False,
        "facts": {},
        "error": f"It hung for {STEP_S:.0f} s.",
    }

    def run() -> None:
        try:
            facts = step.run(scene)
        except Exception as error:  # noqa: BLE001 - an SDK may raise anything; its failure is the answer
            told = "".join(traceback.format_exception_only(type(error), error)).strip()
            where = traceback.extract_tb(error.__traceback__)
            ours = [
                frame for frame in where if Path(frame.filename).parent == Path(__file__).parent
            ]
            outcome["error"] = f"{told} (line {ours[-1].lineno}: {ours[-1].line})" if ours else told
        else:
            outcome.update(ok=True, facts=facts, error=None)

    started = time.monotonic()
    worker = threading.Thread(target=run, daemon=True, name=step.name)
    worker.start()
    worker.join(STEP_S)
    return {**outcome, "seconds": round(time.monotonic() - started, 2)}


def _tell(taken: dict[str, Any]) -> None:
    mark = "ok  " if taken["ok"] else "FAIL"
    error = "" if taken["ok"] else f"  {taken['error']}"
    sys.stderr.write(f"{mark} {taken['seconds']:6.2f} s  {taken['name']}{error}\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="program", description="Drives a Tinker service through the installed SDK."
    )
    parser.add_argument("--report", required=True, help="file that the JSON report is written to")
    parser.add_argument("--model", required=True, help="base model, as the service calls it")
    parser.add_argument(
        "--folder", default="", help="folder of the base model, where its tokenizer is"
    )
    parser.add_argument(
        "--also", action="append", default=[], help="folder to search for modules last (torch)"
    )
    parser.add_argument("--only", default="", help="take the steps whose name contains this")
    return parser.parse_args()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # the SDK's threads and a step that hung are not waited for
