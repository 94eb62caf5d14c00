"""A transformers sequence classifier with one output, or one for each objective, run over rows that
share prefixes; with or without LoRA, saved as PEFT saves it. The head is never adapted: it is
trained whole and saved beside the adapter.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from halteres.engine.torch.loading import refuse_missing, refuse_not_finite
from halteres.errors import InvalidConfig, InvalidData, NotFound
from halteres.files import UnreadableFile, read_json
from halteres.models.shape import check_unquantised, is_classifier, num_outputs_of, read_config
from halteres.rewards.model_folder import Device, check_regular
from halteres.rewards.torch.batches import (
    SharedRow,
    batch_of,
    forward_parts,
    shared_row,
    sharing_pays,
    single_row,
)
from halteres.rewards.training_plan import LoraSettings

PART_TOKENS = {"cpu": 128, "cuda": 4096}  # padding tokens that cost as much as another pass
# scores of a row with branches and of rows apart differ by no more, in fp32, where prefixes are
# shared
CLOSE = 1e-5
HEAD = "score"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PEFT_PREFIX = "base_model.model."
# not read here
_PEFT_OPTIONS = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "layers_to_transform")


class LoraLinear(nn.Module):
    """`base(x) + alpha / r * B(A(dropout(x)))`; A is drawn as PEFT draws it, B is zero."""

    def __init__(self, base: nn.Linear, settings: LoraSettings) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = settings.lora_alpha / settings.r
        self.dropout = settings.lora_dropout
        self.lora_A = nn.Parameter(
            torch.empty(settings.r, base.in_features, device=base.weight.device)
        )
        self.lora_B = nn.Parameter(
            torch.zeros(base.out_features, settings.r, device=base.weight.device)
        )
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """The adapted projection."""
        low = F.dropout(x, self.dropout, self.training) if self.dropout else x
        return self.base(x) + F.linear(F.linear(low, self.lora_A), self.lora_B) * self.scale

    def merged(self) -> nn.Linear:
        """The base layer with the adapter added to its weight."""
        with torch.no_grad():
            self.base.weight += self.scale * (self.lora_B @ self.lora_A)
        return self.base


def read_adapter_config(folder: Path) -> tuple[str, LoraSettings]:
    """Where the base model lies, and the settings. InvalidData: an option of PEFT's that is not
    read here.
    """
    try:
        config = read_json(folder / ADAPTER_CONFIG, dict[str, Any])
    except UnreadableFile as error:
        raise InvalidData(
            f"The adapter in {folder} cannot be read.", f"{error}.", "Save it again."
        ) from error
    odd = [name for name in _PEFT_OPTIONS if config.get(name)]
    if config.get("peft_type") != "LORA" or odd or config.get("bias", "none") != "none":
        why = (
            f"It has {', '.join(odd) or config.get('peft_type')}; plain LoRA without biases is "
            "read."
        )
        fix = "Merge it into its base with PEFT, and name that folder."
        raise InvalidData(f"The adapter in {folder} cannot be read.", why, fix)
    found = config.get("target_modules") or ()
    targets = (
        found
        if found == "all-linear"
        else tuple(name.rpartition(".")[2] for name in found if name != HEAD)
    )
    settings = LoraSettings(r=config["r"], lora_alpha=config["lora_alpha"], target_modules=targets)
    return config["base_model_name_or_path"], settings


class ScoringNetwork:
    """The weights, and how texts go through them.

    Args:
        model: of transformers, with a head that scores; InvalidConfig for any other.
        padding: the token that pads.
        settings: of an adapter; its weights are drawn here, and but for them and the head all
            weights are frozen.
        base: where the model lies that the adapter is for.
        objective_weights: of each output, in order; empty: there is one, without a name.
    """

    def __init__(
        self,
        model: Any,
        *,
        padding: int,
        settings: LoraSettings | None = None,
        base: str = "",
        objective_weights: Mapping[str, float] | None = None,
    ) -> None:
        self.model: nn.Module = model
        self.objective_weights = dict(objective_weights or {})
        self.config: Any = model.config
        self.lora, self.base, self.padding = settings, base, padding
        self.bf16 = False
        self.num_computed_tokens = 0  # so far, padding among them
        self._head: Any = getattr(model, HEAD, None)
        if not isinstance(self._head, nn.Linear):
            what = (
                f"{type(model).__name__} has no head named '{HEAD}', as decoders that score have."
            )
            fix = (
                "Give a decoder's folder, or load it with AutoModelForSequenceClassification "
                "and num_labels=1."
            )
            raise InvalidConfig(what, next=fix)
        num_outputs = max(1, len(self.objective_weights))
        if self._head.out_features != num_outputs:
            what = f"The model has {self._head.out_features} outputs."
            raise InvalidConfig(
                what, next=f"Load it with num_labels={num_outputs}: one, or one for each objective."
            )
        self.config.pad_token_id = padding
        self.config.problem_type = "regression"  # transformers' pipeline then gives the raw score
        self._backbone: Any = getattr(model, model.base_model_prefix)
        if settings is not None:
            self._attach(settings)
        self.shares_prefixes = self._can_share()

    def _attach(self, settings: LoraSettings) -> None:
        self.model.requires_grad_(False)
        self._head.requires_grad_(True)
        linear = {
            name: one
            for name, one in self.model.named_modules()
            if isinstance(one, nn.Linear) and name != HEAD
        }
        wide = settings.target_modules == "all-linear"
        targets = [
            name for name in linear if wide or name.rpartition(".")[2] in settings.target_modules
        ]
        if not targets:
            what = f"No layer of the model is named {settings.target_modules}."
            why = "LoRA is put on linear layers, never on the head."
            fix = "Set target_modules to 'all-linear', or to the last parts of their names."
            raise InvalidConfig(what, why, fix, field="target_modules")
        for name in targets:
            self.model.set_submodule(name, LoraLinear(linear[name], settings))

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next(self.model.parameters()).device

    @property
    def num_parameters(self) -> int:
        """All of them, trained or not."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        return {name: one for name, one in self.model.named_parameters() if one.requires_grad}

    def rows_of(self, texts: Sequence[tuple[int, ...]], most: int) -> list[SharedRow]:
        """Texts as rows: one, where that is less work and has at most so many tokens, else one
        each.
        """
        if len(texts) > 1:
            row = shared_row(texts)
            together, width = len(row.tokens_L), self.config.get_text_config().hidden_size
            if together > most and len(texts) > 2:
                half = len(texts) // 2
                return self.rows_of(texts[:half], most) + self.rows_of(texts[half:], most)
            # without branches it is one text, read often
            possible = self.shares_prefixes or not any(row.branches_L)
            if (
                possible
                and together <= most
                and sharing_pays([len(text) for text in texts], together, width)
            ):
                return [row]
        return [single_row(text) for text in texts]

    def scores(self, rows: Sequence[SharedRow]) -> Tensor:
        """Raw scores in fp32 of all rows' texts, end to end, shape (T,)."""
        outputs_TO = self.outputs(rows)
        return self.mixed(outputs_TO, [None] * len(outputs_TO))

    def mixed(self, outputs_TO: Tensor, objectives: Sequence[str | None]) -> Tensor:
        """One score per text, shape (T,): its objective's output, and of None the weighted sum."""
        names = list(self.objective_weights)
        shares = {name: [float(name == other) for other in names] for name in names}
        whole = list(self.objective_weights.values()) or [1.0]
        shares_TO = [whole if name is None else shares[name] for name in objectives]
        return (outputs_TO * torch.tensor(shares_TO, device=outputs_TO.device)).sum(-1)

    def outputs(self, rows: Sequence[SharedRow], multiple_of: int = 1) -> Tensor:
        """Of all rows' texts, end to end, in fp32: shape (T, O), O objectives, or 1."""
        most = PART_TOKENS.get(self.device.type, PART_TOKENS["cuda"])
        parts = forward_parts([(1, len(row.tokens_L)) for row in rows], max_padding=most)
        if len(parts) == 1:
            return self._pass(rows, multiple_of)
        outputs_TO = torch.cat(
            [self._pass([rows[place] for place in part], multiple_of) for part in parts]
        )
        firsts = np.cumsum([0, *(len(row.ends_K) for row in rows)])
        texts = [
            text
            for part in parts
            for place in part
            for text in range(firsts[place], firsts[place + 1])
        ]
        return outputs_TO[np.argsort(texts)]

    def _pass(self, rows: Sequence[SharedRow], multiple_of: int) -> Tensor:
        batch = batch_of(rows, self.padding, self.device, multiple_of)
        self.num_computed_tokens += batch.tokens_BL.numel()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            hidden_BLD: Tensor = self._backbone(
                input_ids=batch.tokens_BL,
                position_ids=batch.positions_BL,
                attention_mask=batch.mask_B1LL,
                use_cache=False,
            ).last_hidden_state
            hidden_TD = hidden_BLD[batch.rows_T, batch.ends_T]
            weight_OD, bias_O = self._head.weight, self._head.bias
            # One output at a time, so that its bits do not depend on how many there are.
            columns = [
                F.linear(
                    hidden_TD, weight_OD[o : o + 1], None if bias_O is None else bias_O[o : o + 1]
                )
                for o in range(self._head.out_features)
            ]
            return torch.cat(columns, -1).float()

    def save(self, folder: Path) -> None:
        """Write its weights: a PEFT folder with an adapter, else a folder of transformers."""
        if self.lora is None:
            with _quiet():
                self.model.save_pretrained(folder)  # pyright: ignore[reportCallIssue]
            return
        whole = {
            name: tensor.detach().cpu().contiguous()
            for name, tensor in self._adapter_tensors().items()
        }
        save_file(whole, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        config = {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS",
            "base_model_name_or_path": self.base,
            **self.lora.model_dump(),
            "target_modules": sorted({name.rpartition(".")[2] for name in self._adapters()}),
            "modules_to_save": [HEAD],
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def load_weights(self, folder: Path) -> None:
        """Put back what `save` wrote. InvalidData where it is of another model."""
        if self.lora is None:
            with _quiet():
                model = _from_pretrained(folder, False, {}, tuple(self.objective_weights))
            self.model.load_state_dict(model.state_dict())
            return
        found, own = load_file(folder / ADAPTER_WEIGHTS), self._adapter_tensors()
        wrong = sorted(own.keys() ^ found.keys()) or [
            name for name in own if own[name].shape != found[name].shape
        ]
        if wrong:
            why = (
                f"{wrong[0]} is missing, too many or of another shape ({len(wrong)} such tensors)."
            )
            raise InvalidData(f"The adapter in {folder} does not fit its base model.", why)
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(found[name])

    def merge(self) -> None:
        """Put the adapter into the weights."""
        for name, layer in self._adapters().items():
            self.model.set_submodule(name, layer.merged())
        self.lora = None

    def fold(self, objective_weights: Mapping[str, float]) -> None:
        """Make one output of several: the weighted sum of linear outputs is one of them."""
        weight_OD, bias_O = self._head.weight, self._head.bias
        shares_1O = weight_OD.new_tensor(
            [[objective_weights[name] for name in self.objective_weights]]
        )
        head = nn.Linear(weight_OD.shape[1], 1, bias=bias_O is not None).to(weight_OD)
        with torch.no_grad():
            head.weight.copy_(shares_1O @ weight_OD)
            if bias_O is not None:
                head.bias.copy_(shares_1O @ bias_O)
        self.model.set_submodule(HEAD, head)
        self._head, self.objective_weights = head, {}
        self.config.num_labels = 1

    def _adapters(self) -> dict[str, LoraLinear]:
        return {
            name: module
            for name, module in self.model.named_modules()
            if isinstance(module, LoraLinear)
        }

    def _adapter_tensors(self) -> dict[str, Tensor]:
        """Adapter and head, by PEFT's names."""
        head = self._head.named_parameters()
        tensors: dict[str, Tensor] = {f"{_PEFT_PREFIX}{HEAD}.{name}": value for name, value in head}
        for name, layer in self._adapters().items():
            tensors[f"{_PEFT_PREFIX}{name}.lora_A.weight"] = layer.lora_A
            tensors[f"{_PEFT_PREFIX}{name}.lora_B.weight"] = layer.lora_B
        return tensors

    def _can_share(self) -> bool:
        """Whether it takes a mask of branches and positions: by its layers' kinds, then tried on a
        few tokens.
        """
        config = self.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        window = (
            getattr(config, "sliding_window", None)
            if getattr(config, "use_sliding_window", True)
            else None
        )
        if kinds - {"full_attention"} or (window and not kinds):
            return False
        texts = [[(7 * i + 3) % config.vocab_size for i in range(length)] for length in (9, 12)]
        texts[1][6:] = [(5 * i + 11) % config.vocab_size for i in range(6)]
        training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                together = self.scores([shared_row(texts)])
                apart = self.scores([single_row(text) for text in texts])
        except (TypeError, ValueError, RuntimeError):
            # a model that takes no mask or no positions of this shape
            return False
        finally:
            self.model.train(training)
        return bool(torch.allclose(together, apart, rtol=CLOSE, atol=CLOSE))


def device_of(name: Device = "auto") -> torch.device:
    """The device of this name. InvalidConfig for `cuda` where there is none."""
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise InvalidConfig(
            "There is no GPU to compute on.", next="Say cpu, or auto.", field="device"
        )
    return torch.device("cuda" if found and name != "cpu" else "cpu")


def open_network(
    folder: Path,
    *,
    padding: int,
    lora_settings: LoraSettings | None = None,
    seed: int = 0,
    device: Device = "auto",
    trust_remote_code: bool = False,
    arguments: Mapping[str, Any] | None = None,
    objective_weights: Mapping[str, float] | None = None,
) -> ScoringNetwork:
    """Read the weights of a folder, in Hugging Face's format or PEFT's: a base model or a reward
    model.

    Args:
        lora_settings: train an adapter on it; a folder that is one goes on with its own.
        seed: of what is drawn: a new head, a new adapter.
        arguments: of `from_pretrained`.
        objective_weights: the objectives that it has an output for, with what each counts; none: it
            has one output.

    NotFound where no model is there, InvalidConfig or InvalidData where its head has other outputs.
    """
    where = device_of(device)
    base, settings = folder, lora_settings
    adapted = (folder / ADAPTER_CONFIG).is_file()
    if adapted:
        name, settings = read_adapter_config(folder)
        base = Path(name)
    config, names = base_config(base), tuple(objective_weights or ())
    check_regular(base)
    if is_classifier(config) and num_outputs_of(config) != max(1, len(names)):
        why = (
            f"It is to have one for each of {', '.join(names)}."
            if names
            else "A reward model has one."
        )
        raise InvalidData(f"The model in {folder} has {num_outputs_of(config)} outputs.", why)
    with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []), _quiet():
        torch.manual_seed(seed)
        network = ScoringNetwork(
            _from_pretrained(base, trust_remote_code, arguments or {}, names).to(where),
            padding=padding,
            settings=settings,
            base=str(base.absolute()),
            objective_weights=objective_weights,
        )
    if adapted:
        network.load_weights(folder)
    return network


def base_config(base: Path) -> Mapping[str, Any]:
    """The config.json of a reward model, or of what an adapter is for. NotFound where there is
    none, InvalidData where it cannot be read, or the weights are quantised.
    """
    next = "Name a model folder in Hugging Face format."
    if not (base / "config.json").is_file():
        raise NotFound(f"No model is in {base}.", "config.json is missing.", next)
    try:
        config = read_config(base)
        check_unquantised(config)
    except ValueError as error:
        raise InvalidData(f"The model in {base} cannot be used.", f"{error}.", next) from error
    return config


def _from_pretrained(
    folder: Path, trust_remote_code: bool, arguments: Mapping[str, Any], objectives: Sequence[str]
) -> Any:
    from transformers import AutoModelForSequenceClassification

    labels: dict[str, Any] = {"num_labels": max(1, len(objectives))}
    if objectives:
        labels |= {
            "id2label": dict(enumerate(objectives)),
            "label2id": {name: o for o, name in enumerate(objectives)},
        }
    chosen = {"dtype": torch.float32, "trust_remote_code": trust_remote_code, **labels, **arguments}
    chosen["output_loading_info"] = True
    model, report = AutoModelForSequenceClassification.from_pretrained(folder, **chosen)
    missing = set(report["missing_keys"])
    if not is_classifier(read_config(folder)):
        missing -= {f"{HEAD}.weight"}  # of a new reward model it is drawn, and nothing else
    refuse_missing(folder, missing)
    refuse_not_finite(folder, model)
    # a mapped file's addresses are not aligned, and that moves a score's last bit
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers reports the head that a base model does not have, and shows a bar for each
    file.
    """
    from transformers.utils import logging as theirs

    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity(logging.ERROR)
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()
