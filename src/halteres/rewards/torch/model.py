"""A trained reward model: loaded from a folder, scoring, ranking, saved.

Owns: texts to scores; the folder's layout; the probes that show that a loaded model scores as the saved one did; what
is assumed of a folder that was trained elsewhere.
Never: trains.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError

from halteres.config import environ
from halteres.engine.folders import written
from halteres.engine.torch.merge import COMPANIONS
from halteres.errors import InvalidData, NotFound, boundary
from halteres.models import known_folder
from halteres.rewards.batches import forward_parts
from halteres.rewards.calibration import Calibration
from halteres.rewards.model_folder import Device
from halteres.rewards.reward_file import SAVING, Probe, RewardFile, read_reward_file, write_reward_file
from halteres.rewards.template import Rendered, ScoringTemplate, padding_token, template_for
from halteres.rewards.torch import lora
from halteres.rewards.torch.network import ScoringNetwork, open_network
from halteres.rewards.torch.shared_prefix import SharedRow, shared_row, sharing_pays, single_row
from halteres.rewards.torch.training_folder import checkpoints
from halteres.rewards.training_config import settled_weights
from halteres.scores import Scorable, Score, best_first
from halteres.text import Message, Tokenizer

PROBE_TOLERANCE = 1e-4
"""A loaded model scores its probes as the saved one did, in fp32, to this share of the score or absolutely."""

MAX_PROBES = 4

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json")

Scored = Scorable | str | Sequence[Message] | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a training leaves in the folder about itself."""

    settings: Mapping[str, Any]
    data: Mapping[str, Any]
    metrics: Mapping[str, float]
    probes: tuple[Scored, ...] = ()
    tie_threshold: float | None = None


