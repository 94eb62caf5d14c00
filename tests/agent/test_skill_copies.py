"""Skills in the folders of agent clients: what a user wrote or edited stays, and copies that are
shared go last.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from halteres.agent.skill_copies import MARKER
from halteres.agent.skills import skills

from .user_home import UserHome, land

SKILLS = [skill.name for skill in skills()]


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> UserHome:
    return land(tmp_path, monkeypatch, capsys)


def test_one_that_the_user_edited_is_neither_overwritten_nor_removed(here: UserHome) -> None:
    here.install("claude")
    mine = here.home / ".claude" / "skills" / "train-with-rl" / "SKILL.md"
    mine.write_text("My own way.", encoding="utf-8")
    assert f"{mine.parent} (edited since it was installed)" in here.install("claude").out
    assert (
        f"{mine.parent} (edited since it was installed)" in here.install("claude", "--remove").out
    )
    assert [path.name for path in mine.parent.parent.iterdir()] == ["train-with-rl"]
    assert mine.read_text(encoding="utf-8") == "My own way."
    assert [path.name for path in mine.parent.iterdir()] == ["SKILL.md"]


def test_one_of_the_same_name_that_is_not_ours_stays(here: UserHome) -> None:
    theirs = here.home / ".claude" / "skills" / "debug-a-run" / "SKILL.md"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("Another one.", encoding="utf-8")
    assert f"{theirs.parent} (there is another one of this name)" in here.install("claude").out
    here.install("claude", "--remove")
    assert [*here.files().values()] == [b"Another one."]


def test_an_older_copy_of_ours_is_brought_up_to_date(
    here: UserHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = here.home / "package"
    for name in SKILLS:
        (older / name).mkdir(parents=True)
        text = f"---\nname: {name}\ndescription: d\n---\nAs it was.\n"
        (older / name / "SKILL.md").write_text(text, encoding="utf-8")
        (older / name / "notes.md").write_text("No longer part of it.", encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr("halteres.agent.skills.FOLDER", older)
        here.install("codex")
    report = here.install("codex")
    for skill in skills():
        copied = here.home / ".agents" / "skills" / skill.name
        assert report.done("updated", copied)
        assert sorted(path.name for path in copied.iterdir()) == [MARKER, "SKILL.md"]
        assert (copied / "SKILL.md").read_bytes() == skill.file.read_bytes()


def test_a_copy_that_two_clients_read_goes_with_the_second(here: UserHome) -> None:
    here.install("codex")
    assert here.install("gemini").done(
        "already there", here.home / ".agents" / "skills" / SKILLS[0]
    )
    assert "(it is for codex too)" in here.install("gemini", "--remove").out
    assert (here.home / ".agents" / "skills" / SKILLS[0] / "SKILL.md").is_file()
    here.install("codex", "--remove")
    assert list(here.home.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_sentence(here: UserHome) -> None:
    (here.home / ".agents").write_text("a file where a folder must be", encoding="utf-8")
    ended = here.run("install-agent", "--client", "codex")
    assert ended.code == 1
    assert ended.err.startswith(f"error: {here.home}/.agents")
    assert here.commands() == []


def test_a_marker_that_names_files_elsewhere_is_not_ours(here: UserHome) -> None:
    """A project that was cloned may bring one."""
    victim = here.home / "precious"
    victim.write_bytes(b"mine")
    digest = hashlib.sha256(b"mine").hexdigest()
    folder = here.project / ".claude" / "skills" / SKILLS[0]
    folder.mkdir(parents=True)
    for name in (str(victim), "../../../../home/precious"):
        marker = {"clients": ["claude"], "files": {name: digest}}
        (folder / MARKER).write_text(json.dumps(marker), encoding="utf-8")
        here.install("claude", "--project")
        here.install("claude", "--project", "--remove")
        assert victim.read_bytes() == b"mine"
