"""The stage of a run: sockets, addresses and the files that tell the roles about them.

Owns: wiring.json and config.yaml as the roles read them, the scene that roles are cast from.
Never: starts a process.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from halteres.config import environ
from halteres.files import replace_file
from halteres.runs.starting.start import config_text, wiring_of_run, write_resolved
from halteres.runs.supervision.ledger import Ledger
from halteres.runs.supervision.ports import API_PORT, SERVICE_PORT, listen
from halteres.runs.supervision.roles import Scene


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
    service = None if state.service_given else listen(SERVICE_PORT)
    api = listen(API_PORT)
    for listener in (service, api):
        if listener:
            opened.callback(listener.close)
    service_url = service.url if service else state.urls["service"]
    ledger.update(urls={"service": service_url, "api": api.url})
    scene = Scene(
        path=run.path,
        run_name=state.name,
        settings=settings,
        environment=state.program,
        base_model=state.base_model,
        service=service,
        service_url=service_url,
        api=api,
    )
    _write_wiring(ledger, scene)
    return Stage(scene, opened)


def _write_wiring(ledger: Ledger, scene: Scene) -> None:
    """Both files may hold a key: readable by the owner alone then."""
    key = environ.api_key() if scene.service is None else None  # a service of our own asks for none
    wiring = {
        "run_id": ledger.state.run_id,
        "run_dir": str(scene.path),
        "service_url": scene.service_url,
        "api_url": scene.api.url,
        "api_key": key,
        "base_model": scene.base_model,
        "tokenizer": ledger.state.tokenizer,
        "is_foreign": scene.environment.is_foreign,
        "resume_from": ledger.state.resume_point,
    }
    _write_private(scene.path / "wiring.json", json.dumps(wiring, indent=1), key)
    config = config_text(scene.settings, ledger.state, scene.path, key)
    _write_private(scene.path / "config.yaml", config, key)
    write_resolved(scene.path, wiring_of_run(scene.settings, ledger.state, scene.path))


def _write_private(file: Path, text: str, key: str | None) -> None:
    before = os.umask(0o077) if key else None
    try:
        replace_file(file, text.encode())
    finally:
        if before is not None:
            os.umask(before)
