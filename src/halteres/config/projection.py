"""The seeds' config format (env / openai / tinker) and ours (run / env / inference / trainer), both ways.

Owns: which field of the one is which of the other; what in the seeds' format is wiring, and so dropped when read and
written afresh for a run.
Never: validates values, reads or writes files.

What the seeds' format has no word for travels in a section `halteres`, which others ignore: nothing is lost on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from halteres.config import environ
from halteres.config.edits import SWITCHES, switch_refused
from halteres.config.problem import Problem, UnknownSetting
from halteres.config.settings import ENV_WIRING, Settings
from halteres.config.sources import NOTHING_GIVEN, Sources
from halteres.errors import nearest

Sections = dict[str, dict[str, Any]]
"""Section name to field to value: settings before validation."""

_FROM_ENV = {
    "total_steps": ("trainer", "total_steps"),
    "steps_per_eval": ("trainer", "eval_every"),
    "seed": ("run", "seed"),
    "success_threshold": ("run", "success_threshold"),
}
_FROM_TINKER = {
    "lora_rank": ("trainer", "lora_rank"),
    "learning_rate": ("trainer", "learning_rate"),
    "max_token_trainer_length": ("trainer", "max_token_trainer_length"),
    "save_checkpoint_interval": ("trainer", "checkpoint_every"),
}
_TINKER_DROPPED = frozenset(("checkpoint_dir", "wandb_group", "wandb_run_name", "wandb_run_suffix", "tool_call_parser"))
SERVER: Mapping[str, Any] = {"weight": 1.0, "num_requests_for_eval": 256, "timeout": 3600}
"""What the seeds' files say of the inference server beside its address (seed 002)."""

