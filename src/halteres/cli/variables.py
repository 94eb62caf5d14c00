"""`halteres variables`: what a user of the `tinker` SDK exports to reach our service."""

from __future__ import annotations

from typing import Annotated

import typer


def variables(
    url: Annotated[str, typer.Option(help="Address of the service.")] = "http://127.0.0.1:8001",
) -> None:
    """Print the variables an SDK user exports: eval "$(halteres variables)"."""
    for name, value, why in (
        ("TINKER_BASE_URL", url, "where the SDK finds the service"),
        ("TINKER_API_KEY", "tml-local", "the SDK insists on a key of this form; the service asks for none on loopback"),
        ("TINKER_TELEMETRY", "0", "nothing is sent anywhere"),
        ("HF_HUB_OFFLINE", "1", "tokenizers load from the folder the service names, without asking a hub"),
    ):
        typer.echo(f"export {name}={value}  # {why}")
