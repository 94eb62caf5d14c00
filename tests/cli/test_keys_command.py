"""`halteres keys`, and what `halteres serve` makes of its options."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from contract.requirements import proves

from halteres.service.keys import Keys

pytestmark = pytest.mark.runs

Program = Callable[..., subprocess.CompletedProcess[str]]


@proves("keys:hashed")
def test_a_key_is_made_shown_once_listed_without_itself_and_revoked(
    halteres: Program, tmp_path: Path
) -> None:
    made = halteres(
        "keys", "create", "alice", "--tenant", "team", "--note", "her laptop", "--expires", "30d"
    )
    assert made.returncode == 0, made.stderr
    key = made.stdout.strip()
    state = tmp_path / "service"
    assert Keys(state).tenant(key) == "team"
    assert (str(state / "keys.json") in made.stderr, key in made.stderr) == (True, False)

    listed = halteres("keys", "list")
    told = json.loads(halteres("keys", "list", "--json").stdout)["keys"]
    assert [(one["name"], one["tenant"], one["note"], one["state"]) for one in told] == [
        ("alice", "team", "her laptop", "valid")
    ]
    assert told[0]["expires_at"] == pytest.approx(told[0]["created_at"] + 30 * 86400)
    assert "sha256" not in told[0]
    for text in (told[0]["id"], "alice", "team", "valid", "until", "her laptop"):
        assert text in listed.stdout
    assert key not in listed.stdout

    ended = halteres("keys", "revoke", told[0]["id"])
    assert (ended.returncode, "is revoked" in ended.stdout) == (0, True)
    assert "revoked" in halteres("keys", "list").stdout


def test_a_note_of_several_lines_stays_in_its_row(halteres: Program) -> None:
    assert halteres("keys", "create", "alice", "--note", "one\ntwo\x1b[31m").returncode == 0
    listed = halteres("keys", "list").stdout
    header, row = listed.splitlines()
    assert (header.startswith("id "), "one two [31m" in row) == (True, True)


def test_the_state_of_another_service_has_keys_of_its_own(
    halteres: Program, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    key = halteres("keys", "create", "bob", "--state", str(other)).stdout.strip()
    assert Keys(other).tenant(key) == "bob"
    assert "No key was made" in halteres("keys", "list").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("create", "a b"), "cannot name a tenant or a key"),
        (("create", "a", "--expires", "soon"), "12h, 30d or 8w"),
        (("create", "a", "--expires", ""), "'' is no lifetime"),
        (("revoke", "nothing"), "There is no key 'nothing'."),
    ],
)
def test_what_cannot_be_is_one_sentence(
    halteres: Program, arguments: tuple[str, ...], says: str
) -> None:
    ended = halteres("keys", *arguments)
    assert (ended.returncode, says in ended.stderr, ended.stdout) == (1, True, "")
    assert ended.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--host", "192.0.2.1"), "halteres keys create NAME"),
        (("--limit", "models=3", "--limit", "rnak=3"), "Did you mean 'rank'?"),
        (("--certificate", "chain.pem"), "come together"),
        (("--host", "192.0.2.1", "--require-keys"), "cannot be used"),
    ],
)
def test_options_of_serve_reach_the_service(
    halteres: Program, arguments: tuple[str, ...], says: str
) -> None:
    ended = halteres("serve", "--engine", "scripted", "--port", "0", *arguments)
    assert ended.returncode == 1
    assert says in ended.stderr


def test_a_kind_of_log_probabilities_that_is_none_is_refused(halteres: Program) -> None:
    ended = halteres("serve", "--engine", "scripted", "--port", "0", "--sample-logprobs", "cooked")
    assert ended.returncode == 2
    assert "'raw', 'tempered'" in ended.stderr