_SEED_SECTIONS = frozenset(("env", "openai", "tinker", "slurm", "testing", "halteres"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where a run's parts are: what the supervisor writes into the config file."""

    run_id: str
    run_dir: str
    service_url: str
    api_url: str
    tokenizer: str  # folder of the base model, or its name
    api_key: str = "x"


def is_seed_format(data: Mapping[str, Any]) -> bool:
    """Whether a config file is in the seeds' format."""
    return any(name in data for name in ("openai", "tinker", "slurm", "testing", "halteres"))


def from_seed_format(data: Mapping[str, Any], problems: list[Problem]) -> Sections:
    """Our sections, wiring dropped. What cannot be placed is added to `problems`."""
    sections: Sections = {"run": {}, "env": {}, "inference": {}, "trainer": {}}
    problems.extend(_unknown(name, data[name], _SEED_SECTIONS) for name in data.keys() - _SEED_SECTIONS)
    problems.extend(switch_refused(name, data[name]) for name in SWITCHES if data.get(name))
    for name, values in _mapping(data, "halteres", problems).items():
        if name in ("run", "inference", "trainer"):
            sections[name].update(_mapping({name: values}, name, problems))
        else:
            problems.append(_unknown(f"halteres.{name}", values, ("run", "inference", "trainer")))
    _read_env(_mapping(data, "env", problems), sections)
    if "halteres" in data:  # a run wrote this file, and filled in what its environment was to do; its sinks are told
        sections["env"].pop("use_wandb", None)
    _read_tinker(_mapping(data, "tinker", problems), sections, problems)
    _read_model(data, sections)
    return sections


def to_seed_format(settings: Settings, addresses: Addresses, sources: Sources = NOTHING_GIVEN) -> dict[str, Any]:
    """The config file of a run: what the environment reads, and any trainer of that format.

    Args:
        sources: where the settings come from; fields that hold the environment's own values are left out where they
            are empty.
    """
    trainer = settings.trainer
    run_name = settings.run.default_name(addresses.run_id)
    return {
        "env": {
            **{
                name: value
                for name, value in settings.env.items()
                if value not in (None, "") or sources.get(f"env.{name}") != "config_init"
            },
            "tokenizer_name": addresses.tokenizer,
            "rollout_server_url": addresses.api_url,
            "total_steps": trainer.total_steps,
            "steps_per_eval": trainer.eval_every,
            "seed": settings.run.seed,
            "success_threshold": settings.run.success_threshold,
            "use_wandb": settings.env.get("use_wandb", False),  # there only where somebody set it
            "wandb_name": settings.run.name or run_name,
            "run_dir": addresses.run_dir,
            **({"weights_lag": trainer.max_staleness} if trainer.deterministic else {}),
        },
        "openai": [
            {
                "model_name": settings.inference.model,
                "base_url": f"{addresses.service_url.rstrip('/')}/runs/{addresses.run_id}/v1",
                "api_key": addresses.api_key,
                "server_type": "sglang",
                "tokenizer_name": addresses.tokenizer,  # else atroposlib looks for the model's name on the hub
                **SERVER,
            }
        ],
        "tinker": {
            **{name: getattr(trainer, field) for name, (_, field) in _FROM_TINKER.items()},
            "wandb_project": settings.run.project,
            "wandb_run_name": run_name,
            "checkpoint_dir": f"{addresses.run_dir}/service",
        },
        "slurm": False,
        "testing": False,
        "halteres": _beyond_seeds(settings, sources),
    }


def _beyond_seeds(settings: Settings, sources: Sources) -> Sections:
    """What was set away from its default and has no word in the seeds' format; of the trainer also what was set to our
    default, for the environment's may be another."""
    told = {("inference", "model"), *_FROM_ENV.values(), *_FROM_TINKER.values()}
    changed = settings.model_dump(mode="json", exclude_defaults=True)
    trainer = settings.trainer.model_dump(mode="json")
    given = {name: value for name, value in trainer.items() if sources.get(f"trainer.{name}", "default") != "default"}
    changed["trainer"] = {**changed.get("trainer", {}), **given}
    if settings.sinks:
        changed.setdefault("run", {})["sinks"] = list(settings.sinks)
    return {
        section: kept
        for section in ("run", "inference", "trainer")
        if (kept := {k: v for k, v in changed.get(section, {}).items() if (section, k) not in told})
    }


def _read_env(env: Mapping[str, Any], sections: Sections) -> None:
    for name, value in env.items():
        if name in _FROM_ENV:
            section, field = _FROM_ENV[name]
            sections[section][field] = value
        elif name not in ENV_WIRING:
            sections["env"][name] = value


def _read_tinker(tinker: Mapping[str, Any], sections: Sections, problems: list[Problem]) -> None:
    for name, value in tinker.items():
        if name in _FROM_TINKER:
            section, field = _FROM_TINKER[name]
            sections[section][field] = value
        elif name == "wandb_project":
            if value != environ.wandb_project():  # what holds anyway is no setting: there and back, nothing is added
                sections["run"].setdefault(name, value)
        elif name not in _TINKER_DROPPED:
            problems.append(_unknown(f"tinker.{name}", value, _FROM_TINKER))


def _read_model(data: Mapping[str, Any], sections: Sections) -> None:
    """The base model: `openai.model_name`, or the tokenizer's, which is the same where both are given."""
    for server in _servers(data):
        if "model_name" in server:
            sections["inference"]["model"] = server["model_name"]
            return
    env = data.get("env")
    if isinstance(env, Mapping) and "tokenizer_name" in env:
        sections["inference"].setdefault("model", env["tokenizer_name"])


def _servers(data: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    openai = data.get("openai") or []
    for server in openai if isinstance(openai, list) else [openai]:
        if isinstance(server, Mapping):
            yield server


def _mapping(data: Mapping[str, Any], name: str, problems: list[Problem]) -> dict[str, Any]:
    value = data.get(name) or {}
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    problems.append(Problem(field=name, got=value, rule="must be a section of fields"))
    return {}


def _unknown(field: str, got: Any, known: Any) -> Problem:
    section, _, name = field.rpartition(".")
    guess = nearest(name, known)
    return UnknownSetting(field=field, got=got, did_you_mean=f"{section}.{guess}".strip(".") if guess else None)
