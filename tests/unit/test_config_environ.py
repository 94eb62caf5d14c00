"""Variables of the environment: read in one place, each misreading told with the variable's
name.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from halteres.config import environ
from halteres.errors import InvalidConfig
from halteres.redaction import Redactor


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("HALTERES_THREADS", "x", environ.threads),
        ("HALTERES_THREADS", "0", environ.threads),
        ("HALTERES_THREADS", "-1", environ.threads),
        ("HALTERES_LOG", "x", environ.log_level),
        ("HALTERES_LIFELINE_FD", "x", environ.lifeline_fd),
    ],
)
def test_a_variable_that_cannot_be_read_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, read: object
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidConfig, match=name):
        read()  # type: ignore[operator]


def test_variables_that_are_empty_or_in_small_letters_are_understood(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HALTERES_LOG", "debug")
    monkeypatch.setenv("HALTERES_THREADS", "")
    environ.check()
    assert environ.log_level() == "DEBUG"
    assert environ.threads() is None


@pytest.mark.parametrize(
    ("given", "exempt"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"no_proxy": "a.example, localhost"}, "a.example,localhost,127.0.0.1"),
        (
            {"NO_PROXY": "b.example", "no_proxy": "a.example"},
            "a.example,b.example,127.0.0.1,localhost",
        ),
        ({"NO_PROXY": "*"}, "*"),
    ],
)
def test_children_ask_no_proxy_for_loopback_and_keep_what_was_exempt(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], exempt: str
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    child = environ.for_child()
    assert child["no_proxy"] == child["NO_PROXY"] == exempt


@pytest.mark.parametrize("given", [None, "0", "1"])
def test_whether_a_hub_is_asked_is_left_to_the_user_of_an_environment(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    if given is not None:
        monkeypatch.setenv("HF_HUB_OFFLINE", given)
    assert {
        child.get("HF_HUB_OFFLINE") for child in (environ.for_child(), environ.for_sandboxed())
    } == {given}


@pytest.mark.parametrize(("given", "holds"), [(None, "1"), ("0", "0")])
def test_a_process_of_ours_asks_no_hub_unless_its_user_wants_it(
    monkeypatch: pytest.MonkeyPatch, given: str | None, holds: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", given or "")
    if given is None:
        monkeypatch.delenv("HF_HUB_OFFLINE")
    environ.stay_offline()
    assert environ.for_child()["HF_HUB_OFFLINE"] == holds


SECRETS = (
    "A_KEY",
    "DB_PASS",
    "DB_PASSWD",
    "MYSQL_PWD",
    "GITHUB_PAT",
    "SSH_PASSPHRASE",
    "PASSWD",
    "pat",
)
OPEN = ("PWD", "OLDPWD", "SSH_ASKPASS", "HERMES_COMPAT", "PATHS")


def test_what_is_named_like_a_secret_is_handed_to_nobody_and_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (*SECRETS, *OPEN):
        monkeypatch.setenv(name, f"value of {name}")
    child, known = environ.for_sandboxed(), environ.secrets()
    assert {name for name in SECRETS if name in child or known[name] != f"value of {name}"} == set()
    assert {name for name in OPEN if name not in child or name in known} == set()


def test_a_variable_that_is_held_back_is_a_secret_whatever_it_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environ, "_held_back", set[str]())
    monkeypatch.setenv("LETMEIN", "hunter2222")
    assert "LETMEIN" in environ.for_sandboxed()
    environ.hold_back(("LETMEIN",))
    for child in (environ.for_sandboxed(), environ.with_keys("OTHER"), environ.for_loopback()):
        assert "LETMEIN" not in child
    assert environ.for_loopback("LETMEIN")["LETMEIN"] == "hunter2222"
    assert Redactor.of_this_process().text("it said hunter2222") == "it said ***"


@pytest.mark.parametrize(
    ("name", "value", "handed", "secret"),
    [
        ("DATABASE_URL", "postgres://me:hunter22@db:5432/x", "postgres://db:5432/x", "hunter22"),
        ("HTTPS_PROXY", "http://me:p@ss:word@proxy:3128", "http://proxy:3128", "p@ss:word"),
        ("all_proxy", "me:hunter22@proxy:3128", "proxy:3128", "hunter22"),
        ("CACHE_DSN", "redis://:hunter22@cache/0", "redis://cache/0", "hunter22"),
        (
            "SOME_URL",
            "https://a.example:8000/x?mail=a@b.example",
            "https://a.example:8000/x?mail=a@b.example",
            None,
        ),
        ("SOME_PROXY", "http://proxy:3128", "http://proxy:3128", None),
        ("SOMETHING", "http://me:hunter22@proxy", "http://proxy", "hunter22"),
    ],
)
def test_an_address_is_handed_on_without_its_login(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, handed: str, secret: str | None
) -> None:
    monkeypatch.setenv(name, value)
    assert environ.for_sandboxed()[name] == handed
    assert environ.secrets().get(name) == secret
    assert (
        Redactor.of_this_process().text(f"to {value}")
        == f"to {value.replace(secret, '***') if secret else value}"
    )


def test_who_is_handed_a_key_may_pass_the_proxy_and_loopback_stays_exempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:hunter22@proxy:3128")
    monkeypatch.setenv("NO_PROXY", "a.example")
    monkeypatch.setenv("SOME_API_KEY", "k")
    keyed, other = environ.with_keys("SOME_API_KEY"), environ.with_keys()
    assert (keyed["HTTPS_PROXY"], keyed["SOME_API_KEY"]) == ("http://me:hunter22@proxy:3128", "k")
    assert (other["HTTPS_PROXY"], "SOME_API_KEY" in other) == ("http://proxy:3128", False)
    assert "127.0.0.1" in keyed["NO_PROXY"] and "127.0.0.1" in other["NO_PROXY"]


def test_a_process_with_a_bad_log_level_ends_with_one_sentence() -> None:
    code = "from halteres.process import begin; begin('api')"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=environ.for_child(HALTERES_LOG="loud"),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: The variable HALTERES_LOG is 'LOUD'.")
    assert len(ended.stderr.splitlines()) == 1


PROXIES = (
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "FTP_PROXY",
)


@pytest.fixture
def proxies(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets these variables of proxies, and no other."""

    def only(**variables: str) -> None:
        for name in (*PROXIES, "no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return only


def test_a_child_that_talks_to_this_machine_alone_gets_no_proxy(
    proxies: Callable[..., None],
) -> None:
    proxies(**dict.fromkeys(PROXIES, "socks5://proxy:1080"))
    child = environ.for_loopback("MY_KEY", HALTERES_X="1")
    assert not set(PROXIES) & child.keys()
    assert (child["HALTERES_X"], child["NO_PROXY"]) == ("1", "127.0.0.1,localhost")
    assert set(PROXIES) <= environ.for_sandboxed().keys()


def test_a_child_that_talks_to_this_machine_alone_may_have_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_KEY", "k")
    assert environ.for_loopback("MY_KEY")["MY_KEY"] == "k"
    assert "MY_KEY" not in environ.for_loopback()


def test_where_everything_is_exempt_no_child_gets_a_proxy(proxies: Callable[..., None]) -> None:
    """pyqwest 0.7, by which the SDK of tinker 0.38 sends, does not know the asterisk."""
    proxies(**dict.fromkeys(PROXIES, "http://me:hunter22@proxy:3128"), no_proxy="a.example, *")
    for child in (environ.for_child(), environ.for_sandboxed(), environ.with_keys("PATH")):
        assert not set(PROXIES) & child.keys()
        assert child["NO_PROXY"] == "*"


@pytest.mark.parametrize(
    ("name", "value", "is_usable"),
    [
        ("ALL_PROXY", "http://proxy:3128", True),
        ("all_proxy", "proxy:3128", True),
        ("HTTPS_PROXY", "https://me:hunter22@proxy", True),
        ("FTP_PROXY", "ftp://proxy", True),
        ("ALL_PROXY", "socks5://proxy:1080", False),
        ("http_proxy", "socks5h://proxy:1080", False),
        ("HTTPS_PROXY", "socks4://proxy:1080", False),
    ],
)
def test_a_proxy_that_the_sdk_cannot_ask_is_named(
    proxies: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    is_usable: bool,
) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)
    proxies(**{name: value})
    assert set(environ.unusable_proxies()) == (set() if is_usable else {name})
    if not is_usable:
        with pytest.raises(InvalidConfig) as refused:
            environ.check_proxies()
        assert refused.value.details["field"] == name
        monkeypatch.setenv("NO_PROXY", "*")
        environ.check_proxies()


@pytest.mark.parametrize(
    ("visible", "number", "shown"), [(None, 3, "3"), ("4,5", 1, "5"), ("GPU-ab", 0, "GPU-ab")]
)
def test_a_rank_sees_one_gpu_of_those_that_its_machine_gives(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, number: int, shown: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    environ.show_one_gpu(number)
    assert environ.for_child()["CUDA_VISIBLE_DEVICES"] == shown


def test_a_rank_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(InvalidConfig, match="The rank 2 of this machine has no GPU"):
        environ.show_one_gpu(2)
