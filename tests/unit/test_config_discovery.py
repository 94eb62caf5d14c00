"""Finding environments without running them."""

from __future__ import annotations

from pathlib import Path

import pytest

from halteres.config import discovery
from halteres.config.discovery import EnvironmentBroken, discover, find_environment
from halteres.errors import NotFound

PLAIN = '''"""A module."""
from halteres.environments.base import BaseEnv

class Chess(BaseEnv):
    """Plays chess.

    More about it.
    """
'''

INDIRECT = """
import halteres.environments.single_turn as st
from halteres.environments.base import BaseEnv as Root
Kept = Root

class Middle(Kept):
    pass

class Leaf(Middle):
    name: str = "leafy"

class Aside(st.SingleTurnEnv):
    name = "aside"

if __name__ == "__main__":
    Leaf.cli()
"""


BUILT_IN = {
    "agent",
    "arithmetic",
    "game",
    "gsm8k",
    "judge_pairs",
    "reasoning_gym",
    "text_gym",
    "word_problems",
}


def folder(tmp_path: Path, **files: str) -> Path:
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def test_the_built_in_environment_is_found_by_name() -> None:
    found = find_environment("arithmetic")
    assert (found.class_name, Path(found.file_path).name) == ("ArithmeticEnv", "arithmetic.py")
    assert found.description.startswith("Easy arithmetic")


def test_the_framework_itself_is_no_environment() -> None:
    assert {environment.name for environment in discover().environments} == BUILT_IN
    assert discover().broken == ()


def test_name_and_description_fall_back_to_the_file_and_the_docstring(tmp_path: Path) -> None:
    found = find_environment("chess", [folder(tmp_path, chess=PLAIN)])
    assert (found.name, found.class_name, found.description) == ("chess", "Chess", "Plays chess.")
    assert found.file_path == str(tmp_path / "chess.py")
    bare = find_environment("bare", [folder(tmp_path, bare="class A(BaseEnv): ...")])
    assert bare.description == "Environment from bare.py"
    told = 'class A(BaseEnv):\n    """Plays\n    go.\n\n    At length.\n    """\n'
    assert find_environment("go", [folder(tmp_path, go=told)]).description == "Plays go."


def test_bases_are_followed_through_the_file_and_its_aliases_to_the_class_that_is_run(
    tmp_path: Path,
) -> None:
    found = find_environment("leafy", [folder(tmp_path, several=INDIRECT)])
    assert found.class_name == "Leaf"


def test_without_a_cli_call_the_last_class_that_is_no_base_counts(tmp_path: Path) -> None:
    text = "class A(x.BaseEnv[int]): ...\nclass B(A): ...\nclass C(B): ...\nclass Other: ..."
    assert find_environment("f", [folder(tmp_path, f=text)]).class_name == "C"


def test_broken_files_are_listed_with_the_reason_and_nothing_is_run(tmp_path: Path) -> None:
    found = discover(
        [
            folder(
                tmp_path, bad="x = 1\nclass A(BaseEnv:\n", odd="class A(BaseEnv):\n    name = 'a b'"
            )
        ]
    )
    whys = {Path(file.file_path).name: file.why for file in found.broken}
    assert whys["bad.py"].startswith("line 2: ")
    assert "'a b'" in whys["odd.py"]
    folder(tmp_path, loud="raise SystemExit('it was run')\nclass A(BaseEnv): ...")
    assert find_environment("loud", [tmp_path]).class_name == "A"


def test_files_that_begin_with_an_underscore_or_define_no_environment_are_passed_over(
    tmp_path: Path,
) -> None:
    names = {
        e.name
        for e in discover([folder(tmp_path, _hidden=PLAIN, helper="def f(): ...")]).environments
    }
    assert names == BUILT_IN


def test_an_environment_is_found_by_the_name_of_its_file_too_unless_another_has_that_name(
    tmp_path: Path,
) -> None:
    """The guide of Hermes names gsm8k by its file: rl_select_environment("gsm8k_tinker")."""
    assert find_environment("gsm8k_tinker") == find_environment("gsm8k")
    named = PLAIN.replace('"""Plays chess.', 'name = "gsm8k_tinker"\n    """Mine.')
    assert find_environment("gsm8k_tinker", [folder(tmp_path, mine=named)]).class_name == "Chess"


def test_the_first_folder_wins(tmp_path: Path) -> None:
    mine = PLAIN.replace('"""Plays chess.', 'name = "arithmetic"\n    """Mine.')
    assert find_environment("arithmetic", [folder(tmp_path, mine=mine)]).class_name == "Chess"


