"""What samples beside the engine that trains: a number of engines of ours, or a list.

2                                   two engines of ours
[own, vllm, vllm]                   one of ours, two `vllm serve`
[http://gpu2:8000 VLLM_KEY]         a vLLM at an address, and the variable that has its key
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from halteres.logins import is_web_address

MOST = 64  # samplers of one service
RULE = (
    "must be a number of engines, 0 to 64, or a list whose parts are 'own' (an engine), 'vllm', or "
    "the address of a vLLM, followed by the name of the variable that has its key if it asks for "
    "one"
)

EVERYDAY = frozenset(
    {
        *("HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "OLDPWD", "PATH", "PWD", "PYTHONPATH"),
        *("SHELL", "SHLVL", "TERM", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV"),
    }
)
"""Variables that hold no key: what a variable here holds is kept from children and struck out of
texts, and without these nothing would start.
"""

Given = int | tuple[str, ...]  # as a setting has it


@dataclass(frozen=True, slots=True)
class Sampler:
    """One of them."""

    kind: Literal["own", "vllm", "remote"]
    url: str = ""
    variable: str = ""  # that has the key of `url`

    @classmethod
    def read(cls, text: str) -> Sampler:
        """One part of a list. ValueError where it is none; the text says why."""
        kind, *variable = text.split() or [""]
        if kind == "own" and not variable:
            return cls("own")
        if kind == "vllm" and not variable:
            return cls("vllm")
        has_path = "/" in kind.rstrip("/").partition("://")[2]
        if not is_web_address(kind) or has_path or len(variable) > 1:
            # it is not quoted: a mistyped address may hold a login
            raise ValueError(RULE)
        if variable and variable[0] in EVERYDAY:
            raise ValueError(f"{RULE}; {variable[0]} holds no key")
        return cls("remote", kind.rstrip("/"), "".join(variable))


def samplers_of(given: Given) -> tuple[Sampler, ...]:
    """All of them. ValueError where a part is none, or an address is there twice."""
    if isinstance(given, int):
        return (Sampler("own"),) * given
    found = tuple(map(Sampler.read, given))
    urls = [one.url for one in found if one.url]
    if len(set(urls)) < len(urls):
        raise ValueError(f"{RULE}; each address once")
    return found


def as_given(text: str) -> Given:
    """What a text on a command line means. ValueError where it is neither number nor list."""
    if text.isdecimal():
        number = int(text)
        if number > MOST:
            raise ValueError(RULE)
        return number
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    if not parts or len(parts) > MOST:
        raise ValueError(RULE)
    samplers_of(parts)
    return parts


def as_text(given: Given) -> str:
    """As `as_given` reads it."""
    if isinstance(given, int):
        return str(given)
    return ",".join(given)


def has_own(samplers: Iterable[Sampler]) -> bool:
    """Whether one of them is ours, which takes adapters of every rank, and of the unembedding."""
    listed = tuple(samplers)
    return not listed or any(one.kind == "own" for one in listed)


def are_exact(samplers: Iterable[Sampler]) -> bool:
    """Whether all are ours: vLLM never draws the same twice for sure."""
    return all(one.kind == "own" for one in samplers)


def key_variables(given: Given) -> tuple[str, ...]:
    """The variables that have their keys."""
    return tuple(dict.fromkeys(one.variable for one in samplers_of(given) if one.variable))
