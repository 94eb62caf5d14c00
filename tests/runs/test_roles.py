"""The roles of a run: what its own service is told, who is given a proxy."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from halteres.agent.trial.request import Request, TestedModel
from halteres.config import environ
from halteres.config.program import EnvironmentProgram
from halteres.config.settings import InferenceSettings, Settings
from halteres.process import Lifeline
from halteres.runs.servers import (
    READY_WITHIN_S,
    VLLM_S,
    Server,
    ready_within_s,
    service_arguments,
)
from halteres.runs.supervision.roles import Listener, RunContext, listen, roles_of
from halteres.runs.supervision.run_processes import spawn


@contextmanager
def listening() -> Iterator[Listener]:
    listener = listen()
    with listener.socket:
        yield listener


def scene_of(
    path: Path, env: dict[str, float], service: Listener | None, api: Listener, url: str
) -> RunContext:
    program = EnvironmentProgram(
        name="sums", path=path / "sums.py", interpreter="python", working_directory=path
    )
    return RunContext(
        path=path,
        run_name="sums",
        settings=Settings(env=env),
        environment=program,
        base_model="halteres/tiny",
        service=service,
        inference=Server(url=service.url if service else url, key=None),
        api=api,
        secret="s",
    )


def commands(
    path: Path, env: dict[str, float], *, own_service: bool
) -> tuple[RunContext, dict[str, tuple[str, ...]]]:
    with ExitStack() as held:
        service = held.enter_context(listening()) if own_service else None
        scene = scene_of(path, env, service, held.enter_context(listening()), "http://127.0.0.1:1")
        return scene, {role.name: tuple(role.command) for role in roles_of(scene)}


@pytest.mark.parametrize(("temperature", "tempered"), [(1.0, False), (0.7, True)])
def test_a_runs_own_service_gives_the_log_probabilities_of_the_temperature_that_training_corrects(
    tmp_path: Path, temperature: float, tempered: bool
) -> None:
    scene, found = commands(tmp_path, {"temperature": temperature}, own_service=True)
    assert scene.tempered is tempered
    assert (found["service"][-2:] == ("--sample-logprobs", "tempered")) is tempered


def test_a_runs_own_service_posts_groups_of_gateway_sessions_to_the_runs_server(
    tmp_path: Path,
) -> None:
    """By its address without a login; the token is a variable's."""
    with listening() as service, listening() as api:
        scene = scene_of(tmp_path, {}, service, api, "")
        (role,) = (one for one in roles_of(scene) if one.name == "service")
        place = role.command.index("--trajectory-server")
        assert role.command[place + 1] == api.url
        assert role.variables[environ.TRAJECTORY_TOKEN] == scene.secret
        assert scene.secret not in role.command


def test_somebody_elses_service_gives_what_it_gives(tmp_path: Path) -> None:
    scene, found = commands(tmp_path, {"temperature": 0.7}, own_service=False)
    assert not scene.tempered and "service" not in found


@pytest.mark.parametrize(
    ("url", "stay_here"),
    [
        (None, {"service", "api", "trainer"}),
        ("http://127.0.0.1:8001", {"api", "trainer"}),
        ("http://[::1]:8001", {"api", "trainer"}),
        ("https://tinker.example", {"api"}),
    ],
)
def test_who_talks_to_this_machine_alone_is_given_no_proxy(
    tmp_path: Path, url: str | None, stay_here: set[str]
) -> None:
    """An environment may read data from elsewhere, and a trainer may have to ask a service
    elsewhere.
    """
    with ExitStack() as held:
        api = held.enter_context(listening())
        service = held.enter_context(listening()) if url is None else None
        scene = scene_of(tmp_path, {}, service, api, url or "")
        assert {role.name for role in roles_of(scene) if role.stays_here} == stay_here


def test_a_vllm_is_waited_for_as_long_by_a_test_and_an_evaluation_as_by_a_run(
    tmp_path: Path,
) -> None:
    """It loads, compiles and measures a large model, wherever it is asked for."""
    for samplers, more_s in (("own", 0.0), ("vllm", VLLM_S), ("own,http://a:1", VLLM_S)):
        with listening() as service, listening() as api:
            scene = scene_of(tmp_path, {}, service, api, "")
            inference = InferenceSettings.model_validate({"samplers": samplers})
            settings = Settings(inference=inference)
            (role,) = (
                one for one in roles_of(replace(scene, settings=settings)) if one.name == "service"
            )
        arguments = service_arguments(inference)
        assert ready_within_s(arguments) == role.ready_within_s == READY_WITHIN_S + more_s
        local = TestedModel(model="local:a", name="a", scale="local", base="a", tokenizer="")
        request = Request(
            draft="d",
            program=scene.environment,
            env={},
            num_steps=1,
            group_size=4,
            models=(local,),
            base_model="a",
            created_at=0.0,
            service=arguments,
        )
        assert request.within_s >= request.model_within_s + ready_within_s(arguments)
        # weights of a run are tried by a service like the run's own
        own = msgspec.structs.replace(local, service=arguments)
        by_run = msgspec.structs.replace(request, models=(own,), service=())
        assert by_run.within_s == request.within_s


async def test_a_role_that_stays_here_starts_without_the_proxies_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://proxy:1080")
    code = "import os; print([name for name in os.environ if name.upper() == 'ALL_PROXY'])"
    line = Lifeline.open()
    for stays_here, told in ((True, "[]\n"), (False, "['ALL_PROXY']\n")):
        log = tmp_path / f"{stays_here}.log"
        command = (sys.executable, "-c", code)
        child = spawn(command, log=log, folder=tmp_path, lifeline=line, stays_here=stays_here)
        async with asyncio.timeout(20):
            await asyncio.wrap_future(child.exit)
        assert log.read_text() == told
    line.close()
