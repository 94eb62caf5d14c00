"""The models that a run uses: its base model (which one a name means, here or in a service), and
reward models by their folders. Nothing is downloaded or loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from halteres.clients import json_client
from halteres.clients.critic import PASS_TOKENS
from halteres.clients.trajectories.address import Address
from halteres.config import environ
from halteres.config.files import data_place
from halteres.config.problem import Problem, refusal
from halteres.config.settings import InferenceSettings, Settings, TrainerSettings
from halteres.documents import DocumentError, parse_yaml
from halteres.engine.shapes import CONFIG
from halteres.errors import (
    FEW_TOLD,
    InvalidConfig,
    InvalidData,
    NotFound,
    NotReady,
    UserError,
    nearest,
)
from halteres.logins import without_logins
from halteres.models import builtin_names, builtin_path, model_folder, stored_models
from halteres.models.shape import (
    ModelShape,
    adapter_numbers,
    is_classifier,
    read_config,
    read_shape,
)
from halteres.rewards.model_folder import ModelFolder, read_model_folder
from halteres.rewards.scorer import places_of
from halteres.runs.planning.resources import NUMBER, UNFREED, layer_numbers
from halteres.scores import is_address
from halteres.short_texts import clipped

ANSWERS_WITHIN_S = 5.0
NAME_LENGTH = 200  # characters of a model's name that a service elsewhere says
TOKENIZER = "tokenizer.json"


class ModelMissing(NotFound):
    """The base model is not on this disk, or not whole."""

    code = "preflight_failed"


class ServiceUnusable(UserError):
    """Somebody else's training service cannot serve a run."""

    code = "preflight_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModel:
    """A run's base model."""

    name: str  # as the service names it
    tokenizer: str  # its folder, or its name where only the service has it
    shape: ModelShape | None = None  # None: a service elsewhere has it
    # the service has no routes for environments and chats: a relay samples it by the SDK
    is_relayed: bool = False
    context: int | None = None  # tokens, where a service elsewhere says so


def models_home() -> Path:
    """Where models are put: HALTERES_HOME/models."""
    return environ.home() / "models"


def find_folder(name: str) -> Path:
    """The absolute folder of the base model of this name, or at this path. ModelMissing where there
    is none.
    """
    if (folder := model_folder(name, models_home())) is not None:
        return folder
    path = Path(name).expanduser()
    # A path is meant from the folder of this process, a name below HALTERES_HOME/models.
    expected = path
    if not (path.is_absolute() or name.startswith((".", "~"))):
        expected = models_home() / name
    here = [*builtin_names(), *(known for known, _ in stored_models(models_home()))]
    why = f"There is no folder {expected.absolute()}."
    if expected.is_dir():
        why = f"{expected} has no config.json."
    raise ModelMissing(
        f"Model '{name}' is not there.",
        why,
        "Register it with `halteres models add` (a folder, a GGUF file, a name of the hub), or "
        "set inference.model to"
        f" the path of a folder or to one of: {', '.join(here)}.",
        field="inference.model",
        did_you_mean=nearest(name, here),
        allowed=here,
    )


def own_model(inference: InferenceSettings) -> RunModel:
    """For a service of the run's own: the model must lie on this disk, and be one that the engine
    computes.
    """
    folder = find_folder(inference.model)
    if builtin_path(inference.model):
        name = inference.model
    else:
        name = str(folder)
    if inference.engine == "scripted":  # it reads the vocabulary's size and no weights
        return RunModel(name=name, tokenizer=str(folder))
    try:
        shape = read_shape(folder)
    except (OSError, ValueError) as error:
        next = "Get its files again: config.json, tokenizer.json and *.safetensors."
        raise ModelMissing(
            f"The model in {folder} is not whole.", f"{error}.", next, field="inference.model"
        ) from error
    if not shape.is_decoder:
        raise InvalidConfig(
            f"The model in {folder} cannot be used.",
            f"Its architecture is '{shape.architecture}', of model_type '{shape.family}': no "
            "causal language model.",
            "Take a decoder, such as Qwen3, Llama or Mistral.",
            field="inference.model",
        )
    return RunModel(name=name, tokenizer=str(folder), shape=shape)


