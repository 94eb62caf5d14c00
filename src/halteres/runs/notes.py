"""What a person says of a run: tags and a note, in RUN/notes.json.

Owns: that file, its bounds, and how two writers do not lose each other's words.
Never: says anything of a run by itself; the supervisor and the trainer read none of it.

A run without the file has the tags of its settings (`run.tags`), and no note.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import msgspec

from halteres.errors import Conflict, UserError
from halteres.files import NOT_JSON, read_regular, replace_file
from halteres.observe.metrics import WriteFailed
from halteres.redaction import printable
from halteres.runs.directory import SETTINGS, RunDirectory
from halteres.runs.state import locked, unreadable

FILE = "notes.json"
LOCK = ".notes.lock"

MOST_TAGS, TAG_LENGTH, NOTE_LENGTH = 16, 40, 10_000
"""Tags of a run; characters of one, and of the note."""

MOST_BYTES = 256 * 1024  # of the file: what we write is smaller
WAIT_S = 5.0  # for another writer, who takes milliseconds


class Notes(msgspec.Struct, frozen=True, kw_only=True):
    """Tags and note of a run."""

    tags: tuple[str, ...] = ()
    note: str = ""
    revision: int = 0  # how often they were changed


class _GivenRun(msgspec.Struct, frozen=True):
    tags: tuple[str, ...] = ()


class _Given(msgspec.Struct, frozen=True):
    """What settings.json says of them."""

    run: _GivenRun = _GivenRun()


_notes = msgspec.json.Decoder(Notes)
_given = msgspec.json.Decoder(_Given)


def read_notes(run: RunDirectory) -> Notes:
    """Tags and note of a run.

    Raises:
        RunUnreadable: the file is damaged.
    """
    file = run.path / FILE
    try:
        return _notes.decode(read_regular(file, MOST_BYTES))
    except FileNotFoundError:
        return Notes(tags=_tags_of_settings(run))
    except (OSError, *NOT_JSON) as error:
        raise unreadable(file, str(error)) from error


def change_notes(
    run: RunDirectory,
    *,
    tags: Sequence[str] | None = None,
    add: Iterable[str] = (),
    remove: Iterable[str] = (),
    note: str | None = None,
    revision: int | None = None,
) -> Notes:
    """Change tags or note; what is not given stays. Returns both as they are then.

    Args:
        run: a run, whether it goes on or has ended.
        tags: all of them, in place of those that are there.
        add: tags, behind those that are there.
        remove: tags; one that is not there is no error.
        note: in place of the one that is there; an empty one removes it.
        revision: of the notes that the writer has seen; None: the newest, whatever they say.

    Raises:
        UserError: a tag or the note is not what one can be; nothing is written.
        Conflict: they were changed since `revision`; nothing is written.
        RunUnreadable: the file is damaged; it stays as it is.
        NotReady: another process held the file all the time.
        WriteFailed: the disk is full, or the folder is not ours to write; nothing is changed.
    """
    try:
        with locked(run.path / LOCK, WAIT_S, "The notes of this run are just being changed."):
            before = read_notes(run)
            if revision is not None and revision != before.revision:
                raise Conflict(
                    f"The notes of run {run.run_id} were changed meanwhile.",
                    "What you wrote would take the place of what another window or command wrote.",
                    "Read them again, then save.",
                )
            after = _changed(before, tags, add, set(remove), note)
            content = msgspec.json.format(msgspec.json.encode(after), indent=1)
            replace_file(run.path / FILE, content + b"\n")
    except OSError as error:
        raise WriteFailed(
            f"The notes of run {run.run_id} could not be written.",
            f"{error.strerror or error}.",
            f"Make room, or make {run.path} writable. Nothing was changed.",
        ) from error
    return after


def _changed(
    before: Notes,
    tags: Sequence[str] | None,
    add: Iterable[str],
    remove: Container[str],
    note: str | None,
) -> Notes:
    if tags is None:
        tags = before.tags
    return Notes(
        tags=_checked_tags(before.tags, [tag for tag in (*tags, *add) if tag not in remove]),
        note=_checked_note(before.note, note),
        revision=before.revision + 1,
    )


def _checked_tags(before: Sequence[str], wanted: Iterable[str]) -> tuple[str, ...]:
    """Each once, in their order. Those that were there are no fault of the change: a run's settings
    may have longer ones.
    """
    found = tuple(dict.fromkeys(tag.strip() for tag in wanted))
    for tag in found:
        if tag in before:
            continue
        if not tag or len(tag) > TAG_LENGTH or not tag.isprintable() or "," in tag:
            raise UserError(
                f"{tag[:TAG_LENGTH]!r} cannot be a tag.",
                f"A tag is one line of 1 to {TAG_LENGTH} characters that can be seen, no comma "
                "among them.",
                "Write it shorter; a note has room for sentences.",
                field="tags",
            )
    if len(found) > max(MOST_TAGS, len(before)):
        raise UserError(
            f"{len(found)} tags are too many.",
            f"A run has {MOST_TAGS} at most.",
            "Remove some.",
            field="tags",
        )
    return found


def _checked_note(before: str, wanted: str | None) -> str:
    if wanted is None:
        return before
    note = wanted.replace("\r\n", "\n").strip()
    if len(note) > NOTE_LENGTH:
        raise UserError(
            f"The note has {len(note)} characters.",
            f"A note has {NOTE_LENGTH} at most.",
            "Write it shorter, or keep it in a file and name that file here.",
            field="note",
        )
    if printable(note) != note:
        raise UserError(
            "The note holds characters that cannot be seen.",
            "They could hide what it says.",
            "Write it as plain text.",
            field="note",
        )
    return note


def _tags_of_settings(run: RunDirectory) -> tuple[str, ...]:
    """As the run was started with; none where the file cannot be read."""
    try:
        return _given.decode(read_regular(run.path / SETTINGS)).run.tags
    except (OSError, *NOT_JSON):
        return ()