class RewardModel:
    """Gives a text a scalar: the raw score, larger is better."""

    def __init__(
        self,
        network: ScoringNetwork,
        tokenizer: Tokenizer,
        template: ScoringTemplate,
        *,
        folder: Path | None = None,
        file: RewardFile | None = None,
        notes: Sequence[str] = (),
        max_tokens_per_forward: int = 8192,
    ) -> None:
        self.network, self.tokenizer, self.template = network, tokenizer, template
        self.folder, self.file, self.notes = folder, file, tuple(notes)
        self.max_tokens_per_forward = max_tokens_per_forward

    @classmethod
    def load(cls, folder: str | Path, *, max_tokens_per_forward: int = 8192, device: Device = "auto") -> RewardModel:
        """A reward model's folder: ours, or one of TRL, PEFT or transformers.

        Raises:
            InvalidConfig: `cuda` is asked for, and there is none.
            NotFound: no such folder; no model or no tokenizer is there.
            InvalidData: it is no reward model, or it does not score its probes as it did when it was saved.
        """
        place = Path(folder)
        if not place.is_dir():
            raise NotFound(
                f"There is no reward model in {place}.",
                "There is no such folder.",
                "Name one that `halteres reward train` has written, or a server's address.",
            )
        file = read_reward_file(place)
        if file is None and not (place / "config.json").is_file() and (found := checkpoints(place)):
            raise NotFound(
                f"The training in {place} has not finished.",
                f"Its newest checkpoint is {found[-1]}.",
                f"Go on with it (halteres reward train ... --resume), or name {found[-1]}.",
            )
        tokenizer = Tokenizer(place if (place / "tokenizer.json").is_file() else _base_of(place))
        template, padding, notes = _own(file, tokenizer) if file is not None else _assumed(place, tokenizer)
        weights = file.objective_weights if file is not None else None
        network = open_network(place, padding=padding, trained=True, device=device, objective_weights=weights)
        network.model.eval()
        if not network.shares_prefixes:
            notes.append("Each text is a row of its own: this model takes no mask of shared prefixes.")
        model = cls(
            network,
            tokenizer,
            template,
            folder=place,
            file=file,
            notes=notes,
            max_tokens_per_forward=max_tokens_per_forward,
        )
        model._check_probes()
        return model

    @property
    def calibration(self) -> Calibration | None:
        """How raw scores are read."""
        return self.file.calibration if self.file is not None else None

    @property
    def digest(self) -> str:
        """SHA-256 of weights, template and calibration: models of one digest give equal scores in every unit."""
        calibration = self.calibration.model_dump_json() if self.calibration is not None else ""
        objectives = json.dumps(self.network.objective_weights) if self.network.objective_weights else ""
        read_as = f"{self.template.digest} {calibration}{objectives}"
        return hashlib.sha256(f"{self._weights_digest} {read_as}".encode()).hexdigest()

    @cached_property
    def _weights_digest(self) -> str:
        """Of the weights as they were when it was first asked."""
        found = hashlib.sha256()
        for name, tensor in sorted(self.network.model.state_dict().items()):
            found.update(name.encode())
            found.update(tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy().data)
        return found.hexdigest()

    def score(self, texts: Sequence[Scored]) -> list[Score]:
        """The raw score of each text; it does not depend on the texts beside it.

        Raises:
            InvalidData: a text cannot be rendered, is too long where the template says `drop` or `error`, or has no
                finite score.
        """
        return [_or_raise(result) for result in self.score_each(texts)]

    def score_each(self, texts: Sequence[Scored]) -> list[Score | InvalidData]:
        """As `score`, but in place of a score that could not be made, why: such a text spoils no other."""
        rendered = [self._readable(text, number) for number, text in enumerate(texts)]
        groups = _computed_together(texts, rendered)
        tokens = [[one.tokens for n in group if isinstance(one := rendered[n], Rendered)] for group in groups]
        placed = dict(zip((n for group in groups for n in group), self._values(tokens), strict=True))
        return [
            self._score(placed[number], one, number) if isinstance(one, Rendered) else one
            for number, one in enumerate(rendered)
        ]

    def score_states(self, chats: Sequence[Sequence[Message]]) -> list[tuple[Score, ...]]:
        """Of each chat the raw score after each of the assistant's turns; the differences are a reward for each turn.

        A chat is computed in one pass where its chat template lets turns only be added.

        Raises:
            InvalidData: as `score`.
        """
        states = [[chat[:end] for end, one in enumerate(chat, start=1) if one["role"] == "assistant"] for chat in chats]
        scores = iter(self.score([state for of_one in states for state in of_one]))
        return [tuple(next(scores) for _ in of_one) for of_one in states]

    def rank(self, prompt: str | Sequence[Message] | None, completions: Sequence[str | Sequence[Message]]) -> list[int]:
        """Places of the completions, the best first; of equal scores, the earlier."""
        scores = self.score([Scorable(prompt=prompt, completion=completion) for completion in completions])
        return best_first([score.value for score in scores])

    def save(self, folder: Path, origin: Origin | None = None, *, beside: Mapping[str, bytes] | None = None) -> None:
        """Write the model's files: weights, tokenizer, template, probes; what else is in the folder stays.

        A new folder appears whole. In one that is there, all new files are written into a folder of their own and then
        moved to their places; until the last is in its place, that folder says that the model is half replaced, and
        it is refused.

        Args:
            folder: where to.
            origin: the training that it comes from; without, what the model's own folder says is kept.
            beside: further files, by name.

        Raises:
            ServerError: the place cannot be written.
        """
        target = folder if not folder.exists() else folder / SAVING
        with written(target) as place:
            try:
                self.network.save(place)
            except SafetensorError as error:  # a full disk, for example
                raise OSError(errno.EIO, str(error)) from error
            self._copy_tokenizer(place)
            write_reward_file(place, self._file(origin))
            for name, content in (beside or {}).items():
                (place / name).write_bytes(content)
        if target != folder:
            for old in (one for pattern in _WEIGHTS for one in folder.glob(pattern)):
                old.unlink()
            for file in list(target.iterdir()):
                file.replace(folder / file.name)
            target.rmdir()

    def save_merged(self, folder: Path, objective_weights: Mapping[str, float] | None = None) -> None:
        """Write the folder with the adapter put into the weights, and several outputs into one; the model here is a
        plain one afterwards.

        Args:
            folder: where to.
            objective_weights: what each objective counts; without, what it does already. A calibration that was made
                with other weights is left out.

        Raises:
            InvalidConfig: an objective that the model has not, or one without a weight.
        """
        own = self.network.objective_weights
        weights = settled_weights(objective_weights or own, tuple(own))
        self.network.merge()
        if own:
            self.network.fold(weights)
        if weights != own and self.file is not None:
            self.file = self.file.model_copy(update={"calibration": None})
        self.save(folder)

    def _score(self, values: Sequence[float], rendered: Rendered, number: int) -> Score | InvalidData:
        value, *outputs = values
        if not math.isfinite(value):
            return InvalidData(f"Text {number} has no score.", f"The model gives it {value}.", index=number)
        return Score(
            value=value,
            num_tokens=len(rendered.tokens),
            truncated=rendered.num_lost > 0,
            ended_with_eos=rendered.ended_with_eos,
            converted=rendered.converted,
            parts=dict(zip(self.network.objective_weights, outputs, strict=False)),  # one without a name is no part
        )

    def _readable(self, text: Scored, number: int) -> Rendered | InvalidData:
        try:
            return self._rendered(text, number)
        except InvalidData as error:
            return error

    def _rendered(self, text: Scored, number: int) -> Rendered:
        with boundary(InvalidData, f"Rendering text {number}"):
            rendered = self.template.render(self.tokenizer, text)
        if not rendered.tokens:
            raise InvalidData(f"Text {number} is empty.", "There is no token to read.", index=number)
        if rendered.num_lost and self.template.truncation in ("drop", "error"):
            raise InvalidData(
                f"Text {number} is too long to be scored.",
                f"It has {len(rendered.tokens)} tokens; the model was trained on at most {self.template.max_length}.",
                "Shorten it, or train with truncation 'keep_end'.",
                index=number,
            )
        return rendered

    def _values(self, groups: Sequence[Sequence[tuple[int, ...]]]) -> list[list[float]]:
        """Of all groups' texts, end to end, the score and every output; a group's texts may share a prefix."""
        rows: list[SharedRow] = []
        for group in groups:
            rows += rows_of(group, self.network, self.max_tokens_per_forward)
        return self._forward(rows)

    def _forward(self, rows: Sequence[SharedRow]) -> list[list[float]]:
        found: list[list[list[float]]] = [[] for _ in rows]
        parts = forward_parts([(1, len(row.tokens_L)) for row in rows], self.max_tokens_per_forward)
        with torch.inference_mode():
            for part in parts:
                outputs_TO = self.network.outputs([rows[place] for place in part])
                score_T = self.network.mixed(outputs_TO, [None] * len(outputs_TO))
                values = iter(torch.cat([score_T.unsqueeze(-1), outputs_TO], -1).tolist())
                for place in part:
                    found[place] = [next(values) for _ in rows[place].ends_K]
        return [value for values in found for value in values]

    def _file(self, origin: Origin | None) -> RewardFile:
        names = ("halteres", "torch", "transformers", "tokenizers")
        stored = self.file or RewardFile(template=self.template)
        texts = origin.probes if origin is not None else [probe.text or probe.tokens for probe in stored.probes]
        changes: dict[str, Any] = {
            "template": self.template,
            "objective_weights": self.network.objective_weights,
            "probes": [self._probe(cast("Scored", text)) for text in texts[:MAX_PROBES]],
            "versions": {name: version(name) for name in names},
        }
        if origin is not None:
            changes |= {
                "settings": dict(origin.settings),
                "data": dict(origin.data),
                "metrics": dict(origin.metrics),
                "tie_threshold": origin.tie_threshold,
                "calibration": None,
            }
        return stored.model_copy(update=changes)

    def _probe(self, text: Scored | dict[str, Any]) -> Probe:
        whole = Scorable(**text) if isinstance(text, dict) else text
        rendered = self.template.render(self.tokenizer, whole)
        network = self.network
        training, bf16 = network.model.training, network.bf16
        network.model.eval()
        network.bf16 = False  # a folder is loaded to compute in fp32, however it was trained
        ((score, *_),) = self._forward([single_row(rendered.tokens)])
        network.model.train(training)
        network.bf16 = bf16
        stored = asdict(whole) if isinstance(whole, Scorable) else None
        return Probe(text=stored, tokens=list(rendered.tokens), score=score)

    def _check_probes(self) -> None:
        for number, probe in enumerate(self.file.probes if self.file is not None else ()):
            now = self._probe(probe.text if probe.text is not None else probe.tokens)
            same_tokens = now.tokens == probe.tokens
            if same_tokens and abs(now.score - probe.score) <= PROBE_TOLERANCE * max(1.0, abs(probe.score)):
                continue
            difference = (
                f"it scores {now.score:.6g}, and scored {probe.score:.6g}" if same_tokens else "its tokens differ"
            )
            raise InvalidData(
                f"The reward model in {self.folder} is not the one that was saved.",
                f"Of its stored probe {number}, {difference}.",
                "Files of the folder were changed or mixed up: copy it whole again, or train again.",
            )

    def _copy_tokenizer(self, place: Path) -> None:
        """The tokenizer's files, with the token that pads here: transformers reads it from them."""
        source = self.tokenizer.folder
        for file in sorted({file for pattern in COMPANIONS for file in source.glob(pattern) if file.is_file()}):
            if not (place / file.name).exists():
                shutil.copyfile(file, place / file.name)
        names = {number: name for name, number in self.tokenizer.special_tokens.items()}
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if (place / name).is_file():
                content = json.loads((place / name).read_text())
                content["pad_token"] = names.get(self.network.padding, content.get("pad_token"))
                (place / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def rows_of(texts: Sequence[tuple[int, ...]], network: ScoringNetwork, most: int) -> list[SharedRow]:
    """Texts as rows: one, where sharing what they begin with is less work and the row not too long, else one each."""
    if len(texts) > 1:
        row = shared_row(texts)
        together = len(row.tokens_L)
        if together > most and len(texts) > 2:
            half = len(texts) // 2
            return rows_of(texts[:half], network, most) + rows_of(texts[half:], network, most)
        possible = network.shares_prefixes or not any(row.branches_L)  # without branches it is one text, read often
        if possible and together <= most and sharing_pays([len(text) for text in texts], together, network.width):
            return [row]
    return [single_row(text) for text in texts]


def _computed_together(texts: Sequence[Scored], rendered: Sequence[Rendered | InvalidData]) -> list[list[int]]:
    """Places of texts that may share a row: states, each of which goes on with the text before it; else those of one
    prompt."""
    runs: list[list[int]] = []
    before: tuple[int, ...] = ()
    for number, one in enumerate(rendered):
        if isinstance(one, Rendered):
            if runs and _goes_on(before, one.tokens):
                runs[-1].append(number)
            else:
                runs.append([number])
            before = one.tokens
    groups: dict[str, list[int]] = {}
    for run in runs:
        text = texts[run[0]]
        prompt = text.prompt if isinstance(text, Scorable) and len(run) == 1 else None
        key = f"{run[0]}" if prompt is None else json.dumps(prompt, sort_keys=True, default=str)
        groups.setdefault(key, []).extend(run)
    return list(groups.values())


def _goes_on(before: tuple[int, ...], text: tuple[int, ...]) -> bool:
    """Whether a text begins with the one before it, whose last token may be an end token."""
    return len(text) > len(before) and text[: len(before) - 1] == before[:-1]


def _or_raise(result: Score | InvalidData) -> Score:
    if isinstance(result, InvalidData):
        raise result
    return result


def _own(file: RewardFile, tokenizer: Tokenizer) -> tuple[ScoringTemplate, int, list[str]]:
    if file.template.unread_token is not None:  # trained elsewhere with pad = EOS, and calibrated here
        return file.template, file.template.unread_token, []
    return file.template, tokenizer.special_tokens[padding_token(tokenizer, file.template.eos_token)], []


def _assumed(folder: Path, tokenizer: Tokenizer) -> tuple[ScoringTemplate, int, list[str]]:
    """Of a folder without our file: TRL's rules."""
    base = _base_of(folder)
    config: dict[str, Any] = json.loads((base / "config.json").read_text()) if (base / "config.json").is_file() else {}
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
        notes.append(f"It pads with its end token {template.eos_token!r}, so that one at a text's end is not read.")
        return template, eos, notes
    return template, own if own is not None else eos, notes


def _base_of(folder: Path) -> Path:
    if not (folder / lora.ADAPTER_CONFIG).is_file():
        return folder
    return Path(lora.read_adapter_config(folder)[0])


def model_place(name: str | Path) -> Path:
    """The folder that a model's name or path means: built-in, registered by `halteres models add`, or anywhere."""
    return known_folder(str(name), environ.home() / "models") or Path(name)