def given_model(inference: InferenceSettings, service_url: str) -> RunModel:
    """For a service elsewhere.

    Args:
        inference: names the model.
        service_url: of the service.

    Raises:
        NotReady, ServiceUnusable, InvalidConfig: it does not answer, is no training service, has
            another model.
    """
    Address.of(service_url)  # whether it is one
    if without_logins(service_url) != service_url:
        raise ServiceUnusable(
            f"The address {without_logins(service_url)} has a login.",
            "The SDK sends a service its key, and no login beside it.",
            "Name the service without the login, and set TINKER_API_KEY to the key.",
        )
    folder = str(model_folder(inference.model, models_home()) or inference.model)
    model = (_ask("/halteres/v1/info", service_url) or {}).get("model") or {}
    name, there = model.get("name"), model.get("folder")
    if name is None:
        return _model_of_others(inference.model, folder, service_url)
    if not {inference.model, folder, str(Path(inference.model).expanduser().absolute())} & {
        name,
        there,
    }:
        rule = f"the service at {service_url} serves '{name}'"
        raise refusal(
            [Problem(field="inference.model", got=inference.model, rule=rule, suggest=(name,))]
        )
    return RunModel(name=name, tokenizer=there if there and Path(there).is_dir() else folder)


def _model_of_others(name: str, folder: str, service_url: str) -> RunModel:
    """For a service that is not ours: whether it is one of the Tinker API, has the model, and lets
    environments sample.
    """
    if _ask("/api/v1/healthz", service_url) is None:
        raise ServiceUnusable(
            f"What answers at {service_url} is no training service.",
            "It has no route /api/v1/healthz, which every service of the Tinker API has.",
            "See to the address.",
        )
    offered = _models_offered(service_url)
    if offered and name not in offered:
        few = ", ".join(sorted(offered)[:FEW_TOLD])
        rule = f"the service at {service_url} does not offer it; it offers {few}"
        suggest = nearest(name, offered)
        raise refusal(
            [
                Problem(
                    field="inference.model",
                    got=name,
                    rule=rule,
                    suggest=(suggest,) if suggest else (),
                )
            ]
        )
    is_relayed = _ask("/runs/preflight/v1/models", service_url) is None
    return RunModel(name=name, tokenizer=folder, is_relayed=is_relayed, context=offered.get(name))


def _models_offered(service_url: str) -> dict[str, int | None]:
    """The models of a service of the Tinker API, each with its context in tokens where it says so;
    empty where it does not say which it has.
    """
    answer = _ask("/api/v1/get_server_capabilities", service_url) or {}
    models = answer.get("supported_models")
    if not isinstance(models, list):
        return {}
    return {
        clipped(one["model_name"], NAME_LENGTH): _tokens_in(one)
        for one in models
        if isinstance(one, dict) and isinstance(one.get("model_name"), str)
    }


def _tokens_in(offered: Mapping[str, Any]) -> int | None:
    """The context of a model, where a service says it as a number of tokens."""
    context = offered.get("max_context_length")
    if type(context) is int and context > 0:
        return context
    return None


def tokenizer_folder(name: str, settings: Literal["data", "env"] = "data") -> Path:
    """The folder of a tokenizer: a model's, by its name or its path. NotFound where none is on this
    disk. `settings`: of a training on a file, which names its tokenizer, or of an environment.
    """
    folder = Path(name).expanduser()
    if not (folder / TOKENIZER).is_file():
        folder = model_folder(name, models_home()) or folder
    if (folder / TOKENIZER).is_file():
        return folder.absolute()
    what = f"There is no tokenizer of '{name}' on this disk."
    files = f"Put its {TOKENIZER}, tokenizer_config.json and chat template into a folder"
    if settings == "env":
        raise NotFound(
            what,
            "Prompts are read as tokens here, also where a service elsewhere has the model.",
            f"{files} of the model's name, with its config.json: {models_home() / name}.",
            field="inference.model",
        )
    raise NotFound(
        what,
        "Rows are read as tokens here, also where a service elsewhere has the model.",
        f"{files}, and name that: data.tokenizer=FOLDER.",
        field="data.tokenizer",
    )


def found_model(inference: InferenceSettings) -> tuple[str | None, RunModel]:
    """The model on this disk, or else in the service that TINKER_BASE_URL names: that one's
    address, and the model. Raises as `own_model` where no service is named, else as `given_model`.
    """
    try:
        return None, own_model(inference)
    except ModelMissing:
        url = (environ.service_url() or "").rstrip("/")
        if not url:
            raise
        return url, given_model(inference, url)


