"""`Samples` over the HTTP of one `vllm serve`.

A snapshot is loaded by folder under its own name (`loaded_names`), never in place: vLLM would
change the weights of a request under way.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import aiohttp
import msgspec
import numpy as np

from halteres.engine import checks
from halteres.engine.protocol import (
    EngineGone,
    ExtraLogprobs,
    GrammarKind,
    ModelInfo,
    Piece,
    SampleResult,
    SamplingParams,
    Sequence,
    Weights,
)
from halteres.engine.vllm.adapters import (
    LARGEST,
    TARGETS,
    AdapterFolders,
    Projections,
    check_adapter,
)
from halteres.engine.vllm.answers import (
    Card,
    Choice,
    Generated,
    Models,
    Version,
    own_logprobs,
    piece_of,
    refusal_text,
    sampled_tokens,
    sequence_of,
    topk_of_prompt,
    whole_piece,
)
from halteres.engine.vllm.loaded_names import LoadedNames
from halteres.engine.vllm.requests import TokenPrompt, TokenSampling, structured
from halteres.errors import HalteresError, InvalidConfig, InvalidData, NotReady, ServerError

OLDEST, NEWER = (0, 32), (0, 33)
"""Versions that this was tested with: from the first on, below the second."""

MOST_LIKELY = 20  # of the likeliest tokens at a position
MOST_SAMPLES = 64  # of one request of vLLM's; more are sent as several
CALL_S, CONNECT_S, LOAD_S = 3600.0, 5.0, 300.0  # no call takes longer

IDLE_S = 2.0
"""Connections are kept so long without a request: less than a server keeps them (uvicorn 5 s), for
a request that meets its end would be taken for the end of the vLLM.
"""
LINE_BYTES = 1 << 20  # of an event of a stream

SPREAD = 0x9E3779B97F4A7C15
"""An odd number: vLLM samples number i of a request with seed + i, so that neighbouring seeds would
share samples.
"""

PREFIX = "snapshot-"  # of the names that a service of ours loads
PROBE = f"{PREFIX}probe"
TEMPERED_APART = 0.02  # nats by which log-probabilities at temperature 2 differ from those at 1

GENERATE, LOAD, UNLOAD = (
    "/inference/v1/generate",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)
DYING = ("EngineCore", "EngineDead", "method failed: cancelled")
"""Words of a server whose engine has ended, or is about to."""

HOW = "docs/vllm.md has the command line that works."

JSON = {"Content-Type": "application/json"}

generated = msgspec.json.Decoder(Generated).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What a vLLM has to serve, and what it is called in errors."""

    title: str = "vLLM"
    name: str  # of the base model
    folder: Path  # ... and where it lies here
    names: tuple[str, ...] = ()  # others that mean it
    context: int = 0  # tokens of the longest sequence; 0: whatever the server has
    rank: int = 32  # of the largest adapter
    places: int = 16  # names loaded at a time: at most its --max-cpu-loras
    tempered: bool = False  # log-probabilities at the sampling temperature are needed
    dtype: str = "float32"
    device: str = "cpu"
    # magnitude of numbers that it computes with; at an address its type is not known
    largest: float = LARGEST["float16"]
    most_samples: int = MOST_SAMPLES  # of one request, at most its --max-num-seqs
    key: str | None = field(default=None, repr=False)


