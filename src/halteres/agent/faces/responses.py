"""Answers over HTTP: JSON, and errors in the tools' own form.

Owns: how both are written.
Never: reads a request.
"""

from __future__ import annotations

import json
from typing import Any, Final

from starlette.responses import Response

from halteres.errors import HalteresError, as_answer
from halteres.redaction import Redactor

JSON: Final = "application/json"


def answer(body: Any, status: int = 200) -> Response:
    """A JSON answer."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode(errors="replace"), status, media_type=JSON)


def refused(error: HalteresError, status: int | None = None) -> Response:
    """An error outside any tool, in the tools' form: it too tells no secret."""
    return answer(Redactor.of_this_process().json(as_answer(error)), status or error.status)
