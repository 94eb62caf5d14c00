"""What there is to sample from, and whether it can be: models, health, facts that clients probe for.

Owns: these answers; text to tokens and back for clients without the model's tokenizer.
Never: samples.
Source: OpenAI's API reference (models); vLLM 0.11 (/health, /ping, /version, /tokenize, /detokenize); sglang 0.5
(/health_generate, /get_model_info).
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from halteres.errors import InvalidData, NotFound, NotReady, shortened
from halteres.service.answers import answer
from halteres.service.inference.addresses import SCHEME, Listed
from halteres.service.inference.answering import Inference
from halteres.service.inference.asking import Call, Prompt
from halteres.service.inference.chats import Chat
from halteres.service.sampling.samples import packed
from halteres.service.tenancy.tenants import tenant_of
from halteres.service.wire.inference.common import read
from halteres.service.wire.inference.tokens import Detokenize, Tokenize


class NameRoutes:
    """The handlers."""

    def __init__(self, inference: Inference) -> None:
        self._inference, self._tokenizer = inference, inference.tokenizer

    async def models(self, request: Request) -> Response:
        """GET v1/models; below a run, the run and the base model."""
        return answer({"object": "list", "data": [self._shaped(one) for one in self._listed(request)]})

    async def model(self, request: Request) -> Response:
        """GET v1/models/{id}."""
        asked: str = request.path_params["model"]
        if asked.startswith("tinker:/") and not asked.startswith(SCHEME):
            asked = asked.replace("tinker:/", SCHEME, 1)  # proxies and clients join slashes
        for one in self._listed(request):
            if one.name == asked:
                return answer(self._shaped(one))
        run = request.path_params.get("run_id")
        if run is not None and SCHEME not in asked and not self._inference.base.answers_to(asked):
            raise NotFound(f"There is no model '{shortened(asked)}' under the run '{run}'.", param="model")
        weights = self._inference.addresses.find(asked, run, tenant_of(request))
        return answer(self._shaped(Listed(name=asked, version=weights.version, base=weights.snapshot is None)))

    def _listed(self, request: Request) -> list[Listed]:
        run, tenant = request.path_params.get("run_id"), tenant_of(request)
        addresses = self._inference.addresses
        if run is None:
            return addresses.all(tenant)
        policy = addresses.find(None, run, tenant)
        return [Listed(name=run, version=policy.version), Listed(name=addresses.base.name, version=0, base=True)]

    def _shaped(self, one: Listed) -> dict[str, Any]:
        base = self._inference.base.name
        return {
            "id": one.name,
            "object": "model",
            "created": int(one.created_at),
            "owned_by": "halteres",
            "root": base if one.base else one.name,
            "parent": None if one.base else base,
            "policy_version": one.version,
        }

    async def health(self, request: Request) -> Response:
        """GET health: 200 once the engine is there, and below a run, once the run has a policy."""
        if not self._inference.ready:
            raise NotReady("The engine is starting.", next="Ask again in a moment.")
        weights = self._inference.addresses.find(None, request.path_params.get("run_id"), tenant_of(request))
        return answer({"status": "ok", "policy_version": weights.version})

    async def model_info(self, request: Request) -> Response:
        """GET get_model_info."""
        weights = self._inference.addresses.find(None, request.path_params.get("run_id"), tenant_of(request))
        folder = str(self._inference.base.folder)
        return answer(
            {
                "model_path": folder,
                "tokenizer_path": folder,
                "served_model_name": weights.name,
                "is_generation": True,
                "weight_version": str(weights.version),
                "max_model_len": await self._inference.context_length(),
            }
        )

    async def version(self, _: Request) -> Response:
        """GET version."""
        return answer({"version": version("halteres")})

    async def tokenize(self, call: Call) -> Response:
        """POST tokenize: a prompt or a chat."""
        asked = await self._inference.read(call, lambda body: read(body, Tokenize))
        self._inference.addresses.find(asked.model, call.run, call.tenant)
        tokens = (await self._prompt(call, asked)).tokens
        told: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": await self._inference.context_length(),
            "tokens": tokens,
        }
        if asked.return_token_strs:
            told["token_strs"] = await self._inference.read(
                call, lambda _: [self._tokenizer.token(token) for token in tokens]
            )
        return answer(told)

    async def _prompt(self, call: Call, asked: Tokenize) -> Prompt:
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidData("The request names no text, or two.", next="Send prompt or messages.")
        if asked.messages is None:
            return (await self._inference.prompts(call, [asked.prompt or ""], asked.add_special_tokens))[0]
        chat = Chat(
            messages=asked.messages,
            tools=asked.tools or (),
            template_kwargs=asked.chat_template_kwargs or {},
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
        )
        return await self._inference.chat_prompt(call, lambda: chat, asked.add_special_tokens)

    async def detokenize(self, call: Call) -> Response:
        """POST detokenize."""
        return answer({"prompt": await self._inference.read(call, self._text)})

    def _text(self, body: bytes) -> str:
        tokens = read(body, Detokenize).tokens
        packed(tokens)
        strange = next((token for token in tokens if not self._tokenizer.knows(token)), None)
        if strange is not None:
            raise InvalidData(f"`tokens` holds {strange}, which is no token of this model.", param="tokens")
        return self._tokenizer.decode(tokens, skip_special_tokens=False)
