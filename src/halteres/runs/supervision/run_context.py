"""What the processes of a run are told: addresses, sockets, keys and files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from halteres.config import environ
from halteres.files import replace_file
from halteres.rewards.model_folder import names_of, path_of
from halteres.runs.servers import WIRING, Server, with_login
from halteres.runs.starting.reward_models import reward_folders, with_places
from halteres.runs.starting.start import config_text, wiring_of_run, write_resolved
from halteres.runs.supervision.roles import Listener, Scene, listen
from halteres.runs.supervision.state_writer import Ledger


@dataclass(slots=True)
class Stage:
    """Open sockets and the scene; close it when the roles have ended."""

    scene: Scene
    _open: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Close the sockets."""
        self._open.close()


def set_stage(ledger: Ledger) -> Stage:
    """Bind the sockets, write the addresses into the run's files and its state."""
    run, state, opened = ledger.run, ledger.state, ExitStack()
    settings = run.settings()
    trains_policy = state.kind == "rl"
    service = listen() if trains_policy and not state.service_given else None
    api = listen() if trains_policy else None
    reward = listen() if reward_folders(settings.env) else None
    for listener in (service, api, reward):
        if listener:
            opened.callback(listener.close)
    service_url = service.url if service else state.urls.get("service", "")
    found = {"service": service_url, "api": api.url if api else "", "reward": reward.url if reward else ""}
    ledger.update(urls={name: url for name, url in found.items() if url})
    secret = environ.run_secret()
    scene = Scene(
        path=run.path,
        run_name=state.name,
        settings=settings,
        environment=state.program,
        base_model=state.base_model,
        service=service,
        inference=Server(url=service_url, key=secret if service else environ.api_key()),
        api=api,
        reward=reward,
        secret=secret,
    )
    if api is not None:
        _write_wiring(ledger, scene, with_login(api.url, secret))
    return Stage(scene, opened)


def _write_wiring(ledger: Ledger, scene: Scene, api_url: str) -> None:
    """Both files hold keys: readable by the owner alone."""
    key = scene.inference.key
    wiring = {
        "run_id": ledger.state.run_id,
        "run_dir": str(scene.path),
        "service_url": scene.inference.url,
        "api_url": api_url,
        "api_key": key,
        "base_model": scene.base_model,
        "tokenizer": ledger.state.tokenizer,
        "is_foreign": scene.environment.is_foreign,
        "tempered": scene.tempered,
        "resume_from": ledger.state.resume_point,
    }
    _write_private(scene.path / WIRING, json.dumps(wiring, indent=1))
    settings = scene.settings
    if scene.reward is not None:
        settings = with_places(settings, _addresses(scene.reward, scene.secret, reward_folders(settings.env)))
    config = config_text(settings, ledger.state, scene.path, api_url=api_url, api_key=key)
    _write_private(scene.path / "config.yaml", config)
    write_resolved(scene.path, wiring_of_run(scene.settings, ledger.state, scene.path))


def _addresses(server: Listener, secret: str, folders: Sequence[Path]) -> Callable[[Path], str]:
    """Where the run's reward server answers for each folder's model."""
    names = {folder: name for name, folder in names_of(folders).items()}
    root = with_login(server.url, secret)
    return lambda folder: f"{root}{path_of(names[folder])}"


def _write_private(file: Path, text: str) -> None:
    before = os.umask(0o077)
    try:
        replace_file(file, text.encode())
    finally:
        os.umask(before)
