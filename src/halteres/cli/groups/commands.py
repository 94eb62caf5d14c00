"""The verbs `view`, `export` and `import`.

Owns: the options, what is said on stderr, the exit codes.
Never: changes a queue but in `import`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halteres.cli.groups import said

if TYPE_CHECKING:
    from halteres.clients.trajectories.groups.reading import PlaceName, Reader
    from halteres.text import Tokenizer

app = typer.Typer(
    help="Groups on a trajectory server: look at them, write them to a file, post them from one.", no_args_is_help=True
)

Url = Annotated[str, typer.Option(help="The trajectory server; a token goes into it, or HALTERES_TRAJECTORY_TOKEN.")]
Places = Annotated[
    list[str] | None,
    typer.Option(
        "--place", help="queued, buffered, out, delivered, set_aside or archived; may be repeated. [default: all]"
    ),
]
Env = Annotated[str | None, typer.Option(help="Only groups of this environment: its name or its id.")]

HERE = "http://127.0.0.1:8000"
SHOWN, ON_PAGE = 20, 100


@app.command()
def view(
    url: Url = HERE,
    tokenizer: Annotated[
        str | None, typer.Option(help="A model by name or folder, whose tokenizer makes the tokens text.")
    ] = None,
    follow: Annotated[
        bool | None, typer.Option("--follow/--once", help="Go on with what comes. [default: on a terminal]")
    ] = None,
    place: Places = None,
    env: Env = None,
    html: Annotated[Path | None, typer.Option(help="Write one page instead, with all sequences.")] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help=f"The newest so many. [default: {SHOWN}, on a page {ON_PAGE}]"),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="All sequences, whole texts.")] = False,
) -> None:
    """Show groups as they arrive: scores, and the best and the worst sequence; changes nothing on the server."""
    from functools import partial

    from rich.console import Console

    from halteres.cli.groups import viewing
    from halteres.cli.groups.terminal import Terminal

    console = Console(highlight=False, markup=False, emoji=False)
    words = None if tokenizer is None else _tokenizer(tokenizer)
    with _reading(url) as reader, _quietly():
        wanted = viewing.Wanted(
            places=_places(place),
            env_id=None if env is None else reader.environment(env),
            limit=limit or (ON_PAGE if html else SHOWN),
            follow=console.is_terminal if follow is None else follow,
        )
        if html is None:
            shown = viewing.view(reader, wanted, Terminal(console, words, full=full))
        else:
            page = viewing.PageFile(
                html, words, source=reader.at.url, limit=wanted.limit, written=partial(said.page, html, wanted.follow)
            )
            shown = viewing.view(reader, wanted, page)
        if not shown:
            said.say("No such group is there.")


@app.command("export")
def export_(
    file: Annotated[Path, typer.Argument(help="FILE.jsonl or FILE.jsonl.gz; - is standard output.")],
    url: Url = HERE,
    place: Places = None,
    env: Env = None,
    since: Annotated[int, typer.Option(min=0, help="Only groups with a larger id.")] = 0,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what comes; Ctrl-C ends the file.")] = False,
) -> None:
    """Write groups to a file, one per line, as a trainer gets them; changes nothing on the server."""
    from halteres.cli.groups.exporting import Chosen, Exported, export

    done = Exported(last=since)
    with _reading(url) as reader, _quietly():
        env_id = None if env is None else reader.environment(env)
        chosen = Chosen(places=_places(place), env_id=env_id, since=since, follow=follow)
        export(reader, chosen, file, said.exporting, done)
    said.exported(file, done, since, _again(reader.at.url, place, env))


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="Groups, one per line; may be gzip; - is standard input.")],
    url: Url = HERE,
    env_id: Annotated[int | None, typer.Option(min=0, help="Post them as groups of this environment.")] = None,
    env_name: Annotated[str | None, typer.Option(help="The same, by its name. [default: of no environment]")] = None,
    keep_version: Annotated[
        bool, typer.Option("--keep-version", help="Keep policy_version, by which the server judges staleness.")
    ] = False,
) -> None:
    """Post groups from a file. Again is harmless: a line that is there already is not doubled."""
    import asyncio
    from functools import partial

    from halteres.clients.trajectories.groups import importing
    from halteres.errors import HalteresError, InvalidConfig

    if env_id is not None and env_name is not None:
        raise InvalidConfig("--env-id and --env-name both name an environment.", "", "Give one of them.")
    done = importing.Imported()
    with _reading(url) as reader, _quietly():
        reader.diagnostics()  # before anything is posted: whoever has none knows no keys either
        named = env_name if env_id is None else str(env_id)
        whose = None if named is None else reader.environment(named)
        changes = importing.Changes(env_id=whose, keep_version=keep_version)
        try:
            with importing.opened(file) as stream:
                complain = partial(said.bad_line, done)
                asyncio.run(importing.import_lines(url, stream, changes, done, complain, said.importing))
        except HalteresError:
            if done.num_posted or done.num_bad:
                said.imported(file, done)
                said.say("Import it again when that is mended: what is there already is not doubled.")
            raise
        said.imported(file, done)
    if done.num_bad:
        raise typer.Exit(1)


@contextmanager
def _reading(url: str) -> Iterator[Reader]:
    from halteres.clients.trajectories.groups.reading import Reader

    reader = Reader(url)
    try:
        yield reader
    finally:
        reader.close()


@contextmanager
def _quietly() -> Iterator[None]:
    """Whoever read our output may have had enough: that is no error, and nothing more is written."""
    import os

    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
        raise typer.Exit from None


def _again(url: str, place: list[str] | None, env: str | None) -> list[str]:
    """The options that choose the same groups once more; of a URL without its token, which is nobody else's to read."""
    server = [] if url == HERE else ["--url", url]
    places = [word for name in place or () for word in ("--place", name)]
    return [*server, *places, *([] if env is None else ["--env", env])]


def _places(given: list[str] | None) -> tuple[PlaceName, ...]:
    from halteres.clients.trajectories.groups.reading import PLACES
    from halteres.errors import InvalidConfig, unknown

    names: dict[str, PlaceName] = {name: name for name in PLACES}
    for wrong in (name for name in given or () if name not in names):
        raise unknown(InvalidConfig, "place", wrong, names)
    return tuple(names[name] for name in given or ())


def _tokenizer(name: str) -> Tokenizer:
    from halteres.config import environ
    from halteres.models import model_folder
    from halteres.text import load_tokenizer

    return load_tokenizer(str(model_folder(name, environ.home() / "models") or Path(name).expanduser()))
