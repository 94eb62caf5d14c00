"""Errors in the shapes of OpenAI's and Anthropic's APIs.

Owns: which type of theirs each of ours is.
Never: decides a status: the error's class does.
Source: OpenAI's and Anthropic's API references, errors.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from halteres.errors import HalteresError
from halteres.service.routes.answers import with_status

OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def openai_error(error: HalteresError) -> dict[str, Any]:
    """The body."""
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    told = {"message": error.sentence, "type": OPENAI_TYPES.get(error.status, fallback)}
    param = error.details.get("param")
    code = "model_not_found" if error.status == 404 and param == "model" else error.code
    return {"error": {**told, "param": param, "code": code}}


def openai_refusal(error: HalteresError) -> Response:
    """The answer."""
    return with_status(openai_error(error), error)


def anthropic_error(error: HalteresError) -> dict[str, Any]:
    """The body."""
    fallback = "invalid_request_error" if error.status < 500 else "api_error"
    kind = ANTHROPIC_TYPES.get(error.status, fallback)
    return {"type": "error", "error": {"type": kind, "message": error.sentence}}


def anthropic_refusal(error: HalteresError) -> Response:
    """The answer."""
    return with_status(anthropic_error(error), error)
