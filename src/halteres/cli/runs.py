"""`halteres runs`: list, look, read logs, tag and annotate, share, connect to, stop."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from halteres.cli.output import AsJson, print_json, print_table, tool_answer
from halteres.errors import unknown
from halteres.redaction import Redactor, printable

if TYPE_CHECKING:
    from halteres.runs.directory import Entry, RunDirectory
    from halteres.runs.reading.report import RunReport

app = typer.Typer(help="List, look at and stop runs.", no_args_is_help=True)

Run = Annotated[str, typer.Argument(help="Run id (a unique beginning will do) or name.")]


def _say(text: str) -> None:
    """A line, parts of which environments, models and other programs wrote."""
    typer.echo(printable(text))


@app.command("list")
def list_(
    tag: Annotated[
        list[str] | None, typer.Option(help="Only runs that have this tag; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Every run, newest first."""
    from halteres.agent.status import listed_run
    from halteres.errors import boundary
    from halteres.runs.directory import UNREADABLE, RunDirectory, known_runs
    from halteres.runs.reading.report import report_of
    from halteres.runs.state import RunUnreadable

    entries = known_runs()
    wanted = set(tag or ())
    if wanted:
        entries = _tagged(entries, wanted)
    if as_json:
        found = [listed_run(entry).model_dump(exclude_unset=True) for entry in entries]
        shown = Redactor.of_this_process().json({"runs": found, "count": len(found)})
        print_json(shown)
        return
    if wanted and not entries:
        _say(f"No run has {', '.join(map(repr, sorted(wanted)))}.")
        return
    if not entries:
        _say("No runs yet. Try: halteres quickstart")
        return
    rows: list[tuple[str, ...]] = []
    for entry in entries:
        if entry.unreadable:
            rows.append((entry.run_id, entry.facts.status, "", "", "", entry.error))
            continue
        try:
            # one that is damaged hides no other
            with boundary(RunUnreadable, f"Reading run {entry.run_id}"):
                rows.append(_row(report_of(RunDirectory(entry.path))))
        except RunUnreadable as error:
            rows.append((entry.run_id, UNREADABLE, "", "", "", error.what))
    print_table(("run", "status", "environment", ">step", ">reward", "name"), rows)


def _tagged(entries: list[Entry], wanted: set[str]) -> list[Entry]:
    """The runs that have all of these tags."""
    from halteres.runs.directory import RunDirectory
    from halteres.runs.notes import read_notes
    from halteres.runs.state import RunUnreadable

    found: list[Entry] = []
    for entry in entries:
        with suppress(RunUnreadable):
            if wanted <= set(read_notes(RunDirectory(entry.path)).tags):
                found.append(entry)
    return found


def _row(report: RunReport) -> tuple[str, ...]:
    state, rewards = report.state, report.progress.reward
    reward = ""
    if rewards:
        reward = f"{rewards[-1][1]:.2f}"
    elif state.is_on_file and report.progress.loss:
        reward = f"loss {report.progress.loss[-1][1]:.3g}"
    step = f"{report.step}/{state.total_steps}"
    return (state.run_id, state.status, state.environment, step, reward, state.own_name or "")