@pytest.mark.parametrize(
    "variants",
    [
        'variants = ("Easy-v0", "Hard-v0")',
        "variants: ClassVar[tuple[str, ...]] = NAMES",
        "variants = tuple(BY_NAME)",
        "variants = BESIDE",
        "variants = tuple(_beside.BY_NAME)",
    ],
)
def test_the_variants_of_a_family_are_read_from_the_text(tmp_path: Path, variants: str) -> None:
    """A tuple or a dict's keys: in the class, in a constant of the file or of one beside it."""
    (tmp_path / "_beside.py").write_text(
        'BESIDE = ["Easy-v0", "Hard-v0"]\nBY_NAME = {"Easy-v0": 1, "Hard-v0": f()}'
    )
    text = f"""
import _beside
from _beside import BESIDE
NAMES = ("Easy-v0", "Hard-v0")
BY_NAME: dict[str, int] = {{"Easy-v0": 1, "Hard-v0": 2}}
class Chess(BaseEnv):
    name = "chess"
    {variants}
"""
    (listed,) = [
        one for one in discover([folder(tmp_path, games=text)]).environments if one.name == "chess"
    ]
    assert (listed.name, listed.members) == ("chess", ("chess:Easy-v0", "chess:Hard-v0"))
    asked = (
        "chess",
        "chess:Easy-v0",
        "games:Hard-v0",
        str(tmp_path / "games.py"),
        f"{tmp_path}/games.py:Hard-v0",
    )
    names = [find_environment(name, [tmp_path]).name for name in asked]
    assert names == [
        "chess:Easy-v0",
        "chess:Easy-v0",
        "chess:Hard-v0",
        "chess:Easy-v0",
        "chess:Hard-v0",
    ]
    with pytest.raises(NotFound, match="Did you mean 'chess:Hard-v0'"):
        find_environment("chess:hard-v0", [tmp_path])
    with pytest.raises(NotFound, match=r"Did you mean '.*/games\.py:Hard-v0'"):
        find_environment(f"{tmp_path}/games.py:hard-v0")


@pytest.mark.parametrize(
    "variants", ['("a b",)', "('a/b',)", "names()", "ELSEWHERE", "NAMES[1:]", "('a', *NAMES)"]
)
def test_variants_that_cannot_be_read_or_used_are_told(tmp_path: Path, variants: str) -> None:
    text = f"NAMES = ('a', 'b')\nclass Chess(BaseEnv):\n    variants = {variants}"
    (broken,) = discover([folder(tmp_path, games=text)]).broken
    assert broken.why.startswith("line 2: its `variants` must be names")


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(NotFound, match="Did you mean 'arithmetic'") as caught:
        find_environment("aritmetic")
    assert caught.value.details["did_you_mean"] == "arithmetic"


def test_a_path_is_read_as_it_is(tmp_path: Path) -> None:
    file = folder(tmp_path, chess=PLAIN) / "chess.py"
    assert find_environment(str(file)).name == "chess"
    with pytest.raises(NotFound, match="no environment file"):
        find_environment(str(tmp_path / "none.py"))


