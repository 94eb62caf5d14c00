"""Logins within addresses (`http://any:KEY@HOST`): found in any text, struck out of it, and put
back by their owner; which texts are addresses at all.

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
MOST_MISTYPED = 128  # characters of a password, so that the search stays linear
_KEPT = rf"[^{_END}/@',;(){{}}\[\]]"
_MISTYPED = re.compile(
    rf"""(?P<start> (?P<scheme> (?<![\w:]) https?: [/\\]{{0,4}} | (?<![:/\w]) // )
        | (?<![\w.~%+@:/\\-]) )
    (?P<user> [\w.~%+-]{{1,64}} :)
    (?P<password>
        {_KEPT}{{1,{MOST_MISTYPED}}} \\{{0,4}}
        | (?(scheme) (?! \d+\b ) {_KEPT} (?: [ ] | {_KEPT} ){{1,{MOST_MISTYPED}}} ) )
    @ (?= (?(scheme) \[?\w | [\w.-]{{1,255}} (?: :\d{{1,5}}\b | / ) ) )""",
    re.VERBOSE | re.ASCII | re.IGNORECASE,
)
"""Logins of addresses that clients read, or would refuse: without a scheme, with too few slashes or
too many of them, with a backslash or a blank. Without scheme and slashes a port or a path follows
the host."""

_ADDRESS = re.compile(
    r"""https?:// (?: (?: [\w.~!$&'()*+,;=:-] | %[0-9A-Fa-f]{2} )* @ )?
    (?: \[ [0-9A-Fa-f:.]+ (?: %[\w.-]+ )? \] | [\w-]+ (?: \.[\w-]+ )* \.? )
    (?: : (?!0+(?!\d)) [0-5]?\d{1,4} | : 6[0-5]\d{3} )?
    (?: / (?: [\w.~!$&'()*+,;=:/-] | %[0-9A-Fa-f]{2} )* )?
    (?: \? (?: [\w.~!$&'()*+,;=:/?-] | %[0-9A-Fa-f]{2} )* )?""",
    re.VERBOSE | re.ASCII,
)
"""What a server's address is made of, by RFC 3986; no @ behind its host, which may end a key."""

ADDRESS_FORM: Final = (
    "must be an address like http://HOST:8000/PATH; in a login before HOST signs are written as %40"
)

_UNFINISHED = re.compile(rf":(?:/(?:/[^{_END}]{{0,{MOST_LOGIN}}})?)?\Z", re.ASCII)


def without_logins(text: str) -> str:
    """The text with `***` in place of each login's password, or of its user where there is no
    password.

    >>> without_logins("'http://any:s3cr3t@h:8002/v1' or https://t0ken@h, not http://h:80/@me")
    "'http://any:***@h:8002/v1' or https://***@h, not http://h:80/@me"
    """
    if "@" not in text:
        return text
    return _MISTYPED.sub(_struck, _LOGIN.sub(_struck, text))


def refused(text: str) -> str:
    """A text that was refused, to be quoted: nothing of it stays that may be a login, between its
    first colon and its last `@`, however it was typed.

    >>> refused('http://any:s3 cr"3t@h'), refused("http://any:s3cr3t@h/v1"), refused("a: b")
    ('http:***@h', 'http://any:***@h/v1', 'a: b')
    """
    struck = without_logins(text)
    start, end = struck.find(":"), struck.rfind("@")
    is_known = struck[:end].endswith(STRUCK) and "@" not in struck[:end]
    if start < 0 or end < start or is_known:
        return struck
    return f"{struck[: start + 1]}{STRUCK}{struck[end:]}"


def is_web_address(text: str) -> bool:
    """Whether it is the address of a web server as RFC 3986 has it.

    >>> [is_web_address(one) for one in ("http://any:K%40Y@h:80/v1", "http://any:K@Y@h", "h:80")]
    [True, False, False]
    """
    return _ADDRESS.fullmatch(text) is not None


def is_place(text: str) -> bool:
    """Whether it is an address, or the path of a file, which one that was mistyped is not.

    >>> [is_place(one) for one in ("http://h", "models/a", "/a@b", "//any:KEY@h", "any:KEY@h:9")]
    [True, True, True, False, False]
    """
    is_path = re.match(r"/(?!/)|[.~]", text) is not None
    names_a_server = "@" in text or re.match(r"//|https?:", text, re.IGNORECASE) is not None
    return is_path or not names_a_server or is_web_address(text)


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


def refused_in(value: Any) -> Any:
    """As `refused`, of a JSON value's texts and names."""
    if isinstance(value, str):
        return refused(value)
    if isinstance(value, Mapping):
        return {refused_in(name): refused_in(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [refused_in(item) for item in value]
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
