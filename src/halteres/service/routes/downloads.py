"""Downloads: an export's files and a checkpoint's archive, by URLs that carry their own proof.

Source: tinker SDK 0.38.0, cli/commands/checkpoint.py (files), 0.25.0, resources/weights.py (archives, up to 0.35).
"""

from __future__ import annotations

import time
from email.utils import formatdate
from pathlib import Path

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from halteres.errors import InvalidData, NotFound
from halteres.service.answers import answer, timestamp
from halteres.service.checkpoints.store import Checkpoint
from halteres.service.exports.archive import Archive
from halteres.service.exports.peft_folders import FILES
from halteres.service.exports.signing import SIGNED, VALID_S, Signer
from halteres.service.routes.checkpoints import CHECKPOINT, path_in
from halteres.service.service import Service
from halteres.service.tenancy.tenants import tenant_of

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
