"""The supervisor of one run: `python -m halteres.runs.supervision.supervisor DIR`.

It takes the lock, obeys signals, and writes the run's end: weights, results.json, STATUS.md,
plot.png, and last the state. What happens in between the controller decides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from halteres import process
from halteres.config import environ
from halteres.errors import Conflict, HalteresError, NotFound, ServerError, boundary
from halteres.files import replace_file
from halteres.observe.sinks import read_reports
from halteres.redaction import printable
from halteres.runs.directory import WAKE, RunDirectory, StateWriter
from halteres.runs.reading.evaluations import PLOT, before_and_after, draw
from halteres.runs.reading.report import RunReport, report_of
from halteres.runs.reading.status_figures import REWARD, success_in
from halteres.runs.servers import new_secret
from halteres.runs.state import RESERVE, Failure, Phase, RunState, Status, take_lock
from halteres.runs.supervision.controller import (
    RunController,
    StopRequest,
    Verdict,
    final_checkpoint,
)
from halteres.runs.supervision.roles import RolesOf, prepared_run, roles_of
from halteres.runs.supervision.usage_sampler import sampling_usage

_log = logging.getLogger("halteres.runs.supervision.supervisor")

NUM_SAMPLES = 2  # answers shown before and after


async def supervise(run: RunDirectory, roles_of: RolesOf = roles_of) -> Status:
    """Supervise one run to its end; the lock is the caller's. Returns its final status."""
    # first: whatever is written from here on is searched for it
    environ.set_run_secret(new_secret())
    writer = StateWriter(run)
    if writer.state.terminal:
        raise Conflict(
            f"Run {run.run_id} has ended already ({writer.state.status}).",
            "",
            "Resume it as a new run.",
        )
    async with writer.beating(), sampling_usage(writer):
        try:
            # Whatever goes wrong in here, the run must end with a true state.
            with boundary(ServerError, "The supervisor"), prepared_run(writer) as context:
                controller = RunController(writer, context, roles_of)
                loop = asyncio.get_running_loop()
                for number in (signal.SIGINT, signal.SIGTERM):
                    loop.add_signal_handler(
                        number, controller.ask_to_stop, StopRequest("now", number.name)
                    )
                loop.add_signal_handler(WAKE, controller.look_for_stop)
                # From here on a stop request may wake us; one that came earlier is found by the
                # first look.
                phase: Phase = "api"
                if writer.state.kind == "reward":
                    phase = "trainer"
                us = process.identity(os.getpid())
                writer.update(status="starting", phase=phase, started_at=time.time(), supervisor=us)
                verdict = await controller.run_to_verdict()
        except HalteresError as error:
            _log.exception("The supervisor failed.")
            verdict = Verdict(status="failed", error=error)
        return await _close(writer, verdict)


async def _close(writer: StateWriter, verdict: Verdict) -> Status:
    """Write the end: weights, results, picture, and only then the state that says so."""
    run = writer.run
    (run.path / RESERVE).unlink(missing_ok=True)
    exported: Path | None = None
    # Else they are kept by somebody else's service or written by the trainer itself, or there are
    # none.
    if (
        not writer.state.service_given
        and writer.state.trains_policy
        and final_checkpoint(run) is not None
    ):
        try:
            with boundary(ServerError, "Copying the final weights"):
                exported = await asyncio.to_thread(export_adapter, run)
        except HalteresError as error:  # a completed run without its weights has failed
            if verdict.status == "completed":
                verdict = Verdict(status="failed", error=error, note=verdict.note)
    newest, error = run.newest_checkpoint(), verdict.error
    end: dict[str, Any] = {
        "status": verdict.status,
        "phase": writer.state.phase if verdict.status == "failed" else None,
        "code": verdict.code,
        "note": verdict.note,
        "resumable": verdict.status != "completed" and newest is not None,
        "last_checkpoint": newest or writer.state.last_checkpoint,
        "ended_at": time.time(),
    }
    if error:
        end |= {"error": error.sentence, "code": error.code, "failure": Failure.of(error)}
        end["exit"] = error.details.get("exit")
    end = writer.without_secrets(end)
    if exported:
        writer.event("weights", folder=str(exported))
    try:
        with boundary(ServerError, "Concluding"):  # a defect of ours, too: the end must be written
            problems = await asyncio.to_thread(
                conclude, run, msgspec.structs.replace(writer.state, **end)
            )
    except HalteresError as defect:
        _log.exception("The run could not be concluded.")
        problems = [defect.sentence]
    for problem in problems:
        writer.event("conclusion_failed", error=problem)
    writer.update(**end)
    return verdict.status


def export_adapter(run: RunDirectory) -> Path:
    """Copy the final weights, as a PEFT folder, to RUN/adapter. NotFound where they do not
    exist.
    """
    from halteres.service.checkpoint_folders import folder_of

    checkpoint = final_checkpoint(run)
    if checkpoint is None or not checkpoint.get("sampler_path"):
        raise NotFound(
            "There are no final weights.", "The trainer has written no final checkpoint."
        )
    source = folder_of(run.path / "service", checkpoint["sampler_path"])
    if not (source / "adapter_config.json").is_file():
        raise NotFound(
            f"The final weights {checkpoint['sampler_path']} are not on disk.",
            f"{source} is no adapter.",
        )
    beside, target = run.path / ".adapter", run.path / "adapter"
    shutil.rmtree(beside, ignore_errors=True)
    training_only = shutil.ignore_patterns("optimizer.safetensors", "state.json")
    shutil.copytree(source, beside, ignore=training_only)
    mode = stat.S_IMODE(run.path.stat().st_mode)
    for copied in (beside, *beside.iterdir()):  # the service made its files for itself alone
        copied.chmod(mode if copied.is_dir() else mode & 0o666)
    shutil.rmtree(target, ignore_errors=True)
    beside.rename(target)
    return target


