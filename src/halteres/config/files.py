"""Config files: YAML in our sections or in the seeds' format (env / openai / tinker), read and
written; where each value comes from, and where the data lies that a file names.

The supervisor's wiring is dropped when a file is read, and written afresh for a run. What the
seeds' format has no word for is in a section `halteres`, which others ignore.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from halteres.config import environ
from halteres.config.edits import SWITCHES, switch_refused
from halteres.config.problem import Problem, UnknownSetting
from halteres.config.settings import ENV_WIRING, Settings
from halteres.documents import read_document
from halteres.errors import InvalidConfig, nearest

Sections = dict[str, dict[str, Any]]  # section name to field to value: settings before validation

Source = Literal["default", "config_init", "model", "file", "edit", "policy", "wiring", "resume"]
"""default: ours; model: what suits the base model's size; config_init: the environment's, also
where it declares defaults of the trainer; file, edit: given;
policy: held by the operator's; wiring: filled in by the run; resume: held in the run gone on from.
"""

Sources = Mapping[str, Source]  # section.field -> source, of what was given

NOTHING_GIVEN: Sources = MappingProxyType({})

# section.field -> {value, source}: what config.resolved.json says
Effective = dict[str, dict[str, Any]]

SERVER: Mapping[str, Any] = {"weight": 1.0, "num_requests_for_eval": 256, "timeout": 3600}
"""What the seeds' files say of the inference server in addition to its address (seed 002)."""

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
_TINKER_DROPPED = frozenset(
    ("checkpoint_dir", "wandb_group", "wandb_run_name", "wandb_run_suffix", "tool_call_parser")
)
DATASET = "env.dataset"
PLACES = ("env.tasks", "env.workspace")
"""Files and folders of an environment's, which it looks for in its own folder too."""

