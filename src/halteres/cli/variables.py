"""`halteres variables`: what a user of the `tinker` SDK, or of somebody's script, exports to reach our service."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

import typer

DEFAULT_URL = "http://127.0.0.1:8001"


def variables(
    url: Annotated[
        str | None, typer.Option(help="Address of the service. [default: of the one `halteres serve` started last]")
    ] = None,
) -> None:
    """Print the variables an SDK user exports: eval "$(halteres variables)"."""
    from halteres.config import environ
    from halteres.models import builtin_names, stored_models

    needed = [
        ("TINKER_BASE_URL", url or _last_served(), "where the SDK finds the service"),
        ("TINKER_API_KEY", "tml-local", "the SDK insists on a key of this form; the service asks for none on loopback"),
        ("TINKER_TELEMETRY", "0", "nothing is sent anywhere"),
        ("HF_HUB_OFFLINE", "1", "tokenizers load from this disk (`halteres models add`), without asking a hub"),
    ]
    if not environ.is_set("WANDB_MODE") and not environ.is_set("WANDB_API_KEY"):
        needed.append(("WANDB_MODE", "offline", "scripts that log to W&B write files in ./wandb, without an account"))
    if environ.has_proxy():
        needed.append(("NO_PROXY", environ.for_child()["NO_PROXY"], "the service is not asked for through the proxy"))
    for name, value, why in needed:
        typer.echo(f"export {name}={shlex.quote(value)}  # {why}")
    names = dict.fromkeys([*builtin_names(), *(name for name, _ in stored_models(environ.home() / "models"))])
    typer.echo(f"# models here: {', '.join(names)}; a script's name for one: halteres models add MODEL --as NAME")


def _last_served() -> str:
    """The address in the card that a service leaves in its state directory."""
    from halteres.config import environ

    try:
        return str(json.loads((environ.home() / "service" / "service.json").read_bytes())["url"])
    except (OSError, ValueError, KeyError):
        return DEFAULT_URL
