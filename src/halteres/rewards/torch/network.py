"""A transformers sequence classifier with one output, or one for each objective, run over rows that
share prefixes; with or without LoRA, saved as PEFT saves it. The head is never adapted: it is
trained whole and saved beside the adapter.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halteres.engine.shapes import CONFIG
from halteres.engine.torch.loading import refuse_missing, refuse_not_finite
from halteres.engine.torch.micro_batches import trie_of
from halteres.engine.torch.model import Attention
from halteres.engine.torch.transformers_model import UnsupportedAttention, attend
from halteres.engine.torch.trie import Trie, TrieAttention
from halteres.errors import InvalidConfig, InvalidData, NotFound
from halteres.models.shape import check_unquantised, is_classifier, num_outputs_of, read_config
from halteres.rewards.model_folder import Device, check_regular
from halteres.rewards.torch.adapter import HEAD, Adapter, new_adapter, read_adapter
from halteres.rewards.torch.batches import Rows, Tokens, padded, padded_parts
from halteres.rewards.training_plan import LoraSettings

if TYPE_CHECKING:
    from peft import LoraConfig

PART_TOKENS = {"cpu": 128, "cuda": 4096}  # padding tokens that cost as much as another pass
# scores of a trie and of rows apart differ by no more, in fp32, where prefixes are shared
CLOSE = 1e-5
# of the attention in transformers' register, and of what a pass hands down to it
ATTENTION, TRIE = "halteres_tries", "halteres_trie"
ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


class ScoringNetwork:
    """The weights, and how texts go through them.

    Args:
        model: of transformers, with a head that scores; InvalidConfig for any other.
        padding: the token that pads.
        adapter: of PEFT's; its weights are drawn here, and but for them and the head all weights
            are frozen.
        objective_weights: of each output, in order; empty: there is one, without a name.
    """

    def __init__(
        self,
        model: Any,
        *,
        padding: int,
        adapter: LoraConfig | None = None,
        objective_weights: Mapping[str, float] | None = None,
    ) -> None:
        self.model: nn.Module = model
        self.objective_weights = dict(objective_weights or {})
        self.config: Any = model.config
        self.padding = padding
        self.bf16 = False
        self.num_computed_tokens = 0  # so far, padding among them
        self.num_padding_tokens = 0
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
        if adapter is None:
            self.adapter = None
        else:
            self.adapter = Adapter(self.model, adapter)
        if self.adapter is not None:
            self._head = self.adapter.head
        self.shares_prefixes = self._can_share()

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return next(self.model.parameters()).device

    @property
    def heads(self) -> int:
        """Of queries, in a layer; 0: its configuration does not say."""
        return getattr(self.config.get_text_config(), "num_attention_heads", 0)

    @property
    def kv_heads(self) -> int:
        """Of keys and values."""
        return getattr(self.config.get_text_config(), "num_key_value_heads", None) or self.heads

    @property
    def num_parameters(self) -> int:
        """All of them, trained or not."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        return {name: one for name, one in self.model.named_parameters() if one.requires_grad}

    def scores(self, texts: Sequence[Tokens]) -> Tensor:
        """Raw scores in fp32, shape (T,)."""
        outputs_TO = self.outputs(texts)
        return self.mixed(outputs_TO, [None] * len(outputs_TO))

    def mixed(self, outputs_TO: Tensor, objectives: Sequence[str | None]) -> Tensor:
        """One score per text, shape (T,): its objective's output, and of None the weighted sum."""
        names = list(self.objective_weights)
        shares = {name: [float(name == other) for other in names] for name in names}
        whole = list(self.objective_weights.values()) or [1.0]
        shares_TO = [whole if name is None else shares[name] for name in objectives]
        return (outputs_TO * torch.tensor(shares_TO, device=outputs_TO.device)).sum(-1)

    def outputs(
        self, texts: Sequence[Tokens], *, share: bool = True, multiple_of: int = 1
    ) -> Tensor:
        """Of all texts in fp32: shape (T, O), O objectives, or 1.

        Args:
            share: compute only once what texts begin with alike.
            multiple_of: of the length to which rows are padded.
        """
        if share:
            rows = Rows.joined(texts)
        else:
            rows = Rows.apart(texts)
        return self._at(rows, rows.places_T, share=share, multiple_of=multiple_of)

    def outputs_at(self, texts: Sequence[Tokens], ends: Sequence[Sequence[int]]) -> Tensor:
        """After each of these tokens of each text, in fp32: shape (all ends, O)."""
        rows = Rows.joined(texts)
        places = [
            (row, end) for (row, _), own in zip(rows.places_T, ends, strict=True) for end in own
        ]
        return self._at(rows, places, share=True, multiple_of=1)

    def _at(
        self, rows: Rows, places_T: Sequence[tuple[int, int]], *, share: bool, multiple_of: int
    ) -> Tensor:
        """Outputs at these places of rows."""
        if share and self.shares_prefixes:
            trie = trie_of(rows.tokens)
            if trie is not None:
                return self._of_trie(trie, places_T)
        most = PART_TOKENS.get(self.device.type, PART_TOKENS["cuda"])
        found: dict[int, Tensor] = {}
        for part in padded_parts([len(tokens) for tokens in rows.tokens], most):
            number = {row: b for b, row in enumerate(part)}
            own = [text for text, (row, _) in enumerate(places_T) if row in number]
            if not own:
                continue
            places = [(number[row], end) for row, end in (places_T[text] for text in own)]
            outputs_TO = self._of_rows([rows.tokens[row] for row in part], places, multiple_of)
            found.update(zip(own, outputs_TO, strict=True))
        return torch.stack([found[text] for text in range(len(places_T))])

    def _of_rows(
        self, rows: Sequence[Tokens], places_T: Sequence[tuple[int, int]], multiple_of: int = 1
    ) -> Tensor:
        """Outputs at these places of padded rows."""
        tokens_BL = padded(rows, self.padding, self.device, multiple_of)
        self._count(tokens_BL.numel(), sum(map(len, rows)))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            hidden_BLD: Tensor = self._backbone(
                input_ids=tokens_BL, use_cache=False
            ).last_hidden_state
            rows_T, ends_T = torch.tensor(places_T, device=self.device).unbind(-1)
            return self._outputs_of(hidden_BLD[rows_T, ends_T])

    def _of_trie(self, trie: Trie, places_T: Sequence[tuple[int, int]]) -> Tensor:
        """Outputs at these places of a trie's sequences."""
        length = len(trie.tokens_N)
        self._count(length, sum(len(run) - run.start for run in trie.runs))
        tokens_N, positions_N = (
            torch.from_numpy(part).to(self.device) for part in (trie.tokens_N, trie.positions_N)
        )
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            # A token is a row, so that heads lie as the attention reads them.
            hidden_N1D: Tensor = self._backbone(
                input_ids=tokens_N.unsqueeze(1),
                position_ids=positions_N.unsqueeze(1),
                use_cache=False,
                **{TRIE: TrieAttention([trie], self)},
            ).last_hidden_state
            ends_T = [int(trie.runs[row].path_L[end]) for row, end in places_T]
            return self._outputs_of(hidden_N1D[torch.tensor(ends_T, device=self.device), 0])

    def _outputs_of(self, hidden_TD: Tensor) -> Tensor:
        weight_OD, bias_O = self._head.weight, self._head.bias
        # One output at a time, so that its bits do not depend on how many there are.
        columns = [
            F.linear(hidden_TD, weight_OD[o : o + 1], None if bias_O is None else bias_O[o : o + 1])
            for o in range(self._head.out_features)
        ]
        return torch.cat(columns, -1).float()

    def _count(self, computed: int, without_padding: int) -> None:
        self.num_computed_tokens += computed
        self.num_padding_tokens += computed - without_padding

    def save(self, folder: Path) -> None:
        """Write its weights: a PEFT folder with an adapter, else a folder of transformers."""
        if self.adapter is not None:
            self.adapter.save(folder)
            return
        with _quiet():
            self.model.save_pretrained(folder)  # pyright: ignore[reportCallIssue]

    def load_weights(self, folder: Path) -> None:
        """Put back what `save` wrote. InvalidData where it is of another model."""
        if self.adapter is not None:
            self.adapter.load(folder)
            return
        with _quiet():
            model = _from_pretrained(folder, False, {}, tuple(self.objective_weights))
        self.model.load_state_dict(model.state_dict())

    def weights(self) -> dict[str, Tensor]:
        """All that a score is computed from, by name."""
        # Next to a trained head, PEFT keeps the one that the base model came with.
        unused = f"{HEAD}.original_module."
        return {
            name: one
            for name, one in self.model.state_dict().items()
            if not name.startswith(unused)
        }

    def disable_dropout(self) -> None:
        """The base model's; an adapter keeps the dropout that it was asked for."""
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Dropout) and "lora_dropout" not in name:
                module.p = 0.0

    def merge(self) -> None:
        """Put the adapter into the weights."""
        if self.adapter is not None:
            self.adapter.merge()
            self._head, self.adapter = self.model.get_submodule(HEAD), None

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

    def _can_share(self) -> bool:
        """Whether the model takes the attention of a trie: by its configuration, then tried on a
        few tokens. It goes on computing padded rows as before.
        """
        config = self.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)
        if not getattr(config, "use_sliding_window", True):
            window = None
        if kinds - {"full_attention"} or (window and not kinds):
            return False
        # Another kernel was asked for, or the model has its reasons; weights that are dropped
        # would be missed.
        dropout = any(getattr(config, name, 0) for name in ATTENTION_DROPOUTS)
        implementation = self.config._attn_implementation
        if implementation not in ("sdpa", ATTENTION) or dropout or not self.heads:
            return False
        model: Any = self.model
        training = model.training
        model.eval()
        try:
            with torch.inference_mode():
                before = self._tried(apart=True)
                model.set_attn_implementation(_registered())
                after = self._tried(apart=True), self._tried(apart=False)
            shares = all(torch.allclose(one, before, rtol=CLOSE, atol=CLOSE) for one in after)
        except (AttributeError, TypeError, ValueError, RuntimeError, UnsupportedAttention):
            # a model that takes no such argument, for example
            shares = False
        finally:
            model.train(training)
        if not shares:
            model.set_attn_implementation("sdpa")
        return shares

    def _tried(self, *, apart: bool) -> Tensor:
        """The outputs of two texts that begin alike."""
        vocabulary = self.config.get_text_config().vocab_size
        texts = [(7 * np.arange(length) + 3) % vocabulary for length in (9, 12)]
        texts[1][6:] = (5 * np.arange(6) + 11) % vocabulary
        rows = Rows.apart(texts)
        if apart:
            return self._of_rows(rows.tokens, rows.places_T)
        return self._of_trie(Trie.of(rows.tokens), rows.places_T)