@pytest.mark.parametrize(("text", "why"), [("x = (", "line 1"), ("\x00", "null bytes")])
def test_a_path_that_cannot_be_used_says_why(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(EnvironmentBroken, match=why):
        find_environment(str(folder(tmp_path, f=text) / "f.py"))


def test_a_broken_file_asked_for_by_name_says_why(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBroken, match="line 1"):
        find_environment("bad", [folder(tmp_path, bad="def (")])


def test_a_path_whose_class_cannot_be_recognised_is_taken_at_its_word(tmp_path: Path) -> None:
    """Its base may be somebody else's; whether it is an environment, its `describe` tells."""
    file = tmp_path / "foreign.py"
    file.write_text("from company import CompanyEnv\n\nclass Task(CompanyEnv):\n    pass\n")
    assert find_environment(str(file)).name == "foreign"


def test_bases_are_followed_into_files_beside_and_through_generics(tmp_path: Path) -> None:
    (tmp_path / "_games.py").write_text(
        "from halteres.environments.base import BaseEnv as B\nclass Game(B): ..."
    )
    folder(
        tmp_path,
        go=(
            "from typing import Generic\nfrom _games import Game as G\nclass Go(Generic[T], "
            "G[int]): ..."
        ),
        chess="from ._games import Game\nclass Chess(Game): ...",
        draughts="import _games as games\nclass Draughts(games.Game): ...",
        maybe=(
            "try:\n    from x import BaseEnv\nexcept ImportError:\n    B = 1\nif 1:\n    class "
            "M(BaseEnv): 1"
        ),
        circle="from circle import Loop\nA = B\nB = A\nclass Loop(Loop): ...\nclass C(A): ...",
        other="from elsewhere import Game\nclass Other(Game): ...",
    )
    names = {environment.name for environment in discover([tmp_path]).environments}
    assert names == BUILT_IN | {"go", "chess", "draughts", "maybe"}


def test_folders_of_a_folder_are_looked_through_one_level_deep(tmp_path: Path) -> None:
    for path in ("games/chess", "games/deep/go", "_private/x", ".hidden/y"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{path}.py").write_text(PLAIN)
    assert {environment.name for environment in discover([tmp_path]).environments} == BUILT_IN | {
        "chess"
    }


def test_a_name_taken_already_becomes_the_file_and_its_class(tmp_path: Path) -> None:
    for place in ("one", "two", "three"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "chess.py").write_text(PLAIN)
    found = discover([tmp_path / "one", tmp_path / "two", tmp_path / "three"]).environments
    paths = {environment.name: environment.file_path for environment in found}
    assert paths.keys() == BUILT_IN | {"chess", "chess.Chess", "three.chess.Chess"}
    assert paths["chess"] == str(tmp_path / "one" / "chess.py")
    assert (
        find_environment("chess.Chess", [tmp_path / "one", tmp_path / "two"]).file_path
        == paths["chess.Chess"]
    )


def test_a_shadowed_built_in_environment_can_still_be_named(tmp_path: Path) -> None:
    mine = PLAIN.replace('"""Plays chess.', 'name = "arithmetic"\n    """Mine.')
    folder(tmp_path, mine=mine)
    assert find_environment("arithmetic.ArithmeticEnv", [tmp_path]).file_path.endswith(
        "environments/arithmetic.py"
    )


def test_folders_are_named_by_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("given", "home/environments"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / f"{place[:4]}_env.py").write_text(PLAIN)
    monkeypatch.setenv("HALTERES_ENVIRONMENTS", str(tmp_path / "given"))
    monkeypatch.setenv("HALTERES_HOME", str(tmp_path / "home"))
    assert {environment.name for environment in discover().environments} == BUILT_IN | {
        "give_env",
        "home_env",
    }


def test_other_packages_offer_environments_by_entry_points_and_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "offering"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('it was imported')")
    (package / "chess.py").write_text(PLAIN)
    info = tmp_path / "offering-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
    points = "chess = offering.chess:Chess\nlost = offering.lost\nnone = no_such_package.env\n"
    (info / "entry_points.txt").write_text(f"[halteres.environments]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = discover()
    assert find_environment("chess").file_path == str(package / "chess.py")
    assert {file.file_path: file.why for file in found.broken} == {
        "offering.lost": "There is no module offering.lost.",
        "no_such_package.env": "There is no module no_such_package.env.",
    }


def test_files_are_read_again_only_where_they_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    parse = discovery.ast.parse
    monkeypatch.setattr(
        discovery.ast,
        "parse",
        lambda text, filename: read.append(filename) or parse(text, filename),
    )
    folder(tmp_path, chess=PLAIN, go=PLAIN)
    discover([tmp_path])
    first = len(read)
    discover([tmp_path])
    assert len(read) == first
    folder(tmp_path, chess=PLAIN + "\n# changed\n")
    discover([tmp_path])
    assert read[first:] == [str(tmp_path / "chess.py")]
    discover([tmp_path], afresh=True)
    assert len(read) > first + 2


def test_a_file_nested_beyond_measure_is_broken_and_no_more(tmp_path: Path) -> None:
    found = discover([folder(tmp_path, deep="x = " + "(" * 5000 + ")" * 5000)])
    assert [Path(file.file_path).name for file in found.broken] == ["deep.py"]


@pytest.mark.parametrize(
    "head",
    [
        "from halteres.environments.arithmetic import ArithmeticEnv\nclass MineEnv(ArithmeticEnv):",
        "from halteres.environments import arithmetic\nclass MineEnv(arithmetic.ArithmeticEnv):",
        "import halteres.environments.arithmetic\nclass "
        "MineEnv(halteres.environments.arithmetic.ArithmeticEnv):",
    ],
)
def test_a_class_derived_from_a_built_in_environment_is_one(tmp_path: Path, head: str) -> None:
    folder(tmp_path, mine=f"{head}\n    pass\n")
    assert find_environment("mine", [tmp_path]).class_name == "MineEnv"


def test_what_is_imported_from_a_built_in_file_and_is_no_environment_makes_none(
    tmp_path: Path,
) -> None:
    other = (
        "from halteres.environments.problems import Problem\nfrom halteres.environments.gone "
        "import Gone\n"
    )
    found = discover([folder(tmp_path, mine=f"{other}class A(Problem): ...\nclass B(Gone): ...\n")])
    assert ("mine" in {one.name for one in found.environments}, found.broken) == (False, ())
