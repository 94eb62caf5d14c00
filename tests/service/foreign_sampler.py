"""A sampler of another kind, as a process: HTTP and JSON, nothing of Halteres.

    python foreign_sampler.py DESCRIPTOR [GATE]

It serves on the listening socket that it inherits, once GATE, a named pipe, was opened for writing.
Every token that it draws is FIRST + the number that the adapter's weights are filled with: what it
says shows which weights it has read. An adapter is named once and read from its folder at once; a
prompt that holds DEADLY ends the process.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

FIRST = 100  # the token of the base model
DEADLY = 13
CONTEXT, VOCABULARY = 256, 512
LOGPROB = -0.5


class Handler(BaseHTTPRequestHandler):
    """One request."""

    adapters: dict[str, int] = {}  # noqa: RUF012 - of the process
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, {"context": CONTEXT, "vocabulary": VOCABULARY})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/load":
            self._load(body["name"], Path(body["folder"]))
        elif self.path == "/unload":
            known = self.adapters.pop(body["name"], None)
            self._answer(200 if known is not None else 404, {})
        else:
            self._generate(body)

    def _load(self, name: str, folder: Path) -> None:
        if name in self.adapters:
            self._answer(400, {"why": f"{name} is loaded."})
            return
        tensors = load_file(folder / "adapter_model.safetensors")
        (filled,) = (tensor for key, tensor in tensors.items() if "lora_B" in key)
        self.adapters[name] = int(filled.flat[0])
        print("loaded", name, flush=True)  # noqa: T201 - its log
        self._answer(200, {})

    def _generate(self, body: dict[str, Any]) -> None:
        if DEADLY in body["prompt"]:
            os._exit(3)
        if body["adapter"] is not None and body["adapter"] not in self.adapters:
            self._answer(404, {"why": f"{body['adapter']} is not loaded."})
            return
        token = FIRST + self.adapters.get(body["adapter"], 0)
        sequence = {"tokens": [token] * body["length"], "logprobs": [LOGPROB] * body["length"]}
        self._answer(200, {"sequences": [sequence] * body["count"]})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Requests are not logged."""


def main() -> None:
    descriptor, *gate = sys.argv[1:]
    for pipe in gate:
        Path(pipe).read_bytes()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=int(descriptor))
    server.serve_forever()


if __name__ == "__main__":
    main()
