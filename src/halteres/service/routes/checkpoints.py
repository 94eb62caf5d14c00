"""Checkpoints, for RestClient: listed, described, published, given a time to live, copied, deleted,
downloaded.

A copy is a checkpoint of its own, of the kind and name of its source, in a training run of its own
without an adapter. A download's URL carries its own proof: whoever has one may read one file for an
hour, without a key.

Source: tinker SDK 0.38.0, lib/public_interfaces/rest_client.py, resources/weights.py,
resources/models.py, cli/commands/checkpoint.py (files); 0.25.0, resources/weights.py (archives, up
to 0.35); 0.3.0 for the list of a model's checkpoints.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import secrets
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from halteres.engine.folders import copy_linked, size_of
from halteres.engine.protocol import Saved
from halteres.errors import Conflict, InvalidData, NotFound, UserError
from halteres.files import replace_file
from halteres.service.checkpoint_folders import CARD, FILES, checked_ttl, end_of_life, refuse_token
from halteres.service.checkpoints import Checkpoint
from halteres.service.http import (
    SIGNED,
    body_of,
    page_of,
    read_body,
    route,
    sdk_before,
    tenant_of,
    timestamp,
)
from halteres.service.keys import Tenant
from halteres.service.service import Service
from halteres.service.training_runs import Model, Session, model_id_of, record
from halteres.service.wire import bodies

RUN = "/api/v1/training_runs/{run_id}"
CHECKPOINT = f"{RUN}/checkpoints/{{kind}}/{{name}}"

# clients have URLs signed again where fewer than 5 minutes are left (SDK 0.38, tinker-cookbook
# 0.6.1)
VALID_S = 3600


class NotSigned(UserError):
    """A URL whose signature does not fit, or whose time is over."""

    code, status = "not_signed", 403

    def __init__(self, why: str) -> None:
        super().__init__(
            "This URL opens nothing.", why, "Ask for a new one: external_weights_urls, or archive."
        )


class CheckpointRoutes:
    """What a RestClient asks of checkpoints."""

    def __init__(self, service: Service) -> None:
        self._service, self._checkpoints = service, service.checkpoints
        self._copying = asyncio.Lock()  # copies are links, and take no time
        secret = service.state / "signing.key"
        if not secret.is_file():
            replace_file(secret, secrets.token_bytes(32))
            os.chmod(secret, 0o600)
        self._secret = secret.read_bytes()

    def table(self) -> list[Route]:
        """The routes."""
        return [
            route("/api/v1/weights_info", self._weights_info, "POST"),
            route("/api/v1/copy_weights", self._copy, "POST"),
            route("/api/v1/checkpoints", self._all),
            route(f"{RUN}/checkpoints", self._of_run),
            route("/api/v1/models/{run_id}/checkpoints", self._of_run),
            route(CHECKPOINT, self._delete, "DELETE"),
            route(f"{CHECKPOINT}/publish", self._publish, "POST"),
            route(f"{CHECKPOINT}/publish", self._publish, "DELETE"),
            route(f"{CHECKPOINT}/ttl", self._set_ttl, "PUT"),
            route(f"{CHECKPOINT}/external_weights_urls", self._urls),
            route(f"{CHECKPOINT}/archive", self._archive_url),
            route(f"{SIGNED}/exports/{{run_id}}/{{kind}}/{{name}}/{{file}}", self._file),
            route(f"{SIGNED}/archives/{{run_id}}/{{kind}}/{{name}}", self._archive),
        ]

    async def _weights_info(self, request: Request) -> Any:
        path = bodies.read_field(await body_of(request), "tinker_path")
        found = self._checkpoints.readable(path, tenant_of(request))
        return {
            "base_model": found.base_model or self._service.base.name,
            "optimizer_config": {"type": "adamw"},
            "is_lora": True,
            "lora_rank": found.lora.rank,
            "train_unembed": found.lora.train_unembed,
            "train_mlp": found.lora.train_mlp,
            "train_attn": found.lora.train_attn,
        }

    async def _of_run(self, request: Request) -> Any:
        """Weights that were put here belong to no training run of this service."""
        run, tenant = request.path_params["run_id"], tenant_of(request)
        await self._checkpoints.discover()
        found = self._checkpoints.all(run, tenant)
        if not found:
            self._service.models.find(run, tenant)
        return {"checkpoints": [described(one) for one in _listable(found, request)]}

    async def _all(self, request: Request) -> Any:
        await self._checkpoints.discover()
        newest_first = self._checkpoints.all(tenant=tenant_of(request))[::-1]
        page, cursor = page_of(_listable(newest_first, request), request)
        return {"checkpoints": [described(found) for found in page], "cursor": cursor}

    async def _delete(self, request: Request) -> None:
        await self._checkpoints.remove(self._own(request))

    async def _publish(self, request: Request) -> None:
        """From now on everybody may load it, or nobody else (DELETE); repeated, it changes
        nothing.
        """
        await self._checkpoints.change(self._own(request), public=request.method == "POST")

    async def _set_ttl(self, request: Request) -> None:
        body = await read_body(request, bodies.Ttl)
        if isinstance(body.ttl_seconds, msgspec.UnsetType):
            raise InvalidData(
                "The body has no ttl_seconds.",
                next="Send seconds, or null for a checkpoint that stays.",
            )
        expires_at = end_of_life(checked_ttl(body.ttl_seconds), time.time())
        await self._checkpoints.change(self._own(request), expires_at=expires_at)

    def _own(self, request: Request) -> Checkpoint:
        return self._checkpoints.owned(_path_in(request), tenant_of(request))

    async def _copy(self, request: Request) -> Any:
        """Under the same idempotency key a repetition gets the first copy."""
        body, tenant = await read_body(request, bodies.CopyWeights), tenant_of(request)
        refuse_token(
            request.headers.get("x-tinker-weights-access-token") or body.weights_access_token
        )
        key = request.headers.get("x-idempotency-key")
        request_id = f"copy/{key}" if key else None
        async with self._copying:
            made = self._checkpoints.outcome_of(request_id, tenant) if request_id else None
            if made is not None:
                return {"tinker_path": str(made.path)}
            source = self._checkpoints.readable(body.source_path, tenant)
            checked_ttl(body.ttl_seconds)
            model = await self._destination(body, tenant, source)
            kind, name = source.path.kind, source.path.name
            path = self._checkpoints.place(model, kind, name, request_id=request_id)
            folder = self._checkpoints.folder(path)
            # which names the source's path
            await asyncio.to_thread(copy_linked, source.folder, folder, leave_out=CARD)
            saved = Saved(folder=str(folder), size_bytes=size_of(folder), version=source.version)
            ttl_s, metadata = body.ttl_seconds, source.user_metadata
            await self._checkpoints.add(
                path, saved, model, ttl_s=ttl_s, user_metadata=metadata, request_id=request_id
            )
            return {"tinker_path": str(path)}

    async def _destination(
        self, body: bodies.CopyWeights, tenant: Tenant, source: Checkpoint
    ) -> Model:
        sessions, models = self._service.sessions, self._service.models
        if body.session_id is not None and body.model_seq_id is not None:
            session, seq = sessions.find(body.session_id, tenant), body.model_seq_id
        elif body.destination_project_id is not None:
            project = body.destination_project_id
            session, seq = (
                Session(tenant=tenant, tags=["copy_weights"], user_metadata={}, project_id=project),
                0,
            )
            await sessions.add(session)
            sessions.finish(session, "success")
        else:
            raise InvalidData(
                "The copy has no destination.",
                next="Send destination_project_id, or session_id and model_seq_id.",
            )
        model_id = model_id_of(session.id, seq)
        if models.of_id(model_id) is not None:
            raise Conflict(
                f"The training run {model_id} is in use.", next="Send a model_seq_id that is free."
            )
        base, metadata = (
            source.base_model or self._service.base.name,
            {"copied_from": str(source.path)},
        )
        model = await models.add(model_id, session.id, tenant, base, metadata)
        model.lora = source.lora
        await record(self._service.journal, model)
        return model

    # Downloads

    async def _urls(self, request: Request) -> Any:
        found = self._checkpoints.readable(_path_in(request), tenant_of(request))
        if found.path.kind != "external_weights":
            raise InvalidData(
                f"{found.path} is no export.",
                next="Make one: TrainingClient.save_weights_external(name).",
            )
        expires = int(time.time()) + VALID_S
        urls = {
            name: self._url(request, "exports", found, name, expires) for name in files_of(found)
        }
        return {"urls": urls, "expires": timestamp(expires)}

    async def _archive_url(self, request: Request) -> Response:
        found = self._checkpoints.readable(_path_in(request), tenant_of(request))
        expires = int(time.time()) + VALID_S
        url = self._url(request, "archives", found, "", expires)
        return Response(
            status_code=302, headers={"location": url, "expires": formatdate(expires, usegmt=True)}
        )

    def _url(
        self, request: Request, what: str, checkpoint: Checkpoint, file: str, expires: int
    ) -> str:
        """By the scheme, host and port by which the client reached us; an archive has no `file`."""
        path = checkpoint.path
        parts = (what, path.run, path.kind, path.name, *([file] if file else []))
        query = urlencode(
            {"expires": expires, "signature": self._signature(what, checkpoint, file, expires)}
        )
        base = str(request.base_url).rstrip("/")
        return f"{base}{SIGNED}/{'/'.join(quote(part, safe=':') for part in parts)}?{query}"

    def _signature(self, what: str, checkpoint: Checkpoint, file: str, expires: int) -> str:
        """Over the time of making too: a path that is used again is another checkpoint's."""
        text = "\n".join(
            (what, str(checkpoint.path), repr(checkpoint.created_at), file, str(expires))
        )
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    def _signed(self, request: Request, what: str, file: str) -> Checkpoint:
        """The checkpoint that a signed request names, whoever asks; NotSigned where the signature
        is missing, another or over, or the checkpoint gone or another one.
        """
        found, expires = (
            self._checkpoints.at(_path_in(request)),
            request.query_params.get("expires", ""),
        )
        right, signature = "", request.query_params.get("signature", "")
        if found is not None and re.fullmatch(r"[0-9]{1,15}", expires):
            right = self._signature(what, found, file, int(expires))
        if (
            found is None
            or not right
            or not hmac.compare_digest(right.encode(), signature.encode())
        ):
            raise NotSigned("It was changed, or what it led to was deleted.")
        if int(expires) <= time.time():
            raise NotSigned("Its time is over.")
        return found

    async def _file(self, request: Request) -> Response:
        """A file of an export; ranges of it too."""
        name = request.path_params["file"]
        found = self._signed(request, "exports", name)
        if (file := files_of(found).get(name)) is None:
            raise NotFound(
                f"{found.path} has no file '{name}'.", f"It has {', '.join(files_of(found))}."
            )
        return FileResponse(file, media_type="application/octet-stream", filename=name)

    async def _archive(self, request: Request) -> Response:
        found = self._signed(request, "archives", "")
        size, chunks = _tar_of(files_of(found))
        headers = {
            "content-length": str(size),
            "content-disposition": f'attachment; filename="{found.path.name}.tar"',
        }
        return StreamingResponse(chunks, 200, headers, "application/x-tar")