_SEED_SECTIONS = frozenset(("env", "openai", "tinker", "slurm", "testing", "halteres"))
_OURS = ("run", "inference", "trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where a run's parts are: what the supervisor writes into the config file."""

    run_id: str
    run_dir: str
    service_url: str
    api_url: str
    tokenizer: str  # folder of the base model, or its name
    api_key: str = "x"


def read_sections(file: Path, problems: list[Problem]) -> Sections:
    """Our sections of a config file, in either format; what cannot be placed is added to
    `problems`.
    """
    data = read_document(file, "config file")
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        raise InvalidConfig(
            f"The config file {file} holds no sections.", next="Start with `env:` or `trainer:`."
        )
    if is_seed_format(data):
        return from_seed_format(data, problems)
    known = ("run", "env", "inference", "trainer")
    others = [name for name in data if name not in known]
    problems.extend(
        UnknownSetting(field=name, got=data[name], did_you_mean=nearest(name, known))
        for name in others
    )
    return {name: section_of(data, name, problems) for name in known if name in data}


def data_place(given: Any, *folders: Path) -> Any:
    """A data set's file or folder as it is called from anywhere: the environment runs in another
    folder.

    It is looked for in these folders, the first of which is meant where none has it. A name on the
    hub stays as it is.
    """
    if not isinstance(given, str) or not given:
        return given
    path = Path(os.path.expanduser(given))  # of any text: Path would raise for an unknown user
    found = next((folder / path for folder in folders if os.path.exists(folder / path)), None)
    if found is None and (given.startswith((".", "~")) or path.suffix == ".jsonl"):
        found = folders[0] / path
    if found is not None:
        return str(found.absolute())
    return given


def placed(key: str, value: Any, *folders: Path) -> Any:
    """The value of a setting; a file or folder as it is called from anywhere."""
    if key == DATASET:
        return data_place(value, *folders)
    is_there = (
        key in PLACES
        and isinstance(value, str)
        and value != ""
        and any(os.path.exists(folder / os.path.expanduser(value)) for folder in folders)
    )
    if is_there:
        return data_place(value, *folders)
    return value


def is_seed_format(data: Mapping[str, Any]) -> bool:
    """Whether a config file is in the seeds' format."""
    return not _SEED_SECTIONS.isdisjoint(data.keys() - {"env"})


def from_seed_format(data: Mapping[str, Any], problems: list[Problem]) -> Sections:
    """Our sections, wiring dropped. What cannot be placed is added to `problems`."""
    sections: Sections = {"run": {}, "env": {}, "inference": {}, "trainer": {}}
    problems.extend(
        _unknown(name, data[name], _SEED_SECTIONS) for name in data.keys() - _SEED_SECTIONS
    )
    problems.extend(switch_refused(name, data[name]) for name in SWITCHES if data.get(name))
    for name, values in section_of(data, "halteres", problems).items():
        if name in _OURS:
            sections[name].update(section_of({name: values}, name, problems))
        else:
            problems.append(_unknown(f"halteres.{name}", values, _OURS))
    env = section_of(data, "env", problems)
    for name, value in env.items():
        section, field = _FROM_ENV.get(name, ("env", name))
        if name in _FROM_ENV or name not in ENV_WIRING:
            sections[section][field] = value
    # a run wrote this file, and filled in what its environment was to do; its sinks are there
    if "halteres" in data:
        sections["env"].pop("use_wandb", None)
    for name, value in section_of(data, "tinker", problems).items():
        if name in _FROM_TINKER:
            section, field = _FROM_TINKER[name]
            sections[section][field] = value
        elif name == "wandb_project":
            # what holds anyway is no setting: there and back, nothing is added
            if value != environ.wandb_project():
                sections["run"].setdefault(name, value)
        elif name not in _TINKER_DROPPED:
            problems.append(_unknown(f"tinker.{name}", value, _FROM_TINKER))
    openai = data.get("openai") or []
    servers = [
        one
        for one in (openai if isinstance(openai, list) else [openai])
        if isinstance(one, Mapping)
    ]
    if models := [server["model_name"] for server in servers if "model_name" in server]:
        sections["inference"]["model"] = models[0]
    elif "tokenizer_name" in env:  # the same, where both are given
        sections["inference"].setdefault("model", env["tokenizer_name"])
    return sections


def to_seed_format(
    settings: Settings, addresses: Addresses, sources: Sources = NOTHING_GIVEN
) -> dict[str, Any]:
    """The config file of a run: what the environment reads, and any trainer of that format. Empty
    fields of the environment's own (by `sources`) are left out.
    """
    trainer = settings.trainer
    run_name = settings.run.default_name(addresses.run_id)
    # What was set away from its default and has no word in the seeds' format; of the trainer also
    # what was set to our default, for the environment's may be another.
    placed = {("inference", "model"), *_FROM_ENV.values(), *_FROM_TINKER.values()}
    changed = settings.model_dump(mode="json", exclude_defaults=True)
    values = trainer.model_dump(mode="json").items()
    given = {
        name: value
        for name, value in values
        if sources.get(f"trainer.{name}", "default") != "default"
    }
    changed["trainer"] = {**changed.get("trainer", {}), **given}
    if settings.sinks:
        changed.setdefault("run", {})["sinks"] = list(settings.sinks)
    beyond = {
        name: {k: v for k, v in changed.get(name, {}).items() if (name, k) not in placed}
        for name in _OURS
    }
    own = {
        name: value
        for name, value in settings.env.items()
        if value not in (None, "") or sources.get(f"env.{name}") != "config_init"
    }
    return {
        "env": {
            **own,
            "tokenizer_name": addresses.tokenizer,
            "rollout_server_url": addresses.api_url,
            "total_steps": trainer.total_steps,
            "steps_per_eval": trainer.eval_every,
            "seed": settings.run.seed,
            "success_threshold": settings.run.success_threshold,
            "use_wandb": settings.env.get("use_wandb", False),  # there only where it was set
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
                # else atroposlib looks for the model's name on the hub
                "tokenizer_name": addresses.tokenizer,
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
        "halteres": {name: fields for name, fields in beyond.items() if fields},
    }


def section_of(data: Mapping[str, Any], name: str, problems: list[Problem]) -> dict[str, Any]:
    """One section of a file. Anything but a mapping is added to `problems`."""
    value = data.get(name) or {}
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    problems.append(Problem(field=name, got=value, rule="must be a section of fields"))
    return {}


def _unknown(field: str, got: Any, known: Any) -> Problem:
    section, _, name = field.rpartition(".")
    guess = nearest(name, known)
    return UnknownSetting(
        field=field, got=got, did_you_mean=f"{section}.{guess}".strip(".") if guess else None
    )


def resolved(settings: Settings, given: Sources, *, is_resumed: bool = False) -> Effective:
    """Every effective setting with its source. A setting of ours that differs from its default
    counts as edited, also where `given` does not name it.
    """
    defaults = Settings().model_dump(mode="json")
    values: Effective = {}
    for section, fields in settings.model_dump(mode="json").items():
        own: Source
        if is_resumed:
            own = "resume"
        elif section == "env":
            own = "config_init"
        else:
            own = "default"
        for name, value in fields.items():
            key = f"{section}.{name}"
            by_program = own == "default" and value != defaults[section][name]
            values[key] = {"value": value, "source": given.get(key, "edit" if by_program else own)}
    return values
