"""Which models sit a test.

Owns: the models of the seeds, what a name means (a model of this machine, weights of a run, or an endpoint's id), the
names of their files.
Never: refuses an endpoint's id, asks the endpoint.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from halteres.agent.trial.request import LOCAL, Candidate
from halteres.config.environment_name import in_file_name
from halteres.config.settings import Settings
from halteres.errors import HalteresError
from halteres.models import model_folder
from halteres.runs.directory import RunAmbiguous, RunNotFound, find_run
from halteres.runs.reading.adapter import CONFIG, weights_of
from halteres.runs.starting.base_model import RunModel, found_model, shelf

Backend = Literal["local", "openrouter"]

DEFAULTS = {
    "qwen/qwen3-8b": ("Qwen3 8B", "small"),
    "z-ai/glm-4.7-flash": ("GLM-4.7 Flash", "medium"),
    "minimax/minimax-m2.5": ("MiniMax M2.5", "large"),
}
"""The endpoint's models that are tried where none is named: id -> name, scale (seed 002)."""

LONGEST_STEM = 120  # characters


@dataclass(frozen=True, slots=True)
class Bench:
    """Makes candidates for one draft."""

    environment: str  # its name
    settings: Settings
    backend: Backend | None

    def seat(self, models: Sequence[str] | None) -> tuple[Candidate, ...]:
        """The models to test. ModelMissing where none is named and the draft's base model is not there."""
        if models:
            named = list(dict.fromkeys(models))
            made = [self._named(name) for name in named]
        elif self.backend == "openrouter":
            made = [self._remote(name) for name in DEFAULTS]
        else:
            made = [self._base(self.settings.inference.model)]
        return _with_own_files(made)

    def _named(self, name: str) -> Candidate:
        if self.backend != "openrouter" and _names_weights(name):
            return self._of_run(name)
        return self._local(name) if self._is_local(name) else self._remote(name)

    def _of_run(self, name: str) -> Candidate:
        """Weights of a run. Those that are not there are a candidate too, as with models."""
        try:
            found = weights_of(name)
            model = RunModel(name=found.path, tokenizer=found.run.state().tokenizer)
            return self._candidate(name, f"weights of run {found.run.run_id}", "local", model, run=found.run.run_id)
        except HalteresError as error:
            missing = RunModel(name=name, tokenizer="")
            return self._candidate(name, name, "local", missing, problem=f"{error.what} {error.why}".strip())

    def _is_local(self, name: str) -> bool:
        if self.backend == "openrouter":
            return name.startswith(LOCAL)
        is_here = name.startswith(LOCAL) or name == self.settings.inference.model
        return self.backend == "local" or is_here or model_folder(name, shelf()) is not None

    def _local(self, name: str) -> Candidate:
        """One that is not there is a candidate too: it fails, and the others do not."""
        model = name.removeprefix(LOCAL)
        try:
            return self._base(model)
        except HalteresError as error:
            return self._candidate(
                LOCAL + model, model, "local", RunModel(name=model, tokenizer=""), problem=error.what
            )

    def _base(self, model: str) -> Candidate:
        asked = self.settings.inference.model_copy(update={"model": model})
        url, found = found_model(asked)
        return self._candidate(LOCAL + model, model, "local", found, service_url=url)

    def _remote(self, model: str) -> Candidate:
        """Prompts are counted with the base model's tokenizer, nobody else's is here; without it, in characters."""
        name, scale = DEFAULTS.get(model, (model, "custom"))
        return self._candidate(model, name, scale, RunModel(name=model, tokenizer=self._tokenizer_folder()))

    def _tokenizer_folder(self) -> str:
        """Of the draft's base model; empty where it is not here: an endpoint's model is tested without it too."""
        asked = self.settings.inference
        if (folder := model_folder(asked.model, shelf())) is not None:
            return str(folder)
        try:
            tokenizer = found_model(asked)[1].tokenizer
        except HalteresError:
            return ""
        return tokenizer if Path(tokenizer).is_dir() else ""

    def _candidate(
        self,
        model: str,
        name: str,
        scale: str,
        found: RunModel,
        *,
        run: str = "",
        service_url: str | None = None,
        problem: str = "",
    ) -> Candidate:
        return Candidate(
            model=model,
            name=name,
            scale=scale,
            base=found.name,
            is_local=scale == "local",
            tokenizer=found.tokenizer,
            stem=_stem(self.environment, model),
            wandb_run=f"test_inference_RSIAgent_{in_file_name(self.environment)}_{secrets.token_hex(4)}",
            run=run,
            service_url=service_url,
            problem=problem,
        )


def _names_weights(name: str) -> bool:
    """Whether it is one of the forms in which rl_get_results names weights: tinker://, an adapter folder, a run."""
    if name.startswith("tinker://") or (Path(name).expanduser() / CONFIG).is_file():
        return True
    if "/" in name or model_folder(name, shelf()) is not None:
        return False
    try:
        find_run(name)
    except RunAmbiguous:
        return True  # `weights_of` says which they are
    except RunNotFound:
        return False
    return True


def _stem(environment: str, model: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", f"test_{environment}_{model}")[:LONGEST_STEM]


def _with_own_files(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Two names may come to the same file name: the later one gets a number."""
    seen: dict[str, int] = {}
    told: list[Candidate] = []
    for one in candidates:
        seen[one.stem] = seen.get(one.stem, 0) + 1
        number = seen[one.stem]
        told.append(one if number == 1 else msgspec.structs.replace(one, stem=f"{one.stem}.{number}"))
    return tuple(told)
