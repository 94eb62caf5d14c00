"""Lines of logs as readers get them, and those that tell of a failure."""

from __future__ import annotations

import re

from halteres.redaction import Redactor, printable
from halteres.runs.reading.report import RunReport
from halteres.short_texts import clipped


def clean_line(line: str) -> str:
    """The line without what only a terminal understands.

    >>> clean_line("10 %\\r50 %\\r\\x1b[32mdone\\x1b[0m")
    'done'
    """
    last = line.rstrip("\r\n").rpartition("\r")[2]
    return printable(last).rstrip()


LINES_READ = 400  # of the log's end
QUOTED = 24  # characters from which on a text counts as quoted
FAILURE_LINES, FAILURE_LINE_LENGTH = 8, 160
ANSWER_LENGTH, LEAST_LENGTH = 1340, 300
"""Characters of a whole answer on a failed run, and how many of them its log has at least."""

_STAMP = re.compile(r"^\d{4}-\d\d-\d\d[ T][\d:.,]+Z? (?:[a-z]+ (?=[A-Z]+ ))?")
_LOGGER = re.compile(r"^(?:(?:INFO|DEBUG)|(WARNING|ERROR|CRITICAL)) [\w.]+: ")
_TROUBLE = re.compile(r"^(?:WARNING|ERROR|CRITICAL|error)\b|\b\w*(?:Error|Exception)\b")


def log_tail(report: RunReport, used: int) -> list[str]:
    """Whole lines from the end of the log of the process that failed, as many as there is room for
    next to the `used` characters of the answer: the last one, then those of trouble, then the
    newest. Each once, and none that the error says already.
    """
    failed = "supervisor"
    if report.failure:
        failed = report.failure.whose_log
    error = ""
    if report.failure:
        error = report.failure.error
    found: dict[str, None] = {}
    for line in report.run.log_tail(failed, LINES_READ):
        text = Redactor.of_this_process().text(_STAMP.sub("", clean_line(line)))
        text = _LOGGER.sub(lambda mark: f"{mark[1]}: " if mark[1] else "", text)
        # a repeated line stands where it was last
        found.pop(text, None)
        if text and not _says(error, text):
            found[text] = None
    lines = [clipped(text, FAILURE_LINE_LENGTH) for text in found]
    room = max(LEAST_LENGTH, ANSWER_LENGTH - used)
    last = len(lines) - 1
    by_weight = sorted(
        range(last, -1, -1),
        key=lambda number: number != last and not _TROUBLE.search(lines[number]),
    )
    shown: list[int] = []
    for number in by_weight[:FAILURE_LINES]:
        room -= len(lines[number]) + len('"",')
        if room < 0:
            break
        shown.append(number)
    return [lines[number] for number in sorted(shown)]


def _says(error: str, line: str) -> bool:
    """Whether the error quotes what this line says behind its marks."""
    said = line
    while said:
        if len(said) >= QUOTED and said in error:
            return True
        said = said.partition(": ")[2]
    return False
