"""Redeeming futures: retrieve_future, retrieve_futures, cancel_future.

Source: tinker SDK 0.38.0, lib/api_future_impl.py: 408 is polled again silently, a 200 `try_again` is logged each time;
lib/session_futures_poller.py.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halteres.errors import NotFound
from halteres.service.answers import answer, body_of
from halteres.service.durable.futures import LOST_SAMPLE, SAMPLE, Completions, Outcome, Place
from halteres.service.service import Service
from halteres.service.tenancy.tenants import tenant_of
from halteres.service.wire import bodies
from halteres.service.wire.codec import JSON, PROTOBUF
from halteres.service.wire.results import as_json

INLINE_BYTES = 256 * 1024
"""Up to here a result is answered at once; of a larger one a client is told the size first, if it asked to be."""


class FutureRoutes:
    """Long polls."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._completions = Completions(service.journal, service.futures)

    def table(self) -> list[Route]:
        """The routes."""
        return [
            Route("/api/v1/retrieve_future", self.retrieve, methods=["POST"]),
            Route("/api/v1/retrieve_futures", self.retrieve_many, methods=["POST"]),
            Route("/api/v1/cancel_future", self.cancel, methods=["POST"]),
        ]

    async def retrieve(self, request: Request) -> Response:
        """POST retrieve_future: the outcome, or after 30 s a 408 that says what the request waits for."""
        asked = bodies.read(await body_of(request), bodies.Retrieve)
        found = await self._service.futures.redeem(asked.request_id, tenant_of(request))
        if isinstance(found, Outcome):
            return await self._response(request, found, sized=asked.allow_metadata_only)
        if found is None:
            return _unknown(request, asked.request_id)
        away = self._service.fleet.trouble
        place = Place("the engine is starting", stuck=True) if away else found.place()
        state = "paused_capacity" if place.stuck else "active"  # the SDK tells its user the reason of the first alone
        return answer({"queue_state": state, "queue_state_reason": place.reason}, 408)

    async def retrieve_many(self, request: Request) -> Response:
        """POST retrieve_futures: which samples of a client of a sampling session were settled since it last asked."""
        asked = bodies.read(await body_of(request), bodies.RetrieveMany)
        sampler = self._service.samplers.find(asked.target.sampling_session_id, tenant_of(request))
        poll_s = self._service.futures.poll_s
        hold_s = poll_s if asked.timeout is None else min(asked.timeout, poll_s)
        found, cursor = await self._completions.after(
            sampler.id, asked.target.cloned_sampler_id, asked.prev_cursor, hold_s
        )
        return answer({"completions": found, "cursor": cursor})

    async def cancel(self, request: Request) -> Response:
        """POST cancel_future: a sample that nobody waits for any more is not sampled further."""
        asked = bodies.read(await body_of(request), bodies.Retrieve)
        found = self._service.futures.find(asked.request_id, tenant_of(request))
        if found is not None and found.kind == SAMPLE:
            self._service.samples.cancel(found.request_id)
        return Response(status_code=204)

    async def _response(self, request: Request, found: Outcome, *, sized: bool) -> Response:
        """An outcome, as JSON where the client reads JSON: SDKs before 0.18 read only that, since 0.25 none."""
        body, content_type = found.body, found.content_type
        if content_type == PROTOBUF and JSON in request.headers.get("accept", ""):
            body = await self._service.threads.run(tenant_of(request), len(body), lambda: as_json(found.body))
            content_type = JSON
        if sized and len(body) > INLINE_BYTES and found.status == 200:
            return answer({"status": "complete_metadata", "response_payload_size": len(body)})
        return Response(body, found.status, media_type=content_type)


def _unknown(request: Request, request_id: str) -> Response:
    """No such future: a sampling client, which says that it is one, submits its sample again by itself."""
    if request.headers.get("x-tinker-request-type") == "Sample":
        return Response(LOST_SAMPLE.body, LOST_SAMPLE.status, media_type=LOST_SAMPLE.content_type)
    raise NotFound(f"There is no promise '{request_id[:100]}' here.", next="Send the request again.")
