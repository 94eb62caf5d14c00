"""Keys on disk: their making, and the file that says whose they are.

Owns: the form of a key, what is kept of it.
Never: keeps a key (a hash of it is all that is written); decides who is let in (`keys` does).

    tml-ID-SECRET      ID: 8 hex digits, public; SECRET: 43 characters that hold 256 random bits
    STATE/keys.json    what is known of every key ever made here; its owner alone may read it

The hash is SHA-256. A slow one (bcrypt, Argon2) makes up for how little there is to guess of a password; of 256 random
bits nobody guesses a part, however fast the hash is, and a slow one would cost every request its time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from halteres.errors import InvalidConfig, NotFound, ServerError, shortened, unknown
from halteres.files import replacing
from halteres.service.tenancy.tenants import Tenant, checked_name

PREFIX = "tml"
"""The SDK up to 0.9 refuses keys that begin otherwise."""

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
        """All of them, oldest first; none where there is no file.

        Raises:
            ServerError: the file cannot be read, or holds something else.
        """
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
        self, name: str, *, tenant: Tenant | None = None, note: str = "", lifetime_s: float | None = None
    ) -> NewKey:
        """Make a key and write down whose it is.

        Args:
            name: its own.
            tenant: whose it is; its name, where this is None.
            note: for people.
            lifetime_s: until it expires; None: never.

        Raises:
            InvalidConfig: an impossible name.
            ServerError: the file cannot be written.
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
        """From now on this key is refused; one that was revoked before stays as it was.

        Raises:
            NotFound: there is none of this id.
            ServerError: the file cannot be written.
        """
        with self._changing() as keys:
            for index, key in enumerate(keys):
                if key.id == key_id:
                    keys[index] = key if key.revoked_at is not None else replace(key, revoked_at=time.time())
                    return keys[index]
            raise unknown(NotFound, "key", key_id, (key.id for key in keys), "`halteres keys list` tells them.")

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
                self._write(keys)
            finally:
                os.close(folder)
        except OSError as error:
            raise ServerError(f"The keys in {self._state} cannot be written.", f"{error.strerror}.") from error

    def _write(self, keys: Sequence[Key]) -> None:
        with replacing(self.path) as beside:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as stream:
                stream.write(msgspec.json.format(msgspec.json.encode(keys)) + b"\n")
                stream.flush()
                os.fsync(stream.fileno())


def hash_of(text: str) -> str:
    """What is kept of a key, hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def id_of(text: str) -> str:
    """The public part of a key; empty where the text is none."""
    parts = text.split("-", 2)
    return parts[1] if len(parts) == 3 and parts[0] == PREFIX else ""


def lifetime_s(text: str) -> float:
    """A lifetime as people write it.

    Raises:
        InvalidConfig: it is none.

    >>> lifetime_s("30d")
    2592000.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if found is None:
        raise _no_lifetime(text, "It is a number and one of s, m, h, d, w.")
    seconds = float(found[1]) * _UNITS[found[2]]
    if not 0 < seconds <= LONGEST_S:
        raise _no_lifetime(text, "It is longer than 0 and at most 300 years.")
    return seconds


def _no_lifetime(text: str, why: str) -> InvalidConfig:
    return InvalidConfig(f"'{shortened(text)}' is no lifetime.", why, "Write 30m, 12h, 30d or 8w, or none for ever.")
