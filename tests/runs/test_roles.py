"""The roles of a run: what its own service is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from halteres.config.program import EnvironmentProgram
from halteres.config.settings import Settings
from halteres.runs.servers import Server
from halteres.runs.supervision.roles import RunContext, listen, roles_of


def commands(path: Path, env: dict[str, float], *, own_service: bool) -> tuple[RunContext, dict[str, tuple[str, ...]]]:
    program = EnvironmentProgram(name="sums", path=path / "sums.py", interpreter="python", working_directory=path)
    service, api = listen() if own_service else None, listen()
    scene = RunContext(
        path=path,
        run_name="sums",
        settings=Settings(env=env),
        environment=program,
        base_model="halteres/tiny",
        service=service,
        inference=Server(url=service.url if service else "http://127.0.0.1:1", key=None),
        api=api,
        secret="s",
    )
    found = {role.name: tuple(role.command) for role in roles_of(scene)}
    for listener in filter(None, (service, api)):
        listener.socket.close()
    return scene, found


@pytest.mark.parametrize(("temperature", "tempered"), [(1.0, False), (0.7, True)])
def test_a_runs_own_service_gives_the_log_probabilities_of_the_temperature_that_training_corrects(
    tmp_path: Path, temperature: float, tempered: bool
) -> None:
    scene, found = commands(tmp_path, {"temperature": temperature}, own_service=True)
    assert scene.tempered is tempered
    assert (found["service"][-2:] == ("--sample-logprobs", "tempered")) is tempered


def test_somebody_elses_service_gives_what_it_gives(tmp_path: Path) -> None:
    scene, found = commands(tmp_path, {"temperature": 0.7}, own_service=False)
    assert not scene.tempered and "service" not in found
