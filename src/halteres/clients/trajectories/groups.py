"""Groups on a trajectory server, read and followed. Reading changes nothing there.

Texts in groups may be anybody's: what is shown to a person has no control characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal, TypeVar
from urllib.parse import urlencode

import msgspec

from halteres.clients.retries import Retries
from halteres.clients.trajectories.calls import EVERYWHERE, PlainClient, Refusals
from halteres.errors import NotFound, unknown

PlaceName = Literal["queued", "buffered", "out", "delivered", "set_aside", "archived"]
PLACES: tuple[PlaceName, ...] = ("queued", "buffered", "out", "delivered", "set_aside", "archived")
# places that a group leaves for another
WAITING: tuple[PlaceName, ...] = ("queued", "buffered", "out")
# groups with tokens asked for at a time; the server cuts a page earlier where it grows too large
PAGE = 100
MOST = 1000  # groups that one page may hold
RETRIES = Retries.for_seconds(1.0)  # somebody waits for the first answer
T = TypeVar("T")


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One group of GET /v1/groups."""

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
    # b"" where not asked for, b"null" where it is kept no more
    element: msgspec.Raw = msgspec.Raw(b"")

    @property
    def has_tokens(self) -> bool:
        """What a trainer would get of it came along."""
        return bytes(self.element) not in (b"", b"null")


class Page(msgspec.Struct, frozen=True):
    """GET /v1/groups."""

    groups: list[GroupInfo]
    next: int | None  # the `after` of the page behind; None on the last


class _Environment(msgspec.Struct, frozen=True):
    env_id: int
    name: str


class _Diagnostics(msgspec.Struct, frozen=True):  # as far as it is of use here
    environments: list[_Environment]


_HIDDEN = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def harmless(text: str) -> str:
    """The text without characters that move a cursor, start a terminal's command or turn the
    direction of reading.

    >>> harmless("a\\x1b[2J\\u202eb")
    'a<U+001B>[2J<U+202E>b'
    """
    return _HIDDEN.sub(_code_point, text.replace("\r\n", "\n"))


def on_one_line(text: str) -> str:
    """The same of a name or a sentence, which may not break a line or a table either.

    >>> on_one_line("a\\nb\\t\\x1b[2J")
    'a<U+000A>b<U+0009><U+001B>[2J'
    """
    return re.sub(r"[\t\n]", _code_point, harmless(text))


def _code_point(found: re.Match[str]) -> str:
    return f"<U+{ord(found[0]):04X}>"


class NoGroups(NotFound):
    """Something answers there, but it has no list of groups."""


class Reader(PlainClient):
    """A client that only reads: one connection, one caller at a time.

    Raises:
        NotReady: the server is away for longer than `retries` say.
        NoGroups: what answers is an Atropos server, or no trajectory server at all.
        NotAllowed: it asks for a token.
    """

    refusals: ClassVar[Refusals] = {**EVERYWHERE, 404: NoGroups, 405: NoGroups}

    def __init__(self, url: str, retries: Retries = RETRIES) -> None:
        super().__init__(url, retries)

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
        query = [
            ("after", str(after)),
            ("limit", str(limit)),
            *(("place", place) for place in places),
        ]
        query += [] if env_id is None else [("env_id", str(env_id))]
        query += [
            (name, "true") for name, is_on in (("newest", newest), ("bodies", bodies)) if is_on
        ]
        return self._get(f"/v1/groups?{urlencode(query)}", Page)

    def pages(
        self,
        after: int,
        places: Sequence[PlaceName],
        env_id: int | None,
        *,
        limit: int = PAGE,
        bodies: bool = True,
    ) -> Iterator[list[GroupInfo]]:
        """Everything there is now after an id."""
        at: int | None = after
        while at is not None:
            page = self.page(after=at, places=places, env_id=env_id, limit=limit, bodies=bodies)
            yield page.groups
            at = page.next

    def group(self, group_id: int) -> GroupInfo:
        """GET /v1/groups/{id}, with its tokens where they are kept."""
        return self._get(f"/v1/groups/{group_id}", GroupInfo)

    def environment_names(self) -> dict[int, str]:
        """Names of the environments that the server knows, by id; harmless ones, of one line
        each.
        """
        found = self._get("/v1/diagnostics", _Diagnostics)
        return {env.env_id: on_one_line(env.name) for env in found.environments}

    def environment(self, name_or_id: str) -> int:
        """The id that somebody means by an id, by a name, or by a name without its number where
        only one has it.

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
            several = ", ".join(f"'{names[id]}' ({id})" for id in found)
            raise NotFound(
                f"'{name_or_id}' is the name of {len(found)} environments.",
                f"{several}.",
                "Give one whole.",
            )
        raise unknown(NotFound, "environment", name_or_id, names.values())

    def _get(self, path: str, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(self.ask("GET", path), type=kind)
        except (NoGroups, msgspec.DecodeError, UnicodeDecodeError):
            pass
        status, answer = self.ask_once("GET", "/")
        if status == 200 and b"AtroposLib API" in answer:
            raise NoGroups(
                f"The server at {self.at.url} has no list of groups (/v1/groups).",
                "It is the original Atropos server, or a Halteres that is older than this one.",
                "Groups can be looked at on ours: halteres serve trajectories",
            )
        raise NoGroups(
            f"What answers at {self.at.url} is no trajectory server.",
            f"It answers / with {status}.",
            "Name one with --url http://HOST:PORT.",
        )


class Follower:
    """What has come to these places since the last look, each group once.

    Groups come to a place in another order than to the server, so what still waits is looked at
    again: a look begins at the oldest group that could move since.
    """

    def __init__(
        self, reader: Reader, after: int, places: Sequence[PlaceName], env_id: int | None
    ) -> None:
        self._reader, self._places, self._env_id = reader, tuple(places), env_id
        self._after = after  # everything up to this id was seen
        self._seen: set[int] = set()  # of those behind it

    def skip(self) -> None:
        """What is there by now counts as seen."""
        self._settle(self._settled())
        self.saw(info.id for info in self._listed())

    def saw(self, group_ids: Iterable[int]) -> None:
        """These were shown by other means."""
        self._seen.update(group_ids)

    def look(self) -> Iterator[list[GroupInfo]]:
        """Pages of what is new, with tokens. A look that failed may be repeated: what it gave is
        not given again.
        """
        if not self._places:  # in the order of their ids
            for infos in self._reader.pages(self._after, (), self._env_id):
                if fresh := [info for info in infos if info.id not in self._seen]:
                    yield fresh
                self._settle(max((info.id for info in infos), default=0))
            return
        # before the list: what moves in between is found now or at the next look
        settled = self._settled()
        for info in self._listed():
            if info.id not in self._seen:
                yield [self._reader.group(info.id)]
                self._seen.add(info.id)
        self._settle(settled)

    def _listed(self) -> list[GroupInfo]:
        pages = self._reader.pages(
            self._after, self._places, self._env_id, limit=MOST, bodies=False
        )
        return [info for page in pages for info in page]

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
