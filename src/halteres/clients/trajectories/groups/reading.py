"""Groups on a trajectory server, asked for and followed: what it tells of each, and of its tokens.

Texts in groups may be anybody's: what is shown to a person has no control characters.
"""

from __future__ import annotations

import gzip
import http.client
import math
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar
from urllib.parse import urlencode

import msgspec

from halteres.clients.trajectories.address import Address
from halteres.clients.trajectories.calls import EVERYWHERE, REPLY_S, Patience, checked, unreachable
from halteres.errors import InvalidConfig, NotFound, NotReady, unknown

PlaceName = Literal["queued", "buffered", "out", "delivered", "set_aside", "archived"]
PLACES: tuple[PlaceName, ...] = ("queued", "buffered", "out", "delivered", "set_aside", "archived")
WAITING: tuple[PlaceName, ...] = ("queued", "buffered", "out")
"""Places that a group leaves for another."""

CONTEXT = -100
"""The mask of a token that the policy was given, rather than sampled."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One group, as GET /v1/groups tells it."""

    id: int
    env_id: int | None
    size: int  # sequences
    num_bytes: int  # of the element
    received_at: float  # unix s
    place: PlaceName
    policy_version: tuple[int, int] | None  # smallest and largest
    reason: str | None = None  # code, where set aside, or served with a flaw
    why: str | None = None  # one sentence, as well
    batch_id: int | None = None
    element: msgspec.Raw = msgspec.Raw(b"")  # b"" where not asked for, b"null" where it is kept no more

    @property
    def has_tokens(self) -> bool:
        """What a trainer would get of it came along."""
        return bytes(self.element) not in (b"", b"null")


class Page(msgspec.Struct, frozen=True):
    """GET /v1/groups."""

    groups: list[Told]
    next: int | None  # the `after` of the page behind; None on the last


class Environment(msgspec.Struct, frozen=True):
    """One of GET /v1/diagnostics."""

    env_id: int
    name: str


class Diagnostics(msgspec.Struct, frozen=True):
    """GET /v1/diagnostics, as far as it is of use here."""

    environments: list[Environment]


