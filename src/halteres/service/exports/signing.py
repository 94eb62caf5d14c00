"""URLs that carry their own proof: whoever has one may read one file for an hour, without a key.

Owns: the secret in the state directory, what a signature covers, when it ends.
Never: opens a file.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

from halteres.errors import UserError
from halteres.files import replace_file
from halteres.service.checkpoints.store import Checkpoint

SIGNED = "/halteres/v1/files"
"""Routes below this ask for no key (`guard`); every one of them checks a signature."""

VALID_S = 3600
"""Clients have URLs signed again where fewer than 5 minutes are left (SDK 0.38, tinker-cookbook 0.6.1)."""


class NotSigned(UserError):
    """A URL whose signature does not fit, or whose time is over."""

    code, status = "not_signed", 403


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs and checks URLs with one secret."""

    secret: bytes

    @classmethod
    def kept_in(cls, file: Path) -> Signer:
        """The signer of a state directory; its secret is made when there is none."""
        if not file.is_file():
            replace_file(file, secrets.token_bytes(32))
            os.chmod(file, 0o600)
        return cls(file.read_bytes())

    def url(self, base: str, what: str, checkpoint: Checkpoint, file: str, expires: int) -> str:
        """The URL of a checkpoint's file, or of what `file` "" means.

        Args:
            base: scheme, host and port by which the client reached us.
            what: the route below SIGNED.
            checkpoint: whose file it is.
            file: a name within its folder.
            expires: unix s.
        """
        path = checkpoint.path
        parts = (what, path.run, path.kind, path.name, *([file] if file else []))
        query = urlencode({"expires": expires, "signature": self._signature(what, checkpoint, file, expires)})
        return f"{base.rstrip('/')}{SIGNED}/{'/'.join(quote(part, safe=':') for part in parts)}?{query}"

    def check(self, what: str, checkpoint: Checkpoint | None, file: str, expires: str, signature: str) -> None:
        """Let a request pass only with the signature that `url` gave it, and before its time is over.

        Raises:
            NotSigned: it has none, another, or one that is over; or the checkpoint is gone or another one.
        """
        if checkpoint is None or not (expires.isascii() and expires.isdigit() and len(expires) < 16):
            raise _refused("It was changed, or what it led to was deleted.")
        right = self._signature(what, checkpoint, file, int(expires))
        if not hmac.compare_digest(right.encode(), signature.encode()):
            raise _refused("It was changed, or what it led to was deleted.")
        if int(expires) <= time.time():
            raise _refused("Its time is over.")

    def _signature(self, what: str, checkpoint: Checkpoint, file: str, expires: int) -> str:
        """Over the time of making too: a path that is used again is another checkpoint's."""
        text = "\n".join((what, str(checkpoint.path), repr(checkpoint.created_at), file, str(expires)))
        return hmac.new(self.secret, text.encode(), hashlib.sha256).hexdigest()


def _refused(why: str) -> NotSigned:
    return NotSigned("This URL opens nothing.", why, "Ask for a new one: external_weights_urls, or archive.")
