"""A run in a terminal: a live view for people or plain lines for pipes, and what is said when it
has ended.
"""

from __future__ import annotations

import shlex
import time
from contextlib import AbstractContextManager

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from halteres.errors import ProcessFailed
from halteres.next_step import NextStep, lines_of
from halteres.observe.plots import sparkline
from halteres.observe.sinks import read_reports
from halteres.redaction import printable
from halteres.rewards.model_folder import RESULT
from halteres.runs.directory import RunDirectory, stop_run
from halteres.runs.reading.alerts import Alert
from halteres.runs.reading.evaluations import GREEDY, Evaluation, before_and_after
from halteres.runs.reading.progress import Progress
from halteres.runs.reading.report import RunReport, report_of
from halteres.runs.reading.result_metrics import HELD_OUT, SAMPLED
from halteres.runs.reading.status_figures import HELD_OUT_LOSS, HELD_OUT_PER_TOKEN
from halteres.runs.state import RunState

POLL_S = 0.25
SPARKLINE_WIDTH = 48
PLAIN_LINES = 60  # a long run's plain lines are thinned to about so many
ANSWERS_SHOWN = 2  # before and after


def follow(run: RunDirectory, console: Console, *, may_stop: bool = True) -> RunState:
    """Show the run until it has ended; returns its final state.

    Ctrl-C asks the run to stop and goes on watching; a second one, or the first where not
    `may_stop`, leaves it.
    """
    if console.is_terminal:
        view = LiveView(run, console)
    else:
        view = PlainView(console)
    with view:
        while True:
            try:
                report = report_of(run)
                view.show(report)
                if report.state.terminal:
                    return report.state
                time.sleep(POLL_S)
            except KeyboardInterrupt:
                if not may_stop:
                    view.say(f"Left to itself. Look at it with: halteres runs status {run.run_id}")
                    raise
                may_stop = False
                view.say(
                    f"Stopping run {run.run_id}: it writes a checkpoint first. Ctrl-C again "
                    "leaves it to itself."
                )
                stop_run(run, deadline_s=0)


