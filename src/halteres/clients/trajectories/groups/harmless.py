"""Texts that anybody may have written, for a person's eye.

Owns: which characters a text may not bring along.
Never: escapes for HTML.
"""

from __future__ import annotations

import re

_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def harmless(text: str) -> str:
    """The text without characters that move a cursor, start a terminal's command or turn the direction of reading.

    >>> harmless("a\\x1b[2J\\u202eb")
    'a<U+001B>[2J<U+202E>b'
    """
    return _HIDDEN.sub(lambda found: f"<U+{ord(found[0]):04X}>", text.replace("\r\n", "\n"))
