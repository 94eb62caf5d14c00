"""Logins within addresses (`http://any:KEY@HOST`): found in any text, struck out of it, and put
back by their owner.

The one rule for all that leaves a process: an address may stay, its password may not. Nothing here
knows which addresses there are, so that one in a traceback, in a list or in a sentence of another
program is none the less found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

STRUCK: Final = "***"

MOST_LOGIN = 16_384  # characters: longer than the request lines that servers take

# What RFC 3986 lets no address hold ends one, so that no match reaches over the end of a text in
# JSON or YAML.
_END = r"\s\"<>\\"

# A path makes one `/` of two: an address that was taken for a folder is still one.
# A key as it was drawn may hold `/`, `?` or `#`, which should have been quoted: then the address is
# refused, and the refusal names it. A number before one of these is a port, and what follows is a
# path.
_LOGIN = re.compile(
    rf"""(?P<start> :// | :/ (?= [^{_END}/:@]* : [^{_END}/@]* @ ) )
    (?P<user> [^{_END}/?\#:@\[]* : )?
    (?P<password>
        [^{_END}/?\#]+
        | (?<=:) (?! \d+[/?\#] ) (?: (?!://) [^{_END},] ){{1,{MOST_LOGIN}}}
    )@""",
    re.VERBOSE | re.ASCII,
)
_UNFINISHED = re.compile(rf":(?:/(?:/[^{_END}]{{0,{MOST_LOGIN}}})?)?\Z", re.ASCII)


def without_logins(text: str) -> str:
    """The text with `***` in place of each login's password, or of its user where there is no
    password.

    >>> without_logins("'http://any:s3cr3t@h:8002/v1' or https://t0ken@h, not http://h:80/@me")
    "'http://any:***@h:8002/v1' or https://***@h, not http://h:80/@me"
    """
    return _LOGIN.sub(_struck, text) if ":/" in text else text


def _struck(found: re.Match[str]) -> str:
    return f"{found['start']}{found['user'] or ''}{STRUCK}@"


def without_logins_in(value: Any) -> Any:
    """A JSON value without logins in its texts and names; lists stay lists, whatever is no text
    stays as it is.
    """
    if isinstance(value, str):
        return without_logins(value)
    if isinstance(value, Mapping):
        return {without_logins_in(name): without_logins_in(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_logins_in(item) for item in value]
    return value


def passwords_in(value: Any) -> Iterator[str]:
    """The passwords of all logins in a JSON value: as they stand there, and as a server would
    repeat them.
    """
    if isinstance(value, str):
        for found in _LOGIN.finditer(value):
            yield found["password"]
            yield unquote(found["password"])
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from passwords_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from passwords_in(item)


def is_struck(value: Any) -> bool:
    """Whether something was struck out of a JSON value: it was copied from an answer, and its key
    is missing.
    """
    return value == STRUCK or STRUCK in passwords_in(value)


def restored(value: Any, source: Any) -> Any:
    """A JSON value with what was struck out of it, from the same places of `source`.

    >>> restored({"model": "/a,http://any:***@h"}, {"model": "http://run:1@here,http://any:K@h"})
    {'model': '/a,http://any:K@h'}
    """
    if value == STRUCK:
        return value if source is None else source
    if isinstance(value, Mapping) and isinstance(source, Mapping):
        return {name: restored(item, source.get(name)) for name, item in value.items()}
    if (
        isinstance(value, list | tuple)
        and isinstance(source, list | tuple)
        and len(value) == len(source)
    ):
        return [restored(item, other) for item, other in zip(value, source, strict=True)]
    if not isinstance(value, str) or not isinstance(source, str) or STRUCK not in value:
        return value
    if without_logins(source) == value:
        return source
    # Of a list of places by commas some may be others in the source: folders stand there by their
    # server's address.
    places, others = value.split(","), source.split(",")
    if len(places) != len(others):
        return value
    return ",".join(
        other if without_logins(other) == place else place
        for place, other in zip(places, others, strict=True)
    )


def unfinished_login(text: str) -> int:
    """Where an address at the end of a text begins whose login may go on in what follows; else the
    text's length.

    >>> unfinished_login("see http://any:KE"), unfinished_login("see http://h ")
    (8, 13)
    """
    found = _UNFINISHED.search(text, max(0, len(text) - MOST_LOGIN - 3))
    return found.start() if found else len(text)
