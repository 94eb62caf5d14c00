"""The sampling relay: answers what environments ask of a policy, where the service cannot.

A service of the Tinker API alone has no routes for environments. This process has them, on the
loopback, and draws each answer through the unmodified SDK (`SamplingClient.sample`): from the
newest version that the trainer has published, or from the weights that a request names.

    python -m halteres.training.sampling_relay --service URL --model BASE --tokenizer DIR
        --listen-fd N [--published FILE]

Owns: the policy version of an answer, which the SDK does not tell: it is that of the snapshot which
was newest when the request came.
Never: holds anything that matters. One that is started again reads FILE, and goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from halteres import process
from halteres.access_policy import AccessControl, AccessPolicy
from halteres.config import environ
from halteres.errors import (
    HalteresError,
    InvalidData,
    NotFound,
    NotReady,
    ServerError,
    as_http,
    boundary,
)
from halteres.files import read_regular
from halteres.loopback import HOST, body_within, open_listener, serve, while_connected
from halteres.tokenizer import Tokenizer, load_tokenizer
from halteres.training.failures import RequestRefused, ServiceFailed
from halteres.training.folder import Published, Wiring
from halteres.training.policy import SentCall, connect

if TYPE_CHECKING:
    import tinker

log = logging.getLogger(__name__)

T = TypeVar("T")
Fields = TypeVar("Fields", bound=msgspec.Struct)

SCHEME = "tinker://"
MOST_BODY_BYTES = 32 * 1024 * 1024
MOST_SAMPLES = 1024  # sequences of one request

ANSWERED_WITHIN_S = 1100.0
"""How long one answer may take, the SDK's own retries included: less than the 1,200 s for which an
environment waits, so that it learns what was missing.
"""

OPENED_WITHIN_S = 120.0  # a sampling client
NAMED_CLIENTS = 4  # sampling clients of named weights that are kept: evaluations use one at a time

Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_SAMPLES)]
Length = Annotated[int, msgspec.Meta(ge=1)]
Temperature = Annotated[float, msgspec.Meta(ge=0)]

HARMLESS = frozenset(
    (
        *("user", "metadata", "rid", "skip_special_tokens", "spaces_between_special_tokens"),
        *("return_text_in_logprobs", "logprob_start_len", "return_logprob"),
    )
)
"""Fields without which an answer is the same."""


# -- what is asked for


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """sglang's sampling parameters, as far as the SDK has them."""

    max_new_tokens: Length = 128
    temperature: Temperature = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n: Count = 1
    stop: str | list[str] | None = None
    sampling_seed: int | None = None

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer; an empty one asks for nothing."""
        stops = self.stop or []
        if isinstance(stops, str):
            stops = [stops]
        return [stop for stop in stops if stop]


class Generate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST generate, in sglang's shape: tokens or a text to be continued."""

    input_ids: list[int] | None = None
    text: str | None = None
    sampling_params: dict[str, Any] = msgspec.field(default_factory=dict)
    model: str | None = None


class OpenAISampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What completions and chats have alike, in OpenAI's shape."""

    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    temperature: Temperature = 1.0
    top_p: float = 1.0
    n: Count = 1
    stop: str | list[str] | None = None
    seed: int | None = None
    model: str | None = None
    stream: bool = False  # as events: each answer is one, since the SDK has it whole

    @property
    def sampling(self) -> Sampling:
        """The same in sglang's shape."""
        limit = self.max_completion_tokens or self.max_tokens
        return Sampling(
            max_new_tokens=limit or 128,
            temperature=self.temperature,
            top_p=self.top_p,
            n=self.n,
            stop=self.stop,
            sampling_seed=self.seed,
        )


class Completion(OpenAISampling, kw_only=True):
    """POST v1/completions."""

    prompt: str | list[int]


class ChatCompletion(OpenAISampling, kw_only=True):
    """POST v1/chat/completions."""

    messages: list[dict[str, Any]]


def read_fields(given: Any, kind: type[Fields]) -> Fields:
    """The fields of a request.

    Raises:
        InvalidData: one does not fit, or asks for what the SDK's `sample` does not do.
    """
    if not isinstance(given, dict):
        raise InvalidData("The body is no JSON object.")
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    # null, false, 0 and what is empty ask for nothing
    asked = {
        name: value
        for name, value in given.items()
        if name in known or (value and name not in HARMLESS)
    }
    try:
        return msgspec.convert(asked, kind)
    except msgspec.ValidationError as error:
        raise InvalidData(
            "The sampling relay cannot answer this request.",
            f"{error}.",
            "The service speaks the Tinker API alone: leave out what its `sample` does not take.",
        ) from error


