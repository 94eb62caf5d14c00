"""Training and sampling: what TrainingClient and SamplingClient call, and the futures of their
requests.

Every parseable request of a training sequence is accepted, and whatever is wrong with it is its
future's failure: a 4xx would leave a gap that its client never fills. Source: tinker SDK 0.38.0,
lib/public_interfaces/training_client.py, custom_loss.py and sampling_client.py;
lib/api_future_impl.py: 408 is polled again silently, a 200 `try_again` is logged each time;
0.9.0 to 0.24.1 for JSON passes; 0.3.0 to 0.22, resources/models.py, for unload_model.
"""

from __future__ import annotations

import logging
import secrets
from contextlib import suppress
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from halteres.errors import HalteresError, InvalidData, NotFound, UserError
from halteres.losses import STABLE_REINFORCE
from halteres.service.context_window import check_sample
from halteres.service.durable import futures
from halteres.service.durable.journal import SAMPLE, Entry, new_id
from halteres.service.http import answer, body_of, read_body, route, sdk_before, tenant_of
from halteres.service.keys import Tenant
from halteres.service.limits import LONG
from halteres.service.sampling.samples import MAX_SAMPLES, drawn_for, drawn_seed
from halteres.service.service import Service
from halteres.service.training_runs import Job, Model, model_id_of
from halteres.service.wire import bodies
from halteres.service.wire.results import as_json
from halteres.service.wire.training import (
    PASSES,
    SEQUENCED,
    TAKES_FAMILIES,
    PassRequest,
    Request,
    TrainingBody,
    address_of,
    read_request,
)

STAND_IN = (
    f"The loss {STABLE_REINFORCE} is computed by a formula of Halteres's own "
    "(docs/training-service.md): the hosted"
    " service's is not public, and its results may differ."
)

# sequence numbers of one client of a sampling session: a copy's begin at its own multiple of this
CLONE = 10**9
# copies of a sampling client, so that the numbers of their requests fit 64 bits
MAX_CLIENTS = 2**63 // CLONE

INLINE_BYTES = 256 * 1024
"""Up to here a result is answered at once; of a larger one a client is told the size first, if it
wants to be.
"""

NAMES_FAMILIES = (0, 8, 0)
"""The SDK from which on a client from state asks for the trained families of the checkpoint; older
ones ask for all of them, whatever was trained (lib/public_interfaces/service_client.py).
"""

log = logging.getLogger(__name__)


