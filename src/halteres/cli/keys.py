"""`halteres keys`: who may use the training service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from halteres.service.tenancy.keys import KeyFile

app = typer.Typer(help="Keys of the training service: make, list, revoke.", no_args_is_help=True)

State = Annotated[Path | None, typer.Option(help="Folder of the service's state. [default: HALTERES_HOME/service]")]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="What the key is called: a person, a machine, a project.")],
    tenant: Annotated[
        str | None, typer.Option(help="Whose things it opens; several keys may share one tenant. [default: NAME]")
    ] = None,
    note: Annotated[str, typer.Option(help="For people.")] = "",
    expires: Annotated[
        str | None, typer.Option(metavar="30d", help="When it ends: 30m, 12h, 30d, 8w. [default: never]")
    ] = None,
    state: State = None,
) -> None:
    """Make a key and print it, this once; a service that runs takes it at once."""
    from halteres.service.tenancy.keys import lifetime_s

    keys = _file(state)
    made = keys.create(name, tenant=tenant, note=note, lifetime_s=None if expires is None else lifetime_s(expires))
    typer.echo(made.text)
    typer.echo(
        f"This is the key {made.key.id} of tenant '{made.key.tenant}'. It is shown this once; of it {keys.path} holds a"
        " hash.\n"
        "Its user sets TINKER_API_KEY to it. From now on the service asks for a key on every request.",
        err=True,
    )


@app.command("list")
def list_(state: State = None, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """List the keys ever made, without the keys themselves."""
    import time
    from datetime import UTC, datetime

    now = time.time()
    keys = _file(state).read()
    if as_json:
        names = ("id", "name", "tenant", "note", "created_at", "expires_at", "revoked_at")
        facts = [{**{name: getattr(key, name) for name in names}, "state": key.state(now)} for key in keys]
        typer.echo(json.dumps({"keys": facts}))
        return
    for key in keys:
        made, ends = (at and datetime.fromtimestamp(at, UTC).date() for at in (key.created_at, key.expires_at))
        expiry = f", until {ends}" if ends else ""
        note = "".join(one if one.isprintable() else " " for one in key.note)  # it stays within its line
        line = f"{key.id}  {key.state(now):8} {key.name:20} tenant {key.tenant:20} made {made}{expiry}"
        typer.echo(line + (f"  {note}" if note else ""))
    if not keys:
        typer.echo("No key was made: the service asks for none, and listens on this machine only.")


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="As `halteres keys list` tells it.")], state: State = None
) -> None:
    """Refuse a key from the next request on. What its tenant made stays."""
    key = _file(state).revoke(key_id)
    typer.echo(f"The key {key.id} ('{key.name}') is revoked.")


def _file(state: Path | None) -> KeyFile:
    from halteres.config import environ
    from halteres.service.tenancy.keys import KeyFile

    return KeyFile(state or environ.home() / "service")