def _registered() -> str:
    """The name under which transformers knows attention over padded rows, as "sdpa", and over a
    trie, where a pass hands one down.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, AttentionMaskInterface()["sdpa"])
    return ATTENTION


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **how: Any
) -> tuple[Tensor, Any]:
    """transformers' attention interface."""
    from transformers import AttentionInterface

    trie: Attention | None = how.pop(TRIE, None)
    if trie is None:
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **how)
    heads = (part.float() for part in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        return attend(trie, module, *heads, **how).to(query.dtype), None


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
    base = folder
    adapter = None
    adapted = (folder / CONFIG).is_file()
    if adapted:
        adapter = read_adapter(folder)
        base = Path(adapter.base_model_name_or_path or "").absolute()
        adapter.base_model_name_or_path = str(base)
    elif lora_settings is not None:
        adapter = new_adapter(lora_settings, str(base.absolute()))
    config, names = base_config(base), tuple(objective_weights or ())
    check_regular(base)
    if is_classifier(config) and num_outputs_of(config) != max(1, len(names)):
        why = "A reward model has one."
        if names:
            why = f"It is to have one for each of {', '.join(names)}."
        raise InvalidData(f"The model in {folder} has {num_outputs_of(config)} outputs.", why)
    with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []), _quiet():
        torch.manual_seed(seed)
        network = ScoringNetwork(
            _from_pretrained(base, trust_remote_code, arguments or {}, names).to(where),
            padding=padding,
            adapter=adapter,
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
