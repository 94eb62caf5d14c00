"""Logins within addresses: found in any text, and put back where their owner has them."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from halteres.clients.trajectories.address import Address
from halteres.errors import HalteresError, InvalidConfig, as_answer, as_failure, as_http
from halteres.logins import (
    is_place,
    is_struck,
    is_web_address,
    passwords_in,
    refused,
    restored,
    unfinished_login,
    without_logins,
    without_logins_in,
)

KEY = "s3cr3t-0123"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"http://any:{KEY}@h:8002/v1", "http://any:***@h:8002/v1"),
        (f"HTTPS://any:{KEY}@h", "HTTPS://any:***@h"),
        (f"no answer from 'http://any:{KEY}@h'.", "no answer from 'http://any:***@h'."),
        (f"http://a:{KEY}@h1,http://b:{KEY}@h2", "http://a:***@h1,http://b:***@h2"),
        (f"https://{KEY}@sentry.example/1", "https://***@sentry.example/1"),
        (f"redis://:{KEY}@cache/0", "redis://:***@cache/0"),
        (f"http://me@work.example:{KEY}@proxy", "http://***@proxy"),
        (f"http://any:a@b{KEY}@h", "http://any:***@h"),
        (f"http://any:{KEY}/not?quoted#at-all@h:1/x", "http://any:***@h:1/x"),
        (f"/home/me/http:/any:{KEY}@h", "/home/me/http:/any:***@h"),
        (
            f'{{"url": "http://any:{KEY}@h", "to": "a@b"}}',
            '{"url": "http://any:***@h", "to": "a@b"}',
        ),
        ("http://any:***@h", "http://any:***@h"),
        (f"http://any:{KEY}\\@h", "http://any:***@h"),
        (f"http://any:{KEY} 1@h", "http://any:***@h"),
        (f"http:///any:{KEY}@h", "http:///any:***@h"),
        (f"http:\\\\any:{KEY}@h", "http:\\\\any:***@h"),
        (f"http:any:{KEY}@h", "http:any:***@h"),
        (f"HTTP:any:{KEY}@h", "HTTP:any:***@h"),
        (f"'//any:{KEY}@h'", "'//any:***@h'"),
        (f"There is no file any:{KEY}@h:9.", "There is no file any:***@h:9."),
        (f"any:{KEY}@h.example/v1", "any:***@h.example/v1"),
    ],
)
def test_a_password_is_struck_out_of_an_address_wherever_it_stands(text: str, shown: str) -> None:
    assert without_logins(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "https://a.example:8000/x?mail=a@b.example",
        "https://medium.example/@me",
        "http://[::1]:8000/x@y",
        "http://h:80 a@b",
        "see http://host: then a@b",
        'http://h:80","b@c',
        "C:/me@work",
        "12:30 a@b",
        "http://h:8000. Mail a@b",
        "mailto:me@work.example",
        "image:tag@sha256:9f0c",
        "git@work.example:a/b",
        '{"url": "http://any:x", "to": "a@b"}',
    ],
)
def test_what_is_no_login_stays(text: str) -> None:
    assert without_logins(text) == text
    assert list(passwords_in(text)) == []


def test_a_password_is_known_as_it_stands_and_as_a_server_repeats_it() -> None:
    assert set(passwords_in([{"url": "http://any:a%40b@h"}])) == {"a%40b", "a@b"}


WITHIN_S = 20.0
"""Of processor time; 4 s were measured, and minutes where a password may be of any length."""


@pytest.mark.parametrize(
    "text",
    [
        "://" * 50_000,
        "://a:" + "b/" * 50_000,
        "http://a:b/" * 20_000,
        ":/a:b" * 50_000,
        "a:!" * 200_000,
        "http:a:!" * 50_000,
        "http://a:b " * 50_000,
        "//a:b!" * 50_000,
    ],
)
def test_a_long_text_is_searched_in_time_that_grows_with_its_length(text: str) -> None:
    begun = time.process_time()
    assert without_logins(f"{text} @") == f"{text} @"
    assert time.process_time() - begun < WITHIN_S


MISTYPED = [
    f"http://any:{KEY}\\@h",
    f"http://any:{KEY} 1@h",
    f'http://any:{KEY}"1@h',
    f"http://any:{KEY}'1 2\"@h",
    f"http://any:{KEY}@1@h",
    f"http://any:{KEY}/1@h",
    f"http://any:1/{KEY}@h",
    f"http:///any:{KEY}@h",
    f"http:/any:{KEY}@h",
    f"http:any:{KEY}@h",
    f"HTTP://any:{KEY}@h",
    f"//any:{KEY}@h",
    f"any:{KEY}@h",
    f"any:{KEY}@h:9",
    f"http://any:{KEY}@h:port",
    f"http://any:{KEY}@h:70000",
    f"http://any:{KEY}@h\n",
    f"http://any:{KEY}@",
]


@pytest.mark.parametrize("text", MISTYPED)
def test_what_is_no_address_is_none_and_is_quoted_without_its_login(text: str) -> None:
    assert not is_web_address(text) and not is_place(text)
    assert KEY not in refused(text)
    assert KEY not in refused(f"[{{name: a, model: {text!r}}}]")
    with pytest.raises(InvalidConfig) as error:
        Address.of(text)
    assert KEY not in shown_in_any_way(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "http://h",
        "https://h.example:8000/api/v1/",
        f"http://any:{KEY}@127.0.0.1:9/runs/1/v1",
        "http://any:a%40b@[::1]:80",
    ],
)
def test_an_address_is_taken_as_it_is(text: str) -> None:
    assert is_web_address(text) and is_place(text)
    assert is_place("models/a") and is_place("/models/a@b") and is_place("~/a") and is_place("./a")


SETTINGS: dict[str, Any] = {
    "model": f"/models/a,http://any:{KEY}@h",
    "rewards": [
        {"name": "r", "model": f"http://any:{KEY}@h1"},
        {"judge": {"base_url": f"http://b:{KEY}2@h1/v1"}},
    ],
    "as_text": f"[{{model: 'http://any:{KEY}@h'}}]",
    "seed": 7,
}


def test_what_was_struck_out_is_put_back_from_the_same_place() -> None:
    shown = without_logins_in(SETTINGS)
    assert KEY not in str(shown)
    assert restored(shown, SETTINGS) == SETTINGS
    own = {**SETTINGS, "model": f"http://run:1@127.0.0.1:1/a,http://any:{KEY}@h"}
    assert restored(shown, own) == SETTINGS, (
        "of a folder, a running server's address takes the place"
    )
    assert restored({"judge_key": "***"}, {"judge_key": KEY}) == {"judge_key": KEY}


def test_what_was_struck_out_stays_so_where_its_owner_has_something_else() -> None:
    shown = without_logins_in(SETTINGS)
    for source in (
        {},
        {"model": "x", "rewards": [], "as_text": 1},
        {"model": f"http://any:{KEY}@another"},
    ):
        assert restored(shown, source) == shown


def test_a_value_that_was_copied_from_an_answer_is_known_as_one() -> None:
    assert is_struck({"a": ["http://any:***@h"]}) and is_struck("***")
    assert not is_struck({"a": [f"http://any:{KEY}@h"]}) and not is_struck("2 *** 3")


@pytest.mark.parametrize("seed", range(20))
def test_a_stream_is_cut_before_an_address_that_may_go_on(seed: int) -> None:
    draw = random.Random(seed)
    text = f"see http://any:{KEY}@h:80/v1 and 'https://b:{KEY}@h', at 12:30\n"
    at = draw.randrange(len(text))
    cut = unfinished_login(text[:at])
    assert KEY not in without_logins(text[:cut]) + without_logins(text[cut:])


def shown_in_any_way(error: HalteresError) -> str:
    return (
        f"{error} {error.sentence} {error.args} {as_answer(error)} {as_http(error)} "
        f"{as_failure(error)}"
    )


def test_no_error_shows_a_login_however_it_is_shown() -> None:
    address = f"http://any:{KEY}@h"
    error = InvalidConfig(
        f"{address} is none.", f"{address}.", f"Not {address}.", got=[address], problems=[SETTINGS]
    )
    assert KEY not in shown_in_any_way(error)
    error.why = address
    assert KEY not in shown_in_any_way(error)