# -- the weights that are sampled


@dataclass(frozen=True, slots=True)
class Weights:
    """A snapshot that can be sampled."""

    client: tinker.SamplingClient
    version: int | None  # policy version; None: not known of named weights


class WeightsOfService:
    """The snapshots of one service, by the names that requests have for them.

    Args:
        wiring: the service's address and key, and the base model.
        published: the file that says which version is the newest; None: there is no policy in
            training, and unnamed weights are the base model's.
    """

    def __init__(self, wiring: Wiring, published: Path | None) -> None:
        self._wiring, self._published = wiring, published
        self._newest: tuple[bytes, Weights] | None = None
        self._named = OrderedDict[str, Weights]()
        self._service: tinker.ServiceClient | None = None
        # requests of one moment make one client
        self._opening = asyncio.Lock()

    async def find(self, model: str | None) -> Weights:
        """The weights of this name; None, or a name that is neither a tinker:// path nor the base
        model's: the newest of the policy.

        Raises:
            NotReady: the trainer has published none yet.
            RequestRefused, ServiceFailed: the service has none of this name, or cannot be reached.
        """
        name = model or ""
        is_named = SCHEME in name or name == self._wiring.base_model
        if is_named or self._published is None:
            return await self._find_named(name)
        return await self._find_newest(self._published)

    async def _find_newest(self, published: Path) -> Weights:
        async with self._opening:
            try:
                content = read_regular(published)
            except FileNotFoundError as error:
                raise NotReady(
                    "The policy cannot be sampled yet.", "The trainer has published no version."
                ) from error
            if self._newest is None or self._newest[0] != content:
                newest = msgspec.json.decode(content, type=Published)
                client = await self._opened(lambda: self._client_of(newest))
                self._newest = content, Weights(client, newest.version)
            return self._newest[1]

    def _client_of(self, newest: Published) -> tinker.SamplingClient:
        import tinker

        return tinker.SamplingClient.from_sampler_handle(
            newest.handle, api_key=self._wiring.key_of_sdk
        )

    async def _find_named(self, name: str) -> Weights:
        path = None
        if SCHEME in name:
            # "BASE;tinker://..." is how some clients write it
            path = name.rpartition(";")[2]
        async with self._opening:
            known = self._named.pop(path or "", None)
            if known is None:
                if self._service is None:
                    self._service = await connect(self._wiring)
                service = self._service
                base = None if path else self._wiring.base_model
                client = await self._opened(
                    lambda: service.create_sampling_client(model_path=path, base_model=base).result(
                        OPENED_WITHIN_S
                    )
                )
                known = Weights(client, None if path else 0)
            self._named[path or ""] = known
            while len(self._named) > NAMED_CLIENTS:
                self._named.popitem(last=False)
            return known

    async def _opened(self, make: Callable[[], tinker.SamplingClient]) -> tinker.SamplingClient:
        """A sampling client; the SDK may wait for the service while it makes one."""
        call = SentCall[Any](
            asyncio.to_thread(make), "create_sampling_client", within_s=OPENED_WITHIN_S
        )
        return await refused_as_such(call)


async def refused_as_such(call: SentCall[T]) -> T:
    """What a call of the SDK returns. RequestRefused instead of ServiceFailed where the service
    answered with a status that says that asking again will not help.
    """
    import tinker

    try:
        return await call
    except ServiceFailed as failure:
        cause = failure.__cause__
        is_status = isinstance(cause, tinker.APIStatusError)
        if is_status and 400 <= cause.status_code < 500 and cause.status_code not in (408, 429):
            raise RequestRefused(failure.what) from cause
        raise


