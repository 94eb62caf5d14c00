"""`halteres runs`: what a person writes about runs, and shares of them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from halteres.runs.directory import RunDirectory
from halteres.runs.notes import read_notes

Halteres = Callable[..., subprocess.CompletedProcess[str]]


def test_tags_and_notes_are_written_shown_and_listed_by(
    finished: RunDirectory, halteres: Halteres
) -> None:
    assert halteres("runs", "tag", "aaaa", "best", "lr sweep").stdout == (
        "run aaaa1111: best, lr sweep\n"
    )
    assert halteres("runs", "note", "aaaa", "-", stdin="Twice\nthe rate.\n").returncode == 0
    assert halteres("runs", "note", "aaaa").stdout == "Twice\nthe rate.\n"
    assert "aaaa1111" in halteres("runs", "list", "--tag", "best").stdout
    assert (
        halteres("runs", "list", "--tag", "best", "--tag", "x").stdout
        == "No run has 'best', 'x'.\n"
    )
    status = halteres("runs", "status", "aaaa").stdout
    assert "tags: best, lr sweep\nyour note: Twice\nthe rate." in status
    halteres("runs", "tag", "aaaa", "--remove", "best")
    assert halteres("runs", "note", "aaaa", "--clear").stdout == (
        "run aaaa1111: the note is removed\n"
    )
    found = read_notes(finished)
    assert (found.tags, found.note) == (("lr sweep",), "")


def test_what_is_no_tag_is_refused_with_one_sentence(
    finished: RunDirectory, halteres: Halteres
) -> None:
    refused = halteres("runs", "tag", "aaaa", "x" * 50)
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1 and "cannot be a tag" in refused.stderr
    assert read_notes(finished).tags == ()


def test_a_report_is_one_file_and_replaces_none_unasked(
    finished: RunDirectory, halteres: Halteres, tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    written = halteres("runs", "report", "aaaa", "--out", str(out))
    assert written.returncode == 0, written.stderr
    assert written.stdout.startswith(f"{out}: 1 run, 0.")
    first = out.read_text()
    assert first.startswith("<!doctype html>") and "aaaa1111" in first
    again = halteres("runs", "report", "aaaa", "--out", str(out))
    assert again.returncode == 1
    assert again.stderr == (f"error: {out} exists already. Name another file, or add --force.\n")
    assert out.read_text() == first
    assert halteres("runs", "report", "aaaa", "--out", str(out), "--force").returncode == 0


def test_a_report_that_cannot_be_is_refused_with_one_sentence(
    finished: RunDirectory, halteres: Halteres, tmp_path: Path
) -> None:
    missing = halteres("runs", "report", "bbbb", "--out", str(tmp_path / "report.html"))
    nowhere = halteres("runs", "report", "aaaa", "--out", str(tmp_path / "none" / "report.html"))
    folder = halteres("runs", "report", "aaaa", "--force", "--out", str(tmp_path))
    assert "Run 'bbbb' not found" in missing.stderr
    assert "cannot be written. No such file or directory." in nowhere.stderr
    assert "cannot be written. Is a directory." in folder.stderr
    for refused in (missing, nowhere, folder):
        assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert not (tmp_path / "report.html").exists()
