"""Tenants and their keys: whose a request is, the file that says so, and the check of a key that a
request brings.

    tml-ID-SECRET      ID: 8 hex digits, public; SECRET: 43 characters that hold 256 random bits
    STATE/keys.json    what is known of every key ever made here; its owner alone may read it

The hash is SHA-256. A slow one (bcrypt, Argon2) makes up for how little there is to guess of a
password; of 256 random bits nobody guesses a part, however fast the hash is, and a slow one would
cost every request its time.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from halteres.errors import (
    InvalidConfig,
    NotFound,
    NotReady,
    ServerError,
    UserError,
    shortened,
    unknown,
)
from halteres.files import replacing

log = logging.getLogger(__name__)


Tenant = str  # the owner of an API key, by name
LOCAL: Tenant = "local"  # everybody, on a service without keys
NOBODY: Tenant = ""  # whoever asks for what needs no key, of a service with keys: owns nothing
SCOPE_KEY = "halteres.tenant"  # where the check of keys leaves the tenant in a request's ASGI scope


def checked_name(name: str) -> Tenant:
    """The name of a tenant or a key."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,63}", name):
        raise InvalidConfig(
            f"'{name}' cannot name a tenant or a key.",
            "It may have letters, digits and . _ @ + -, up to 64, and begins with a letter, a "
            "digit or _.",
            "Choose another name.",
        )
    return name


PREFIX = "tml"  # the SDK up to 0.9 refuses keys that begin otherwise

LONGEST_S = 300 * 365.25 * 86400

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What is known of a key."""

    id: str
    name: str
    tenant: Tenant
    note: str = ""
    sha256: str  # of the whole key, hex
    created_at: float  # unix s
    expires_at: float | None = None  # unix s
    revoked_at: float | None = None  # unix s

    def state(self, now: float) -> str:
        """valid, expired or revoked."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "valid"


class NewKey(NamedTuple):
    """A key that was just made; its text is nowhere else."""

    key: Key
    text: str


_decode = msgspec.json.Decoder(list[Key]).decode


class KeyFile:
    """The keys of one state directory. It may be changed whether or not a service runs there."""

    def __init__(self, state: Path) -> None:
        self._state, self.path = state, state / "keys.json"

    def read(self) -> list[Key]:
        """All of them, oldest first; none where there is no file."""
        try:
            return _decode(self.path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, msgspec.MsgspecError) as error:
            raise ServerError(
                "The keys of this service cannot be read.",
                f"{self.path}: {error}.",
                "Mend the file; or move it away, and make every key anew.",
            ) from error

    def create(
        self,
        name: str,
        *,
        tenant: Tenant | None = None,
        note: str = "",
        lifetime_s: float | None = None,
    ) -> NewKey:
        """Make a key and write down whose it is: without a `tenant`, that of its own name; without
        a lifetime it never expires. InvalidConfig for an impossible name.
        """
        now, key_id = time.time(), secrets.token_hex(4)
        text = f"{PREFIX}-{key_id}-{secrets.token_urlsafe(32)}"
        key = Key(
            id=key_id,
            name=checked_name(name),
            tenant=checked_name(name if tenant is None else tenant),
            note=note,
            sha256=hash_of(text),
            created_at=now,
            expires_at=None if lifetime_s is None else now + lifetime_s,
        )
        with self._changing() as keys:
            keys.append(key)
        return NewKey(key, text)

    def revoke(self, key_id: str) -> Key:
        """From now on this key is refused; one that was revoked before stays as it was."""
        with self._changing() as keys:
            ids = [key.id for key in keys]
            if key_id not in ids:
                raise unknown(NotFound, "key", key_id, ids, "`halteres keys list` tells them.")
            key = keys[ids.index(key_id)]
            keys[ids.index(key_id)] = revoked = replace(
                key, revoked_at=key.revoked_at or time.time()
            )
            return revoked

    @contextmanager
    def _changing(self) -> Iterator[list[Key]]:
        """The keys, written back when the block ends; one at a time changes them."""
        try:
            self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = os.open(self._state, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX)
                keys = self.read()
                yield keys
                with replacing(self.path) as beside:
                    descriptor = os.open(
                        beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
                    )
                    with open(descriptor, "wb") as stream:
                        stream.write(msgspec.json.format(msgspec.json.encode(keys)) + b"\n")
                        stream.flush()
                        os.fsync(stream.fileno())
            finally:
                os.close(folder)
        except OSError as error:
            raise ServerError(
                f"The keys in {self._state} cannot be written.", f"{error.strerror}."
            ) from error


