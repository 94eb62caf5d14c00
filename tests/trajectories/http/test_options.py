"""What an operator may choose, and the sentence for what cannot be."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from halteres.errors import InvalidConfig
from halteres.trajectories.options import Options, Rules, num_bytes, options_of, parser
from halteres.trajectories.server import open_store
from halteres.trajectories.stores.sqlite import SqliteStore

TOKEN = "correct-horse-battery"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test here knows the user's own folder or token."""
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path))
    for name in ("HALTERES_TRAJECTORY_TOKEN", "HALTERES_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def given(*words: str) -> Options:
    """The options of a command line."""
    return options_of(parser().parse_args(words))


def test_a_server_that_is_told_nothing_has_the_defaults(home: Path) -> None:
    options = given()
    assert options == Options()
    assert options.rules == Rules()
    assert options.database == str(home / "trajectories.sqlite")
    assert (options.host, options.port, options.token) == ("127.0.0.1", 8000, None)


def test_the_database_may_be_named_by_a_variable_which_other_users_cannot_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A password in a command line is every user's of the machine; a flag goes before the
    variable.
    """
    monkeypatch.setenv("HALTERES_DATABASE_URL", "postgresql://me:hunter22@db/queue")
    assert given().database == "postgresql://me:hunter22@db/queue"
    assert given("--database", "postgresql://queue").database == "postgresql://queue"


def test_every_flag_reaches_its_option() -> None:
    options = given(
        *(
            "--database",
            "postgresql://queue",
            "--host",
            "0.0.0.0",
            "--port",
            "0",
            "--listen-fd",
            "7",
        ),
        *("--durability", "power", "--insecure", "--gzip", "never", "--max-body", "1M"),
        *(
            "--allow-host",
            "GPU7.lan",
            "--allow-host",
            "b",
            "--validate",
            "strict",
            "--composition",
            "weighted",
        ),
        *(
            "--max-staleness",
            "2",
            "--require-version",
            "--env-timeout",
            "9.5",
            "--min-alloc-patience",
            "3",
        ),
        *("--max-queue-batches", "4", "--max-queue-bytes", "2G", "--same-content-window", "30"),
    )
    assert options == Options(
        database="postgresql://queue",
        host="0.0.0.0",
        port=0,
        listen_fd=7,
        durability="power",
        insecure=True,
        gzip="never",
        max_body=1024**2,
        allowed_hosts=frozenset({"gpu7.lan", "b"}),
        rules=Rules(
            validation="strict",
            composition="weighted",
            max_staleness=2,
            require_version=True,
            env_timeout_s=9.5,
            min_share_patience_s=3.0,
            max_queue_batches=4,
            max_queue_bytes=2 * 1024**3,
            same_content_s=30.0,
        ),
    )
    assert all(getattr(options.rules, field.name) != field.default for field in fields(Rules)), (
        "a rule without a flag"
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [("7", 7), ("64k", 65536), ("64K", 65536), ("2M", 2**21), ("1GiB", 2**30), ("1 TB", 2**40)],
)
def test_bytes_have_suffixes(text: str, number: int) -> None:
    assert num_bytes(text) == number


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5G", "3x", "1e9", "9" * 20 + "q"])
def test_what_is_no_number_of_bytes_is_said(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no number of bytes"):
        num_bytes(text)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--port", "65536"), "--port is 65536. It must be from 0 to 65535."),
        (("--port", "-1"), "--port is -1."),
        (("--max-body", "10"), "--max-body is 10."),
        (("--max-staleness", "-1"), "--max-staleness is -1."),
        (("--env-timeout", "0"), "--env-timeout is 0."),
        (("--env-timeout", "nan"), "--env-timeout is nan."),
        (("--same-content-window", "inf"), "--same-content-window is inf."),
        (("--min-alloc-patience", "-2"), "--min-alloc-patience is -2."),
        (("--max-queue-batches", "0"), "--max-queue-batches is 0. It must be from 1 to"),
        (("--max-queue-bytes", "5k"), "--max-queue-bytes is 5120. It must be at least 1048576."),
        (
            ("--allow-host", "http://gpu7.lan"),
            "--allow-host 'http://gpu7.lan' is no name of a host.",
        ),
        (("--allow-host", "gpu7:8000"), "no port"),
        (
            ("--token-file", "/no/such"),
            "The token's file /no/such cannot be read. No such file or directory.",
        ),
    ],
)
def test_a_value_out_of_bounds_is_one_sentence(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        given(*words)
    assert says in refused.value.sentence


def test_the_token_comes_from_a_file_or_a_variable_never_from_an_argument(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HALTERES_TRAJECTORY_TOKEN", TOKEN + "1")
    assert given().token == TOKEN + "1"
    (home / "token").write_text(f"{TOKEN}2\n")
    options = given("--token-file", str(home / "token"))
    assert options.token == TOKEN + "2"
    assert TOKEN not in repr(options)
    with pytest.raises(SystemExit):
        given("--token", TOKEN)
    assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [b"", b"short", b"two words in a token file", b"\xff" * 20, "ü".encode() * 20]
)
def test_a_token_that_cannot_be_used_is_refused_and_not_shown(home: Path, content: bytes) -> None:
    (home / "token").write_bytes(content)
    with pytest.raises(InvalidConfig, match=r"token") as refused:
        given("--token-file", str(home / "token"))
    assert not content or content.decode("latin-1") not in refused.value.sentence


def test_a_file_is_a_sqlite_database_made_with_its_folder(home: Path) -> None:
    store = open_store(Options(database=str(home / "new" / "queue.sqlite"), durability="power"))
    assert isinstance(store, SqliteStore)
    store.close()
    assert (home / "new" / "queue.sqlite").exists()


def test_without_psycopg_a_postgres_queue_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        name for name in sys.modules if "stores.postgres" in name or name.split(".")[0] == "psycopg"
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(InvalidConfig) as refused:
        open_store(Options(database="postgresql://x:secret@127.0.0.1:1/queue"))
    assert "pip install 'halteres[postgres]'" in refused.value.sentence
    assert "secret" not in refused.value.sentence
