"""Watching a run in a terminal: a live view for people, plain lines for pipes.

Owns: how progress looks; what Ctrl-C does (stop the run with a checkpoint, or leave it to its supervisor).
Never: decides anything about the run; it reads the run directory as any process may.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from halteres.observe.plots import sparkline
from halteres.redaction import printable
from halteres.runs.directory import RunDirectory, stop_run
from halteres.runs.reading.progress import Progress, Series, read_progress
from halteres.runs.state import RunState

LOOK_EVERY_S = 0.25
SPARKLINE_WIDTH = 48
PLAIN_LINES = 60  # a long run's plain lines are thinned to about so many


class View(Protocol):
    """Shows progress as it comes."""

    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, progress: Progress) -> None:
        """Show this look; called a few times a second."""
        ...

    def say(self, text: str) -> None:
        """A remark between looks."""
        ...


def follow(run: RunDirectory, console: Console, *, may_stop: bool = True) -> RunState:
    """Show the run until it has ended; returns its final state.

    Ctrl-C asks the run to stop and goes on watching; a second one, or the first where not `may_stop`, leaves it.
    """
    view: View = LiveView(run, console) if console.is_terminal else PlainView(console)
    leaving = not may_stop
    with view:
        while True:
            try:
                progress = read_progress(run)
                view.show(progress)
                if run.state().terminal:
                    return run.state()
                time.sleep(LOOK_EVERY_S)
            except KeyboardInterrupt:
                if leaving:
                    view.say(f"Left to itself. Look at it with: halteres runs status {run.run_id}")
                    raise
                leaving = True
                view.say(f"Stopping run {run.run_id}: it writes a checkpoint first. Ctrl-C again leaves it to itself.")
                stop_run(run, deadline_s=0)


class PlainView:
    """One line per step, phase and evaluation, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said: set[str] = set()
        self._step = -1  # the last one read

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, progress: Progress) -> None:
        """Print what was not printed yet."""
        if progress.resumed_at and self._step < 0:
            self._once(f"going on after step {progress.resumed_at}")
        self._step = max(self._step, progress.resumed_at)
        if progress.phase and progress.status == "starting":
            self._once(f"starting: {progress.phase}")
        for sink in progress.sinks:
            self._once(sink)
        self._show_steps(progress)
        for step, share in progress.evaluation:
            is_its_end = step == progress.total_steps  # all that was left to a run resumed after its last step
            if step > progress.resumed_at or not progress.resumed_at or is_its_end:
                self._once(progress.evaluation_line(step, share))
        for failed in progress.eval_failed:
            self._once(str(failed))
        if progress.no_evaluation:
            self._once(progress.no_evaluation)
        for alert in progress.alerts:
            self._once(f"alert: {alert}")

    def _show_steps(self, progress: Progress) -> None:
        total, success = progress.total_steps, dict(progress.success_rates)
        stride = max(1, total // PLAIN_LINES)
        for step, reward in progress.reward:
            if step <= self._step:
                continue
            self._step = step
            if step % stride == 0 or step in (progress.resumed_at + 1, total):
                rate = f"  success {success[step]:.0%}" if step in success else ""
                dropped = progress.dropped.get(step)
                many = f"  {dropped}" if dropped and dropped.are_many else ""
                self._once(f"step {step}/{total}  reward {reward:.3f}{rate}{many}")

    def say(self, text: str) -> None:
        """Print a remark."""
        self._console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def _once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.say(line)


class LiveView:
    """A panel redrawn in place: progress, reward sparkline, success rate, time left."""

    def __init__(self, run: RunDirectory, console: Console) -> None:
        self._run, self._console = run, console
        self._remark = ""
        self._live = Live(console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, progress: Progress) -> None:
        """Redraw."""
        self._live.update(self._draw(progress))

    def say(self, text: str) -> None:
        """Show a remark under the panel."""
        self._remark = printable(text)

    def _draw(self, progress: Progress) -> Group:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        what = f"{progress.status}, {progress.phase}" if progress.status == "starting" else progress.status
        table.add_row("run", Text(f"{self._run.run_id}  {what}"))
        bar = ProgressBar(total=max(1, progress.total_steps), completed=progress.step, width=SPARKLINE_WIDTH)
        table.add_row("steps", bar)
        table.add_row("", Text(f"{progress.step} of {progress.total_steps}{_time_left(progress)}"))
        table.add_row("reward", Text(_curve(progress.reward), style="green"))
        table.add_row("success", Text(_success(progress)))
        held_out = "  ".join(_held_out(progress, step, share) for step, share in progress.evaluation[-5:])
        table.add_row("held out", Text(held_out or progress.no_evaluation or "evaluating before training …"))
        if failed := progress.unevaluated:
            table.add_row("", Text(str(failed), style="yellow"))
        for alert in progress.alerts[-2:]:
            table.add_row("alert", Text(str(alert), style="yellow"))
        for sink in progress.sinks:
            table.add_row("metrics", Text(sink))
        return Group(table, Text(self._remark, style="yellow"))


def _curve(values: Series) -> str:
    if not values:
        return "waiting for the first batch …"
    figures = [value for _, value in values]
    return f"{sparkline(figures, SPARKLINE_WIDTH)}  {figures[0]:.2f} → {figures[-1]:.2f}"


def _success(progress: Progress) -> str:
    if not progress.success_rates:
        return "–"
    step, share = progress.success_rates[-1]
    dropped = progress.dropped.get(step)
    return f"{share:.0%} of rollouts" + (f"; {dropped}" if dropped and dropped.are_many else "")


def _held_out(progress: Progress, step: int, share: float) -> str:
    partly = progress.tasks_evaluated(step)
    return f"step {step}: {share:.0%}" + (f" ({partly})" if partly else "")


def _time_left(progress: Progress) -> str:
    left = progress.remaining_s
    return "" if left is None or progress.status != "running" else f"   about {left:.0f} s left"
