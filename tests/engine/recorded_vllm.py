"""A stand-in for `vllm serve`: it answers from `recorded_vllm.json`, bodies of the real one (0.32.0 on
a CPU, the built-in model), less fields that nothing reads.

    python recorded_vllm.py serve FOLDER --uds PATH | --port N [vLLM's own options ...]

Of an adapter it samples the token FIRST + the number that B is filled with, read anew for each
request: what it says shows which weights it has. A name whose folder is gone ends it, as it does the
real one that has let go of the name. Some tokens of a prompt make it fail in the ways of the real one.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_bytes())
FIRST = 100  # the token of an adapter whose B is filled with 0
DEADLY, FAILING, NAN, HANGING, CUT, ABORTED = 13, 14, 15, 16, 17, 18
"""Tokens of a prompt: the process ends, its engine does, it is poisoned, silent, breaks off, gives up."""

FLAWS = [
    "version",
    "html",
    "key",
    "no_tokens",
    "no_loading",
    "other_model",
    "vocabulary",
    "short",
    "rank",
    "blind",
    "processed",
]


SLOW_S = 0.2  # after which a slow one answers that a name was loaded or unloaded


class RecordedVllm(ThreadingHTTPServer):
    """One of them."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, bound: socket.socket, flaws: set[str], most_rank: int = 32) -> None:
        super().__init__(("127.0.0.1", 0), Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.flaws, self.most_rank = bound, flaws, most_rank
        self.adapters: dict[str, Path] = {}
        self.most_loaded = 0
        self.connections: list[socket.socket] = []
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.key = "secret" if "key" in flaws else None

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        self.connections.append(connection)
        return connection, address

    def end(self) -> None:
        """End, and every connection with it."""
        self.shutdown()
        self.server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: RecordedVllm
    protocol_version = "HTTP/1.1"

    def address_string(self) -> str:
        return "client"  # a Unix socket has none

    def do_GET(self) -> None:
        self._route({})

    def do_POST(self) -> None:
        self._route(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _route(self, body: dict[str, Any]) -> None:
        server, path = self.server, self.path
        server.requests.append((path, body))
        key = self.headers.get("authorization") == f"Bearer {server.key}"
        if "html" in server.flaws:
            self._send(200, b"<html>welcome</html>", "text/html")
        elif path == "/health":
            self._send(200, b"")
        elif path == "/version":
            version = "0.31.2" if "version" in server.flaws else "0.32.0"
            self._send(200, json.dumps({"version": version}).encode())
        elif server.key is not None and not key:
            self._recorded("wrong_key")
        elif path == "/v1/models":
            self._models()
        elif path == "/v1/load_lora_adapter" and "no_loading" not in server.flaws:
            self._load(body["lora_name"], Path(body["lora_path"]))
        elif path == "/v1/unload_lora_adapter" and "no_loading" not in server.flaws:
            known = server.adapters.pop(body["lora_name"], None)
            if "slow" in server.flaws:
                time.sleep(SLOW_S)
            self._recorded("unload" if known else "unload_unknown", a=body["lora_name"])
        elif path == "/inference/v1/generate" and "no_tokens" not in server.flaws:
            self._generate(body)
        else:
            self._recorded("no_route")

    def _models(self) -> None:
        body = copy.deepcopy(RECORDED["models"]["body"])
        base = body["data"][0]
        if "other_model" in self.server.flaws:
            base["id"] = "someone/else"
        if "short" in self.server.flaws:
            base["max_model_len"] = 64
        for name, folder in list(self.server.adapters.items()):
            body["data"].append({"id": name, "root": str(folder), "parent": base["id"]})
        self._send(200, json.dumps(body).encode())

    def _load(self, name: str, folder: Path) -> None:
        server = self.server
        if "dying" in server.flaws and not name.endswith("probe"):
            self._recorded("load_dying")
        elif name in server.adapters:
            self._recorded("load_twice", a=name)
        elif "blind" in server.flaws or not folder.is_dir():
            self._recorded("load_missing", m=name)
        elif (
            json.loads((folder / "adapter_config.json").read_bytes())["r"] > server.most_rank
            or "rank" in server.flaws
        ):
            self._recorded("load_rank")
        else:
            server.adapters[name] = folder
            server.most_loaded = max(server.most_loaded, len(server.adapters))
            if "slow" in server.flaws:
                time.sleep(SLOW_S)
            self._recorded("load", a=name)

    def _generate(self, body: dict[str, Any]) -> None:
        server, prompt, sampling = self.server, body["token_ids"], body["sampling_params"]
        adapter = server.adapters.get(body["model"])
        vocabulary = 700 if "vocabulary" in server.flaws else 672
        if DEADLY in prompt:
            os._exit(3)
        elif HANGING in prompt:
            time.sleep(600)
        elif FAILING in prompt and not body.get("stream"):
            self._recorded("killed")
        elif NAN in prompt:
            self._recorded("generate_nan")
        elif any(token >= vocabulary for token in prompt):
            self._recorded("vocabulary")
        elif adapter is None and body["model"] != RECORDED["models"]["body"]["data"][0]["id"]:
            self._recorded("unknown", x=body["model"])
        elif body.get("stream"):
            self._stream(prompt)
        else:
            self._send(200, json.dumps(self._answer(prompt, sampling, adapter)).encode())

    def _answer(
        self, prompt: list[int], sampling: dict[str, Any], adapter: Path | None
    ) -> dict[str, Any]:
        name = "greedy" if sampling["temperature"] == 0 else "generate"
        if sampling["prompt_logprobs"] is not None:
            name = "prompt"
        elif prompt == [671]:
            name = "greedy"  # which tells of the likeliest
        answer = copy.deepcopy(RECORDED[name]["body"])
        choices = answer["choices"]
        answer["choices"] = [
            {**copy.deepcopy(choices[index % len(choices)]), "index": index}
            for index in range(sampling.get("n", 1))
        ]
        if ABORTED in prompt:
            answer["choices"][0]["finish_reason"] = "abort"
        if prompt == [671] and "processed" in self.server.flaws:
            for one in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
                one["logprob"] /= sampling["temperature"]
        if adapter is not None:
            try:
                token = FIRST + _filled(adapter)
            except FileNotFoundError:
                os._exit(4)
            for choice in answer["choices"]:
                for one in choice["logprobs"]["content"]:
                    one["token_id"] = token
                choice["token_ids"] = [token] * len(choice["token_ids"])
        return answer

    def _stream(self, prompt: list[int]) -> None:
        events = RECORDED["killed_stream" if FAILING in prompt else "stream"]["body"]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for number, event in enumerate(events):
            text = event if isinstance(event, str) else json.dumps(event)
            if CUT in prompt and number == 2:
                break
            with suppress(OSError):
                self.wfile.write(f"data: {text}\n\n".encode())
                self.wfile.flush()
        self.close_connection = True

    def _recorded(self, name: str, **names: str) -> None:
        """A recorded answer; `names`: what stands for `snapshot-LETTER`."""
        recorded = RECORDED[name]
        text = recorded["body"]
        if not isinstance(text, str):
            text = json.dumps(text)
        for letter, instead in names.items():
            text = text.replace(f"snapshot-{letter}", instead)
        self._send(recorded["status"], text.encode())

    def _send(self, status: int, content: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Requests are not logged."""


def _filled(folder: Path) -> int:
    tensors = load_file(folder / "adapter_model.safetensors")
    return int(next(tensor for name, tensor in tensors.items() if "lora_B" in name).flat[0])


def listening(*, path: str | None = None, port: int = 0) -> socket.socket:
    if path is None:
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
    else:
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bound.bind(path)
    bound.listen(128)
    return bound


def in_thread(*flaws: str, port: int = 0) -> RecordedVllm:
    """One on a port of this process; `end` ends it."""
    server = RecordedVllm(listening(port=port), set(flaws))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


def main() -> None:
    words = sys.argv[1:]

    def option(name: str) -> str | None:
        return words[words.index(name) + 1] if name in words else None

    bound = listening(path=option("--uds"), port=int(option("--port") or 0))
    flaws = set(os.environ.get("RECORDED_VLLM_FLAWS", "").split())
    server = RecordedVllm(bound, flaws, int(option("--max-lora-rank") or 32))
    # as the real one's worker, which outlives its front process
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    server.serve_forever(0.01)


if __name__ == "__main__":
    main()
