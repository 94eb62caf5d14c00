"""A request for inference, whatever its shape: which weights a `model` means, prompts as tokens, how to sample.

halteres/tiny, its folder, its aliases      the base model
tinker://RUN/sampler_weights/NAME           named weights; …/weights/NAME too
halteres/tiny;tinker://…                    the same, with the base model said
NAME                                        the newest policy of the tenant's run of that name
nothing                                     the run in the URL; without one, the base model
"""

from __future__ import annotations

from collections.abc import Sequence
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
        name = model or run or self.base.name
        if self.base.answers_to(name) if model else run is None:
            return Weights(name=name, snapshot=None)
        if run is None and name not in self._runs(tenant):
            raise NotFound(
                f"There is no model '{shortened(name)}' here.",
                f"The base model is '{self.base.name}'.",
                "Name it, a tinker:// path or a run; GET /v1/models lists them.",
                did_you_mean=nearest(name, self.all(tenant)),
                param="model",
            )
        return Weights(name=name, snapshot=self._service.samplers.policy(run or name, tenant, version))

    def all(self, tenant: Tenant) -> dict[str, tuple[int, float]]:
        """Policy version and unix s of making, of the base model, every run with a policy, every named checkpoint."""
        began, policies = self._runs(tenant), self._service.samplers.versions(tenant)
        saved = [one for one in self._service.checkpoints.all(tenant=tenant) if one.path.kind == "sampler_weights"]
        return {
            **dict.fromkeys(self.base.names, (0, 0.0)),
            **{run: (version, began.get(run, 0.0)) for run, version in policies.items()},
            **{str(one.path): (one.version, one.created_at) for one in saved},
        }

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


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """Prompts, and how to go on with them."""

    call: Call
    weights: Weights
    prompts: Sequence[Prompt]
    sampling: SamplingFields
    top: int = 0  # most likely tokens at each sampled position
    prompt_top: int | None = None  # ... and at each position of the prompt; None: nothing of the prompt is answered
    prompt_start: int = 0  # the first position of the prompt that is answered
    parallel_calls: bool | None = None  # of tools, several or the first alone; None: calls are text

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
