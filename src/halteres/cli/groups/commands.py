"""The verbs `view`, `export` and `import`: their options, what is said on stderr, the exit codes.

Standard output may be the file, so that progress is written to stderr alone.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    from halteres.text import load_tokenizer

    console = Console(highlight=False, markup=False, emoji=False)
    words = None
    if tokenizer is not None:
        folder = model_folder(tokenizer, environ.home() / "models") or Path(tokenizer).expanduser()
        words = load_tokenizer(str(folder))
    with _reading(url) as reader:
        selection = Selection(
            places=_places(place),
            env_id=None if env is None else reader.environment(env),
            limit=limit or (ON_PAGE if html else SHOWN),
            follow=console.is_terminal if follow is None else follow,
        )
        display: Display = Terminal(console, words, full=full)
        if html is not None:
            text = (
                f"{html}: open it in a "
                f"browser{'; reload it to see what came' if selection.follow else ''}."
            )
            source, limit = reader.at.url, selection.limit
            display = PageFile(html, words, source=source, limit=limit, written=lambda: _say(text))
        if not show(reader, selection, display):
            _say("No such group is there.")


@app.command()
def export(
    file: Annotated[
        Path, typer.Argument(help="FILE.jsonl or FILE.jsonl.gz; - is standard output.")
    ],
    url: Url = HERE,
    place: Places = None,
    env: Env = None,
    since: Annotated[int, typer.Option(min=0, help="Only groups with a larger id.")] = 0,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with what comes; Ctrl-C ends the file.")
    ] = False,
) -> None:
    """Write groups to a file, one per line, as a trainer gets them; changes nothing on the
    server.
    """
    from halteres.cli.groups import transfer
    from halteres.cli.groups.view import Selection
    from halteres.groups.group import counted

    done = transfer.Exported(last=since)

    def size() -> str:
        return f"{counted(done.num_groups, 'group')}, {done.num_bytes / 1e6:.1f} MB"

    with _reading(url) as reader:
        env_id = None if env is None else reader.environment(env)
        selection = Selection(places=_places(place), env_id=env_id, since=since, follow=follow)
        transfer.export(reader, selection, file, lambda done: _progress(size()), done)
    gone = (
        f"; {counted(done.num_gone, 'group')} left out: no tokens are kept of them"
        if done.num_gone
        else ""
    )
    _say(f"{file}: {size()}{gone}")
    if done.last > since:  # of a URL without its token, which is nobody else's to read
        server = [] if url == HERE else ["--url", reader.at.url]
        places = [word for name in place or () for word in ("--place", name)]
        options = [
            *server,
            *places,
            *([] if env is None else ["--env", env]),
            "--since",
            str(done.last),
        ]
        _say(f"What comes later: halteres groups export {shlex.join(options)} FILE")


@app.command("import")
def import_(
    file: Annotated[
        Path, typer.Argument(help="Groups, one per line; may be gzip; - is standard input.")
    ],
    url: Url = HERE,
    env_id: Annotated[
        int | None, typer.Option(min=0, help="Post them as groups of this environment.")
    ] = None,
    env_name: Annotated[
        str | None, typer.Option(help="The same, by its name. [default: of no environment]")
    ] = None,
    keep_version: Annotated[
        bool,
        typer.Option(
            "--keep-version", help="Keep policy_version, by which the server judges staleness."
        ),
    ] = False,
) -> None:
    """Post groups from a file. Again is harmless: a line that is there already is not doubled."""
    import asyncio

    from halteres.cli.groups import transfer
    from halteres.groups.group import counted

    if env_id is not None and env_name is not None:
        raise InvalidConfig(
            "--env-id and --env-name both name an environment.", "", "Give one of them."
        )
    done = transfer.Imported()

    def complain(line: Line, error: HalteresError) -> None:
        if done.num_bad <= MOST_BAD:
            _say(f"line {line.number}: {on_one_line(str(error))}")

    def report(done: Imported) -> None:
        if done.num_posted % IMPORTED_EVERY == 0:
            _progress(f"{counted(done.num_posted, 'group')} posted")

    with _reading(url) as reader:
        # before anything is posted: whoever has none knows no keys either
        reader.environment_names()
        owner = env_name if env_id is None else str(env_id)
        whose = None if owner is None else reader.environment(owner)
        try:
            with transfer.opened(file) as stream:
                posting = transfer.import_lines(
                    url, stream, done, complain, report, env_id=whose, keep_version=keep_version
                )
                asyncio.run(posting)
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
    once = " What was there already counts once." if done.num_posted else ""
    _say(
        f"{file}: {counted(done.num_posted, 'group')} posted, "
        f"{counted(done.num_bad, 'bad line')}.{once}"
    )
    if done.num_buffered:
        rest = (
            "waits for the rest of its group"
            if done.num_buffered == 1
            else "wait for the rest of their groups"
        )
        _say(f"{done.num_buffered} of them {rest}.")
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


@contextmanager
def _reading(url: str) -> Iterator[Reader]:
    """A client of the server. Whoever read our output may have had enough: that is no error, and
    nothing is written.
    """
    reader = Reader(url)
    try:
        yield reader
        sys.stdout.flush()
    except BrokenPipeError:
        # or the interpreter complains at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from None
    finally:
        reader.close()


def _places(given: list[str] | None) -> tuple[PlaceName, ...]:
    names: dict[str, PlaceName] = {name: name for name in PLACES}
    for wrong in (name for name in given or () if name not in names):
        raise unknown(InvalidConfig, "place", wrong, names)
    return tuple(names[name] for name in given or ())
