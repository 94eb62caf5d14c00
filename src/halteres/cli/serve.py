"""`halteres serve`, `ui`, `keys`, `variables`: servers in the foreground, who may use them, what a
client exports.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from halteres.cli.output import AsJson, print_json, print_table

if TYPE_CHECKING:
    from halteres.service.keys import KeyFile

PASSED_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
"""Settings of a command whose every word, --help too, belongs to another program."""

STARTS_WITHIN_S = 5.0
"""How long `variables` waits for a service: the one of `halteres serve &` a line before leaves its
card in a moment.
"""

Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")]


class _Serve(TyperGroup):
    """Its commands, and the training service where none is named: every word is then the service's
    own.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and not args[0].startswith("-"):  # a command, or a misspelt one
            return super().parse_args(ctx, args)
        if "--help" in args:
            typer.echo(self.get_help(ctx))
        become("halteres.service", *args)
        raise typer.Exit


app = typer.Typer(
    cls=_Serve,
    help="Serve the Tinker API and inference (`halteres variables` prints what an SDK user "
    "exports), or by a command "
    "something else. Without a command, these options:",
)


@app.command(context_settings=PASSED_ON)
def trajectories(context: typer.Context) -> None:
    """Serve the Atropos trajectory API (--help lists its flags)."""
    become("halteres.trajectories", *context.args)


@app.command()
def control(
    port: Port = 8080,
    auth: Annotated[
        str,
        typer.Option(
            metavar="open|token",
            help="Whether the seed's routes want the token too, as Basic password.",
        ),
    ] = "open",
) -> None:
    """Serve the agent's tools over HTTP; the token is in HALTERES_HOME/token."""
    become("halteres.agent.transports.http_server", "--port", str(port), "--auth", auth)