class PlainView(AbstractContextManager["PlainView"]):
    """One line per step, phase and evaluation, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: set[str] = set()  # that were printed
        self._step = -1  # the last one read

    def __exit__(self, *_: object) -> None:
        """Nothing is left open."""

    def show(self, report: RunReport) -> None:
        """Print what was not printed yet; called a few times a second."""
        progress = report.progress
        if progress.resumed_at and self._step < 0:
            self._once(f"going on after step {progress.resumed_at}")
        self._step = max(self._step, progress.resumed_at)
        if progress.phase and progress.status == "starting":
            self._once(f"starting: {progress.phase}")
        for sink in progress.sinks:
            self._once(sink)
        self._show_steps(report)
        for step, share in progress.evaluation:
            # all that was left to a run resumed after its last step
            is_its_end = step == progress.total_steps
            if step > progress.resumed_at or not progress.resumed_at or is_its_end:
                self._once(progress.evaluation_line(step, share))
        for failed in progress.eval_failed:
            self._once(str(failed))
        if progress.no_evaluation:
            self._once(progress.no_evaluation)
        for alert in progress.alerts:
            self._once(f"alert: {_text_of(alert)}")
            if alert.is_over:
                self._once(f"alert over: {alert.rule}, at step {alert.over_at}")

    def _show_losses(self, report: RunReport) -> None:
        progress = report.progress
        total = progress.total_steps
        stride = max(1, total // PLAIN_LINES)
        for step, loss in progress.loss:
            if step > self._step:
                self._step = step
                if step % stride == 0 or step in (progress.resumed_at + 1, total):
                    self._once(f"step {step}/{total}  loss {loss:.4g}")
        for step, loss in progress.held_out_loss:
            self._once(f"held-out rows after step {step}: loss {loss:.4g}")

    def _show_steps(self, report: RunReport) -> None:
        if report.state.is_on_file:
            self._show_losses(report)
            return
        progress = report.progress
        total, success = progress.total_steps, dict(progress.success_rates)
        stride = max(1, total // PLAIN_LINES)
        newest = 0
        if progress.reward:
            newest = progress.reward[-1][0]
        for step, reward in progress.reward:
            if step <= self._step:
                continue
            # What the environment counts of a step may come after the trainer's row: the line waits
            # for it, until the next step at most.
            is_whole = step in dict(progress.correct) or step < newest or report.state.terminal
            if not is_whole:
                break
            self._step = step
            if step % stride == 0 or step in (progress.resumed_at + 1, total):
                rate = ""
                if step in success:
                    rate = f"  success {success[step]:.0%}"
                dropped = progress.dropped.get(step)
                many = ""
                if dropped and dropped.are_many:
                    many = f"  {dropped}"
                self._once(f"step {step}/{total}  reward {reward:.3f}{rate}{many}")

    def say(self, text: str) -> None:
        """Print a remark."""
        self._console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def _once(self, line: str) -> None:
        if line not in self._lines:
            self._lines.add(line)
            self.say(line)


class LiveView(AbstractContextManager["LiveView"]):
    """A panel redrawn in place: progress, reward sparkline, success rate, time left."""

    def __init__(self, run: RunDirectory, console: Console) -> None:
        self._run, self._remark = run, ""
        self._live = Live(console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """Show a remark under the panel."""
        self._remark = printable(text)

    def show(self, report: RunReport) -> None:
        """Redraw."""
        progress = report.progress
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        if progress.status == "starting":
            what = f"{progress.status}, {progress.phase}"
        else:
            what = progress.status
        left = progress.remaining_s
        time_left = ""
        if not (left is None or progress.status != "running"):
            time_left = f"   about {left:.0f} s left"
        rewards = [value for _, value in progress.reward]
        curve = ""
        if rewards:
            curve = f"{sparkline(rewards, SPARKLINE_WIDTH)}  {rewards[0]:.2f} → {rewards[-1]:.2f}"
        table.add_row("run", Text(f"{self._run.run_id}  {what}"))
        bar = ProgressBar(
            total=max(1, progress.total_steps), completed=progress.step, width=SPARKLINE_WIDTH
        )
        table.add_row("steps", bar)
        table.add_row("", Text(f"{progress.step} of {progress.total_steps}{time_left}"))
        if report.state.is_on_file:
            self._add_losses(table, progress)
        else:
            table.add_row("reward", Text(curve or "waiting for the first batch …", style="green"))
            self._add_successes(table, progress)
        for alert in report.current_alerts[:2]:
            table.add_row("alert", Text(_text_of(alert), style="yellow"))
        for sink in progress.sinks:
            table.add_row("metrics", Text(sink))
        self._live.update(Group(table, Text(self._remark, style="yellow")))

    def _add_losses(self, table: Table, progress: Progress) -> None:
        """Of a training on a file."""
        losses = [value for _, value in progress.loss]
        words = "waiting for the first step …"
        if losses:
            curve = sparkline(losses, SPARKLINE_WIDTH)
            words = f"{curve}  {losses[0]:.3g} → {losses[-1]:.3g}"
        table.add_row("loss", Text(words, style="green"))
        held_out = [f"step {step}: {loss:.4g}" for step, loss in progress.held_out_loss[-4:]]
        table.add_row("held out", Text("  ".join(held_out) or "–"))

    def _add_successes(self, table: Table, progress: Progress) -> None:
        """Of reinforcement learning."""
        success = "–"
        if progress.success_rates:
            step, share = progress.success_rates[-1]
            dropped = progress.dropped.get(step)
            success = f"{share:.0%} of rollouts"
            if dropped and dropped.are_many:
                success += f"; {dropped}"
        table.add_row("success", Text(success))
        held_out: list[str] = []
        for step, share in progress.evaluation[-5:]:
            held_out.append(f"step {step}: {share:.0%}")
            partly = progress.tasks_evaluated(step)
            if partly:
                held_out[-1] += f" ({partly})"
        otherwise = progress.no_evaluation or "evaluating before training …"
        table.add_row("held out", Text("  ".join(held_out) or otherwise))
        if progress.unevaluated:
            table.add_row("", Text(str(progress.unevaluated), style="yellow"))


def summarise(run: RunDirectory, state: RunState, console: Console) -> None:
    """Print figures before and after, two answers, where things are, and what to try next.

    Raises:
        ProcessFailed: the run failed; the sentence is the run's own.
    """
    report = report_of(run, state)
    if state.status == "failed":
        why = state.error or ""
        # a command at its end runs into no other
        if why and not why.endswith((".", "!", "?")):
            why += "."
        raise ProcessFailed(
            f"Run {run.run_id} failed.", why, f"Read its logs: halteres runs logs {run.run_id}"
        )
    console.print()
    if state.note:
        _say(console, state.note)
    evaluations = report.outcome.evaluations
    if len(evaluations) >= 2:
        console.print(_figures(evaluations[0], evaluations[-1]))
    else:
        progress = report.progress
        for why in (progress.no_evaluation, *progress.eval_failed):
            if why:
                _say(console, str(why))
    learnt = [task for task in before_and_after(run) if task.learnt][:ANSWERS_SHOWN]
    if learnt:
        console.print("\nlearnt, for example:")
    for task in learnt:
        console.print()
        _say(console, str(task.prompt).strip())
        _say(console, f"  before: {' '.join(task.before.split())}", style="red")
        _say(console, f"  after:  {' '.join(task.after.split())}", style="green")
    console.print()
    results = ()
    if state.step:
        results = (("plot", run.path / "plot.png"), ("adapter", run.path / "adapter"))
    for label, path in (*results, ("run", run.path)):
        if path.exists():
            _say(console, f"{label + ':':9}{path}")
    for name, sink in read_reports(run.path).items():
        _say(console, f"{name + ':':9}{sink.line}")
    console.print()
    label = "next:    "
    for line in next_lines(report):
        _say(console, label + line)
        label = ""


def _figures(before: Evaluation, after: Evaluation) -> Table:
    first, last = before.figures, after.figures
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    what = "held-out tasks"
    if HELD_OUT_PER_TOKEN in last or HELD_OUT_LOSS in last:
        what = "held-out rows"
    table.add_column(what)
    table.add_column(f"before (step {before.step})", justify="right")
    table.add_column(f"after (step {after.step})", justify="right")
    for name, words, form in HELD_OUT:
        label = words
        # an environment's own evaluation, at whatever temperature
        if GREEDY not in last:
            label = words.removesuffix(SAMPLED)
        if first.get(name) is not None and last.get(name) is not None:
            table.add_row(label, format(first[name], form), format(last[name], form))
    failed = [int(row.get("eval/num_failed") or 0) for row in (first, last)]
    if any(failed):
        tasks = [int(row.get("eval/num_tasks") or 0) for row in (first, last)]
        shares = (
            f"{number} of {number + done}" for number, done in zip(failed, tasks, strict=True)
        )
        table.add_row("tasks failed, left out", *shares)
    return table


def next_lines(report: RunReport) -> list[str]:
    """What a person types after a look at a run, one command on each line."""
    # .3 s: only where a call is written
    from halteres.agent.transports.command_line import for_person

    run, state = report.run, report.state
    if state.status != "completed":
        return [str(line) for line in lines_of(report.next, for_person)]
    if state.kind == "reward":
        held_out = {"model": str(run.path / RESULT), "data": "HELD_OUT"}
        return [for_person(NextStep("rl_evaluate_reward_model", held_out))]
    # a chat is no episode of an environment that answers
    if "max_turns" in run.environment_config():
        return [f"halteres rl get-rollouts {run.run_id}"]
    example = run.environment_config().get("example_question")
    words = None
    if not example:
        # it loads tokenizers: only where there is no example
        from halteres.runs.conversation import wording_of

        words = wording_of(run)
    if words:
        example = words.example
    if example:
        return [f"halteres chat {run.run_id} {shlex.quote(str(example))}"]
    return [f"halteres chat {run.run_id}"]


def _text_of(alert: Alert) -> str:
    # .3 s: only where there is an alert
    from halteres.agent.transports.command_line import for_person

    return alert.text(for_person)


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(printable(text), style=style), soft_wrap=True)
