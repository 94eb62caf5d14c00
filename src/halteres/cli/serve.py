"""`halteres serve`: the servers, in the foreground."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from halteres.cli.rl import PASSED_ON

app = typer.Typer(
    help="Serve the training service, the trajectory server, or the agent's tools.", invoke_without_command=True
)

Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")]

SampleLogprobs = Annotated[
    str, typer.Option(metavar="raw|tempered", help="Log-probabilities of samples: at temperature 1, or at theirs.")
]
Host = Annotated[
    str, typer.Option(help="Address to listen on; beyond this machine only with keys (`halteres keys create`).")
]
RequireKeys = Annotated[bool, typer.Option("--require-keys", help="Ask for a key also while none was made.")]
RefuseStableReinforce = Annotated[
    bool,
    typer.Option(
        "--refuse-stable-reinforce", help="Refuse that loss: the formula is ours, the hosted service's is not public."
    ),
]
Limit = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="A limit of every tenant; may be repeated (docs/keys.md)."),
]
RewardModel = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=URL", help="A reward server by which `best_of` may choose; may be repeated."),
]
Certificate = Annotated[Path | None, typer.Option(help="For TLS: PEM file with the certificate chain.")]
CertificateKey = Annotated[Path | None, typer.Option(help="... and PEM file of its private key.")]


@app.callback()
def service(
    context: typer.Context,
    port: Port = 8001,
    model: Annotated[
        str, typer.Option(help="'halteres/tiny', a name in the store (`halteres models list`), or a model folder.")
    ] = "halteres/tiny",
    state: Annotated[
        Path | None, typer.Option(help="Folder of the service's state. [default: HALTERES_HOME/service]")
    ] = None,
    engine: Annotated[str, typer.Option(help="'torch', or 'scripted' (a deterministic fake for tests).")] = "torch",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each engine. [default: cores - 1]")] = None,
    samplers: Annotated[
        int, typer.Option(min=0, max=64, help="Engines that only sample; 0: the one that trains samples too.")
    ] = 0,
    sample_logprobs: SampleLogprobs = "raw",
    host: Host = "127.0.0.1",
    require_keys: RequireKeys = False,
    refuse_stable_reinforce: RefuseStableReinforce = False,
    limit: Limit = None,
    reward_model: RewardModel = None,
    certificate: Certificate = None,
    certificate_key: CertificateKey = None,
) -> None:
    """Serve the Tinker API and inference (`halteres variables` prints what an SDK user exports)."""
    if context.invoked_subcommand is not None:
        return
    from halteres.config import environ

    folder = state or environ.home() / "service"
    given: dict[str, object] = {
        "state": folder,
        "host": host,
        "port": port,
        "model": model,
        "engine": engine,
        "threads": threads,
        "samplers": samplers or None,
        "sample-logprobs": sample_logprobs,
        "certificate": certificate,
        "certificate-key": certificate_key,
    }
    named = [f"--{name}={value}" for name, value in given.items() if value is not None]
    repeated = [f"--limit={one}" for one in limit or ()]
    repeated += [f"--reward-model={one}" for one in reward_model or ()]
    switches = {"--require-keys": require_keys, "--refuse-stable-reinforce": refuse_stable_reinforce}
    become("halteres.service", *named, *repeated, *(name for name, chosen in switches.items() if chosen))


@app.command(context_settings=PASSED_ON)
def trajectories(context: typer.Context) -> None:
    """Serve the Atropos trajectory API (--help lists its flags)."""
    become("halteres.trajectories", *context.args)


@app.command()
def control(
    port: Port = 8080,
    auth: Annotated[
        str, typer.Option(metavar="open|token", help="Whether the seed's routes want the token too, as Basic password.")
    ] = "open",
) -> None:
    """Serve the agent's tools over HTTP; the token is in HALTERES_HOME/token."""
    become("halteres.agent.faces.http", "--port", str(port), "--auth", auth)


def become(module: str, *arguments: str) -> None:
    """Replace this process by a module of ours: signals and exit code are then its own."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])  # noqa: S606 - no shell, our own interpreter