def hash_of(text: str) -> str:
    """What is kept of a key, hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def lifetime_s(text: str) -> float:
    """A lifetime as people write it; InvalidConfig where it is none.

    >>> lifetime_s("30d")
    2592000.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < seconds <= LONGEST_S:
        why = "It is a number above 0 and one of s, m, h, d, w; at most 300 years."
        raise InvalidConfig(
            f"'{shortened(text)}' is no lifetime.",
            why,
            "Write 30m, 12h, 30d or 8w, or none for ever.",
        )
    return seconds


HOW = "`halteres keys create NAME` on the service's machine makes one; set TINKER_API_KEY to it."
OWN = (
    "It is of one run, for its own processes: `halteres runs connect RUN` prints its address "
    "and key."
)


class KeyRefused(UserError):
    """A request without a key, or with one that is not good (any more)."""

    code, status = "key_refused", 401


class KeyOfSession(UserError):
    """A gateway session's key, at what is not that session."""

    code, status = "key_of_session", 403


class Keys:
    """The keys as a running service knows them: every request looks whether the file is still the
    same. One that required keys once goes on requiring them, also when the file is gone. `own` is a
    key that is in no file; who brings it is the tenant of a service without keys.
    """

    def __init__(self, state: Path, *, required: bool = False, own: str | None = None) -> None:
        self._file, self._required, self._own = KeyFile(state), required or own is not None, own
        self._mark: object = None
        self._unreadable = False
        self._known: dict[str, Key] = {}

    @property
    def required(self) -> bool:
        """Whether a request needs a key; NotReady where the file cannot be read: nobody is let in
        then.
        """
        self._look()
        return self._required

    def tenant(self, presented: str | None) -> Tenant:
        """Whose key this is; KeyRefused where it is nobody's, expired or revoked."""
        how = HOW if self._own is None else OWN
        if not presented:
            raise KeyRefused("This service asks for a key, and the request has none.", next=how)
        if self._own is not None and hmac.compare_digest(presented.encode(), self._own.encode()):
            return LOCAL
        self._look()
        known = self._known.get(presented.removeprefix(f"{PREFIX}-").partition("-")[0])
        matches = hmac.compare_digest(hash_of(presented), known.sha256 if known else "0" * 64)
        if known is None or not matches:
            raise KeyRefused("The key of this request is not known here.", next=how)
        if (state := known.state(time.time())) != "valid":
            raise KeyRefused(f"The key {known.id} ('{known.name}') is {state}.", next=HOW)
        return known.tenant

    def check_tenant(self, tenant: Tenant) -> None:
        """Raise KeyRefused for a tenant that has no good key any more."""
        if self._own is not None and tenant == LOCAL:
            return
        self._look()
        now = time.time()
        own = (key for key in self._known.values() if key.tenant == tenant)
        if not any(key.state(now) == "valid" for key in own):
            raise KeyRefused(
                "Whoever opened this gateway session has no key here any more.", next=HOW
            )

    def _look(self) -> None:
        try:
            found = self._file.path.stat()
            mark: object = (found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode)
        except (FileNotFoundError, NotADirectoryError):
            mark = None
        except OSError as error:
            mark = f"{error}"
        if mark != self._mark:
            self._required, self._known, self._unreadable, self._mark = True, {}, False, mark
            try:
                self._known = {key.id: key for key in self._file.read()}
            except ServerError as error:
                self._unreadable = True
                log.error("%s Until then every request is refused.", error)
        if self._unreadable:
            raise NotReady(
                "The keys of this service cannot be read.", next="The service's log says why."
            )
