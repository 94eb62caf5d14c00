"""Measuring a policy on held-out tasks: an environment's `evaluate` against a service.

A run's own settings and interpreter hold where its environment is measured, else the environment's defaults. No key of
a service stays in what an evaluation leaves.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from halteres.config.program import EnvironmentProgram, find_program
from halteres.config.projection import ENV_WIRING
from halteres.config.sandboxed_process import run_caught
from halteres.errors import EnvironmentFailed
from halteres.files import replace_file
from halteres.models import builtin_path
from halteres.redaction import Redactor
from halteres.rewards.components import secret_variables
from halteres.runs.directory import RunDirectory
from halteres.runs.reading.adapter import newest_policy
from halteres.runs.reading.evaluations import LOGGED, figures_of
from halteres.runs.reading.failures import reason
from halteres.runs.servers import Server
from halteres.runs.starting.run_models import FIELDS as REWARD_FIELDS

WITHIN_S = 3600.0
"""How long a measurement may take."""

KEPT = ("seed", "success_threshold")
"""Of what a run fills in: the held-out tasks are drawn and judged with it. Its addresses and folders are not ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Who is measured, on what."""

    program: EnvironmentProgram
    env: Mapping[str, Any]  # the environment's settings
    base: str  # base model
    tokenizer: str  # folder of the base model, or its name
    policy: str  # tinker:// path, or the base model
    run: RunDirectory | None = None


def examination(environment: str, run: RunDirectory | None, model: str, policy: str | None = None) -> Examination:
    """What to measure: a run's weights (`policy`: which; None: its newest), or the base model where there is no run.

    A run's settings hold in its own environment; in another one, that one's defaults do.
    """
    if run is None:
        tokenizer = str(builtin_path(model) or model)
        return Examination(program=find_program(environment), env={}, base=model, tokenizer=tokenizer, policy=model)
    state, settings = run.state(), run.settings()
    program, env = state.program, dict[str, Any]()
    found = program if environment == state.environment else find_program(environment)
    if (found.path, found.variant_setting) == (program.path, program.variant_setting):
        # Reward models are named by their folders: the server that the run had for them is gone.
        own = {name: settings.env[name] for name in REWARD_FIELDS if name in settings.env}
        config = {**run.environment_config(), **own}
        env = {name: value for name, value in config.items() if name not in ENV_WIRING or name in KEPT}
    else:
        program = found
    return Examination(
        program=program,
        env=env,
        base=settings.inference.model,
        tokenizer=state.tokenizer,
        policy=policy or newest_policy(run),
        run=run,
    )


def measure(
    exam: Examination, service: Server, wanted: Mapping[str, Any], keep_in: Path | None = None
) -> dict[str, Any]:
    """Run the environment's `evaluate` verb against a service; its figures.

    Args:
        exam: who, on what.
        service: that has the weights.
        wanted: settings of the environment that beat all others.
        keep_in: an existing folder for the evaluation's files, the samples among them; None: they are not kept.

    Raises:
        EnvironmentFailed: it ended with an error, not in time, or without figures.

    The service's key is in the config that the environment reads, and in nothing that is kept or answered.
    """
    program, redactor = exam.program, Redactor([service.key] if service.key else [])
    url, key = f"{service.url}/runs/eval/v1", service.key or "x"
    server = {"model_name": exam.policy, "base_url": url, "api_key": key, "server_type": "sglang"}
    env = {**exam.env, **program.variant_setting, **wanted, "tokenizer_name": exam.tokenizer, "use_wandb": False}
    with tempfile.TemporaryDirectory(prefix="halteres-") as ours:  # which its user alone may look into
        folder, settings = keep_in or Path(ours), Path(ours, "config.yaml")
        settings.write_text(yaml.safe_dump({"env": env, "openai": [server]}))
        words = command(program, settings, folder, program.name)
        try:
            ended = run_caught(words, program.working_directory, WITHIN_S, secret_variables(env))
        except TimeoutError as error:
            what = f"{program.path.name} evaluate took more than {WITHIN_S:g} s."
            raise EnvironmentFailed(
                what, "It was ended.", "Ask for fewer tasks or samples: --tasks, --samples."
            ) from error
        except OSError as error:
            what = f"{program.interpreter} cannot be started."
            raise EnvironmentFailed(what, f"{error.strerror or error}.") from error
        finally:
            strike_keys_out(folder, redactor)
        if ended.code != 0:
            last = reason(ended.err.strip().splitlines(), ended.code)
            what = f"{program.path.name} evaluate ended with exit code {ended.code}."
            raise EnvironmentFailed(what, redactor.text(last.removeprefix("error: ")))
        return {redactor.text(name): value for name, value in figures_of(program, folder, ended.out).items()}


def command(program: EnvironmentProgram, settings: Path, folder: Path, name: str, *more: str) -> tuple[str, ...]:
    """The command line of an evaluation that registers as `name`, takes its config from `settings` and leaves its files
    in `folder`; `more`: further arguments."""
    files = ("--config", str(settings), "--env.data_dir_to_save_evals", str(folder))
    return program.command_in_run("evaluate", *files, *more, metrics=folder / LOGGED, name=name)


def strike_keys_out(folder: Path, redactor: Redactor) -> None:
    """Take the keys out of what an evaluation in this folder says of its config."""
    file = folder / "evaluate_config.yaml"
    if file.is_file():
        replace_file(file, redactor.text(file.read_text(errors="replace")).encode())
