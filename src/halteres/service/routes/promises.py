"""Redeeming promises: retrieve_future.

Source: tinker SDK 0.38.0, lib/api_future_impl.py: 408 is polled again silently, a 200 `try_again` is logged each time.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halteres.errors import InvalidData, NotFound
from halteres.service.promises import Outcome
from halteres.service.routes.answers import answer, body_of
from halteres.service.service import Service
from halteres.service.wire import bodies
from halteres.service.wire.codec import PROTOBUF


class PromiseRoutes:
    """Long polls."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def table(self) -> list[Route]:
        """The routes."""
        return [Route("/api/v1/retrieve_future", self.retrieve, methods=["POST"])]

    async def retrieve(self, request: Request) -> Response:
        """POST retrieve_future: the outcome, or after 30 s a 408 that says what the request waits for."""
        asked = bodies.read(await body_of(request), bodies.Retrieve)
        found = await self._service.promises.redeem(asked.request_id)
        if found is None:
            raise NotFound(f"There is no promise '{asked.request_id}' here.", next="Send the request again.")
        if isinstance(found, Outcome):
            _refuse_old(request, found)
            return Response(found.body, found.status, media_type=found.content_type)
        ready = self._service.host.state == "ready"
        reason = found.waits_for if ready else "the engine is starting"
        return answer({"queue_state": "active" if ready else "paused_capacity", "queue_state_reason": reason}, 408)


def _refuse_old(request: Request, found: Outcome) -> None:
    """SDKs before 0.18 read JSON only; that form comes with them."""
    accepted = request.headers.get("accept", "*/*")
    if found.content_type == PROTOBUF and PROTOBUF not in accepted and "*/*" not in accepted:
        raise InvalidData("This result is given as protobuf only.", "Your client accepts JSON.", "Use tinker 0.38.")