# -- answers


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled sequence."""

    tokens: Sequence[int]  # as they were sampled, an end token included
    logprobs: Sequence[float]  # natural, one per token
    text: str  # without special tokens and what stopped it
    finish: str  # "stop" or "length"
    version: int | None

    @property
    def of_version(self) -> dict[str, Any]:
        """How answers in either shape say it."""
        if self.version is None:
            return {}
        return {"policy_version": [self.version, self.version]}


class Relay:
    """The routes."""

    def __init__(self, weights: WeightsOfService, tokenizer: Tokenizer, base_model: str) -> None:
        self._weights, self._tokenizer, self._base_model = weights, tokenizer, base_model

    def app(self, secret: str | None) -> Starlette:
        """The app; `secret`: what requests must bring as their key."""
        policy = AccessPolicy.of(HOST, secret)
        guard = Middleware(AccessControl, policy=policy)
        return Starlette(
            routes=[
                Route("/runs/{run}/generate", endpoint(self.generate), methods=["POST"]),
                Route("/runs/{run}/v1/completions", endpoint(self.completions), methods=["POST"]),
                Route("/runs/{run}/v1/chat/completions", endpoint(self.chat), methods=["POST"]),
                Route("/runs/{run}/v1/models", endpoint(self.models)),
                Route("/runs/{run}/health", endpoint(self.health)),
                Route("/api/v1/healthz", endpoint(self.health)),
                Route("/{path:path}", endpoint(self.missing), methods=["GET", "POST"]),
            ],
            middleware=[guard],
        )

    async def generate(self, _: Request, given: bytes) -> Any:
        """POST /runs/RUN/generate."""
        body = read_fields(_json_of(given), Generate)
        sampling = read_fields(body.sampling_params, Sampling)
        if (body.input_ids is None) == (body.text is None):
            raise InvalidData(
                "The request names no prompt, or two.", next="Send input_ids or text."
            )
        prompt = body.input_ids
        if prompt is None:
            prompt = self._tokenizer.encode(body.text or "")
        answers = await self._sample(prompt, sampling, body.model)
        items = [_in_sglangs_shape(one, len(prompt)) for one in answers]
        if sampling.n == 1:
            return items[0]
        return items

    async def completions(self, _: Request, given: bytes) -> Any:
        """POST /runs/RUN/v1/completions."""
        body = read_fields(_json_of(given), Completion)
        prompt = body.prompt
        if isinstance(prompt, str):
            prompt = self._tokenizer.encode(prompt)
        answers = await self._sample(prompt, body.sampling, body.model)
        choices = [{"text": one.text} for one in answers]
        return self._in_openais_shape("text_completion", body, prompt, answers, choices)

    async def chat(self, _: Request, given: bytes) -> Any:
        """POST /runs/RUN/v1/chat/completions."""
        body = read_fields(_json_of(given), ChatCompletion)
        prompt = self._tokenizer.apply_chat_template(body.messages)
        answers = await self._sample(prompt, body.sampling, body.model)
        kind, part = "chat.completion", "message"
        if body.stream:
            kind, part = "chat.completion.chunk", "delta"
        choices = [{part: {"role": "assistant", "content": one.text}} for one in answers]
        return self._in_openais_shape(kind, body, prompt, answers, choices)

    def _in_openais_shape(
        self,
        kind: str,
        body: OpenAISampling,
        prompt: Sequence[int],
        answers: Sequence[Answer],
        choices: Sequence[dict[str, Any]],
    ) -> dict[str, Any] | EventStream:
        completed = sum(len(one.tokens) for one in answers)
        whole: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "object": kind,
            "created": int(time.time()),
            "model": body.model or self._base_model,
            "choices": [
                {
                    "index": place,
                    "finish_reason": one.finish,
                    "token_ids": list(one.tokens),
                    **choice,
                }
                for place, (one, choice) in enumerate(zip(answers, choices, strict=True))
            ],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": completed,
                "total_tokens": len(prompt) + completed,
            },
            **answers[0].of_version,
        }
        if body.stream:
            return EventStream(whole)
        return whole

    async def models(self, _: Request, __: bytes) -> Any:
        """GET /runs/RUN/v1/models."""
        return {"object": "list", "data": [{"id": self._base_model, "object": "model"}]}

    async def health(self, _: Request, __: bytes) -> Any:
        """GET /runs/RUN/health."""
        return {"status": "ready"}

    async def missing(self, request: Request, _: bytes) -> Any:
        """Anything else."""
        raise NotFound(
            f"The sampling relay has no route {request.url.path}.",
            "The run's service speaks the Tinker API alone, and this relay answers `generate`, "
            "`v1/completions` and `v1/chat/completions` for it.",
            "A service of Halteres has all others.",
        )

    async def _sample(
        self, prompt: Sequence[int], wanted: Sampling, model: str | None
    ) -> list[Answer]:
        import tinker

        weights = await self._weights.find(model)
        params = tinker.SamplingParams(
            max_tokens=wanted.max_new_tokens,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            stop=wanted.stops or None,
            seed=wanted.sampling_seed,
        )
        call = weights.client.sample(
            prompt=tinker.ModelInput.from_ints(list(prompt)),
            num_samples=wanted.n,
            sampling_params=params,
        )
        drawn = await refused_as_such(
            SentCall[tinker.SampleResponse](call, "sample", within_s=ANSWERED_WITHIN_S)
        )
        return [self._answer(one, wanted, weights.version) for one in drawn.sequences]

    def _answer(
        self, sequence: tinker.SampledSequence, wanted: Sampling, version: int | None
    ) -> Answer:
        tokens, logprobs = sequence.tokens, sequence.logprobs
        if logprobs is None or len(logprobs) != len(tokens):
            raise ServiceFailed(
                "The service's sample has no log-probability for each of its tokens.",
                "A policy cannot be trained on it.",
            )
        text = self._tokenizer.decode(tokens)
        for stop in wanted.stops:
            text = text.partition(stop)[0]
        finish = "stop"
        if sequence.stop_reason == "length":
            finish = "length"
        return Answer(tokens, logprobs, text, finish, version)


@dataclass(frozen=True, slots=True)
class EventStream:
    """What was asked for as a stream of server-sent events, of which it has one."""

    event: dict[str, Any]

    @property
    def encoded(self) -> bytes:
        """As it is sent."""
        return b"data: " + msgspec.json.encode(self.event) + b"\n\ndata: [DONE]\n\n"


def _in_sglangs_shape(one: Answer, num_prompt_tokens: int) -> dict[str, Any]:
    pairs = zip(one.logprobs, one.tokens, strict=True)
    return {
        "text": one.text,
        "output_ids": list(one.tokens),
        "meta_info": {
            "id": uuid.uuid4().hex,
            "finish_reason": {"type": one.finish},
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": len(one.tokens),
            "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
            **one.of_version,
        },
    }


def _json_of(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidData("The body is no JSON.", f"{error}.") from error


Handler = Callable[[Request, bytes], Coroutine[Any, Any, Any]]


def endpoint(handler: Handler) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """A route: its work ends when its client leaves, and fails with a sentence in both shapes."""

    async def worked(request: Request, body: bytes) -> Any:
        with boundary(ServerError, "The sampling relay"):
            return await handler(request, body)

    async def answered(request: Request) -> Response:
        content: Any
        try:
            body = await body_within(request, MOST_BODY_BYTES)
            content = await while_connected(request, worked(request, body))
            status = 200
        except ClientDisconnect:
            return Response(status_code=499)
        except HalteresError as error:
            if error.status >= 500:
                log.warning("%s", error.sentence)
            failure = {"message": error.sentence, "code": error.code}
            content, status = {**as_http(error), "error": failure}, error.status
        if isinstance(content, EventStream):
            return Response(content.encoded, media_type="text/event-stream")
        return Response(msgspec.json.encode(content), status, media_type="application/json")

    return answered


def main(arguments: list[str] | None = None) -> int:
    """Answer until SIGTERM, SIGINT or the end of the lifeline; exit code 0, or 1 with one
    sentence.
    """
    environ.stay_offline()
    process.begin("relay")
    given = _parser().parse_args(arguments)
    wiring = Wiring(
        run_id="sampling-relay",
        service_url=given.service,
        api_url="",
        base_model=given.model,
        api_key=environ.api_key(),
    )
    try:
        tokenizer = load_tokenizer(given.tokenizer)
        with open_listener(0, given.listen_fd) as bound:
            relay = Relay(WeightsOfService(wiring, given.published), tokenizer, given.model)
            serve(relay.app(environ.service_key()), bound)
    except HalteresError as error:
        sys.stderr.write(f"error: {error.sentence}\n")
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m halteres.training.sampling_relay")
    made.add_argument(
        "--service", required=True, help="URL of the service; TINKER_API_KEY: its key"
    )
    made.add_argument("--model", required=True, help="the base model, as the service names it")
    made.add_argument("--tokenizer", required=True, help="folder of its tokenizer")
    made.add_argument("--published", type=Path, help="file that says which version is the newest")
    made.add_argument("--listen-fd", type=int, required=True, help="inherited socket")
    return made


if __name__ == "__main__":
    # as the trainer's: the SDK leaves threads running
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
