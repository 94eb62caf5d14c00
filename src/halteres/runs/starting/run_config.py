"""A run's config files: what its environment reads, and what tells where every setting comes from.

Owns: config.yaml (the seeds' format) and config.resolved.json of a run, before and after its addresses are known.
Never: decides a setting or an address.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from halteres.config.projection import Addresses, to_seed_format
from halteres.config.settings import ENV_WIRING, Settings
from halteres.config.sources import Effective, Sources, wired
from halteres.files import replace_file
from halteres.runs.state import RunState

FILE = "config.resolved.json"


def config_text(
    settings: Settings,
    state: RunState,
    path: Path,
    *,
    api_url: str | None = None,
    api_key: str | None = None,
    folder: Path | None = None,
) -> str:
    """config.yaml of a run; before its supervisor has ports, with the default ones.

    Args:
        api_url: of the trajectory server, with its login; None: as the state has it.
        api_key: of the service.
        folder: where the run's files lie, while that is not `path` yet. config.resolved.json is among them.
    """
    config = to_seed_format(settings, _addresses(state, path, api_url, api_key), sources_of(folder or path))
    # Through JSON: an environment's values may be of types that only its own interpreter knows.
    return yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False)


def wiring_of_run(settings: Settings, state: RunState, path: Path) -> Effective:
    """What the run fills in itself, for config.resolved.json: addresses, folders, and what is copied from section to
    section. No key is among it."""
    env = to_seed_format(settings, _addresses(state, path))["env"]
    filled = {f"env.{name}": value for name, value in env.items() if name in ENV_WIRING}
    return wired({**filled, "inference.url": state.urls.get("service")})


def write_resolved(folder: Path, values: Effective) -> None:
    """config.resolved.json: these values laid over what it says already."""
    replace_file(folder / FILE, json.dumps({**_written(folder), **values}, indent=1).encode() + b"\n")


def sources_of(folder: Path) -> Sources:
    """Where the settings of the run in this folder come from."""
    return {key: one["source"] for key, one in _written(folder).items()}


def _written(folder: Path) -> Effective:
    file = folder / FILE
    return json.loads(file.read_bytes()) if file.exists() else {}


def _addresses(state: RunState, path: Path, api_url: str | None = None, api_key: str | None = None) -> Addresses:
    return Addresses(
        run_id=state.run_id,
        run_dir=str(path),
        service_url=state.urls.get("service", "http://127.0.0.1:8001"),
        api_url=api_url or state.urls.get("api", "http://127.0.0.1:8000"),
        tokenizer=state.tokenizer,
        api_key=api_key or "x",
    )