def _ask(path: str, service_url: str) -> dict[str, Any] | None:
    """GET JSON, with the key of TINKER_API_KEY; None where the service has no such route."""
    try:
        return json_client.get_json(f"{service_url}{path}", ANSWERS_WITHIN_S, environ.api_key())
    except json_client.Refused as error:
        if error.answered in (404, 405):
            return None
        if error.answered in (401, 403):
            raise ServiceUnusable(
                f"The training service at {service_url} refuses the key.",
                error.why,
                "Set TINKER_API_KEY to a key of it.",
            ) from error
        raise NotReady(
            f"The training service at {service_url} is not ready.",
            f"It answered {error.answered}.",
            "Try again soon.",
        ) from error
    except NotReady as error:
        raise NotReady(
            f"No training service answers at {service_url}.",
            error.why,
            f"Check the address{_asked_directly(service_url)}, or leave it out: the run then "
            "starts its own service.",
        ) from error


def _asked_directly(url: str) -> str:
    names = ", ".join(sorted(environ.proxies()))
    # It brings the web server, which is not needed for anything else here.
    from halteres.loopback import is_local

    if not names or is_local(url):
        return ""
    return f" (a run's environments ask without the proxy of {names})"


LISTS, SHORT = ("rewards", "panel"), "reward_model_path"
FIELDS = (*LISTS, SHORT)  # fields of an environment's settings that may name a reward model

RUBRIC_FILES = (".json", ".toml", ".yaml", ".yml")
"""Endings of a rubric's file; a rubric may also stand in the settings itself."""

SERVER_BYTES = 500_000_000  # a reward server's process without a model: torch and transformers

WORKING_BYTES = 200_000_000
"""One forward pass of its limit of tokens, of a small model; of a large one it is a small part of
its weights.
"""


def server_bytes(models: Sequence[ModelFolder]) -> int:
    """What a run's reward server needs at its peak."""
    if models:
        return SERVER_BYTES + WORKING_BYTES + sum(model.num_bytes for model in models)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticModel:
    """What a run's critic begins from."""

    folder: Path  # absolute
    num_bytes: int  # of its weights in memory, in fp32
    shape: ModelShape


def critic_place(trainer: TrainerSettings) -> Path | None:
    """The absolute folder that trainer.critic means; None: the base model."""
    if trainer.critic is None:
        return None
    folder = model_folder(trainer.critic, models_home()) or Path(trainer.critic).expanduser()
    return folder.absolute()


def critic_model(trainer: TrainerSettings, model: RunModel) -> CriticModel:
    """The model that the critic of a run begins from: a reward model's or a base model's folder on
    this disk, whose tokens are those of the run's base model.

    Raises:
        NotFound, InvalidData: there is no such folder, or no such model in it.
        InvalidConfig: its tokens are others, or it has several outputs.
    """
    base = Path(model.tokenizer)
    if not (base / TOKENIZER).is_file():
        raise NotFound(
            f"The critic of trainer.advantage 'gae' needs the model '{model.name}' on this disk.",
            "It computes its values itself, and the service elsewhere gives none.",
            "Register the model with `halteres models add`, or take an advantage without a "
            "critic, such as rebn or group_std.",
            field="trainer.advantage",
        )
    folder = critic_place(trainer) or base.absolute()
    if not folder.is_dir():
        raise NotFound(
            f"There is no model for the critic in {folder}.",
            "There is no such folder.",
            "Name the folder of a reward model or of a base model.",
            field="trainer.critic",
        )
    own = folder
    try:
        if (folder / CONFIG).is_file() or is_classifier(read_config(folder)):
            found = read_model_folder(folder)
            own = Path(found.base or folder)
            num_bytes = found.num_bytes
            if found.facts.get("objective_weights"):
                raise InvalidConfig(
                    f"The reward model in {folder} cannot be a critic.",
                    "It has an output for each of several objectives; a value is one number.",
                    "Merge it into one output, or name another.",
                    field="trainer.critic",
                )
            shape = read_shape(own)
        else:
            shape = read_shape(folder)
            num_bytes = 4 * shape.parameters
    except (OSError, ValueError) as error:
        raise InvalidData(
            f"The model in {folder} cannot be a critic.",
            f"{error}.",
            "Name the folder of a reward model or of a base model.",
            field="trainer.critic",
        ) from error
    _check_tokens(base, model.name, folder, own)
    return CriticModel(folder=folder, num_bytes=num_bytes, shape=shape)