@app.command()
def status(run: Run, as_json: AsJson = False) -> None:
    """One run: state, progress, processes, what to do next."""
    from halteres.agent.transports.command_line import for_person
    from halteres.cli.follow import next_lines
    from halteres.runs.directory import find_run
    from halteres.runs.reading.progress import conditions
    from halteres.runs.reading.report import report_of

    found = find_run(run)
    if as_json:
        print_json(tool_answer("rl_check_status", run_id=found.run_id))
        return
    report = report_of(found)
    state, progress = report.state, report.progress
    phase = ""
    if state.phase and not state.terminal:
        phase = f" ({state.phase})"
    named = ""
    if state.own_name:
        named = f" '{state.own_name}'"
    _say(
        f"run {state.run_id}{named}: {state.status}{phase}, {state.environment}, in "
        f"{report.run.path}"
    )
    _say(f"step {report.step} of {state.total_steps}")
    if progress.reward:
        _say(
            f"reward {progress.reward[0][1]:.3f} at step {progress.reward[0][0]}, "
            f"{progress.reward[-1][1]:.3f} now"
        )
    for step, share in progress.evaluation:
        _say(progress.evaluation_line(step, share))
    for figure in report.figures:
        if figure.value is not None:
            _say(f"  {figure.kind.label}: {figure.text} (step {figure.step})")
    for name, course in report.trend.items():
        if name not in ("reward_mean", "loss", "groups_dropped"):
            _say(f"  {name}: {course}")
    if progress.dropped_groups is not None:
        _say(f"  {progress.dropped_groups}")
    if report.time_shares:
        shares = ", ".join(f"{phase} {share:.0%}" for phase, share in report.time_shares.items())
        _say(f"  a step's time: {shares}")
    for why in (
        *progress.eval_failed,
        progress.no_evaluation,
        report.hardly_moved,
        *report.remarks,
    ):
        if why:
            _say(str(why))
    if failed := progress.failed_rollouts:
        _say(f"failed rollouts: {', '.join(f'{count} {code}' for code, count in failed.items())}")
    for role, condition in conditions(state).items():
        _say(f"  {role:8} pid {state.processes.get(role, {}).get('pid') or '-'}  {condition}")
    if report.restarts:
        _say(f"restarts: {', '.join(f'{role} {times}' for role, times in report.restarts.items())}")
    for alert in report.alerts:
        if alert.is_over:
            _say(f"alert: {alert.rule} (step {alert.step}) was over at step {alert.over_at}")
        else:
            _say(f"alert: {alert.text(for_person)}")
    for sink in progress.sinks:
        _say(sink)
    for label, text in (("note", state.note), ("error", state.error)):
        if text:
            _say(f"{label}: {text}")
    for line in _notes_of(report.run):
        _say(line)
    for number, line in enumerate(next_lines(report)):
        _say(f"next: {line}" if number == 0 else line)


def _notes_of(run: RunDirectory) -> list[str]:
    """What its user says of a run; of a damaged file, that."""
    from halteres.runs.notes import read_notes
    from halteres.runs.state import RunUnreadable

    try:
        notes = read_notes(run)
    except RunUnreadable as error:
        return [error.sentence]
    lines: list[str] = []
    if notes.tags:
        lines.append(f"tags: {', '.join(notes.tags)}")
    if notes.note:
        lines.append(f"your note: {notes.note}")
    return lines


@app.command()
def logs(
    run: Run,
    role: Annotated[
        str | None, typer.Argument(help="One process, e.g. trainer; default: all.")
    ] = None,
    lines: Annotated[int, typer.Option("-n", min=1, help="Lines of each log.")] = 20,
    as_json: AsJson = False,
) -> None:
    """The last lines of a run's logs."""
    from halteres.errors import NotFound
    from halteres.files import tail
    from halteres.runs.directory import find_run

    directory = find_run(run)
    files = {file.stem: file for file in sorted((directory.path / "logs").glob("*.log"))}
    if role is not None and role not in files:
        raise unknown(NotFound, "log", role, files)
    wanted = list(files)
    if role is not None:
        wanted = [role]
    found = {name: tail(files[name], lines) for name in wanted}
    if as_json:
        print_json({"run_id": directory.run_id, "logs": found})
        return
    for name, last in found.items():
        if role is None:
            _say(f"== {name}")
        for line in last:
            _say(line)


@app.command()
def stop(
    run: Run,
    after_step: Annotated[
        bool, typer.Option("--after-step", help="Let the step in progress end first.")
    ] = False,
) -> None:
    """Stop a run with a checkpoint. Safe to repeat."""
    from halteres.runs.directory import find_run, stop_run

    directory = find_run(run)
    state = stop_run(directory, mode="after_step" if after_step else "now")
    _say(f"run {directory.run_id}: {state.status}")
    if state.resumable:
        _say(f"next: {state.resume().command}")


