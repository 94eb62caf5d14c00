"""The verbs `view`, `export` and `import`: their options, what is said on stderr, the exit codes.

What was done is said on stderr; only groups that are shown go to standard output.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halteres.clients.trajectories.groups import PLACES, PlaceName, Reader, on_one_line
from halteres.config import environ
from halteres.errors import HalteresError, InvalidConfig, unknown

if TYPE_CHECKING:
    from halteres.cli.groups.transfer import Imported, Line

app = typer.Typer(
    help="Groups on a trajectory server: look at them, write them to a file, post them from one.",
    no_args_is_help=True,
)

Url = Annotated[
    str,
    typer.Option(help="The trajectory server; a token goes into it, or HALTERES_TRAJECTORY_TOKEN."),
]
Places = Annotated[
    list[str] | None,
    typer.Option(
        "--place",
        help=(
            "queued, buffered, out, delivered, set_aside or archived; may be repeated. [default: "
            "all]"
        ),
    ),
]
Env = Annotated[
    str | None, typer.Option(help="Only groups of this environment: its name or its id.")
]

HERE = "http://127.0.0.1:8000"
SHOWN, ON_PAGE = 20, 100

IMPORTED_EVERY = 50  # lines between two words of progress
MOST_BAD = 5  # bad lines that are named; of a file of another kind every line is one


@app.command()
def view(
    url: Url = HERE,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A model by name or folder, whose tokenizer makes the tokens text."),
    ] = None,
    follow: Annotated[
        bool | None,
        typer.Option("--follow/--once", help="Go on with what comes. [default: on a terminal]"),
    ] = None,
    place: Places = None,
    env: Env = None,
    html: Annotated[
        Path | None, typer.Option(help="Write one page instead, with all sequences.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, max=1000, help=f"The newest so many. [default: {SHOWN}, on a page {ON_PAGE}]"
        ),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="All sequences, whole texts.")] = False,
) -> None:
    """Show groups as they arrive: scores, and the best and the worst sequence; changes nothing on
    the server.
    """
    from rich.console import Console

    from halteres.cli.groups.page import PageFile
    from halteres.cli.groups.view import Display, Selection, Terminal
    from halteres.cli.groups.view import view as show
    from halteres.models import model_folder
    from halteres.tokenizer import load_tokenizer

    console = Console(highlight=False, markup=False, emoji=False)
    if follow is None:
        follow = console.is_terminal
    if limit is None:
        limit = SHOWN
        if html is not None:
            limit = ON_PAGE
    words = None
    if tokenizer is not None:
        folder = model_folder(tokenizer, environ.home() / "models") or Path(tokenizer).expanduser()
        words = load_tokenizer(str(folder))
    with closing(Reader(url)) as reader:
        selection = Selection(
            places=_places(place),
            env_id=_environment(reader, env),
            limit=limit,
            follow=follow,
        )
        display: Display = Terminal(console, words, full=full)
        if html is not None:
            text = f"{html}: open it in a browser"
            if follow:
                text += "; reload it to see what came"
            display = PageFile(
                html, words, source=reader.at.url, limit=limit, written=lambda: _say(f"{text}.")
            )
        if not show(reader, selection, display):
            _say("No such group is there.")


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="FILE.jsonl or FILE.jsonl.gz.")],
    url: Url = HERE,
    place: Places = None,
    env: Env = None,
) -> None:
    """Write groups to a file, one per line, as a trainer gets them; changes nothing on the
    server.
    """
    from halteres.cli.groups import transfer
    from halteres.cli.groups.view import Selection
    from halteres.groups.group import counted

    done = transfer.Exported()

    def size() -> str:
        return f"{counted(done.num_groups, 'group')}, {done.num_bytes / 1e6:.1f} MB"

    with closing(Reader(url)) as reader:
        selection = Selection(places=_places(place), env_id=_environment(reader, env))
        transfer.export(reader, selection, file, lambda done: _progress(size()), done)
    _say(f"{file}: {size()}")
    if done.num_gone:
        _say(f"{counted(done.num_gone, 'group')} left out: no tokens are kept of them.")


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="FILE.jsonl or FILE.jsonl.gz, one group per line.")],
    url: Url = HERE,
    env: Annotated[
        str | None,
        typer.Option(
            help="Post them as groups of this environment: its name or its id. [default: of none]"
        ),
    ] = None,
) -> None:
    """Post groups from a file. Again is harmless: a line that is there already is not doubled."""
    import asyncio

    from halteres.cli.groups import transfer
    from halteres.groups.group import counted

    done = transfer.Imported()

    def complain(line: Line, error: HalteresError) -> None:
        if done.num_bad <= MOST_BAD:
            _say(f"line {line.number}: {on_one_line(str(error))}")

    def report(done: Imported) -> None:
        if done.num_posted % IMPORTED_EVERY == 0:
            _progress(f"{counted(done.num_posted, 'group')} posted")

    with closing(Reader(url)) as reader:
        # before anything is posted: a server without a list of groups knows no keys either
        reader.environment_names()
        env_id = _environment(reader, env)
        try:
            with transfer.opened(file) as stream:
                asyncio.run(
                    transfer.import_lines(url, stream, done, complain, report, env_id=env_id)
                )
        except HalteresError:
            if done.num_posted or done.num_bad:
                _say_imported(file, done)
                _say("Import it again when that is in order: what is there already is not doubled.")
            raise
        _say_imported(file, done)
    if done.num_bad:
        raise typer.Exit(1)


def _say_imported(file: Path, done: Imported) -> None:
    """What became of the file's lines. The server does not say of a post whether it had come
    before.
    """
    from halteres.groups.group import counted

    if done.num_bad > MOST_BAD:
        _say(f"{counted(done.num_bad - MOST_BAD, 'more bad line')}.")
    posted, bad = counted(done.num_posted, "group"), counted(done.num_bad, "bad line")
    summary = f"{file}: {posted} posted, {bad}."
    if done.num_posted:
        summary += " What was there already counts once."
    _say(summary)
    if done.num_buffered == 1:
        _say("1 of them waits for the rest of its group.")
    elif done.num_buffered:
        _say(f"{done.num_buffered} of them wait for the rest of their groups.")
    for why, count in done.set_aside.most_common():
        _say(f"{count} of them set aside, never to be delivered: {on_one_line(why)}")


def _say(text: str) -> None:
    """One line."""
    _progress("")
    typer.echo(text, err=True)


def _progress(text: str) -> None:
    """The line that is written over, where stderr is a terminal; "" makes room for another."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def _environment(reader: Reader, given: str | None) -> int | None:
    """The id of an environment that is named by its name or its id."""
    if given is None:
        return None
    return reader.environment(given)


def _places(given: list[str] | None) -> tuple[PlaceName, ...]:
    names: dict[str, PlaceName] = {name: name for name in PLACES}
    for wrong in (name for name in given or () if name not in names):
        raise unknown(InvalidConfig, "place", wrong, names)
    return tuple(names[name] for name in given or ())
