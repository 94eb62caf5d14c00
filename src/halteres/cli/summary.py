"""The end of a run, told to a person.

Owns: what is said when a run has ended, and the next command to try.
Never: computes a figure that is not in the run directory.
"""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.table import Table
from rich.text import Text

from halteres.cli.chat import wording_of
from halteres.errors import ProcessFailed
from halteres.observe.metrics import Row, merge_by_step
from halteres.observe.sinks import read_reports
from halteres.redaction import printable
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.evaluations import Compared, before_and_after
from halteres.runs.reading.progress import read_progress
from halteres.runs.state import RunState

SCORE, FAILED = "eval/mean_score", "eval/num_failed"

SHOWN = 2
"""Answers before and after."""


def tell(run: RunDirectory, state: RunState, console: Console) -> None:
    """Print figures before and after, two answers, where things are, and what to try next.

    Raises:
        ProcessFailed: the run failed; the sentence is the run's own.
    """
    if state.status == "failed":
        look = f"Read its logs: halteres runs logs {run.run_id}"
        raise ProcessFailed(f"Run {run.run_id} failed.", _ended(state.error or ""), look)
    evaluations = [row for row in merge_by_step(run.metrics()) if "eval/percent_correct" in row]
    console.print()
    if state.note:
        _say(console, state.note)
    if len(evaluations) >= 2:
        console.print(_figures(evaluations[0], evaluations[-1]))
    else:
        progress = read_progress(run, state)
        for told in (progress.no_evaluation, *progress.eval_failed):
            if told:
                _say(console, str(told))
    if learnt := [task for task in before_and_after(run) if task.learnt][:SHOWN]:
        console.print("\nlearnt, for example:")
    for task in learnt:
        _show(task, console)
    _where(run, state, console)
    _say(console, f"next:    {_next(run, state)}")


def _figures(first: Row, last: Row) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("held-out tasks")
    table.add_column(f"before (step {first['step']})", justify="right")
    table.add_column(f"after (step {last['step']})", justify="right")
    own = "eval/percent_correct_greedy" not in last  # an environment's own evaluation, at whatever temperature
    for name, label in (
        ("eval/percent_correct", "correct" if own else "correct, T = 1"),
        ("eval/percent_correct_greedy", "correct, greedy"),
        ("eval/worked_share", "answers that show their work"),
    ):
        if first.get(name) is not None and last.get(name) is not None:
            table.add_row(label, f"{first[name]:.1%}", f"{last[name]:.1%}")
    if first.get(SCORE) is not None and last.get(SCORE) is not None:
        table.add_row("mean score" if own else "mean score, T = 1", f"{first[SCORE]:.3f}", f"{last[SCORE]:.3f}")
    if first.get(FAILED) or last.get(FAILED):
        table.add_row("tasks failed, left out", _failed(first), _failed(last))
    return table


def _failed(row: Row) -> str:
    failed = int(row.get(FAILED) or 0)
    return f"{failed} of {failed + int(row.get('eval/num_tasks') or 0)}"


def _show(task: Compared, console: Console) -> None:
    console.print()
    _say(console, str(task.prompt).strip())
    _say(console, f"  before: {_one_line(task.before)}", style="red")
    _say(console, f"  after:  {_one_line(task.after)}", style="green")


def _where(run: RunDirectory, state: RunState, console: Console) -> None:
    console.print()
    results = (("plot", run.path / "plot.png"), ("adapter", run.path / "adapter")) if state.step else ()
    for label, path in (*results, ("run", run.path)):
        if path.exists():
            _say(console, f"{label + ':':9}{path}")
    for name, report in read_reports(run.path).items():
        _say(console, f"{name + ':':9}{report.line}")
    console.print()


def _next(run: RunDirectory, state: RunState) -> str:
    if state.status == "stopped" and run.newest_checkpoint():
        return state.resume().command
    if state.status == "stopped":
        return f"halteres train {state.environment} (this run had no checkpoint yet)"
    if "max_turns" in run.environment_config():  # a chat is no episode of an environment that answers
        return f"halteres rl get-rollouts {run.run_id}"
    example = run.environment_config().get("example_question") or ((words := wording_of(run)) and words.example)
    return f"halteres chat {run.run_id}" + (f" {shlex.quote(str(example))}" if example else "")


def _ended(sentence: str) -> str:
    """A sentence that another may follow: a command at its end runs into none."""
    return sentence if not sentence or sentence.endswith((".", "!", "?")) else f"{sentence}."


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(printable(text), style=style), soft_wrap=True)
