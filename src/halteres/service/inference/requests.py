"""A request for inference, whatever its shape: which weights a `model` means, prompts as tokens, how to sample.

halteres/tiny, its folder, its aliases      the base model
tinker://RUN/sampler_weights/NAME           named weights; …/weights/NAME too
halteres/tiny;tinker://…                    the same, with the base model said
NAME                                        the newest policy of the tenant's run of that name
nothing                                     the run in the URL; without one, the base model
"""

from __future__ import annotations

from dataclasses import dataclass

from halteres.errors import InvalidData, NotFound, nearest, shortened
from halteres.service.inference.bodies import SamplingFields
from halteres.service.sampling.snapshots import Snapshot
from halteres.service.service import Service
from halteres.service.tenancy.tenants import Tenant
from halteres.text import Tokenizer

SCHEME = "tinker://"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What an HTTP call brings."""

    run: str | None  # of the URL
    tenant: Tenant
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights to sample from, by the name that they were asked for."""

    name: str
    snapshot: Snapshot | None  # None: the base model

    @property
    def version(self) -> int:
        """Policy version."""
        return self.snapshot.version if self.snapshot else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A name that answers."""

    name: str
    version: int  # policy version
    created_at: float = 0.0  # unix s
    base: bool = False


class Addresses:
    """The names of one service's weights."""

    def __init__(self, service: Service) -> None:
        self.base, self._service = service.base, service

    def find(self, model: str | None, run: str | None, tenant: Tenant, version: int | None = None) -> Weights:
        """What a request means. Under a run's URL, a name that is neither a path nor the base model means the run.

        Args:
            version: of a run: these weights, not its newest.

        Raises:
            NotFound: nothing has this name.
            NotReady: the run has not published that yet.
            SnapshotLost: weights of that version are no longer kept.
        """
        if model is not None and SCHEME in model:
            base, _, path = model.rpartition(";")
            if base:
                self.base.check(base)
            found = self._service.checkpoints.find(path, tenant)
            return Weights(name=model, snapshot=self._service.snapshots.of(found))
        if model is not None and self.base.answers_to(model):
            return Weights(name=model, snapshot=None)
        if run is None and not model:
            return Weights(name=self.base.name, snapshot=None)
        if run is None and model not in self._runs(tenant):
            raise NotFound(
                f"There is no model '{shortened(model or '')}' here.",
                f"The base model is '{self.base.name}'.",
                "Name it, a tinker:// path or a run; GET /v1/models lists them.",
                did_you_mean=nearest(model or "", [listed.name for listed in self.all(tenant)]),
                param="model",
            )
        snapshot = self._service.samplers.policy(run or model or "", tenant, version)
        return Weights(name=model or run or "", snapshot=snapshot)

    def all(self, tenant: Tenant) -> list[Listed]:
        """The base model, every run with a policy, every named checkpoint for sampling."""
        began, policies = self._runs(tenant), self._service.samplers.versions(tenant)
        saved = self._service.checkpoints.all(tenant=tenant)
        return [
            *(Listed(name=name, version=0, base=True) for name in self.base.names),
            *(Listed(name=run, version=policies[run], created_at=began.get(run, 0.0)) for run in policies),
            *(
                Listed(name=str(one.path), version=one.version, created_at=one.created_at)
                for one in saved
                if one.path.kind == "sampler_weights"
            ),
        ]

    def _runs(self, tenant: Tenant) -> dict[str, float]:
        """The tenant's runs, and when each began (unix s)."""
        sessions = self._service.sessions.all(tenant)
        return {session.run: session.created_at for session in reversed(sessions) if session.run}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is to be continued. `text` is None where tokens were sent."""

    tokens: list[int]
    text: str | None = None

    @staticmethod
    def of(given: str | list[int], tokenizer: Tokenizer, longest: int, special: bool | None = None) -> Prompt:
        """A text or tokens.

        Args:
            longest: characters that a text may have.
            special: whether a text gets the tokens that begin and end one; None: unless it begins so already.

        Raises:
            InvalidData: the text is longer than any model reads.
        """
        if not isinstance(given, str):
            return Prompt(tokens=given)
        if len(given) > longest:
            raise InvalidData(f"A prompt has {len(given)} characters.", f"{longest} are the limit.", "Shorten it.")
        begins = tokenizer.specials.get("bos_token")
        added = not (begins and given.startswith(begins)) if special is None else special
        return Prompt(tokens=tokenizer.encode(given, add_special_tokens=added), text=given)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """Prompts, and how to go on with them."""

    call: Call
    weights: Weights
    prompts: tuple[Prompt, ...]
    sampling: SamplingFields
    top: int = 0  # most likely tokens at each sampled position
    prompt_top: int | None = None  # ... and at each position of the prompt; None: nothing of the prompt is answered
    prompt_start: int = 0  # the first position of the prompt that is answered

    @property
    def num_prompt_logprobs(self) -> int:
        """Log-probabilities of prompts in the answer, where those of a prompt may stand beside each sequence."""
        if self.prompt_top is None:
            return 0
        positions = sum(max(0, len(prompt.tokens) - self.prompt_start) for prompt in self.prompts)
        return self.sampling.n * positions * (1 + self.prompt_top)

    @property
    def scores_only(self) -> bool:
        """Whether the prompt's log-probabilities are all that is asked for."""
        return self.sampling.max_tokens == 0 and self.prompt_top is not None