class TrainingRoutes:
    """What a TrainingClient and a SamplingClient call."""

    def __init__(self, service: Service) -> None:
        self._service, self._threads = service, service.threads

    def table(self) -> list[Route]:
        """The routes."""
        return [
            route("/api/v1/retrieve_future", self._retrieve, "POST"),
            route("/api/v1/cancel_future", self._cancel, "POST"),
            route("/api/v1/asample", self._asample, "POST"),
            route("/api/v1/create_sampling_session", self._create_sampling_session, "POST"),
            route("/api/v1/join_sampling_session", self._join_sampling_session, "POST"),
            route("/api/v1/samplers/{sampler_id}", self._sampler),
            *(route(f"/api/v1/{kind}", self._sequenced, "POST") for kind in SEQUENCED),
            route("/api/v1/get_info", self._get_info, "POST"),
            route("/api/v1/create_custom_loss", self._create_custom_loss, "POST"),
            route("/api/v1/unload_model", self._unload_model, "POST"),
        ]

    # Training

    async def _sequenced(self, request: HttpRequest) -> Any:
        """Record a request and put it in its model's queue; a repetition gets the same future."""
        kind, tenant = request.url.path.rsplit("/", 1)[1], tenant_of(request)
        content_type = request.headers.get("content-type", bodies.JSON).split(";")[0].strip()
        raw, body = await self._read(request, kind, content_type)
        model_id, seq = (
            (None, None) if isinstance(body, bodies.CreateModel) else (body.model_id, body.seq_id)
        )
        if model_id is not None and seq is not None:
            model, drawn = self._service.models.find(model_id, tenant), None
        else:
            assert isinstance(body, bodies.CreateModel | bodies.LoadWeights)  # noqa: S101 - for the type checker
            model, seq = await self._made(body, tenant), 0
            seedless = isinstance(body, bodies.CreateModel) and body.lora_config.seed is None
            drawn = {"seed": drawn_seed()} if seedless else None
        if isinstance(body, bodies.LoadWeights) and sdk_before(request, *NAMES_FAMILIES):
            drawn = {TAKES_FAMILIES: 1}
        key, passed = f"{model.id}/{seq}", body if isinstance(body, PassRequest) else None
        if self._service.futures.known(key) is None:
            model.queue.refuse_if_full(seq)
            waiting = self._service.futures.open_bytes(model.tenant)
            limits = self._service.options.limits.of(model.tenant)
            limits.check_waiting(waiting, is_next=seq == model.queue.settled + 1)
        entry = Entry(
            key=key,
            kind="forward" if passed and passed.forward_only else kind,
            subject=model.id,
            tenant=model.tenant,
            seq=seq,
            content_type=content_type,
            body=raw,
            drawn=drawn,
        )
        future, new = await self._service.futures.accept(entry)
        if new:
            queued = Request(id=entry.id, kind=entry.kind, seq=seq, body=body, drawn=drawn or {})
            model.queue.put(Job(model, queued, future))
        response = answer({"request_id": future.request_id, "model_id": model.id})
        announced = self._service.options.refuse_stable_reinforce or model.stand_in_announced
        if passed and passed.loss == STABLE_REINFORCE and not announced:
            model.stand_in_announced = True
            log.warning("Training run %s: %s", model.id, STAND_IN)
            # the one header that the SDK shows to its user
            response.headers["x-deprecation-note"] = STAND_IN
        return response

    async def _read(
        self, request: HttpRequest, kind: str, content_type: str
    ) -> tuple[bytes, TrainingBody]:
        """The body, unpacked and parsed; a number that can be read of a broken one is used up."""
        encoding, sent = (
            request.headers.get("content-encoding"),
            await body_of(request, bodies.MAX_BODY_BYTES),
        )
        most = bodies.SMALL_BYTES
        if kind in PASSES:
            most = (
                bodies.MAX_BODY_BYTES if content_type == bodies.PROTOBUF else bodies.MAX_JSON_BYTES
            )
        tenant, in_thread, plain = tenant_of(request), self._threads.run, b""
        # few bytes of zstd may become very many
        size = max(len(sent), LONG) if encoding == "zstd" else len(sent)
        try:
            plain = await in_thread(tenant, size, lambda: bodies.decompressed(sent, encoding, most))
            return plain, await in_thread(
                tenant, len(plain), lambda: read_request(kind, content_type, plain)
            )
        except InvalidData:
            known = plain or await in_thread(tenant, size, lambda: bodies.head_of(sent, encoding))
            address = await in_thread(
                tenant, len(known), lambda: address_of(kind, content_type, known)
            )
            if address is not None:
                await self._service.models.burn(*address, tenant)
            raise

    async def _made(self, body: bodies.CreateModel | bodies.LoadWeights, tenant: Tenant) -> Model:
        """The training run that a creation, or a load that names a session, makes."""
        if body.session_id is None or body.model_seq_id is None:
            raise InvalidData(
                "The load names no model.",
                next="Send model_id and seq_id, or session_id and model_seq_id.",
            )
        session, rank = self._service.sessions.find(body.session_id, tenant), None
        base = body.base_model
        if isinstance(body, bodies.CreateModel):
            rank = body.lora_config.rank
        elif not base:
            # as the checkpoint's own client knew it; a path without a checkpoint fails in its turn
            with suppress(HalteresError):
                base = self._service.checkpoints.find(body.path, tenant).base_model
        base = self._service.base.check(base or self._service.base.name)
        model_id = model_id_of(session.id, body.model_seq_id)
        self._service.refuse_model(session, model_id, rank)
        return await self._service.models.add(
            model_id, session.id, tenant, base, body.user_metadata
        )

    async def _get_info(self, request: HttpRequest) -> Any:
        model = self._service.models.find(
            bodies.read_field(await body_of(request), "model_id"), tenant_of(request)
        )
        if model.lora is None:
            raise NotFound(
                f"The training run {model.id} was never loaded.", next="Make a new training client."
            )
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_name": model.base_model,
            "is_lora": True,
            "lora_rank": model.lora.rank,
            "model_data": {
                "model_name": model.base_model,
                "tokenizer_id": str(self._service.base.folder),
            },
        }

    async def _create_custom_loss(self, request: HttpRequest) -> Any:
        """No SDK asks this after reading our `custom_loss_server_side`."""
        raise UserError(
            "Custom losses are computed by the client here.",
            "This service runs no code or graph of a client's.",
            "forward_backward_custom does that with every SDK; its flag custom_loss_server_side "
            "is false.",
        )

    async def _unload_model(self, request: HttpRequest) -> Any:
        body = await body_of(request)
        model = self._service.models.find(bodies.read_field(body, "model_id"), tenant_of(request))

        async def unload() -> futures.Outcome:
            await self._service.adapters.unload(model)
            return futures.unloaded(model.id)

        subject = f"{model.id}/unload"
        key = f"{subject}/{new_id()}"
        entry = Entry(
            key=key, kind=futures.UNLOAD_MODEL, subject=subject, tenant=model.tenant, body=body
        )
        future = await futures.settled_at_once(self._service.futures, entry, unload())
        return {"request_id": future.request_id, "model_id": model.id}

    # Sampling

    async def _create_sampling_session(self, request: HttpRequest) -> Any:
        body = await read_body(request, bodies.CreateSamplingSession)
        session = self._service.sessions.find(body.session_id, tenant_of(request))
        self._service.refuse_sampler(session, body.sampling_session_seq_id)
        sampler = await self._service.samplers.create(
            session, body.sampling_session_seq_id, body.base_model, body.model_path
        )
        return {"type": "create_sampling_session", "sampling_session_id": sampler.id}

    async def _join_sampling_session(self, request: HttpRequest) -> Any:
        """A number for a copy of a sampling client. It is drawn, not counted: a copy that an
        earlier life of the service knew may not have sent anything yet.
        """
        sampler = bodies.read_field(await body_of(request), "sampling_session_id")
        self._service.samplers.find(sampler, tenant_of(request))
        return {
            "type": "join_sampling_session",
            "client_counter": 1 + secrets.randbelow(MAX_CLIENTS - 1),
        }

    async def _sampler(self, request: HttpRequest) -> Any:
        sampler = self._service.samplers.find(request.path_params["sampler_id"], tenant_of(request))
        return {
            "sampler_id": sampler.id,
            "base_model": sampler.base_model,
            "model_path": sampler.model_path,
        }

    async def _asample(self, request: HttpRequest) -> Any:
        raw, tenant = await body_of(request, bodies.PROMPT_BYTES), tenant_of(request)
        body = await self._threads.run(tenant, len(raw), lambda: bodies.read(raw, bodies.Sample))
        sampler, seq = self._service.samplers.find(body.sampling_session_id, tenant), body.seq_id
        key = f"{sampler.id}/{seq}"
        if self._service.futures.known(key) is None:
            self._check_room(body)
            self._service.samples.refuse_if_full(sampler.tenant)
            waiting = self._service.futures.open_bytes(sampler.tenant)
            self._service.options.limits.of(sampler.tenant).check_waiting(waiting)
        drawn = drawn_for(body, sampler) or None
        entry = Entry(
            key=key, kind=SAMPLE, subject=sampler.id, tenant=tenant, seq=seq, body=raw, drawn=drawn
        )
        future, new = await self._service.futures.accept(entry)
        if new:
            self._service.samples.start(future, sampler, body, entry.drawn)
        sequences = [f"{key}/{index}" for index in range(min(body.num_samples, MAX_SAMPLES))]
        return {"request_id": future.request_id, "sample_sequence_ids": sequences}

    def _check_room(self, body: bodies.Sample) -> None:
        """Refuse what no sampler has room for; while none was ever ready, its future fails."""
        known = [host.info for host in self._service.fleet.samplers if host.info is not None]
        chunks = body.prompt.chunks
        if not known or any(chunk.type != "encoded_text" for chunk in chunks):
            return
        check_sample(
            sum(len(chunk.tokens) for chunk in chunks),
            body.sampling_params.max_tokens,
            min(info.max_context_length for info in known),
            strict=self._service.options.strict_context,
        )

    # Futures

    async def _retrieve(self, request: HttpRequest) -> Any:
        """The outcome, or after 30 s a 408 that says what the request waits for."""
        body, tenant = await read_body(request, bodies.Retrieve), tenant_of(request)
        found = await self._service.futures.redeem(body.request_id, tenant)
        if isinstance(found, futures.Future):
            away = self._service.fleet.trouble
            place = futures.Place("the engine is starting", stuck=True) if away else found.place()
            # the SDK tells its user the first one's reason
            state = "paused_capacity" if place.stuck else "active"
            return answer({"queue_state": state, "queue_state_reason": place.reason}, 408)
        # a sampling client says so
        if found is None and request.headers.get("x-tinker-request-type") == "Sample":
            found = await self._service.samples.lost()
        if found is None:
            raise NotFound(
                f"There is no promise '{body.request_id[:100]}' here.",
                next="Send the request again.",
            )
        content, content_type = found.body, found.content_type
        # SDKs before 0.18 read JSON only, since 0.25 none.
        if content_type == bodies.PROTOBUF and bodies.JSON in request.headers.get("accept", ""):
            try:
                content = await self._threads.run(tenant, len(content), lambda: as_json(content))
            except InvalidData as error:
                content = futures.failure(error).body
            content_type = bodies.JSON
        if body.allow_metadata_only and len(content) > INLINE_BYTES and found.status == 200:
            return answer({"status": "complete_metadata", "response_payload_size": len(content)})
        return Response(content, found.status, media_type=content_type)

    async def _cancel(self, request: HttpRequest) -> None:
        """A sample that nobody waits for any more is not sampled further."""
        body = await read_body(request, bodies.Retrieve)
        found = self._service.futures.find(body.request_id, tenant_of(request))
        if found is not None and found.kind == SAMPLE:
            self._service.samples.cancel(found.request_id)
