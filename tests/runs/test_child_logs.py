"""What a child prints reaches its log without secrets, however it is cut, and nobody waits for
it.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from halteres.config import environ
from halteres.files import tail
from halteres.process import Child, Lifeline, start_time
from halteres.redaction import Redactor
from halteres.runs import directory
from halteres.runs.supervision import run_processes
from halteres.runs.supervision.run_processes import SecretFilter, spawn

SECRETS = ["sk-0123456789", "sk-01234", "34-abcdef", "b\nc\nd\ne", "schlüssel"]


def strained(stream: bytes, cuts: list[int], secrets: list[str] = SECRETS) -> bytes:
    secret_filter = SecretFilter(secrets)
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    return b"".join(secret_filter.through(piece) for piece in pieces) + secret_filter.rest()


@pytest.mark.parametrize("seed", range(40))
def test_a_stream_is_struck_alike_however_it_is_cut(seed: int) -> None:
    """Secrets that overlap, begin like one another, hold line ends or letters of two bytes; among
    bytes of no text.
    """
    draw = random.Random(seed)
    parts = [
        *SECRETS,
        *(secret[: len(secret) // 2] for secret in SECRETS),
        "sk-01234-abcdef",
        "\n",
        "x",
        "k=",
        "\udcff",
    ]
    text = "".join(draw.choice(parts) for _ in range(60))
    stream = os.fsencode(text)
    whole = os.fsencode(Redactor(SECRETS).text(text))
    for pieces in (1, 7, len(stream)):
        cuts = sorted(draw.sample(range(1, len(stream)), pieces - 1))
        assert strained(stream, cuts) == whole


def test_what_is_held_back_is_less_than_a_secret_and_only_the_beginning_of_one() -> None:
    secret_filter = SecretFilter(["tok-1234567890"])
    assert secret_filter.through(b"x" * 1_000_000 + b"tok-12345") == b"x" * 1_000_000
    assert secret_filter.through(b"!\n") == b"tok-12345!\n"
    assert secret_filter.through(b"step 3 to") == b"step 3 "
    assert secret_filter.rest() == b"to"


@pytest.mark.parametrize("seed", range(20))
def test_logins_are_struck_out_of_a_stream_alike_however_it_is_cut(seed: int) -> None:
    draw = random.Random(seed)
    words = (
        *SECRETS,
        "http://any:k3y@h:80/x",
        "'redis://:schlüssel@c/0'",
        "http://h:80",
        "12:30",
        "://",
        "a@b",
        "x:",
    )
    text = " ".join(draw.choice(words) for _ in range(40))
    stream = os.fsencode(text)
    whole = os.fsencode(Redactor(SECRETS).text(text))
    assert b"k3y" not in whole
    for pieces in (1, 7, len(stream)):
        assert strained(stream, sorted(draw.sample(range(1, len(stream)), pieces - 1))) == whole


def test_the_login_of_an_address_is_struck_out_however_late_its_end_comes() -> None:
    secret_filter = SecretFilter(["tok-1234567890"])
    assert secret_filter.through(b"asking http://any:pass") == b"asking http"
    assert secret_filter.through(b"word@h") == b""
    assert secret_filter.through(b":80 \n") == b"://any:***@h:80 \n"
    assert (
        secret_filter.through(b"x" + b"://" + b"y" * 1_000_000) == b"x" + b"://" + b"y" * 1_000_000
    )


def test_what_is_too_short_to_be_a_secret_stays_and_a_login_does_not() -> None:
    secret_filter = SecretFilter(["x", "", "short"])
    assert secret_filter.through(b"x is short ") + secret_filter.rest() == b"x is short "
    long = b"K" * 1500
    stream = b"see http://any:" + long + b"@h now"
    assert (
        secret_filter.through(stream[:700])
        + secret_filter.through(stream[700:])
        + (secret_filter.rest())
        == b"see http://any:***@h now"
    )


@contextmanager
def lifeline() -> Iterator[Lifeline]:
    line = Lifeline.open()
    try:
        yield line
    finally:
        line.close()


async def run(
    folder: Path, code: str, log: Path | None = None, keys: tuple[str, ...] = ()
) -> Child:
    """A child that has ended."""
    with lifeline() as line:
        async with asyncio.timeout(20):
            command = (sys.executable, "-c", code)
            child = spawn(
                command, log=log or folder / "log", folder=folder, lifeline=line, keys=keys
            )
            await asyncio.wrap_future(child.exit)
            return child


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MY_TOKEN", "tok-1234567890")
    return "tok-1234567890"


async def test_a_childs_last_words_are_in_its_log_when_its_end_is_told(
    tmp_path: Path, secret: str
) -> None:
    code = (
        f"import os; os.write(1, b'\\xff {secret[:5]}'); os.write(2, b'{secret[5:]}'); "
        "os.kill(os.getpid(), 9)"
    )
    child = await run(tmp_path, code)
    assert child.exit_code == -signal.SIGKILL
    assert (tmp_path / "log").read_bytes() == b"\xff ***"


async def test_both_outputs_are_in_the_order_in_which_they_were_written(
    tmp_path: Path, secret: str
) -> None:
    code = "import os\nfor i in range(2000): os.write(1 + i % 2, b'%d\\n' % i)"
    await run(tmp_path, code)
    assert (tmp_path / "log").read_text().split() == [str(number) for number in range(2000)]


async def test_a_full_disk_makes_no_child_wait_or_fail(tmp_path: Path, secret: str) -> None:
    child = await run(
        tmp_path, "import sys; sys.stdout.write('x' * 3_000_000)", log=Path("/dev/full")
    )
    assert child.exit_code == 0


async def test_whoever_holds_the_output_open_does_not_delay_the_news_of_the_end(
    tmp_path: Path, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_processes, "EMPTIED_WITHIN_S", 0.05)
    code = (
        "import subprocess, sys; daemon = subprocess.Popen([sys.executable, '-c', 'import signal; "
        "signal.pause()'],"
        " start_new_session=True); print(daemon.pid)"
    )
    child = await run(tmp_path, code)
    daemon = int((tmp_path / "log").read_text())
    assert child.exit_code == 0 and start_time(daemon) is not None
    os.kill(daemon, signal.SIGKILL)


async def test_without_a_secret_logins_in_a_childs_words_are_struck_out_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in environ.secrets():
        monkeypatch.delenv(name)
    await run(tmp_path, "print('see http://any:KEYKEYKEY@h')")
    assert (tmp_path / "log").read_text(encoding="utf-8").strip() == "see http://any:***@h"


def test_a_log_that_grows_without_end_is_cut_while_its_run_goes_on_and_keeps_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "LOG_BYTES", 100_000)
    monkeypatch.setattr(directory, "KEPT_BYTES", 20_000)
    log = tmp_path / "env.log"
    with log.open("ab", buffering=0) as child:  # as a child has it
        child.write(b"".join(b"line %d\n" % number for number in range(20_000)))
        directory.cut_logs(tmp_path)
        assert log.stat().st_size < 30_000
        child.write(b"the last\n")
    first, second, *_, newest, last = log.read_text().splitlines()
    assert "cut" in first and second.startswith("line ")
    assert (newest, last) == ("line 19999", "the last")
    assert tail(log, 1, since=10**9) == ["the last"]


async def test_a_child_is_given_the_secrets_that_are_named_and_no_other(
    tmp_path: Path, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-1234567890")
    monkeypatch.setenv("HARMLESS", "here")
    code = (
        "import os; print([os.environ.get(n, '') and n for n in ('MY_TOKEN', 'TINKER_API_KEY', "
        "'HARMLESS')])"
    )
    await run(tmp_path, code, keys=("TINKER_API_KEY",))
    assert (tmp_path / "log").read_text() == "['', 'TINKER_API_KEY', 'HARMLESS']\n"


async def test_what_a_process_of_ours_logs_itself_holds_no_secret_of_its_own(
    tmp_path: Path, secret: str
) -> None:
    """Also where nobody strains it, as when a supervisor writes its own log; tracebacks
    included.
    """
    code = (
        "import logging, sys; from halteres.process import begin; begin('test'); "
        "sys.stderr.write('raw ')\n"
        f"try: raise RuntimeError('{secret}')\n"
        f"except RuntimeError: logging.exception('key=%s', '{secret}')"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert b"key=***" in said and b"RuntimeError: ***" in said
    assert secret.encode() not in said