def _listable(found: Sequence[Checkpoint], request: Request) -> Sequence[Checkpoint]:
    """Those that the asking SDK can read: before 0.28.1 one external checkpoint makes its whole
    list invalid.
    """
    if not sdk_before(request, 0, 28, 1):
        return found
    return [one for one in found if one.path.kind != "external_weights"]


def _path_in(request: Request) -> str:
    return "tinker://{run_id}/{kind}/{name}".format_map(request.path_params)


_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


def described(found: Checkpoint | None) -> dict[str, Any] | None:
    """A checkpoint as the API tells it; its metadata are texts there."""
    if found is None:
        return None
    return {
        "checkpoint_id": f"{found.path.kind}/{found.path.name}",
        "checkpoint_type": _TYPES[found.path.kind],
        "time": timestamp(found.created_at),
        "tinker_path": str(found.path),
        "size_bytes": found.size_bytes,
        "public": found.public,
        "user_metadata": {name: str(value) for name, value in found.user_metadata.items()} or None,
        "expires_at": None if found.expires_at is None else timestamp(found.expires_at),
    }


def files_of(found: Checkpoint) -> dict[str, Path]:
    """The files that others get of a checkpoint, by name: all of an export, of weights the
    adapter's.
    """
    files = {file.name: file for file in sorted(found.folder.iterdir()) if file.is_file()}
    if found.path.kind == "external_weights":
        return files
    return {name: files[name] for name in FILES if name in files}


def _tar_of(files: Mapping[str, Path]) -> tuple[int, Iterator[bytes]]:
    """How many bytes a tar of these files has, and the tar; it is sent even if the files are
    removed meanwhile.
    """
    try:
        streams = [(name, file.open("rb"), file.stat()) for name, file in files.items()]
    except OSError as error:
        raise NotFound("The checkpoint was just deleted.", f"{error.strerror}.") from error

    def chunks() -> Iterator[bytes]:
        for name, stream, facts in streams:
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.mode = facts.st_size, int(facts.st_mtime), 0o644
            yield info.tobuf(tarfile.USTAR_FORMAT)
            with stream:
                while chunk := stream.read(2**20):
                    yield chunk
            yield bytes(-facts.st_size % tarfile.BLOCKSIZE)
        # At the end an empty file, by which SDKs up to 0.35 know that it is whole.
        yield tarfile.TarInfo("checkpoint_complete").tobuf(tarfile.USTAR_FORMAT) + bytes(
            2 * tarfile.BLOCKSIZE
        )

    blocks = sum(1 + -(-facts.st_size // tarfile.BLOCKSIZE) for _, _, facts in streams)
    return (blocks + 3) * tarfile.BLOCKSIZE, chunks()
