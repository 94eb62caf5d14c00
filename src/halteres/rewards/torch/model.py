"""A trained reward model: loaded from a folder, scoring, ranking, saved.

Probes, texts stored with their scores, show that a loaded model scores as the saved one did. Of a
folder that was trained elsewhere, notes say what is assumed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError

from halteres.config import environ
from halteres.engine.folders import written
from halteres.engine.torch.merge import copy_companions
from halteres.engine.torch.micro_batches import plan
from halteres.errors import HalteresError, InvalidData, NotFound, boundary
from halteres.files import read_json
from halteres.models import known_folder
from halteres.rewards.model_folder import (
    SAVING,
    Calibration,
    Device,
    Probe,
    Rendered,
    RewardFile,
    ScoringTemplate,
    padding_token,
    read_model_folder,
    read_reward_file,
    template_for,
    write_reward_file,
)
from halteres.rewards.preferences import holds_prompt
from halteres.rewards.torch.adapter import new_adapter
from halteres.rewards.torch.network import ScoringNetwork, base_config, device_of, open_network
from halteres.rewards.training_plan import RewardConfig, settled_weights
from halteres.scores import REWARD_FILE, Scorable, Score, best_first
from halteres.tokenizer import Message, Tokenizer

# of a probe's score, or absolutely, between the loaded model and the saved one, in fp32
PROBE_TOLERANCE = 1e-4
MAX_PROBES = 4
TRAINER_STATE = "trainer.pt"  # what a checkpoint of a training has beside the model
UNSHARED = "Each text is a row of its own: this model's attention cannot share prefixes."
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json")

Scored = Scorable | str | Sequence[Message] | Sequence[int]


class NotWanted(HalteresError):
    """Those who asked for scores are gone."""

    code = "not_wanted"


class RewardModel:
    """Gives a text a scalar: the raw score, larger is better."""

    def __init__(
        self,
        network: ScoringNetwork,
        tokenizer: Tokenizer,
        template: ScoringTemplate,
        max_tokens_per_forward: int = 8192,
    ) -> None:
        self.network, self.tokenizer, self.template = network, tokenizer, template
        self.max_tokens_per_forward = max_tokens_per_forward
        self.folder: Path | None = None  # where it was loaded from
        self.file: RewardFile | None = None
        self.notes: tuple[str, ...] = ()  # what is assumed of a model that was trained elsewhere

    @classmethod
    def load(
        cls, folder: str | Path, *, max_tokens_per_forward: int = 8192, device: Device = "auto"
    ) -> RewardModel:
        """A reward model's folder: ours, or one of TRL, PEFT or transformers. InvalidConfig for a
        device that is not there, NotFound for such a folder, InvalidData where it is no reward
        model or its probes score otherwise.
        """
        place = Path(folder)
        has_model = any((place / name).is_file() for name in (REWARD_FILE, "config.json"))
        if not has_model and (found := checkpoints(place)):
            fix = f"Go on with it (halteres reward train ... --resume), or name {found[-1]}."
            raise NotFound(
                f"The training in {place} has not finished.",
                f"Its newest is {found[-1].name}.",
                fix,
            )
        with boundary(InvalidData, f"Loading the reward model in {place}"):
            return cls._loaded(place, max_tokens_per_forward, device)

    @classmethod
    def _loaded(cls, place: Path, max_tokens_per_forward: int, device: Device) -> RewardModel:
        base, file = Path(read_model_folder(place).base or place), read_reward_file(place)
        tokenizer = Tokenizer(place if (place / "tokenizer.json").is_file() else base)
        notes: list[str] = []
        if file is None:
            template, padding, notes = _assumed(base, tokenizer)
        else:
            template, padding = file.template, file.template.unread_token
            if padding is None:  # else it was trained elsewhere with pad = EOS, and calibrated here
                padding = tokenizer.special_tokens[padding_token(tokenizer, template.eos_token)]
        weights = None
        if file is not None:
            weights = file.objective_weights
        network = open_network(place, padding=padding, device=device, objective_weights=weights)
        network.model.eval()
        if not network.shares_prefixes:
            notes.append(UNSHARED)
        model = cls(network, tokenizer, template, max_tokens_per_forward)
        model.folder, model.file, model.notes = place, file, tuple(notes)
        model._check_probes()
        return model

    @property
    def calibration(self) -> Calibration | None:
        """How raw scores are read."""
        if self.file is not None:
            return self.file.calibration
        return None

    @property
    def digest(self) -> str:
        """SHA-256 of weights, template and calibration: models of one digest give equal scores in
        every unit.
        """
        calibration = ""
        if self.calibration is not None:
            calibration = self.calibration.model_dump_json()
        objectives = ""
        if self.network.objective_weights:
            objectives = json.dumps(self.network.objective_weights)
        parts = f"{self._weights_digest} {self.template.digest} {calibration}{objectives}"
        return hashlib.sha256(parts.encode()).hexdigest()

    @cached_property
    def _weights_digest(self) -> str:
        """Of the weights as they were when it was first asked."""
        found = hashlib.sha256()
        for name, tensor in sorted(self.network.weights().items()):
            found.update(name.encode())
            found.update(
                tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy().data
            )
        return found.hexdigest()

    def score(self, texts: Sequence[Scored]) -> list[Score]:
        """The raw score of each text, whatever the texts beside it; InvalidData where one has
        none.
        """
        scores: list[Score] = []
        for result in self.score_each(texts):
            if isinstance(result, InvalidData):
                raise result
            scores.append(result)
        return scores

    def score_each(
        self, texts: Sequence[Scored], are_wanted: Callable[[], bool] = lambda: True
    ) -> list[Score | InvalidData]:
        """As `score`, but in place of a score that could not be made, why: such a text spoils no
        other.

        NotWanted as soon as `are_wanted`, asked between texts and passes, says no.
        """
        rendered: list[Rendered | InvalidData] = []
        for number, text in enumerate(texts):
            _check_wanted(are_wanted)
            rendered.append(self._rendered(text, number))
        tokens = {
            number: one.tokens for number, one in enumerate(rendered) if isinstance(one, Rendered)
        }
        values = dict(zip(tokens, self._forward(list(tokens.values()), are_wanted), strict=True))
        found: list[Score | InvalidData] = []
        for number, one in enumerate(rendered):
            if isinstance(one, InvalidData):
                found.append(one)
                continue
            value, *outputs = values[number]
            if not math.isfinite(value):
                why = f"The model gives it {value}."
                found.append(InvalidData(f"Text {number} has no score.", why, index=number))
                continue
            score = Score(
                value=value,
                num_tokens=len(one.tokens),
                truncated=one.num_lost > 0,
                ended_with_eos=one.ended_with_eos,
                converted=one.converted,
                # without a name it is no part
                parts=dict(zip(self.network.objective_weights, outputs, strict=False)),
            )
            found.append(score)
        return found

    def score_states(self, chats: Sequence[Sequence[Message]]) -> list[tuple[Score, ...]]:
        """Of each chat the raw score after each of the assistant's turns; the differences reward
        each turn.
        """
        states = [
            [chat[:end] for end, one in enumerate(chat, start=1) if one["role"] == "assistant"]
            for chat in chats
        ]
        scores = iter(self.score([state for of_one in states for state in of_one]))
        return [tuple(next(scores) for _ in of_one) for of_one in states]

    def rank(
        self, prompt: str | Sequence[Message] | None, completions: Sequence[str | Sequence[Message]]
    ) -> list[int]:
        """Places of the completions, the best first; of equal scores, the earlier."""
        scores = self.score(
            [Scorable(prompt=prompt, completion=completion) for completion in completions]
        )
        return best_first([score.value for score in scores])

    def save(
        self,
        folder: Path,
        *,
        probes: Sequence[Scored] | None = None,
        beside: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write the model's files: weights, tokenizer, `file` with probes; what else is in the
        folder stays.

        A new folder appears whole. In one that is there, all new files are first written into a
        folder of their own, which says until the last is in its place that the model is half
        replaced. ServerError: it cannot be written. `probes`: texts to be stored with their scores;
        without, those that the model has. `beside`: further files.
        """
        target = folder
        if folder.exists():
            target = folder / SAVING
        stored = self.file or RewardFile(template=self.template)
        if probes is None:
            probes = [_probed_text(probe) for probe in stored.probes]
        own = {
            "template": self.template,
            "objective_weights": self.network.objective_weights,
            "probes": [self._probe(text) for text in probes[:MAX_PROBES]],
            "versions": {
                name: version(name) for name in ("halteres", "torch", "transformers", "tokenizers")
            },
        }
        with written(target) as place:
            try:
                self.network.save(place)
            except SafetensorError as error:  # a full disk, for example
                raise OSError(errno.EIO, str(error)) from error
            self._copy_tokenizer(place)
            write_reward_file(place, stored.model_copy(update=own))
            for name, content in (beside or {}).items():
                (place / name).write_bytes(content)
        if target != folder:
            for old in (one for pattern in _WEIGHTS for one in folder.glob(pattern)):
                old.unlink()
            for file in list(target.iterdir()):
                file.replace(folder / file.name)
            target.rmdir()

    def save_merged(
        self, folder: Path, objective_weights: Mapping[str, float] | None = None
    ) -> None:
        """Write the folder with the adapter put into the weights, several outputs into one; the
        model is plain then.

        `objective_weights`: what each objective counts; a calibration that was made with other
        weights is left out.
        """
        own = self.network.objective_weights
        weights = settled_weights(objective_weights or own, tuple(own))
        self.network.merge()
        if own:
            self.network.fold(weights)
        if weights != own and self.file is not None:
            self.file = self.file.model_copy(update={"calibration": None})
        self.save(folder)

    def _rendered(self, text: Scored, number: int) -> Rendered | InvalidData:
        try:
            with boundary(InvalidData, f"Rendering text {number}"):
                if isinstance(text, Scorable) and holds_prompt(text.prompt, text.completion):
                    why = "It would be read twice."
                    raise InvalidData("The completion holds the prompt.", why, "Send one of them.")
                rendered = self.template.render(self.tokenizer, text, counts_lost=False)
        except InvalidData as error:
            return error
        if not rendered.tokens:
            return InvalidData(
                f"Text {number} is empty.", "There is no token to read.", index=number
            )
        if rendered.num_lost and self.template.truncation in ("drop", "error"):
            why = f"The model was trained on at most {self.template.max_length} tokens."
            fix = "Shorten it, or train with truncation 'keep_end'."
            return InvalidData(f"Text {number} is too long to be scored.", why, fix, index=number)
        return rendered

    def _forward(
        self, texts: Sequence[tuple[int, ...]], are_wanted: Callable[[], bool] = lambda: True
    ) -> list[list[float]]:
        """Of each text the score and every output."""
        tokens = [np.array(text, np.int64) for text in texts]
        found: list[list[float]] = [[] for _ in texts]
        network = self.network
        with torch.inference_mode():
            for part in plan(tokens, self.max_tokens_per_forward, network.shares_prefixes):
                _check_wanted(are_wanted)
                outputs_TO = network.outputs([tokens[number] for number in part])
                score_T = network.mixed(outputs_TO, [None] * len(outputs_TO))
                values = torch.cat([score_T.unsqueeze(-1), outputs_TO], -1).tolist()
                for number, own in zip(part, values, strict=True):
                    found[number] = own
        return found

    def _probe(self, text: Scored) -> Probe:
        network, rendered = self.network, self.template.render(self.tokenizer, text)
        training, bf16 = network.model.training, network.bf16
        network.model.eval()
        network.bf16 = False  # a folder is loaded to compute in fp32, however it was trained
        ((score, *_),) = self._forward([rendered.tokens])
        network.model.train(training)
        network.bf16 = bf16
        stored = None
        if isinstance(text, Scorable):
            stored = asdict(text)
        return Probe(text=stored, tokens=list(rendered.tokens), score=score)

    def _check_probes(self) -> None:
        for number, probe in enumerate(self.file.probes if self.file is not None else ()):
            now = self._probe(_probed_text(probe))
            difference = f"it scores {now.score:.6g}, and scored {probe.score:.6g}"
            if now.tokens != probe.tokens:
                difference = "its tokens differ"
            elif abs(now.score - probe.score) <= PROBE_TOLERANCE * max(1.0, abs(probe.score)):
                continue
            what = f"The reward model in {self.folder} is not the one that was saved."
            fix = "Files of the folder were changed or mixed up: copy it whole, or train anew."
            raise InvalidData(what, f"Of its stored probe {number}, {difference}.", fix)

    def _copy_tokenizer(self, place: Path) -> None:
        """The tokenizer's files, with the token that pads here: transformers reads it from them."""
        source = self.tokenizer.folder
        copy_companions(source, place)
        names = {number: name for name, number in self.tokenizer.special_tokens.items()}
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if (place / name).is_file():
                content = read_json(place / name, dict[str, Any])
                content["pad_token"] = names.get(self.network.padding, content.get("pad_token"))
                (place / name).write_text(
                    json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
                )


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a training in its folder, the newest last."""
    found = [one for one in folder.glob("checkpoint-*") if (one / TRAINER_STATE).is_file()]
    return sorted(found, key=lambda one: int(one.name.rpartition("-")[2]))


def model_place(name: str | Path) -> Path:
    """The folder that a model's name or path means: built-in, registered by `halteres models add`,
    or anywhere.
    """
    return known_folder(str(name), environ.home() / "models") or Path(name)


def _check_wanted(are_wanted: Callable[[], bool]) -> None:
    if not are_wanted():
        raise NotWanted("Nobody waits for these scores any more.")


def _probed_text(probe: Probe) -> Scored:
    if probe.text is not None:
        return Scorable(**probe.text)
    return probe.tokens


def _assumed(base: Path, tokenizer: Tokenizer) -> tuple[ScoringTemplate, int, list[str]]:
    """Template, padding token and notes of a folder without our file: TRL's rules."""
    config = base_config(base)
    longest = config.get("max_position_embeddings")
    template = template_for(tokenizer, max_length=longest)
    notes = [
        "It was trained elsewhere: chats are rendered by its chat template, strings end with "
        f"{template.eos_token!r}, and of more than {longest} tokens the last are read."
    ]
    eos = tokenizer.encode(template.eos_token)[0]
    own = config.get("pad_token_id", tokenizer.pad_token_id)
    if own == eos:
        template = template.model_copy(update={"unread_token": eos})
        notes.append(
            f"It pads with its end token {template.eos_token!r}, so that one at a text's end is "
            "not read."
        )
    return template, own if own is not None else eos, notes


