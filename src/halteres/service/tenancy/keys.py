"""Keys: who may use a service that asks for them.

Owns: the check of a key that a request brings, when the file is read again, whether keys are asked for at all.
Never: writes the file (`key_file` does), knows HTTP.
"""

from __future__ import annotations

import hmac
import logging
import time
from pathlib import Path

from halteres.errors import NotReady, ServerError, UserError
from halteres.service.tenancy.key_file import Key, KeyFile, hash_of, id_of
from halteres.service.tenancy.tenants import LOCAL, Tenant

HOW = "`halteres keys create NAME` on the service's machine makes one; set TINKER_API_KEY to it."

OWN = "It is of one run, for its own processes: `halteres runs connect RUN` prints its address and key."

_NO_HASH = "0" * 64

log = logging.getLogger(__name__)


class KeyRefused(UserError):
    """A request without a key, or with one that is not good (any more)."""

    code, status = "key_refused", 401


class Keys:
    """The keys as a running service knows them: every request looks whether the file is still the same.

    Once a service has asked for keys it goes on asking, also when the file is gone: what is lost opens nothing.

    Args:
        own: a key that is in no file; who brings it is the tenant of a service without keys.
    """

    def __init__(self, state: Path, *, required: bool = False, own: str | None = None) -> None:
        self._file, self._asks, self._own = KeyFile(state), required or own is not None, own
        self._mark: object = None
        self._unreadable = False
        self._known: dict[str, Key] = {}

    @property
    def asked_for(self) -> bool:
        """Whether a request needs a key.

        Raises:
            NotReady: the file cannot be read; nobody is let in then.
        """
        self._look()
        return self._asks

    def tenant(self, presented: str | None) -> Tenant:
        """Whose key this is.

        Raises:
            KeyRefused: nobody's, or it is expired or revoked.
            NotReady: the file cannot be read.
        """
        if not presented:
            raise KeyRefused("This service asks for a key, and the request has none.", next=self._how)
        if self._own is not None and hmac.compare_digest(presented.encode(), self._own.encode()):
            return LOCAL
        self._look()
        known = self._known.get(id_of(presented))
        matches = hmac.compare_digest(hash_of(presented), known.sha256 if known else _NO_HASH)
        if known is None or not matches:
            raise KeyRefused("The key of this request is not known here.", next=self._how)
        if (state := known.state(time.time())) != "valid":
            raise KeyRefused(f"The key {known.id} ('{known.name}') is {state}.", next=HOW)
        return known.tenant

    @property
    def _how(self) -> str:
        return HOW if self._own is None else OWN

    def _look(self) -> None:
        if (mark := self._seen()) != self._mark:
            self._asks, self._known, self._unreadable = True, {}, False
            self._mark = mark
            try:
                self._known = {key.id: key for key in self._file.read()}
            except ServerError as error:
                self._unreadable = True
                log.error("%s Until then every request is refused.", error)
        if self._unreadable:
            raise NotReady("The keys of this service cannot be read.", next="The service's log says why.")

    def _seen(self) -> object:
        try:
            found = self._file.path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            return f"{error}"
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode
