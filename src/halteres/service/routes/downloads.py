"""Downloads: an export's files and a checkpoint's archive.

A URL carries its own proof: whoever has one may read one file for an hour, without a key.

Source: tinker SDK 0.38.0, cli/commands/checkpoint.py (files), 0.25.0, resources/weights.py (archives, up to 0.35).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, urlencode

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from halteres.errors import InvalidData, NotFound, UserError
from halteres.files import replace_file
from halteres.service.answers import answer, timestamp
from halteres.service.checkpoints.peft_folders import FILES
from halteres.service.checkpoints.store import Checkpoint
from halteres.service.routes.checkpoints import CHECKPOINT, path_in
from halteres.service.service import Service
from halteres.service.tenancy.tenants import tenant_of

COMPLETE = "checkpoint_complete"
"""An empty file at the end of an archive, by which SDKs up to 0.35 know that it is whole."""

CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    stream: BinaryIO
    size: int
    modified_at: float

    def header(self) -> bytes:
        info = tarfile.TarInfo(self.name)
        info.size, info.mtime, info.mode = self.size, int(self.modified_at), 0o644
        return info.tobuf(tarfile.USTAR_FORMAT)


class Archive:
    """A tar of open files; it is sent even if their names are removed meanwhile. Close it, or read it to its end.

    Raises:
        NotFound: one of them is gone.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        with ExitStack() as opened:
            try:
                self._members = [_member(name, opened.enter_context(file.open("rb"))) for name, file in files.items()]
            except OSError as error:
                raise NotFound("The checkpoint was just deleted.", f"{error.strerror}.") from error
            self._opened = opened.pop_all()

    @property
    def size(self) -> int:
        """Bytes."""
        blocks = sum(1 + -(-member.size // tarfile.BLOCKSIZE) for member in self._members)
        return (blocks + 3) * tarfile.BLOCKSIZE  # the mark's header, and two empty blocks

    def chunks(self) -> Iterator[bytes]:
        """The bytes, in order."""
        with self._opened:
            for member in self._members:
                yield member.header()
                while chunk := member.stream.read(CHUNK_BYTES):
                    yield chunk
                yield bytes(-member.size % tarfile.BLOCKSIZE)
            yield tarfile.TarInfo(COMPLETE).tobuf(tarfile.USTAR_FORMAT) + bytes(2 * tarfile.BLOCKSIZE)

    def close(self) -> None:
        """Close what was not sent."""
        self._opened.close()


def _member(name: str, stream: BinaryIO) -> _Member:
    size = stream.seek(0, 2)
    stream.seek(0)
    return _Member(name, stream, size, Path(stream.name).stat().st_mtime)


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


BINARY = "application/octet-stream"


class DownloadRoutes:
    """What a RestClient asks for to download weights, and the downloads."""

    def __init__(self, service: Service) -> None:
        self._checkpoints = service.checkpoints
        self._signer = Signer.kept_in(service.state / "signing.key")

    def table(self) -> list[Route]:
        """The routes."""
        return [
            Route(f"{CHECKPOINT}/external_weights_urls", self.urls),
            Route(f"{CHECKPOINT}/archive", self.archive_url),
            Route(f"{SIGNED}/exports/{{run_id}}/{{kind}}/{{name}}/{{file}}", self.file),
            Route(f"{SIGNED}/archives/{{run_id}}/{{kind}}/{{name}}", self.archive),
        ]

    async def urls(self, request: Request) -> Response:
        """GET …/external_weights_urls: one for each file of an export."""
        found = self._checkpoints.readable(path_in(request), tenant_of(request))
        if found.path.kind != "external_weights":
            raise InvalidData(
                f"{found.path} is no export.", next="Make one: TrainingClient.save_weights_external(name)."
            )
        expires, base = int(time.time()) + VALID_S, str(request.base_url)
        urls = {name: self._signer.url(base, "exports", found, name, expires) for name in files_of(found)}
        return answer({"urls": urls, "expires": timestamp(expires)})

    async def archive_url(self, request: Request) -> Response:
        """GET …/archive: the way to a tar of the adapter."""
        found = self._checkpoints.readable(path_in(request), tenant_of(request))
        expires = int(time.time()) + VALID_S
        url = self._signer.url(str(request.base_url), "archives", found, "", expires)
        return Response(status_code=302, headers={"location": url, "expires": formatdate(expires, usegmt=True)})

    async def file(self, request: Request) -> Response:
        """A file of an export; ranges of it too."""
        name = request.path_params["file"]
        found = self._signed(request, "exports", name)
        file = files_of(found).get(name)
        if file is None:
            raise NotFound(f"{found.path} has no file '{name}'.", f"It has {', '.join(files_of(found))}.")
        return FileResponse(file, media_type=BINARY, filename=name)

    async def archive(self, request: Request) -> Response:
        """A tar of a checkpoint's adapter."""
        found = self._signed(request, "archives", "")
        archive = Archive(files_of(found))
        headers = {
            "content-length": str(archive.size),
            "content-disposition": f'attachment; filename="{found.path.name}.tar"',
        }
        closing = BackgroundTask(archive.close)
        return StreamingResponse(archive.chunks(), 200, headers, "application/x-tar", closing)

    def _signed(self, request: Request, what: str, file: str) -> Checkpoint:
        """The checkpoint that a signed request names, whoever asks."""
        found = self._checkpoints.at(path_in(request))
        given = request.query_params
        self._signer.check(what, found, file, given.get("expires", ""), given.get("signature", ""))
        assert found is not None  # noqa: S101 - for the type checker: without one the check fails
        return found


def files_of(found: Checkpoint) -> dict[str, Path]:
    """The files that others get of a checkpoint, by name: all of an export, of weights the adapter's."""
    files = {file.name: file for file in sorted(found.folder.iterdir()) if file.is_file()}
    if found.path.kind == "external_weights":
        return files
    return {name: files[name] for name in FILES if name in files}
