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
from halteres.runs.supervision.roles import Listener, RunContext, listen
from halteres.runs.supervision.state_writer import StateWriter


@dataclass(slots=True)
class PreparedRun:
    """Open sockets, and what roles are made from; close it when the roles have ended."""

    context: RunContext
    _open: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Close the sockets."""
        self._open.close()


def prepare_run(writer: StateWriter) -> PreparedRun:
    """Bind the sockets, write the addresses into the run's files and its state."""
    run, state, opened = writer.run, writer.state, ExitStack()
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
    writer.update(urls={name: url for name, url in found.items() if url})
    secret = environ.run_secret()
    context = RunContext(
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
        _write_wiring(writer, context, with_login(api.url, secret))
    return PreparedRun(context, opened)


def _write_wiring(writer: StateWriter, context: RunContext, api_url: str) -> None:
    """Both files hold keys: readable by the owner alone."""
    key = context.inference.key
    wiring = {
        "run_id": writer.state.run_id,
        "run_dir": str(context.path),
        "service_url": context.inference.url,
        "api_url": api_url,
        "api_key": key,
        "base_model": context.base_model,
        "tokenizer": writer.state.tokenizer,
        "is_foreign": context.environment.is_foreign,
        "tempered": context.tempered,
        "resume_from": writer.state.resume_point,
    }
    _write_private(context.path / WIRING, json.dumps(wiring, indent=1))
    settings = context.settings
    if context.reward is not None:
        settings = with_places(settings, _addresses(context.reward, context.secret, reward_folders(settings.env)))
    config = config_text(settings, writer.state, context.path, api_url=api_url, api_key=key)
    _write_private(context.path / "config.yaml", config)
    write_resolved(context.path, wiring_of_run(context.settings, writer.state, context.path))


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
