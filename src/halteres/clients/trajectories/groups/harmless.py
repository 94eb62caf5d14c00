"""Texts that anybody may have written, for a person's eye.

Owns: which characters a text may not bring along.
Never: escapes for HTML.
"""

from __future__ import annotations

import re

_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")

_BREAKS = re.compile(r"[\t\n]")


def harmless(text: str) -> str:
    """The text without characters that move a cursor, start a terminal's command or turn the direction of reading.

    >>> harmless("a\\x1b[2J\\u202eb")
    'a<U+001B>[2J<U+202E>b'
    """
    return _HIDDEN.sub(_named, text.replace("\r\n", "\n"))


def on_one_line(text: str) -> str:
    """The same of a name or a sentence, which may not break a line or a table either.

    >>> on_one_line("a\\nb\\t\\x1b[2J")
    'a<U+000A>b<U+0009><U+001B>[2J'
    """
    return _BREAKS.sub(_named, harmless(text))


def _named(found: re.Match[str]) -> str:
    return f"<U+{ord(found[0]):04X}>"
