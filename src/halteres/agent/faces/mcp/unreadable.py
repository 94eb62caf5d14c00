"""Lines of a client that are no JSON: answered, so that nobody waits for an answer until his time is up.

Owns: the protocol's error for such a line, and the id of the request that it was, where that can be seen.
Never: touches a line that can be read.

The SDK drops such a line (mcp 2.3.0): broken JSON, but also half of a surrogate pair ("\\ud800"), numbers of more than
4,300 digits, and values nested deeper than its parser goes.
"""

from __future__ import annotations

import re
from types import TracebackType
from typing import Any, Final, Self

import mcp_types as types
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

_ID = r'"id"\s*:\s*(?:(\d{1,15})|"([\w.:-]{1,100})")'
_AT_THE_BEGINNING: Final = re.compile(rf'\s*\{{(?:\s*"(?:jsonrpc|method)"\s*:\s*"[\w./]*"\s*,)*\s*{_ID}\s*[,}}]')
_AT_THE_END: Final = re.compile(rf'"jsonrpc"\s*:\s*"2\.0"\s*,\s*{_ID}\s*\}}\s*$')
_END_LENGTH = 200


class Answering:
    """What is read from a client, without the lines that are no JSON: those are answered."""

    def __init__(self, read: Any, write: Any) -> None:
        self._read, self._write = read, write

    @property
    def last_context(self) -> Any:
        """Of the sender, as the SDK's own streams tell it."""
        return getattr(self._read, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        """The next message that can be read."""
        while await self._is_answered(message := await self._read.receive()):
            pass
        return message

    async def aclose(self) -> None:
        """Close what is read from."""
        await self._read.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        while await self._is_answered(message := await anext(self._read)):
            pass
        return message

    async def _is_answered(self, message: SessionMessage | Exception) -> bool:
        if not isinstance(message, ValidationError) or (line := _broken(message)) is None:
            return False
        await self._write.send(SessionMessage(_refusal(line, message)))
        return True

    async def __aenter__(self) -> Self:
        await self._read.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> bool | None:
        return await self._read.__aexit__(exc_type, exc_val, exc_tb)


def request_id(line: str) -> int | str | None:
    """The id of a request that cannot be read, where it stands before or after all that a request carries.

    >>> request_id('{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"id":8')
    7
    >>> request_id('{"method":"tools/call","params":{"id":8')
    """
    found = _AT_THE_BEGINNING.match(line) or _AT_THE_END.search(line[-_END_LENGTH:])
    return None if found is None else int(found[1]) if found[1] else found[2]


def _broken(error: ValidationError) -> str | None:
    """The line, where it is no JSON; None where it is, and no message of the protocol."""
    first = error.errors(include_url=False, include_context=False)[0]
    return str(first["input"]) if first["type"] == "json_invalid" else None


def _refusal(line: str, error: ValidationError) -> types.JSONRPCError:
    why = error.errors(include_url=False)[0]["msg"]
    told = types.ErrorData(code=types.PARSE_ERROR, message=f"This line cannot be read, and nothing was done: {why}.")
    return types.JSONRPCError(jsonrpc="2.0", id=request_id(line), error=told)