def open_tokenizer(model: Any, processing_class: Any, chat_template: str | None) -> Tokenizer:
    """As a folder: what is not one yet is saved into one that lives as long as the tokenizer."""
    given: Any = processing_class or (
        model if isinstance(model, str | Path) else model.config._name_or_path
    )
    source = None
    if isinstance(given, Tokenizer):
        source = given.folder
    if isinstance(given, str | Path):
        source = model_place(given)
    if source is not None and chat_template is None:
        return Tokenizer(source)
    scratch = Path(tempfile.mkdtemp(prefix="halteres-tokenizer-"))
    if source is None:
        cast("Any", given).save_pretrained(scratch)
    else:
        shutil.copytree(
            source,
            scratch,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("*.safetensors", "*.bin"),
        )
    if chat_template is not None:
        template = Path(chat_template)
        if template.is_dir():
            template = template / "chat_template.jinja"
        if not template.is_file():
            raise NotFound(
                f"There is no chat template at {chat_template}.", next="Name a .jinja file."
            )
        (scratch / "chat_template.jinja").write_text(
            template.read_text(encoding="utf-8"), encoding="utf-8"
        )
    tokenizer = Tokenizer(scratch)
    weakref.finalize(tokenizer, shutil.rmtree, scratch, True)
    return tokenizer


