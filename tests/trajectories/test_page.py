"""docs/trajectories.md: its examples, run from top to bottom, answer what the page says; its
options are all there.
"""

from __future__ import annotations

import http.client
import json
import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from halteres.trajectories.options import parser

from .server_fixtures import ServerProcess

PAGE = (Path(__file__).parents[2] / "docs" / "trajectories.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(
    r"^```(sh|json)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE
)

MARK = "…"


def requests(block: str) -> list[list[str]]:
    """The words of each `curl` of a block; a quoted body may have several lines."""
    words = shlex.split(block, comments=True)
    starts = [at for at, word in enumerate(words) if word == "curl"]
    return [
        words[at:end]
        for at, end in zip(starts, [*starts[1:], len(words)][: len(starts)], strict=True)
    ]


def asked(server: ServerProcess, words: list[str]) -> Any:
    """What `curl -s [-X METHOD] [-H HEADER] [-d BODY] URL` prints."""
    method, headers, body, url = "GET", {}, None, ""
    left = iter(words[1:])
    for word in left:
        match word:
            case "-s":
                pass
            case "-X":
                method = next(left)
            case "-H":
                name, _, value = next(left).partition(": ")
                headers[name] = value
            case "-d":
                method, body = "POST", next(left)
            case _:
                url = word
    parts, place = urlsplit(url), urlsplit(server.url)
    assert parts.netloc == "127.0.0.1:8000", url
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=10)
    try:
        connection.request(
            method, parts.path + (f"?{parts.query}" if parts.query else ""), body, headers
        )
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def check(told: Any, answer: Any, where: str) -> None:
    """The page shows the answer: numbers with a fraction, and uuids, as numbers; the rest as it is.
    Keys are left out only where it has the mark `…`.
    """
    match told:
        case dict():
            assert isinstance(answer, dict), where
            shown = {name: value for name, value in told.items() if name != MARK}
            assert (
                shown.keys() <= answer.keys() if MARK in told else shown.keys() == answer.keys()
            ), f"{where}: {answer}"
            for name, value in shown.items():
                check(value, answer[name], f"{where}.{name}")
        case list():
            assert isinstance(answer, list) and len(answer) == len(told), f"{where}: {answer}"
            for at, value in enumerate(told):
                check(value, answer[at], f"{where}[{at}]")
        case float():
            assert isinstance(answer, float | int), f"{where}: {answer}"
        case _ if where.endswith((".uuid", "_bytes")):
            assert isinstance(answer, int), f"{where}: {answer}"
        case _:
            assert answer == told, f"{where}: {answer}"


def test_the_examples_answer_what_the_page_says(server: ServerProcess) -> None:
    answers: list[Any] = []
    num_checked = 0
    for kind, block in BLOCKS:
        if kind == "sh":
            answers += [asked(server, words) for words in requests(block)]
            continue
        decoder, text = json.JSONDecoder(), block.strip().replace(MARK, f'"{MARK}": 0')
        for at, answer in enumerate(answers):
            told, end = decoder.raw_decode(text)
            text = text[end:].lstrip()
            check(told, answer, f"answer {at}")
            num_checked += 1
        assert not text, "an answer without a question"
        answers = []
    assert num_checked >= 15 and not answers


OPTIONS = PAGE[PAGE.index("## Options") : PAGE.index("## What is promised")]
FLAGS = sorted(set(re.findall(r"--[a-z][a-z-]+", parser().format_usage())))


@pytest.mark.parametrize("flag", FLAGS)
def test_every_option_is_in_the_table(flag: str) -> None:
    assert re.search(rf"^\|[^|]*`{flag}\b", OPTIONS, re.MULTILINE), flag


def test_the_table_has_no_other_options() -> None:
    named = re.findall(
        r"`(--[a-z-]+)", "".join(re.findall(r"^\| (`--.*?) \|", OPTIONS, re.MULTILINE))
    )
    assert named and set(named) <= set(FLAGS)
