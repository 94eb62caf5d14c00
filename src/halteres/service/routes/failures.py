"""Requests that no route answers: there is none, it raised, or the guard let nobody through.

Owns: which shape an error has by its path alone, the handlers of what routes raise.
Never: decides a status.

    /v1/…, /runs/RUN/v1/…, /oai/api/…             OpenAI's, /tokenize and /detokenize too
    …/v1/messages…, /anthropic/api/…              Anthropic's
    everything else                               {"detail": …}, which the others have beside
"""

from __future__ import annotations

import logging
import re
import uuid

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from halteres.errors import HalteresError, NotFound, ServerError, UserError, shortened
from halteres.service.routes.answers import refused, with_status
from halteres.service.routes.inference.refused import anthropic_error, openai_error

ANTHROPIC = re.compile(r"/anthropic/api(/|$)|(/runs/[^/]+)?/v1/messages(/|$)")
OPENAI = re.compile(r"/oai/api(/|$)|(/runs/[^/]+)?/(v1|tokenize|detokenize)(/|$)")

ROUTES = "The routes are those of the Tinker API (SDK 0.38), /v1/… of OpenAI's and Anthropic's, and /runs/RUN/…."

log = logging.getLogger(__name__)


class NoMethod(UserError):
    """The path is there, the method is not."""

    code, status = "no_such_method", 405


def refusal_at(path: str, error: HalteresError) -> Response:
    """The answer to a request for this path, in the shape that its clients read."""
    shape = anthropic_error if ANTHROPIC.match(path) else openai_error if OPENAI.match(path) else None
    return refused(error) if shape is None else with_status({"detail": error.sentence, **shape(error)}, error)


async def on_error(request: Request, error: Exception) -> Response:
    """A HalteresError raised in a route."""
    if not isinstance(error, HalteresError):
        raise error
    return refusal_at(request.url.path, error)


async def on_missing(request: Request, error: Exception) -> Response:
    """No such route or method."""
    wrong_method = isinstance(error, HTTPException) and error.status_code == NoMethod.status
    what = f"There is no {_named(request)} here."
    return refusal_at(request.url.path, (NoMethod if wrong_method else NotFound)(what, ROUTES))


async def on_gone(_: Request, __: Exception) -> Response:
    """A client that closed its connection while its request was read; nobody reads this."""
    return Response(status_code=499)


async def on_bug(request: Request, error: Exception) -> Response:
    """A bug of ours, with an id that is also in the log."""
    name = uuid.uuid4().hex[:8]
    log.error("%s failed, error id %s.", _named(request), name, exc_info=error)
    what = f"{_named(request)} failed (error id {name})."
    found = ServerError(what, f"{type(error).__name__}: {error}.", "See the service's log.")
    return refusal_at(request.url.path, found)


def _named(request: Request) -> str:
    return f"{request.method} {shortened(request.url.path)}"
