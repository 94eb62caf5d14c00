"""docs/compatibility.md cannot go stale silently: its names are those of the SDK, the manifest and
the versions.
"""

from __future__ import annotations

import re
from importlib.metadata import version

from clients.sdk.runs import VERSIONS

from .methods import ARGUMENTS, IN_THE_CLIENT, base_of, public_methods
from .page import HEAD, PAGE, rendered
from .probing import Row, sentence

TEXT = PAGE.read_text()


def section(text: str, title: str) -> str:
    """What stands under a heading."""
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_every_public_method_of_the_installed_sdk_has_a_row_in_order() -> None:
    named = re.findall(r"^\| `(\w+\.\w+)` \|", section(TEXT, "Public methods"), re.MULTILINE)
    assert named == public_methods(), "run `make compatibility`"


def test_no_row_is_empty_handed() -> None:
    """A refusal comes with its sentence; nothing else has one."""
    for outcome, says in re.findall(r"^\| `\w+\.\w+` \| ([a-z ]+) \| (.*) \|$", TEXT, re.MULTILINE):
        assert outcome in {"works", "refused", "in the client"}
        assert bool(says) == (outcome == "refused")


def test_the_versions_are_those_that_the_tests_drive() -> None:
    assert (
        tuple(re.findall(r"^\| ([\d.]+) \| \d+ \|", section(TEXT, "SDK versions"), re.MULTILINE))
        == VERSIONS
    )


def test_the_manifest_and_the_head_are_as_the_generator_writes_them() -> None:
    fresh = rendered([], [], version("tinker"))
    assert TEXT.startswith(HEAD.format(sdk=version("tinker")))
    assert section(TEXT, "What the protocol demands") == section(fresh, "What the protocol demands")


def test_arguments_are_known_for_every_method_and_for_no_other() -> None:
    assert {base_of(method) for method in public_methods()} == ARGUMENTS.keys() | IN_THE_CLIENT
    assert not ARGUMENTS.keys() & IN_THE_CLIENT


def test_a_sentence_is_the_same_on_every_machine() -> None:
    detail = (
        "There is no 'page-0a1b2c3d' of 01234567-89ab-cdef-0123-456789abcdef:train:3 in "
        "/home/me/models. Do."
    )
    assert (
        sentence(f"Error code: 404 - {{'detail': \"{detail}\", 'code': 'a'}}")
        == "There is no 'page-…' of … in /…. Do."
    )
    assert sentence("Request failed: No | way. for self.request_id='12' and more") == "No / way."
    assert Row("RestClient.whoami", "refused", sentence("plain\n words")).says == "plain words"
