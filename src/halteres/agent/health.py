"""Is this machine ready: the findings that `halteres doctor` prints, and their summary,
rl_health_check.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from typing import Any

import halteres
from halteres.agent.next_call import HEALTH, LIST_ENVIRONMENTS
from halteres.agent.tool import READS, Caller, Facts, Result, tool
from halteres.config import environ
from halteres.config.operator_policy import load_policy
from halteres.errors import HalteresError
from halteres.models import TINY, builtin_path
from halteres.next_step import NextStep
from halteres.runs.directory import active_runs
from halteres.runs.planning import resources
from halteres.runs.planning.checks import Check, attempt
from halteres.runs.planning.known_models import known_models, proposed
from halteres.runs.supervision.roles import WELL_KNOWN
from halteres.short_texts import clipped

MIN_FREE_BYTES = 1 << 30
PACKAGES = ("torch", "transformers", "tinker")

MOST_MODELS, MOST_RUNS, MOST_PROBLEMS, PROBLEM_LENGTH = 6, 8, 3, 160
"""An answer is short whatever there is; `halteres models list`, rl_list_runs and `halteres doctor`
show all.
"""


def machine_checks(found: resources.Machine | None = None) -> Iterator[Check]:
    """Every finding, in the order in which a new user meets them; `found`: this machine, if it is
    known already.
    """
    found = found or resources.this_machine()
    version = sys.version.split()[0]
    yield Check(
        name="python",
        ok=sys.version_info >= (3, 11),
        found=version,
        remedy="3.11 or newer is needed.",
    )
    for name in PACKAGES:
        try:
            yield Check(name=name, found=importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Check(
                name=name, ok=False, found="not installed", remedy=f"Install it: pip install {name}"
            )
    folder = builtin_path(TINY)
    is_whole = folder is not None and (folder / "model.safetensors").is_file()
    yield Check(
        name="built-in model",
        ok=is_whole,
        found=str(folder),
        remedy="Reinstall: its files are missing.",
    )
    home = environ.home()
    existing = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    yield Check(
        name="HALTERES_HOME",
        ok=existing.is_dir() and os.access(existing, os.W_OK) and free >= MIN_FREE_BYTES,
        found=f"{home}, {free / 1e9:.0f} GB free"
        if existing.is_dir()
        else f"{home}: {existing} is no folder",
        remedy="Make room, or export HALTERES_HOME=a writable folder.",
    )
    check, policy = attempt("policy", load_policy)
    if policy is None:
        why = ""
        if check.failure:
            why = check.failure.sentence
        yield Check(
            name="policy", ok=False, found=why, remedy=f"Mend {environ.home() / 'policy.yaml'}."
        )
    else:
        yield Check(name="policy", found=policy.name)
    device, _ = attempt("device", found.check_device)
    if device.failure is not None:
        yield Check(
            name="device", ok=False, found=device.failure.what, remedy=str(device.failure.next)
        )
    for port, command in zip(
        WELL_KNOWN, ("serve trajectories", "serve", "reward serve"), strict=True
    ):
        busy = f"busy: `halteres {command}` wants --port (runs have ports of their own)"
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                yield Check(name=f"port {port}", found=busy)
            else:
                yield Check(name=f"port {port}", found="free")
    yield Check(name="machine", found=_described(found))
    model = proposed(known_models(there=found))
    yield Check(
        name="memory",
        ok=model.fits != "no",
        found=f"{model.name} needs {model.need_gb} GB, {model.free_gb} GB are free",
        remedy="End what else uses the memory.",
    )


def _described(found: resources.Machine) -> str:
    gpu = "no GPU: the engine runs on the CPU"
    if found.unused_gpu is not None:
        gpu = (
            f"{found.unused_gpu.name} is not used: its path is not verified yet "
            "(HALTERES_DEVICE=cuda uses it)"
        )
    elif found.gpu is not None:
        gpu = f"{found.gpu.name} with {_gb(found.gpu.memory.free)} GB free"
    return (
        f"{found.cores} cores, {_gb(found.memory.free)} of {_gb(found.memory.total)} GB memory "
        f"free, {gpu}"
    )


def _gb(count: int | None) -> str:
    if count is None:
        return "?"
    return f"{count / 1e9:.1f}"


class MachineFacts(Facts):
    """What computes here; memory in GB, null where the system does not say."""

    cores: int
    memory_gb: float | None
    free_gb: float | None
    gpu: dict[str, Any] | None  # name, free_gb


class ModelFacts(Facts):
    """A base model, and whether it fits."""

    name: str
    fits: str
    proposed: bool = False
    present: bool = True


class Health(Result):
    """What there is to work with."""

    status: str  # ok, degraded
    version: str
    machine: MachineFacts
    # those that are here, the proposed one first; then the largest well-known that would fit
    models: list[ModelFacts]
    active_runs: list[str]
    policy: str
    problems: list[str] = []


@tool(title="Check the machine", hints=READS)
def rl_health_check(caller: Caller) -> Health:
    """Look at this machine: is Halteres ready, which base models fit, what runs, which policy
    holds.
    """
    found = resources.this_machine()
    problems = [
        clipped(f"{check.name}: {check.found.rstrip('.')}. {check.remedy}".strip(), PROBLEM_LENGTH)
        for check in machine_checks(found)
        if not check.ok
    ]
    active = [run.run_id for run in active_runs()]
    try:
        policy = load_policy().name
    except HalteresError:
        policy = "unreadable"  # it is among the problems
    if problems:
        following = ("mend the problems, then ", HEALTH)
    else:
        following = LIST_ENVIRONMENTS
        if active:
            following = NextStep.of("rl_check_status", active[0])
    models = known_models(there=found)
    first = proposed(models)
    present = [model for model in models if model.present and model is not first]
    rows = [ModelFacts(name=first.name, fits=first.fits, proposed=True)]
    rows += [ModelFacts(name=model.name, fits=model.fits) for model in present[: MOST_MODELS - 1]]
    if absent := [model for model in models if not model.present and model.fits == "yes"]:
        rows.append(ModelFacts(name=absent[-1].name, fits="yes", present=False))
    gpu = found.gpu and {"name": found.gpu.name, "free_gb": resources.gb(found.gpu.memory.free)}
    return Health(
        status="degraded" if problems else "ok",
        version=halteres.__version__,
        machine=MachineFacts(
            cores=found.cores,
            memory_gb=resources.gb(found.memory.total),
            free_gb=resources.gb(found.memory.free),
            gpu=gpu,
        ),
        models=rows,
        active_runs=active[:MOST_RUNS],
        policy=policy,
        **({"problems": problems[:MOST_PROBLEMS]} if problems else {}),
        next=following,
    )
