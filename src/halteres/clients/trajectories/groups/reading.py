"""Asking a trajectory server which groups it has.

Owns: pages, following what comes, environments by name; what it means when the server has no list of groups.
Never: a request that changes anything: all are GETs without effect.
"""

from __future__ import annotations

import gzip
import http.client
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import TypeVar
from urllib.parse import urlencode

import msgspec

from halteres.clients.trajectories.address import Address
from halteres.clients.trajectories.calls import EVERYWHERE, REPLY_S, Patience, checked, unreachable
from halteres.clients.trajectories.groups.harmless import on_one_line
from halteres.clients.trajectories.groups.told import Diagnostics, Page, PlaceName, Told
from halteres.errors import InvalidConfig, NotFound, NotReady, unknown

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
