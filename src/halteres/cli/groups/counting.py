"""A number and its noun.

Owns: which of the two forms a noun has.
Never: knows a noun whose plural ends otherwise.
"""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Both.

    >>> counted(1, "group"), counted(2, "group")
    ('1 group', '2 groups')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
