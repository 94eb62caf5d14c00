"""What a run is refused for before it begins: how its service is reached, wrong variables, a cage
that there is none of.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from halteres.config.environ import HTTP_PROXIES
from halteres.config.resolution import resolve_settings
from halteres.config.settings import Settings
from halteres.environments.cage import cage_missing
from halteres.errors import InvalidConfig
from halteres.process import Memory
from halteres.runs.planning import checks, resources
from halteres.runs.planning.models import ServiceUnusable, own_model
from halteres.runs.planning.plan import plan_run
from halteres.runs.start import start_run

ELSEWHERE = "http://service.invalid:8001"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*HTTP_PROXIES, *(one.lower() for one in HTTP_PROXIES), "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "socksio", None)


def failed(url: str | None) -> set[str]:
    """Names of the checks that refuse a run on this service."""
    resolved = resolve_settings("arithmetic", None, ["inference.engine=scripted"])
    plan = plan_run(resolved, service_url=url)
    return {check.name for check in plan.checks if check.failure}


@pytest.mark.parametrize("name", [*HTTP_PROXIES, "all_proxy"])
def test_a_run_on_a_service_elsewhere_is_refused_for_a_proxy_that_the_sdk_cannot_ask(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "socks5://127.0.0.1:9")
    with pytest.raises(InvalidConfig) as refused:
        start_run(plan_run(resolve_settings("arithmetic", None, []), service_url=ELSEWHERE))
    assert refused.value.details["field"] == name
    assert not list((home / "runs").glob("*/run.json"))


def test_a_run_whose_service_is_here_needs_no_proxy(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    assert failed(None) == set()
    assert failed("http://127.0.0.1:1") == {"model present"}, "nothing answers there"


def test_a_wrong_variable_is_a_finding_of_the_plan(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan raises nothing, also where the machine cannot be looked at."""
    monkeypatch.setenv("HALTERES_DEVICE", "tpu")
    assert failed(None) == {"variables"}


def test_a_service_whose_address_has_a_login_is_refused_before_it_is_asked(home: Path) -> None:
    with pytest.raises(ServiceUnusable) as refused:
        start_run(
            plan_run(
                resolve_settings("arithmetic", None, []),
                service_url="http://any:s3cr3t-012@127.0.0.1:9",
            )
        )
    assert "s3cr3t" not in refused.value.sentence
    assert "s3cr3t" not in str(refused.value.details)


NO_CAGES = "This kernel has no user namespaces."


def caged(policy: str, *, is_foreign: bool = False) -> list[str]:
    """Why a run with this `env.cage` is refused."""
    resolved = resolve_settings("arithmetic", None, ["inference.engine=scripted"])
    settings = resolved.settings
    description = replace(
        resolved.description,
        config={**resolved.description.config, "cage": policy},
        is_foreign=is_foreign,
    )
    changed = settings.model_copy(update={"env": {**settings.env, "cage": policy}})
    plan = plan_run(replace(resolved, settings=changed, description=description))
    return [check.failure.sentence for check in plan.checks if check.failure]


def test_a_cage_that_the_machine_lacks_is_refused_by_what_is_missing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for a kernel without namespaces."""
    monkeypatch.setattr(checks, "cage_missing", lambda: NO_CAGES)
    (sentence,) = caged("on")
    assert "env.cage" in sentence and NO_CAGES in sentence
    assert [caged(policy) for policy in ("auto", "off")] == [[], []]


def test_a_cage_that_does_not_start_is_refused_before_the_run(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is started as the scorers would have it."""
    missing = cage_missing()
    if missing is not None:
        pytest.skip(missing)
    monkeypatch.setenv("HOME", "/")
    (sentence,) = caged("on")
    assert "does not start" in sentence and "set HOME" in sentence


def test_a_cage_is_refused_for_an_environment_of_atroposlibs(home: Path) -> None:
    (sentence,) = caged("on", is_foreign=True)
    assert "cannot be separated" in sentence
    assert caged("auto", is_foreign=True) == []


def test_more_tokens_than_the_model_reads_are_warned_of(home: Path) -> None:
    """The built-in model reads 2,048."""

    def warned(longest: int) -> list[str]:
        resolved = resolve_settings("arithmetic", None, [f"env.max_token_length={longest}"])
        return [one for one in plan_run(resolved).warnings if one.startswith("context:")]

    assert warned(2048) == []
    (warning,) = warned(4096)
    assert "4096 tokens, and the model reads 2048" in warning


GB = 10**9


@pytest.mark.parametrize(("free_gb", "is_ok"), [(8, True), (4, False)])
def test_where_a_gpu_trains_reward_models_and_a_critic_must_fit_beside_it(
    free_gb: int, is_ok: bool
) -> None:
    """They compute on the CPU, whose memory nothing else is looked at for."""
    card = resources.Gpu(name="any", memory=Memory(total=80 * GB, free=80 * GB))
    memory = Memory(total=16 * GB, free=free_gb * GB)
    here = replace(resources.this_machine("cpu"), gpu=card, memory=memory)
    shape = own_model(Settings().inference).shape
    settings = Settings()
    (found,) = checks.check_rewards_memory(settings, here, shape, 5 * GB)
    assert found.ok == is_ok
    if not is_ok:
        assert found.failure and "critic compute on the CPU" in found.failure.sentence
    assert not checks.check_rewards_memory(settings, here, shape, 0)
    assert not checks.check_rewards_memory(settings, replace(here, gpu=None), shape, 5 * GB)