def base_network(
    model: Any,
    tokenizer: Tokenizer,
    template: ScoringTemplate,
    config: RewardConfig,
    weights: Mapping[str, float],
) -> ScoringNetwork:
    """The network that is trained: a reward model's own, of a folder, or of a model of
    transformers.
    """
    padding = tokenizer.special_tokens[padding_token(tokenizer, template.eos_token)]
    if isinstance(model, RewardModel):
        model.network.objective_weights = dict(weights)
        return model.network
    if isinstance(model, str | Path):
        return open_network(
            model_place(model),
            padding=padding,
            lora_settings=config.lora,
            seed=config.seed,
            trust_remote_code=config.trust_remote_code,
            arguments=config.model_init_kwargs,
            objective_weights=weights,
        )
    if config.lora is not None:
        torch.manual_seed(config.seed)
    adapter = None
    if config.lora is not None:
        adapter = new_adapter(config.lora, model.config._name_or_path)
    return ScoringNetwork(
        model.to(device_of()), padding=padding, adapter=adapter, objective_weights=weights
    )


def own_objective_weights(model: Any) -> Mapping[str, float] | None:
    """Of the objectives of a reward model that training goes on from; None: a base model."""
    if isinstance(model, RewardModel):
        return model.network.objective_weights
    stored = None
    if isinstance(model, str | Path):
        stored = read_reward_file(model_place(model))
    if stored is not None:
        return stored.objective_weights
    return None