class VllmSamples:
    """One vLLM that answers."""

    def __init__(
        self, demands: Demands, base: Projections, folders: AdapterFolders, *, address: str
    ) -> None:
        """`address`: a URL, or the path of a Unix socket."""
        self._demands, self._base, self._folders = demands, base, folders
        url, connector = address, aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S)
        if address.startswith("/"):
            url = "http://vllm"
            connector = aiohttp.UnixConnector(address, limit=0, keepalive_timeout=IDLE_S)
        headers = {}
        if demands.key:
            headers["Authorization"] = f"Bearer {demands.key}"
        self._http = aiohttp.ClientSession(
            url,
            connector=connector,
            headers=headers,
            # calls have deadlines of their own
            timeout=aiohttp.ClientTimeout(None, sock_connect=CONNECT_S),
            read_bufsize=LINE_BYTES,
        )
        self.failure: HalteresError | None = None  # why it is gone
        self.broken = asyncio.Event()
        self._waits = set[asyncio.Timeout]()  # of calls under way
        self._info: ModelInfo | None = None
        self._served = demands.name  # the base model's name there
        self.names = LoadedNames(self, folders, demands.places)

    # Life

    async def open(self) -> None:
        """See that it is what is needed, and make room there.

        Raises:
            InvalidConfig: it is another version, serves something else, or lacks an option.
            EngineGone: it does not answer.
        """
        await self._ask("GET", "/health", strange="no /health")
        self._check_version(await self._ask("GET", "/version", strange="no version"))
        cards = self._cards(await self._ask("GET", "/v1/models", strange="no list of models"))
        card = self._base_card(cards)
        self._served = card.id
        context = self._checked_context(card)
        for one in cards:
            if one.parent is not None and one.id.startswith(PREFIX):
                await self.unload(one.id)
        logprobs = await self._probe_generation()
        await self._probe_loading()
        self._info = ModelInfo(
            name=self._demands.name,
            folder=str(self._demands.folder),
            architecture=self._base.architecture,
            vocab_size=self._base.vocabulary,
            max_context_length=context,
            num_parameters=0,
            dtype=self._demands.dtype,
            device=self._demands.device,
            threads=0,
            places=self._demands.most_samples,
            trains=False,
            max_rank=self._demands.rank,
            targets=TARGETS,
            logprobs=(logprobs,),
            extras=("prompt", "topk_prompt", "topk_sampled"),
            most_likely=MOST_LIKELY,
            penalties=True,
            grammars=get_args(GrammarKind),
        )

    async def info(self) -> ModelInfo:
        """The base model; EngineGone where it has lost what was loaded: it was started again."""
        if self._info is None:
            await self.open()
        assert self._info is not None  # noqa: S101 - for the type checker
        await self._ask("GET", "/health")
        before = self.names.now()
        cards = self._cards(await self._ask("GET", "/v1/models", strange="no list of models"))
        if lost := self.names.lost_since(before, [card.id for card in cards]):
            raise self._gone(f"It holds {', '.join(lost)} no more: it was started again.")
        return self._info

    def fail(self, error: HalteresError) -> None:
        """Later calls raise it, and so do those that wait: a closed session need not end the
        reading of an answer that has begun.
        """
        self.failure = self.failure or error
        self.broken.set()
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0.0)

    async def disconnect(self) -> None:
        """End the connections; what waits fails with EngineGone."""
        self.fail(EngineGone("The connection to the sampler was closed."))
        await self._http.close()

    async def close(self) -> None:
        """Unload what was loaded, and disconnect."""
        for name in self.names.known:
            await self.drop(name)
        await self.disconnect()

    # Weights

    async def hold(self, name: str, source: Weights) -> int:
        """Be ready to sample from these weights under this name; returns their policy version.

        Raises:
            WeightsDamaged: the folder is not what was written.
            InvalidData: vLLM would compute something else than the adapter says.
        """
        if source.folder is None:
            raise InvalidData("vLLM takes weights as folders alone.")
        folder = Path(source.folder)

        def check() -> None:
            checks.check_weights(source, folder)
            check_adapter(
                folder, self._base, self._demands.rank, self._demands.largest, source.largest
            )
            self._folders.make(name, source, folder)

        await asyncio.to_thread(check)
        self._check_is_there()
        await self.names.hold(name, source)
        return source.version

    async def drop(self, name: str) -> None:
        """Forget a name; its folder goes once it is unloaded."""
        await self.names.drop(name)

    async def load(self, name: str) -> None:
        """For `LoadedNames`: load a name from its folder."""
        body = {"lora_name": name, "lora_path": str(self._folders.path(name))}
        await self._ask("POST", LOAD, body, known="already been loaded", within_s=LOAD_S)

    async def unload(self, name: str) -> None:
        """For `LoadedNames`: unload a name, which need not be loaded."""
        body = {"lora_name": name}
        await self._ask("POST", UNLOAD, body, known="cannot be found", within_s=LOAD_S)

    @asynccontextmanager
    async def _in_use(self, name: str | None) -> AsyncIterator[None]:
        """The name is loaded as long as the block runs; None is the base model."""
        if name is None:
            yield
            return
        self._check_is_there()
        async with self.names.in_use(name):
            yield

    def _check_is_there(self) -> None:
        if self.failure is not None:
            raise self.failure

    # Sampling

    async def sample(
        self,
        snapshot: str | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        extra: ExtraLogprobs = ExtraLogprobs(),  # noqa: B008 - frozen
    ) -> SampleResult:
        """Sample, in as many requests as vLLM needs; a caller that goes away cancels them."""
        bodies = list(self._bodies(snapshot, prompt, num_samples, params, extra))
        async with self._in_use(snapshot):
            answers = [await self._generate(body, snapshot) for body in bodies]
            sequences = [
                sequence_of(choice, extra.topk_sampled)
                for answer in answers
                for choice in sorted(answer.choices, key=lambda one: one.index)
            ]
            if params.grammar is not None:
                scored = (
                    self._scored(snapshot, prompt, one, extra.topk_sampled) for one in sequences
                )
                sequences = [await one for one in scored]
        if len(sequences) != num_samples:
            raise ServerError(f"vLLM answered {len(sequences)} sequences, not {num_samples}.")
        first, length = answers[0], len(prompt) // 4
        cached = first.usage and first.usage.prompt_tokens_details
        own, topk = None, None
        if extra.of_prompt:
            rows = first.prompt_logprobs or ()
            if len(rows) != length:
                raise ServerError(f"vLLM scored {len(rows)} of {length} tokens of a prompt.")
            if extra.prompt_logprobs:
                own = own_logprobs(rows, prompt)
            if extra.topk_prompt:
                topk = topk_of_prompt(rows, extra.topk_prompt)
        return SampleResult(
            sequences=tuple(sequences),
            version=self._version(snapshot),
            prompt_cache_hit_tokens=(cached.cached_tokens or 0) if cached else 0,
            prompt_logprobs=own,
            topk_prompt=topk,
        )

    async def stream(
        self,
        snapshot: str | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        extra: ExtraLogprobs = ExtraLogprobs(),  # noqa: B008 - frozen
    ) -> AsyncIterator[Piece]:
        """As `sample`, piece by piece; closing the iterator cancels the request. Under a grammar
        each sequence comes in one piece, when all are there: they are scored first.
        """
        checks.check_streamed(extra)
        if params.grammar is not None:
            result = await self.sample(snapshot, prompt, num_samples, params, extra)
            for number, sequence in enumerate(result.sequences):
                yield whole_piece(number, sequence, result.version)
            return
        parts = list(self._bodies(snapshot, prompt, num_samples, params, extra))
        version = self._version(snapshot)
        async with self._in_use(snapshot):
            for number, body in enumerate(parts):
                left = body.sampling_params.n
                body.stream = True
                events = self._events(body, snapshot)
                try:
                    async for choice in events:
                        begins = number * self._demands.most_samples
                        piece = piece_of(choice, begins, version, extra.topk_sampled)
                        left -= piece.stop_reason is not None
                        if piece.tokens or piece.stop_reason:
                            yield piece
                finally:
                    await events.aclose()
                if left:
                    raise self._gone("A stream ended before its sequences did.")

    async def _scored(
        self, snapshot: str | None, prompt: bytes, sequence: Sequence, k: int
    ) -> Sequence:
        """A sequence with the model's own log-probabilities: vLLM's under a grammar are of what
        that leaves. Of a token that fills the context there is no other than that.
        """
        assert self._info is not None  # noqa: S101 - it has sampled
        tokens = (prompt + sequence.tokens)[: 4 * (self._info.max_context_length - 1)]
        sampling = TokenSampling(max_tokens=1, temperature=0.0, seed=0, prompt_logprobs=k)
        body = TokenPrompt(
            model=snapshot or self._served,
            token_ids=np.frombuffer(tokens, np.int32).tolist(),
            sampling_params=sampling,
        )
        rows = (await self._generate(body, snapshot)).prompt_logprobs or ()
        if len(rows) != len(tokens) // 4:
            raise ServerError(f"vLLM scored {len(rows)} of {len(tokens) // 4} tokens.")
        own, top = own_logprobs(rows, tokens)[len(prompt) :], None
        rows = rows[len(prompt) // 4 :]
        unscored = len(sequence.tokens) // 4 - len(rows)
        if k:
            top = topk_of_prompt((*rows, *(None,) * unscored), k)
        return msgspec.structs.replace(
            sequence, logprobs=own + sequence.logprobs[len(own) :], top=top
        )

    def _bodies(
        self,
        snapshot: str | None,
        prompt: bytes,
        num_samples: int,
        params: SamplingParams,
        extra: ExtraLogprobs,
    ) -> Iterator[TokenPrompt]:
        info = self._info
        if info is None:
            raise NotReady("The sampler is starting.", next="Ask again in a moment.")
        limit = checks.check_sampling(prompt, num_samples, params, info, extra)
        tokens = np.frombuffer(prompt, np.int32).tolist()
        seed, likely = params.seed * SPREAD, 0
        if extra.topk_sampled:
            likely = extra.topk_sampled + 1  # the sampled one is counted, and may not be among them
        for begins in range(0, num_samples, self._demands.most_samples):
            # Every field is sent: the model's folder may have defaults for those that are not.
            sampling = TokenSampling(
                n=min(self._demands.most_samples, num_samples - begins),
                max_tokens=limit,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=max(params.top_k, 0),
                min_p=params.min_p,
                repetition_penalty=params.repetition_penalty,
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                seed=(seed + begins) % 2**62,
                logprobs=likely,
                # a grammar ends an answer by that token
                ignore_eos=params.stop_tokens is not None and params.grammar is None,
                stop=list(params.stop_strings) or None,
                stop_token_ids=list(params.stop_tokens or ()),
                skip_special_tokens=False,
                structured_outputs=structured(params.grammar),
                detokenize=bool(params.stop_strings),
            )
            if extra.of_prompt and begins == 0:
                sampling.prompt_logprobs = extra.topk_prompt
            yield TokenPrompt(
                model=snapshot or self._served, token_ids=tokens, sampling_params=sampling
            )

    async def _generate(self, body: TokenPrompt, snapshot: str | None) -> Generated:
        raw = await self._ask("POST", GENERATE, body, lost=snapshot)
        try:
            answer = generated(raw)
        except msgspec.MsgspecError as error:
            raise ServerError("vLLM's answer to a sample cannot be read.", f"{error}.") from error
        for choice in answer.choices:
            self._check_end(choice)
        return answer

    async def _events(
        self, body: TokenPrompt, snapshot: str | None
    ) -> AsyncGenerator[Choice, None]:
        """The choices of a stream's events."""
        self._check_is_there()
        try:
            content = msgspec.json.encode(body)
            async with self._http.post(GENERATE, data=content, headers=JSON) as response:
                if response.status != 200:
                    raise self._refusal(response.status, await response.read(), GENERATE, snapshot)
                while True:
                    async with self._waiting(CALL_S):
                        line = await response.content.readline()
                    if not line:
                        break
                    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                        continue
                    event = generated(line[6:])
                    if event.error is not None:
                        raise self._refusal(500, line[6:], GENERATE, snapshot)
                    for choice in event.choices:
                        self._check_end(choice)
                        yield choice
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._gone(f"{type(error).__name__}.") from error
        except msgspec.MsgspecError as error:
            raise ServerError("An event of vLLM's cannot be read.", f"{error}.") from error

    def _check_end(self, choice: Choice) -> None:
        if choice.finish_reason not in (None, "stop", "length"):
            raise self._gone(f"A sequence ended with '{choice.finish_reason}'.")

    def _version(self, snapshot: str | None) -> int:
        if snapshot is None:
            return 0
        return self.names.find(snapshot).version

    # What it serves

    def _refuse(self, why: str) -> InvalidConfig:
        return InvalidConfig(f"{self._demands.title} cannot sample for this service.", why, HOW)

    def _check_version(self, answer: bytes) -> None:
        try:
            version = msgspec.json.decode(answer, type=Version).version
        except msgspec.MsgspecError:
            raise self._refuse("It does not answer as vLLM does.") from None
        found = re.match(r"(\d+)\.(\d+)", version)
        number = tuple(map(int, found.groups())) if found else ()
        if not OLDEST <= number < NEWER:
            raise self._refuse(
                f"It is version {version}; tested are those from {'.'.join(map(str, OLDEST))} "
                f"to below {'.'.join(map(str, NEWER))}."
            )

    def _cards(self, answer: bytes) -> tuple[Card, ...]:
        try:
            return msgspec.json.decode(answer, type=Models).data
        except msgspec.MsgspecError:
            raise self._refuse("It does not answer as vLLM does.") from None

    def _base_card(self, cards: tuple[Card, ...]) -> Card:
        bases = [card for card in cards if card.parent is None]
        known = {self._demands.name, str(self._demands.folder), *self._demands.names}
        for card in bases:
            if card.id in known:
                return card
        raise self._refuse(
            f"It serves '{', '.join(card.id for card in bases)}', not '{self._demands.name}' "
            f"(--served-model-name)."
        )

    def _checked_context(self, card: Card) -> int:
        context = card.max_model_len or 0
        if context < max(self._demands.context, 1):
            raise self._refuse(
                f"It reads {context} tokens, and sequences here have up to "
                f"{self._demands.context} (--max-model-len)."
            )
        return min(context, self._base.context or context)

    async def _probe_generation(self) -> Literal["raw", "tempered"]:
        """See that tokens can be sent and what vocabulary there is; returns at which temperature
        log-probabilities are.
        """
        last = self._base.vocabulary - 1

        async def likeliest(token: int, temperature: float) -> float:
            sampling = TokenSampling(max_tokens=1, temperature=temperature, seed=0, logprobs=2)
            body = TokenPrompt(model=self._served, token_ids=[token], sampling_params=sampling)
            answer = await self._generate(body, None)
            content = sampled_tokens(answer.choices[0])
            return max(one.logprob for one in content[0].top_logprobs)

        try:
            at_one, at_two = await likeliest(last, 1.0), await likeliest(last, 2.0)
        except InvalidData as error:
            if "Not Found" in error.why:
                raise self._refuse("It takes no tokens (--enable-scale-out).") from error
            raise self._refuse(f"It refuses a token of the model's: {error.why}") from error
        try:
            await likeliest(last + 1, 1.0)
        except InvalidData:
            pass
        else:
            raise self._refuse(
                f"Its vocabulary is larger than the model's, which ends at {last}: it serves "
                "another model."
            )
        found: Literal["raw", "tempered"] = "raw"
        if abs(at_one - at_two) > TEMPERED_APART:
            found = "tempered"
        if self._demands.tempered and found == "raw":
            raise self._refuse(
                "Its log-probabilities are those at temperature 1, and this run needs those at "
                "its own temperature (--logprobs-mode processed_logprobs)."
            )
        return found

    async def _probe_loading(self) -> None:
        """Load an adapter that adds nothing, and unload it."""
        rank, folders = self._demands.rank, self._folders
        folder = await asyncio.to_thread(folders.make_probe, PROBE, self._base, rank)
        body = {"lora_name": PROBE, "lora_path": str(folder)}
        try:
            await self._ask("POST", LOAD, body, known="already been loaded", within_s=LOAD_S)
            await self.unload(PROBE)
        except (InvalidData, ServerError) as error:
            raise self._refuse(_loading_flaw(error.why, folder, rank)) from error
        finally:
            await asyncio.to_thread(folders.remove, PROBE)

    # HTTP

    async def _ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | TokenPrompt | None = None,
        *,
        known: str = "",
        lost: str | None = None,
        strange: str = "",
        within_s: float = CALL_S,
    ) -> bytes:
        """The body of an answer.

        Args:
            known: of a refusal that says that it was done before.
            lost: the name without which the call cannot be; where it is not known there, the
                server is another one.
            strange: a refusal says that this is no vLLM of ours.
        """
        self._check_is_there()
        sent = None
        if body is not None:
            sent = msgspec.json.encode(body)
        try:
            async with (
                self._waiting(within_s),
                self._http.request(method, path, data=sent, headers=JSON) as response,
            ):
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._gone(f"{type(error).__name__}.") from error
        text = refusal_text(content)
        if response.status == 200 or (known and known in text):
            return content
        if response.status in (401, 403):
            raise self._refuse("It refuses the key.")
        if strange and response.status < 500:
            raise self._refuse(f"It has {strange} (HTTP {response.status}).")
        raise self._refusal(response.status, content, path, lost)

    @asynccontextmanager
    async def _waiting(self, within_s: float) -> AsyncIterator[None]:
        """TimeoutError where the block takes longer, and at once where the vLLM is gone."""
        async with asyncio.timeout(within_s) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)

    def _refusal(self, status: int, body: bytes, path: str, lost: str | None) -> HalteresError:
        text = refusal_text(body) or f"HTTP {status}."
        if status == 503 or (status == 500 and any(word in text for word in DYING)):
            return self._gone(text)
        if status == 404 and lost is not None and "does not exist" in text:
            return self._gone(f"It has lost {lost}: it was started again.")
        what = f"vLLM refused {path}."
        if status == 429:
            return NotReady(what, text, "Ask again in a moment.")
        if status in (400, 404, 422):
            return InvalidData(what, text)
        return ServerError(what, text)

    def _gone(self, why: str) -> HalteresError:
        """The error of a vLLM that is not there any more; its host hears of it."""
        self.fail(EngineGone(f"{self._demands.title} is gone.", why, "Ask again."))
        assert self.failure is not None  # noqa: S101 - for the type checker
        return self.failure


def _loading_flaw(text: str, folder: Path, rank: int) -> str:
    """Why the probe was not loaded."""
    if "No adapter found" in text:
        return f"It does not see the folder {folder.parent} (inference.weights_folder)."
    if "max_lora_rank" in text:
        return f"It takes no adapter of rank {rank} (--max-lora-rank): {text}"
    if "Not Found" in text:
        return (
            "Adapters cannot be loaded while it runs (VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and "
            "--enable-lora)."
        )
    return f"It does not load an adapter: {text}"