def conclude(run: RunDirectory, state: RunState) -> list[str]:
    """Write plot, results and summary for a run that ends in `state`. Returns what could not be
    made, in sentences.
    """
    report, problems = report_of(run, state), list[str]()
    outcome = report.outcome
    if outcome.rows:
        try:
            draw(run, state, outcome.rows, run.path / PLOT)
        except HalteresError as error:
            problems.append(error.sentence)
    results = _results(report)
    try:
        replace_file(run.path / "results.json", json.dumps(results, indent=1).encode() + b"\n")
        replace_file(run.path / "STATUS.md", _summary(report).encode())
    except OSError as error:
        problems.append(f"Results could not be written: {error}.")
    return problems


def _results(report: RunReport) -> dict[str, Any]:
    run, outcome, progress = report.run, report.outcome, report.progress
    weights, plot = outcome.weights, run.path / PLOT
    names = (
        "run_id",
        "name",
        "status",
        "environment",
        "base_model",
        "step",
        "total_steps",
        "error",
        "note",
    )
    return {
        **{name: getattr(report.state, name) for name in names},
        "minutes": round(outcome.cost.minutes, 2),
        "final_metrics": outcome.final,
        "baseline": dict(outcome.baseline.figures) if outcome.baseline else {},
        "improvement": {name: gain.facts for name, gain in outcome.gains.items()},
        "weights": {
            "step": weights.step,
            "sampler": weights.sampler,
            "state": weights.state,
            "peft_dir": str(weights.peft_dir) if weights.peft_dir else None,
            **({"reward_model": str(weights.reward_model)} if weights.reward_model else {}),
        },
        "checkpoints": run.checkpoints(),
        "samples": [task.facts for task in before_and_after(run)[:NUM_SAMPLES]],
        "plot": str(plot) if plot.exists() else None,
        "sinks": msgspec.to_builtins(read_reports(run.path)),
        "eval_failed": [
            {"step": failed.step, "why": failed.why} for failed in progress.eval_failed
        ],
        "no_evaluation": progress.no_evaluation or None,
    }


def _summary(report: RunReport) -> str:
    """STATUS.md."""
    state, outcome, progress = report.state, report.outcome, report.progress
    lines = [f"# Run {state.run_id}: {printable(state.name)}", ""]
    lines.append(f"**{state.status}** at step {state.step}/{state.total_steps}")
    partly = [
        progress.evaluation_line(*it)
        for it in progress.evaluation
        if progress.tasks_evaluated(it[0])
    ]
    remarks = (state.error, state.note, progress.no_evaluation, *progress.eval_failed, *partly)
    lines += [f"\n{printable(str(text))}" for text in remarks if text]
    lines += ["", "| metric | before | after | gain (95 % interval) |", "|---|---|---|---|"]
    figures = {}
    if outcome.baseline:
        figures = outcome.baseline.figures
    for name, value in outcome.final.items():
        gain, before = outcome.gains.get(name), figures.get(name)
        if gain is None and name not in (REWARD, success_in(outcome.rows)):
            continue
        bounds = ""
        if gain and gain.interval:
            bounds = f" ({gain.interval[0]:+.3f} to {gain.interval[1]:+.3f})"
        known = (f"{number:.4g}" if number is not None else "" for number in (before, value))
        lines.append(
            f"| {name} | {' | '.join(known)} | {f'{gain.delta:+.3f}{bounds}' if gain else ''} |"
        )
    weights = outcome.weights
    places = {"directory": report.run.path, "sampler": weights.sampler, "state": weights.state}
    places |= {"peft_dir": weights.peft_dir, "reward_model": weights.reward_model}
    return (
        "\n".join(
            [*lines, "", *(f"- {name}: `{value}`" for name, value in places.items() if value)]
        )
        + "\n"
    )


def main(arguments: Sequence[str] | None = None, roles_of: RolesOf = roles_of) -> int:
    """Supervise the run in DIR. Exit code 0 whenever its end is on disk; 1 where it could not be
    supervised at all.
    """
    process.begin("supervisor")
    parser = argparse.ArgumentParser(
        prog="python -m halteres.runs.supervision.supervisor", description="Supervise one run."
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--lock-fd", type=int, help="the run's lock, held already by whoever started this"
    )
    given = parser.parse_args(arguments)
    run = RunDirectory(given.directory.absolute())
    try:
        if given.lock_fd is None:
            take_lock(run.path / "lock")  # held until this process ends
        else:
            os.set_inheritable(given.lock_fd, False)  # children must not hold it after us
        process.adopt_orphans()
        try:
            status = asyncio.run(supervise(run, roles_of))
        finally:
            process.end_orphans()
        _log.info("Run %s: %s.", run.run_id, status)
    except HalteresError as error:
        sys.stderr.write(f"error: {error.sentence}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
