"""From a draft and a call's arguments to a request: everything that can be refused is refused here.

Owns: the noun `Order`, which key a test needs, the sentence for one that is missing.
Never: starts a test, writes a file.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from halteres.agent.drafting.drafts import Draft
from halteres.agent.trial import request as limits
from halteres.agent.trial.candidates import Backend, Bench
from halteres.agent.trial.request import Request
from halteres.config import environ
from halteres.config.discovery import read_environment
from halteres.config.policies import load_policy
from halteres.config.program import describe, program_of
from halteres.config.settings import ENV_WIRING
from halteres.runs.served import service_arguments
from halteres.runs.starting.preflight import MissingKey

KEY, ADDRESS = "OPENROUTER_API_KEY", "OPENROUTER_BASE_URL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A test that somebody wants."""

    draft: Draft
    num_steps: int
    group_size: int
    models: Sequence[str] | None
    prompts: Sequence[str]
    max_tokens: int | None
    temperature: float | None
    backend: Backend | None

    def request(self) -> Request:
        """The test, not yet started.

        Raises:
            NoEnvironment, EnvironmentBroken, InvalidConfig: the draft cannot be tested.
            ModelMissing: its base model is not there, and no other was named. MissingKey: a key is.
        """
        settings = self.draft.resolve().settings
        program = program_of(settings.run)
        told = describe(program, {name: value for name, value in settings.env.items() if name not in ENV_WIRING})
        _check_set(*load_policy().require_keys.test, always=True)
        candidates = Bench(program.name, settings, self.backend).seat(self.models)
        if not all(one.is_local for one in candidates):
            _check_set(KEY, always=False)
        found = read_environment(program.path)
        return Request(
            draft=self.draft.handle,
            environment=program.name,
            environment_file=str(program.path),
            class_name=found.class_name if found else "",
            interpreter=program.interpreter,
            working_directory=str(program.working_directory),
            env={
                **settings.env,
                "seed": settings.run.seed,
                "success_threshold": settings.run.success_threshold,
            },
            is_foreign=told.is_foreign,
            num_steps=self.num_steps,
            group_size=self.group_size,
            candidates=candidates,
            base_model=settings.inference.model,
            created_at=time.time(),
            prompts=tuple(self.prompts),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            service=service_arguments(settings.inference),
            model_within_s=limits.MODEL_WITHIN_S,
        )


def _check_set(*keys: str, always: bool) -> None:
    """MissingKey for the first that is not set; `always`: whatever is tested."""
    missing = next((key for key in keys if not environ.is_set(key)), None)
    if missing is None:
        return
    remedy = 'rl_test_inference(backend="local") needs no key'
    raise MissingKey(
        f"{missing} not set. Required for inference testing.",
        "Set it where these tools are started" + ("." if always else ", or test the local model, which needs none."),
        f"set {missing}, then rl_test_inference()" if always else f"{remedy}; {missing} must be set for other models",
        field=missing,
    )