def become(module: str, *arguments: str) -> None:
    """Replace this process by a module of ours: signals and exit code are then its own."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606 - no shell, our own interpreter


def ui(
    port: Port = 8080,
    browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open a browser, if there is one.")
    ] = True,
) -> None:
    """Open the page: runs, live curves, alerts, rollouts. Serves it until Ctrl-C, unless a server
    runs already.
    """
    from halteres.agent.transports.access import check_ours, link, show
    from halteres.errors import Conflict
    from halteres.loopback import HOST, open_listener, url_of

    try:
        listening = open_listener(port)
    except Conflict:
        check_ours(port)
        listening = None
    address = link(url_of(listening) if listening else f"http://{HOST}:{port}")
    typer.echo(
        f"{address}\n(opens in one browser, within ten minutes; for another browser run "
        "`halteres ui` again)"
    )
    if browser:
        show(address)
    if listening:  # served here and now: connections that were made meanwhile wait
        from halteres.agent.transports.http_server import main

        sys.stdout.flush()
        sys.exit(main(["--listen-fd", str(listening.detach())]))


keys = typer.Typer(help="Keys of the training service: make, list, revoke.", no_args_is_help=True)

State = Annotated[
    Path | None,
    typer.Option(help="Folder of the service's state. [default: HALTERES_HOME/service]"),
]


@keys.command()
def create(
    name: Annotated[
        str, typer.Argument(help="What the key is called: a person, a machine, a project.")
    ],
    tenant: Annotated[
        str | None,
        typer.Option(
            help="Whose things it opens; several keys may share one tenant. [default: NAME]"
        ),
    ] = None,
    note: Annotated[str, typer.Option(help="For people.")] = "",
    expires: Annotated[
        str | None,
        typer.Option(metavar="30d", help="When it ends: 30m, 12h, 30d, 8w. [default: never]"),
    ] = None,
    state: State = None,
) -> None:
    """Make a key and print it, this once; a service that runs takes it at once."""
    from halteres.service.keys import lifetime_s

    file = _key_file(state)
    made = file.create(
        name, tenant=tenant, note=note, lifetime_s=None if expires is None else lifetime_s(expires)
    )
    typer.echo(made.text)
    typer.echo(
        f"This is the key {made.key.id} of tenant '{made.key.tenant}'. It is shown this once; of "
        f"it {file.path} holds a"
        " hash.\n"
        "Its user sets TINKER_API_KEY to it. From now on the service asks for a key on every "
        "request.",
        err=True,
    )


@keys.command("list")
def list_(
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """List the keys ever made, without the keys themselves."""
    import time
    from datetime import UTC, datetime

    now = time.time()
    known = _key_file(state).read()
    if as_json:
        names = ("id", "name", "tenant", "note", "created_at", "expires_at", "revoked_at")
        facts = [
            {**{name: getattr(key, name) for name in names}, "state": key.state(now)}
            for key in known
        ]
        print_json({"keys": facts})
        return
    if not known:
        typer.echo("No key was made: the service asks for none, and listens on this machine only.")
        return
    rows: list[tuple[str, ...]] = []
    for key in known:
        made = str(datetime.fromtimestamp(key.created_at, UTC).date())
        until = ""
        if key.expires_at:
            until = str(datetime.fromtimestamp(key.expires_at, UTC).date())
        note = "".join(one if one.isprintable() else " " for one in key.note)
        rows.append((key.id, key.state(now), key.name, key.tenant, made, until, note))
    print_table(("id", "state", "name", "tenant", "made", "until", "note"), rows)


@keys.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `halteres keys list` tells it.")],
    state: State = None,
) -> None:
    """Refuse a key from the next request on. What its tenant made stays."""
    key = _key_file(state).revoke(key_id)
    typer.echo(f"The key {key.id} ('{key.name}') is revoked.")


def _key_file(state: Path | None) -> KeyFile:
    from halteres.config import environ
    from halteres.service.keys import KeyFile

    return KeyFile(state or environ.home() / "service")


def variables(
    url: Annotated[
        str | None,
        typer.Option(
            help="Address of the service. [default: of your newest `halteres serve` that runs]"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the variables an SDK user exports: eval "$(halteres variables)"."""
    from halteres.clients.trajectories.address import Address
    from halteres.config import environ
    from halteres.errors import NotFound
    from halteres.models import builtin_names, stored_models
    from halteres.service.running_services import newest_live

    if url is None:
        card = newest_live(STARTS_WITHIN_S)
        if card is None:
            raise NotFound(
                "No `halteres serve` of yours runs: start one, or name a service with --url "
                "ADDRESS."
            )
        url = card.url
    Address.of(url)  # whether it is one
    needed = [
        ("TINKER_BASE_URL", url, "where the SDK finds the service"),
        (
            "TINKER_API_KEY",
            "tml-local",
            "the SDK insists on a key of this form; the service asks for none on loopback",
        ),
        ("TINKER_TELEMETRY", "0", "nothing is sent anywhere"),
        (
            "HF_HUB_OFFLINE",
            "1",
            "tokenizers load from this disk (`halteres models add`), without asking a hub",
        ),
    ]
    if not environ.is_set("WANDB_MODE") and not environ.is_set("WANDB_API_KEY"):
        needed.append(
            (
                "WANDB_MODE",
                "offline",
                "scripts that log to W&B write files in ./wandb, without an account",
            )
        )
    child, proxies = environ.for_child(), environ.proxies()
    if proxies:
        needed.append(
            ("NO_PROXY", child["NO_PROXY"], "the service is not asked for through the proxy")
        )
    if as_json:
        print_json({name: value for name, value, _ in needed})
        return
    for name, value, why in needed:
        typer.echo(f"export {name}={shlex.quote(value)}  # {why}")
    unknown = "the SDK's HTTP client does not know the * in NO_PROXY"
    for name, why in {
        **dict.fromkeys(proxies.keys() - child.keys(), unknown),
        **environ.unusable_proxies(),
    }.items():
        typer.echo(f"unset {name}  # {why}")
    names = dict.fromkeys(
        [*builtin_names(), *(name for name, _ in stored_models(environ.home() / "models"))]
    )
    typer.echo(
        f"# models here: {', '.join(names)}; a script's name for one: halteres models add MODEL "
        "--as NAME"
    )