@app.command()
def tag(
    run: Run,
    tags: Annotated[list[str] | None, typer.Argument(help="Tags to add.")] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", help="A tag to remove; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Add tags to a run, or remove some; without any, print them."""
    from halteres.runs.directory import find_run
    from halteres.runs.notes import change_notes, read_notes

    directory = find_run(run)
    if tags or remove:
        notes = change_notes(directory, add=tags or (), remove=remove or ())
    else:
        notes = read_notes(directory)
    if as_json:
        print_json({"run_id": directory.run_id, "tags": list(notes.tags)})
        return
    _say(f"run {directory.run_id}: {', '.join(notes.tags) or 'no tags'}")


@app.command()
def note(
    run: Run,
    text: Annotated[str | None, typer.Argument(help="The note; - reads it from stdin.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove the note.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a note on a run, in place of the one that it has; without a text, print it."""
    from halteres.errors import UserError
    from halteres.runs.directory import find_run
    from halteres.runs.notes import change_notes, read_notes

    directory = find_run(run)
    if clear and text is not None:
        raise UserError("--clear takes no text.", "It removes the note.", "Leave one of them out.")
    if text == "-":
        text = typer.get_text_stream("stdin").read()
    if clear:
        text = ""
    found = read_notes(directory).note
    done = found or f"run {directory.run_id} has no note"
    if text is not None:
        found = change_notes(directory, note=text).note
        done = f"run {directory.run_id}: noted"
        if not found:
            done = f"run {directory.run_id}: the note is removed"
    if as_json:
        print_json({"run_id": directory.run_id, "note": found})
        return
    _say(done)


@app.command()
def report(
    runs: Annotated[
        list[str], typer.Argument(help="Run ids (unique beginnings will do) or names.")
    ],
    out: Annotated[Path, typer.Option(help="The HTML file.")],
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file if it exists already.")
    ] = False,
) -> None:
    """Write runs as one HTML file to share: curves, results, settings, some rollouts, hashes.

    It makes no request, and shows without a server what the page shows. Several runs are compared.
    """
    from halteres.cli.groups.view import unwritable
    from halteres.dashboard.report_file import MOST_RUNS
    from halteres.errors import Conflict, UserError
    from halteres.files import replace_file
    from halteres.runs.directory import find_run

    found = {run.run_id: run for run in map(find_run, runs)}
    if len(found) > MOST_RUNS:
        why = f"A report has {MOST_RUNS} at most."
        raise UserError(f"{len(found)} runs are too many.", why, "Name fewer.")
    if out.exists() and not force:
        raise Conflict(f"{out} exists already.", "", "Name another file, or add --force.")
    content = _report_of([*found.values()]).encode()
    try:
        replace_file(out, content)
    except OSError as error:
        raise unwritable(out, error) from error
    _say(f"{out}: {len(found)} {'run' if len(found) == 1 else 'runs'}, {len(content) / 1e6:.1f} MB")


def _report_of(runs: list[RunDirectory]) -> str:
    """The file's content: the tools' own answers, and what the page reads."""
    import asyncio

    from halteres.agent.call import call
    from halteres.agent.tool import Caller
    from halteres.agent.transports.command_line import for_person
    from halteres.dashboard.report_file import report_file

    ids = [run.run_id for run in runs]
    caller = Caller(write=for_person)

    async def answers() -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        results = [(await call("rl_get_results", {"run_id": one}, caller)).body for one in ids]
        comparison = None
        if len(ids) > 1:
            asked = {"run_ids": ids, "plot": False}
            comparison = (await call("rl_compare_runs", asked, caller)).body
        return results, comparison

    return report_file(runs, *asyncio.run(answers()), for_person)


@app.command()
def connect(run: Run, as_json: AsJson = False) -> None:
    """Print the addresses and the key of a run's servers, as variables: eval "$(halteres runs
    connect RUN)".

    For a client that you start by hand: an environment, a script with the `tinker` SDK, curl. The
    key is the run's own, and ends with it; who has it can change what the run learns.
    """
    import shlex

    from halteres.errors import NotReady
    from halteres.runs.directory import find_run
    from halteres.runs.servers import servers_of, with_login

    directory = find_run(run)
    state, servers = directory.state(), servers_of(directory)
    if state.terminal or servers.service is None or servers.trajectories is None:
        look = f"Look at it with: halteres runs status {directory.run_id}"
        raise NotReady(
            f"Run {directory.run_id} has no servers now.", f"It is {state.status}.", look
        )
    service, trajectories = servers.service, servers.trajectories
    if trajectories.key:
        login = with_login(trajectories.url, trajectories.key)
    else:
        login = trajectories.url
    sampling = servers.sampling or service
    base_url = f"{sampling.url}/runs/{directory.run_id}/v1"
    variables = (
        ("TINKER_BASE_URL", service.url, "the training service, for the tinker SDK"),
        ("TINKER_API_KEY", service.key or "tml-local", "... and its key"),
        (
            "ROLLOUT_SERVER_URL",
            login,
            "the trajectory server: --env.rollout_server_url of an environment",
        ),
        ("OPENAI_BASE_URL", base_url, "the policy's newest weights: --openai.base_url"),
        ("OPENAI_API_KEY", sampling.key or "x", "... and its key: --openai.api_key"),
    )
    if as_json:
        print_json({name: value for name, value, _ in variables})
        return
    for name, value, why in variables:
        typer.echo(f"export {name}={shlex.quote(value)}  # {why}")
