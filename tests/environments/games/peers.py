"""What wrappers talk to: a chat template that is easily read, and a search server on this
machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import msgspec


class Markup:
    """A chat template."""

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True
    ) -> str:
        opened = "<assistant>" if add_generation_prompt else ""
        return "".join(f"<{one['role']}>{one['content']}</>" for one in messages) + opened


class SearchServer(HTTPServer):
    """Remembers what it was asked; answers with `result`."""

    asked: list[Any]
    result: Any
    status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/retrieve"


class Search(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, SearchServer)
        server.asked.append(
            msgspec.msgpack.decode(self.rfile.read(int(self.headers["Content-Length"])))
        )
        self.send_response(server.status)
        self.end_headers()
        self.wfile.write(msgspec.msgpack.encode(server.result))

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: stderr is for failures."""


@contextmanager
def running_search_server() -> Iterator[SearchServer]:
    """Two passages, the second without a text."""
    with SearchServer(("127.0.0.1", 0), Search) as server:
        server.asked = []
        documents = ("Sky\nIt is blue.\nMostly.", "Sea")
        server.result = {
            "result": [{"document": {"contents": text}, "score": 1.0} for text in documents]
        }
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()