class Element(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer gets of a group, as far as it is shown: G sequences, where nothing was set aside."""

    tokens: list[list[int]] = []
    masks: list[list[int]] = []
    scores: list[float] = []
    advantages: list[list[float]] | None = None
    inference_logprobs: list[list[float]] | None = None
    messages: Any = None


@dataclass(frozen=True)
class Group:
    """A group to be shown: what is known of it, whose it is, and its element where that is kept."""

    told: Told
    env_name: str  # harmless; "" where it has none, or an unknown one

    @cached_property
    def element(self) -> Element:
        """Read when it is looked at; an empty one where there is none."""
        if not self.told.has_tokens:
            return Element()
        return msgspec.json.decode(self.told.element, type=Element)

    @property
    def num_sequences(self) -> int:
        """Those that can be shown."""
        return len(self.element.tokens)

    @property
    def mean(self) -> float | None:
        """Of the scores."""
        return _mean(self.element.scores)

    def score(self, at: int) -> float | None:
        """Of a sequence."""
        scores = self.element.scores
        return scores[at] if at < len(scores) else None

    def mask(self, at: int) -> list[int]:
        """Of a sequence; as long as its tokens, whatever was posted."""
        masks, length = self.element.masks, len(self.element.tokens[at])
        mask = masks[at][:length] if at < len(masks) else []
        return mask + [CONTEXT] * (length - len(mask))

    def num_sampled(self, at: int) -> int:
        """Tokens of a sequence that the policy sampled."""
        mask = self.mask(at)
        return len(mask) - mask.count(CONTEXT)

    def logprobs(self, at: int) -> list[float] | None:
        """Of a sequence's tokens, as the policy sampled them; None where they do not fit."""
        return self._per_token(self.element.inference_logprobs, at)

    def advantage(self, at: int) -> float | None:
        """Mean advantage of a sequence's sampled tokens."""
        return self._mean_of_sampled(self._per_token(self.element.advantages, at), at)

    def mean_logprob(self, at: int) -> float | None:
        """Mean log-probability of a sequence's sampled tokens."""
        return self._mean_of_sampled(self.logprobs(at), at)

    def _per_token(self, rows: list[list[float]] | None, at: int) -> list[float] | None:
        fits = rows is not None and at < len(rows) and len(rows[at]) == len(self.element.tokens[at])
        return rows[at] if rows is not None and fits else None

    def _mean_of_sampled(self, values: list[float] | None, at: int) -> float | None:
        masked = zip(values or (), self.mask(at), strict=False)
        return _mean([value for value, mask in masked if mask != CONTEXT])

    @property
    def extremes(self) -> tuple[int, ...]:
        """The best and the worst sequence, the first of each; one where all are alike."""
        scores = self.element.scores[: self.num_sequences]
        if not scores:
            return (0,) if self.num_sequences else ()
        best, worst = scores.index(max(scores)), scores.index(min(scores))
        return (best,) if best == worst else (best, worst)


def _mean(values: Sequence[float]) -> float | None:
    """None of no values. A sum that is too large for a float has a mean all the same."""
    if not values:
        return None
    total = sum(values)
    return total / len(values) if math.isfinite(total) else sum(value / len(values) for value in values)


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


PAGE = 100
"""Groups asked for at a time; the server cuts a page earlier where it grows too large."""

MOST = 1000
"""Groups that one page may hold."""

T = TypeVar("T")


class NoGroups(NotFound):
    """Something answers there, but it has no list of groups."""


class Reader:
    """A looker-on: one connection, one caller at a time.

    Raises:
        NotReady: the server is away for longer than `patience` says.
        NoGroups: what answers is an Atropos server, or no trajectory server at all.
        NotAllowed: it asks for a token.
    """

    def __init__(self, url: str, patience: Patience | None = None) -> None:
        self.at, self._patience = Address.of(url), patience or Patience(total_s=1.0)
        self._connection: http.client.HTTPConnection | None = None

    def page(
        self,
        *,
        after: int = 0,
        limit: int = PAGE,
        places: Sequence[PlaceName] = (),
        env_id: int | None = None,
        newest: bool = False,
        bodies: bool = True,
    ) -> Page:
        """GET /v1/groups: the first `limit` after an id, or the last; the oldest first."""
        asked = [("after", str(after)), ("limit", str(limit)), *(("place", place) for place in places)]
        if env_id is not None:
            asked.append(("env_id", str(env_id)))
        flags = {"newest": newest, "bodies": bodies}
        asked.extend((name, "true") for name, wanted in flags.items() if wanted)
        return self._get(f"/v1/groups?{urlencode(asked)}", Page)

    def group(self, group_id: int) -> Told:
        """GET /v1/groups/{id}, with its tokens where they are kept."""
        return self._get(f"/v1/groups/{group_id}", Told)

    def diagnostics(self) -> Diagnostics:
        """GET /v1/diagnostics."""
        return self._get("/v1/diagnostics", Diagnostics)

    def environment_names(self) -> dict[int, str]:
        """Names of the environments that the server knows, by id; harmless ones, of one line each."""
        return {env.env_id: on_one_line(env.name) for env in self.diagnostics().environments}

    def environment(self, name_or_id: str) -> int:
        """The id that somebody means by an id, by a name, or by a name without its number where only one has it.

        Raises:
            NotFound: the server knows none, or several.
        """
        names = self.environment_names()
        if name_or_id.isdecimal() and int(name_or_id) in names:
            return int(name_or_id)
        alike = [id for id, name in names.items() if name_or_id in (name, name.rpartition("_")[0])]
        exact = [id for id in alike if names[id] == name_or_id]
        if len(found := exact or alike) == 1:
            return found[0]
        if found:
            told = ", ".join(f"'{names[id]}' ({id})" for id in found)
            raise NotFound(f"'{name_or_id}' is the name of {len(found)} environments.", f"{told}.", "Give one whole.")
        raise unknown(NotFound, "environment", name_or_id, names.values())

    def pages(self, after: int, places: Sequence[PlaceName], env_id: int | None) -> Iterator[list[Told]]:
        """Everything there is now after an id, with tokens."""
        at: int | None = after
        while at is not None:
            page = self.page(after=at, places=places, env_id=env_id)
            yield page.groups
            at = page.next

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _get(self, path: str, kind: type[T]) -> T:
        status, answer = self._answered(path)
        if status in (404, 405):
            raise self._stranger()
        try:
            return msgspec.json.decode(checked(status, answer, path, EVERYWHERE), type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise self._stranger() from None

    def _stranger(self) -> NoGroups:
        """What answered where there is no list of groups."""
        status, answer = self._answered("/")
        if status == 200 and b"AtroposLib API" in answer:
            return NoGroups(
                f"The server at {self.at.url} has no list of groups (/v1/groups).",
                "It is the original Atropos server, or a Halteres that is older than this one.",
                "Groups can be looked at on ours: halteres serve trajectories",
            )
        return NoGroups(
            f"What answers at {self.at.url} is no trajectory server.",
            f"It answers / with {status}.",
            "Name one with --url http://HOST:PORT.",
        )

    def _answered(self, path: str) -> tuple[int, bytes]:
        pauses = self._patience.pauses()
        while True:
            try:
                status, answer = self._once(path)
                if status < 500:
                    return status, answer
                checked(status, answer, path)
            except NotReady:
                pause = next(pauses, None)
                if pause is None:
                    raise
                time.sleep(pause)

    def _once(self, path: str) -> tuple[int, bytes]:
        if self._connection is None:
            kind = http.client.HTTPSConnection if self.at.is_secure else http.client.HTTPConnection
            self._connection = kind(self.at.host, self.at.port, timeout=REPLY_S)
        compressed = {} if self.at.is_here else {"Accept-Encoding": "gzip"}
        try:
            self._connection.request("GET", self.at.prefix + path, headers={**self.at.headers, **compressed})
            response = self._connection.getresponse()
            answer = response.read()
            is_gzip = response.headers.get("Content-Encoding") == "gzip"
            return response.status, gzip.decompress(answer) if is_gzip else answer
        except (OSError, EOFError, zlib.error, http.client.HTTPException) as error:
            self.close()
            raise unreachable(self.at.url, error) from error
        except ValueError as error:  # of a path or token with a character that has no place in a request
            raise InvalidConfig(
                f"{self.at.url} cannot be asked.", f"{error}.", "Correct the URL or the token."
            ) from error


class Follower:
    """What has come to the wanted places since the last look, each group once.

    Groups come to a place in another order than to the server, so what still waits is looked at again: a look begins at
    the oldest group that could move since.
    """

    def __init__(self, reader: Reader, after: int, places: Sequence[PlaceName], env_id: int | None) -> None:
        self._reader, self._places, self._env_id = reader, tuple(places), env_id
        self._after = after  # nothing up to this id is news
        self._seen: set[int] = set()  # of those behind it

    def skip(self) -> None:
        """What is there by now is no news."""
        self._settle(self._settled())
        self.saw(self._listed())

    def saw(self, group_ids: Iterable[int]) -> None:
        """These are no news: they were shown by other means."""
        self._seen.update(group_ids)

    def look(self) -> Iterator[list[Told]]:
        """Pages of what is new, with tokens. A look that failed may be repeated: what it told is not told again."""
        yield from self._by_place() if self._places else self._by_arrival()

    def _by_arrival(self) -> Iterator[list[Told]]:
        for groups in self._reader.pages(self._after, (), self._env_id):
            fresh = [told for told in groups if told.id not in self._seen]
            if fresh:
                yield fresh
            self._settle(max([self._after, *(told.id for told in groups)]))

    def _by_place(self) -> Iterator[list[Told]]:
        settled = self._settled()  # asked before the list: what moves in between is found now or at the next look
        for group_id in [group_id for group_id in self._listed() if group_id not in self._seen]:
            told = self._reader.group(group_id)
            yield [told]
            self._seen.add(group_id)
        self._settle(settled)

    def _settle(self, upto: int) -> None:
        self._after = max(self._after, upto)
        self._seen = {group_id for group_id in self._seen if group_id > self._after}

    def _settled(self) -> int:
        """Up to which id no group can come to another place any more (those archived aside)."""
        newest = self._reader.page(limit=1, newest=True, bodies=False).groups
        waiting = self._reader.page(after=self._after, limit=1, places=WAITING, bodies=False).groups
        if waiting:
            return waiting[0].id - 1
        return newest[0].id if newest else 0

    def _listed(self) -> Iterator[int]:
        at: int | None = self._after
        while at is not None:
            page = self._reader.page(after=at, limit=MOST, places=self._places, env_id=self._env_id, bodies=False)
            yield from (told.id for told in page.groups)
            at = page.next
