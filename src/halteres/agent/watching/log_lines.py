"""Lines of a log, for a reader that is no terminal.

Owns: what is left of a line (no colours, no control characters, of a progress bar its last state); which lines are
looked for.
Never: knows whose log it is; searches by a regular expression of a caller's: one that backtracks for ever would hold
the whole server, and nobody could end it.
"""

from __future__ import annotations

from collections.abc import Callable

from halteres.redaction import printable


def cleaned(line: str) -> str:
    """The line without what only a terminal understands.

    >>> cleaned("10 %\\r50 %\\r\\x1b[32mdone\\x1b[0m")
    'done'
    """
    last = line.rstrip("\r\n").rpartition("\r")[2]
    return printable(last).rstrip()


def matching(wanted: str) -> Callable[[str], bool]:
    """Whether a line holds this text, or one of several that stand between `|`, in small or capital letters.

    >>> [line for line in ("step 7", "Error: [x", "ok") if matching("error|7")(line) or matching("[x")(line)]
    ['step 7', 'Error: [x']
    """
    texts = [text for text in wanted.casefold().split("|") if text] or [wanted.casefold()]

    def matches(line: str) -> bool:
        folded = line.casefold()
        return any(text in folded for text in texts)

    return matches
