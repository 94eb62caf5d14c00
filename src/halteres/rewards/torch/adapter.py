"""An adapter of a reward model: PEFT's LoRA on linear layers, and the head, trained whole.

Modules, files and their names are PEFT's, so that PEFT and TRL load what is written here. Of a
foreign adapter's configuration, what PEFT would ignore or what changes the base is refused, as the
engine refuses it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from halteres.engine.shapes import CONFIG, WEIGHTS, read_adapter_config
from halteres.errors import InvalidConfig, InvalidData
from halteres.rewards.model_folder import HEADS, MAX_RANK
from halteres.rewards.training_plan import LoraSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peft import LoraConfig

HEAD = HEADS[0]


def new_adapter(settings: LoraSettings, base: str) -> LoraConfig:
    """PEFT's configuration of an adapter to be trained on the model in the folder `base`."""
    from peft import LoraConfig

    alpha = settings.lora_alpha
    targets = settings.target_modules
    return LoraConfig(
        task_type="SEQ_CLS",
        base_model_name_or_path=base,
        r=settings.r,
        # an integer where it is one, as other readers expect
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=settings.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
    )


def read_adapter(folder: Path) -> LoraConfig:
    """The configuration of the adapter in a folder. InvalidData: it asks for what is not computed
    here, or names no base model.
    """
    from peft import LoraConfig

    known = {field.name for field in fields(LoraConfig)}
    settings: dict[str, Any] = {
        name: value
        for name, value in read_adapter_config(folder, HEADS, MAX_RANK).items()
        if name in known
    }
    if not settings.get("base_model_name_or_path"):
        what = f"The adapter in {folder} names no base model."
        raise InvalidData(what, next=f"Set base_model_name_or_path in its {CONFIG}.")
    # it may be trained on
    settings["inference_mode"] = False
    return LoraConfig(**settings)


class Adapter:
    """LoRA on a sequence classifier, whose other weights are frozen but for the head.

    Args:
        model: of transformers; PEFT's modules take the places of its linear layers and its head.
        config: InvalidConfig where the model has no layer that it names.
    """

    def __init__(self, model: nn.Module, config: LoraConfig) -> None:
        from peft import get_peft_model

        # PEFT would warn where the model's own name for itself is another
        self.base, config.base_model_name_or_path = config.base_model_name_or_path, None
        config.modules_to_save = [HEAD]
        try:
            with _quiet():
                self._peft: Any = get_peft_model(model, config)  # pyright: ignore[reportArgumentType]
        except ValueError as error:
            what = f"No layer of the model is named {config.target_modules}."
            why = "LoRA is put on linear layers, never on the head."
            fix = "Set target_modules to 'all-linear', or to the last parts of their names."
            raise InvalidConfig(what, why, fix, field="target_modules") from error

    @property
    def head(self) -> nn.Linear:
        """The head that is trained."""
        return self._peft.base_model.model.get_submodule(HEAD).modules_to_save["default"]

    def save(self, folder: Path) -> None:
        """Write PEFT's two files."""
        tensors = {name: one.cpu().contiguous() for name, one in self._tensors().items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        config = copy(self._peft.peft_config["default"])
        config.base_model_name_or_path = self.base
        config.inference_mode = True
        # PEFT adds names that the model has not, and holds a set, which has another order each time
        config.modules_to_save = [HEAD]
        if not isinstance(config.target_modules, str):
            config.target_modules = sorted(config.target_modules)
        config.save_pretrained(str(folder))

    def load(self, folder: Path) -> None:
        """Put back what `save` wrote. InvalidData where it is of another model."""
        from peft import set_peft_model_state_dict

        found, own = load_file(folder / WEIGHTS), self._tensors()
        wrong = sorted(own.keys() ^ found.keys()) or [
            name for name in own if own[name].shape != found[name].shape
        ]
        if wrong:
            why = (
                f"{wrong[0]} is missing, too many or of another shape ({len(wrong)} such tensors)."
            )
            raise InvalidData(f"The adapter in {folder} does not fit its base model.", why)
        set_peft_model_state_dict(self._peft, found)

    def merge(self) -> None:
        """Put the adapter into the model's weights, and the head into its place."""
        self._peft.merge_and_unload()

    def _tensors(self) -> Mapping[str, Tensor]:
        """Adapter and head, by the names that they have in files."""
        from peft import get_peft_model_state_dict

        # without its embeddings, for which PEFT would ask the hub
        return get_peft_model_state_dict(self._peft, save_embedding_layers=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """peft 0.21 asks transformers 5.24 for a name that it is about to drop, which says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
