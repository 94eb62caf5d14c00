"""Lines of a log, for a reader that is no terminal.

Owns: what is left of a line (no colours, no control characters, of a progress bar its last state); which lines a
pattern means.
Never: knows whose log it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")


def cleaned(line: str) -> str:
    """The line without what only a terminal understands.

    >>> cleaned("10 %\\r50 %\\r\\x1b[32mdone\\x1b[0m")
    'done'
    """
    last = line.rstrip("\r\n").rpartition("\r")[2]
    return _CONTROL.sub("?", _ESCAPES.sub("", last)).rstrip()


LONGEST_PATTERN, SEARCHED = 200, 2000
"""Characters of a pattern, and of a line that it is looked for in."""

_REPEATED_REPETITION = re.compile(r"\([^)]*[*+|}][^)]*\)[*+{]")
"""`(a+)+` and its like take for ever where they do not match; nobody could end that search."""


def matching(pattern: str) -> Callable[[str], bool]:
    """Whether a line holds this text, or matches this pattern, in small or capital letters.

    >>> [line for line in ("step 7", "Error: [x", "ok") if matching("error|7$")(line) or matching("[x")(line)]
    ['step 7', 'Error: [x']
    """
    text = pattern.casefold()
    try:
        compiled = re.compile(pattern, re.IGNORECASE) if _is_harmless(pattern) else None
    except (re.error, RecursionError, OverflowError):
        compiled = None

    def matches(line: str) -> bool:
        if text in line.casefold():
            return True
        return compiled is not None and compiled.search(line[:SEARCHED]) is not None

    return matches


def _is_harmless(pattern: str) -> bool:
    return len(pattern) <= LONGEST_PATTERN and not _REPEATED_REPETITION.search(pattern)
