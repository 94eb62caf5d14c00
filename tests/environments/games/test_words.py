"""The words of the word games."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from halteres.environments.games import make
from halteres.environments.games.word_games import load_words
from halteres.errors import InvalidConfig, InvalidData


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Some names, and words of 3 letters alone."""
    file = tmp_path / "words.txt"
    file.write_text("Ada\nelk\nfir\n\noak\nB2B\n")
    return file


def test_the_bundled_words_are_many_lower_case_and_each_there_once() -> None:
    words = load_words()
    lengths = Counter(map(len, words.full))
    assert set(lengths) == set(range(3, 11))
    assert all(lengths[length] >= 250 for length in range(3, 8))
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words.full)
    assert len(set(words.full)) == len(words.full)
    assert words.full[: len(words.basic)] == words.basic
    assert {len(word) for word in words.basic} == set(range(3, 8))


def test_a_task_names_the_hash_of_its_words(file: Path) -> None:
    bundled, other = make("game:Wordle-v0-easy"), make("game:Wordle-v0-easy", words=file)
    assert bundled.task.parameters["words_sha256"] == load_words().sha256
    assert (
        other.task.parameters["words_sha256"]
        == hashlib.sha256(b"Ada\nelk\nfir\noak\nB2B").hexdigest()
    )
    assert json.loads(json.dumps(other.save.__self__.task.parameters)) == dict(
        other.task.parameters
    )


def test_a_list_of_ones_own_is_played_with_and_spawned(file: Path) -> None:
    game = make("game:Wordle-v0-easy", words=file)
    secrets: set[str] = set()
    for seed in range(20):
        game.reset(seed)
        secrets.add(game.save()["state"]["secret"])
    assert secrets == {"ELK", "FIR", "OAK"}
    assert game.spawn(same_state=True).random_action(random.Random(1)) == game.random_action(
        random.Random(1)
    )


def test_another_list_than_the_task_names_is_refused(file: Path) -> None:
    with pytest.raises(InvalidConfig, match="words_sha256 is 0000"):
        make("game:Hangman-v0-easy", words=file, words_sha256="0000")
    bundled, other = make("game:Hangman-v0-easy"), make("game:Hangman-v0-easy", words=file)
    bundled.reset(1)
    with pytest.raises(InvalidData):
        other.restore(bundled.save())


def test_a_list_without_words_of_the_length_says_so(file: Path) -> None:
    with pytest.raises(InvalidConfig, match="has no word of 7 letters"):
        make("game:Hangman-v0-hard", words=file).reset(1)


def test_a_file_that_holds_no_words_is_refused(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n\n")
    binary.write_bytes(b"\xff\xfe\x00")
    for file, why in (
        (empty, "is empty"),
        (binary, "cannot be read"),
        (tmp_path / "none", "cannot be read"),
    ):
        with pytest.raises(InvalidConfig, match=why):
            make("game:WordSearch-v0-easy", words=file)