def _check_tokens(base: Path, name: str, folder: Path, own: Path) -> None:
    """That a critic reads the tokens of the base model.

    Args:
        base: folder of the base model's tokenizer.
        name: the base model's.
        folder: the critic's.
        own: of the base model that the critic was trained on, which may have its tokenizer.
    """
    theirs = own
    if (folder / TOKENIZER).is_file():
        theirs = folder
    try:
        is_same = _same_tokens(base, theirs)
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        # the file is anyone's, and may be of any shape
        raise InvalidData(
            f"The model in {folder} cannot be a critic.",
            f"Its {TOKENIZER} cannot be read: {error}.",
            f"Put the {TOKENIZER} of '{name}' there.",
            field="trainer.critic",
        ) from error
    if not is_same:
        raise InvalidConfig(
            f"The model in {folder} cannot be the critic of '{name}'.",
            "Its tokenizer is another: it would read other texts than the policy wrote.",
            "Name a reward model that was trained on this base model, or leave trainer.critic out.",
            field="trainer.critic",
        )


def critic_bytes(critic: CriticModel | None, rank: int) -> int:
    """What the process of a run's critic needs at its peak."""
    if critic is None:
        return 0
    shape = critic.shape
    activations = int(PASS_TOKENS * shape.layers * layer_numbers(shape, rank) * UNFREED)
    # weights, gradient, two moments
    adapter = 4 * adapter_numbers(shape, rank)
    return SERVER_BYTES + critic.num_bytes + NUMBER * (activations + adapter)


def _same_tokens(one: Path, other: Path) -> bool:
    """Whether the tokenizers of two folders give the same ids."""
    files = [(folder / TOKENIZER).read_bytes() for folder in (one, other)]
    if files[0] == files[1]:
        return True
    vocabularies: list[Any] = []
    for content in files:
        found = json.loads(content)
        added = {token["id"]: token["content"] for token in found.get("added_tokens") or ()}
        vocabularies.append((found.get("model"), added))
    return vocabularies[0] == vocabularies[1]


def reward_folders(env: Mapping[str, Any]) -> tuple[Path, ...]:
    """The local folders that an environment's settings name as reward models, each once, in
    order.
    """
    models = [
        component.get("model") for name in LISTS for component in components_of(env.get(name))
    ]
    places = [place for model in (*models, env.get(SHORT)) for place in _split(model)]
    return tuple(
        dict.fromkeys(Path(place).expanduser() for place in places if not is_address(place))
    )


def _split(given: Any) -> list[str]:
    """The places in a text of one or several. Anything else is for the environment to refuse."""
    if isinstance(given, str):
        return places_of(given)
    return []


def components_of(given: Any) -> list[dict[str, Any]]:
    """The components of a list, which may be YAML; the environment refuses anything else."""
    if isinstance(given, str):
        try:
            given = parse_yaml(given)
        except DocumentError:
            return []
    if isinstance(given, list):
        return [component for component in given or () if isinstance(component, dict)]
    return []


def with_absolute_folders(settings: Settings) -> Settings:
    """The settings with folders, and files of data, functions and rubrics, called as they are from
    anywhere.
    """

    def absolute(component: dict[str, Any]) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        function, rubric = component.get("function"), component.get("rubric")
        if isinstance(function, str):
            file, colon, name = function.rpartition(":")
        else:
            file, colon, name = ("", "", "")
        if file.endswith(".py"):
            changes["function"] = f"{Path(file).expanduser().absolute()}{colon}{name}"
        if isinstance(rubric, str) and Path(rubric).suffix in RUBRIC_FILES:
            changes["rubric"] = str(Path(rubric).expanduser().absolute())
        return {**component, **changes}

    if "dataset" in settings.env:
        env = {**settings.env, "dataset": data_place(settings.env["dataset"], Path())}
        settings = settings.model_copy(update={"env": env})
    return with_places(_with_components(settings, absolute), lambda folder: str(folder.absolute()))


def with_places(settings: Settings, place_of: Callable[[Path], str]) -> Settings:
    """The settings with something else in place of each local folder."""

    def moved(values: Mapping[str, Any], name: str) -> dict[str, Any]:
        places = _split(values.get(name))
        replaced = (
            place if is_address(place) else place_of(Path(place).expanduser()) for place in places
        )
        if places:
            return {**values, name: ",".join(replaced)}
        return dict(values)

    settings = _with_components(settings, lambda component: moved(component, "model"))
    return settings.model_copy(update={"env": moved(settings.env, SHORT)})


def _with_components(
    settings: Settings, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> Settings:
    env = dict(settings.env)
    for name in LISTS:
        if components := components_of(env.get(name)):
            env[name] = [change(component) for component in components]
    if env == settings.env:
        return settings
    return settings.model_copy(update={"env": env})
