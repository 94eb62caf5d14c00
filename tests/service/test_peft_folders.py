"""Adapters for others: under which names their tensors are found, in PEFT and by
tinker-cookbook.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from contract.requirements import proves
from engine.requests import CROSS_ENTROPY
from engine.torch_fixtures import logprobs_of, pair, prompts, running, trained
from safetensors.torch import load_file, save_file

from halteres.engine.protocol import LoraConfig
from halteres.errors import InvalidData, NotFound
from halteres.models import TINY, builtin_path
from halteres.service.checkpoint_folders import (
    check_adapter,
    copy_adapter,
    has_own_head,
    rename_tensors,
    tensor_names,
)

WEIGHTS = "adapter_model.safetensors"
LM_HEAD, UNEMBED = (
    "base_model.model.lm_head.lora_A.weight",
    "base_model.model.model.unembed_tokens.lora_A.weight",
)


@pytest.fixture
def tied() -> Path:
    folder = builtin_path(TINY)
    assert folder is not None
    return folder


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    """The files of a base model with an output matrix of its own."""
    folder = tmp_path / "untied"
    folder.mkdir()
    tensors = {"lm_head.weight": torch.zeros(1), "model.embed_tokens.weight": torch.zeros(1)}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """What an engine writes."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 32}')
    (folder / "state.json").write_text("{}")
    tensors = {
        LM_HEAD: torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "base_model.model.x": torch.ones(2),
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def copied(adapter: Path, base: Path, into: Path) -> dict[str, torch.Tensor]:
    into.mkdir()
    copy_adapter(adapter, into, for_tinker=base)
    assert {file.name for file in into.iterdir()} == {"adapter_config.json", WEIGHTS}
    return load_file(into / WEIGHTS)


@proves("export:cookbook")
def test_the_unembedding_has_the_name_whose_weight_the_base_model_has(
    adapter: Path, tied: Path, untied: Path, tmp_path: Path
) -> None:
    """tinker-cookbook 0.6.1 merges lm_head where there is one, unembed_tokens into the embedding
    otherwise.
    """
    assert (has_own_head(tied), has_own_head(untied)) == (False, True)
    values = load_file(adapter / WEIGHTS)[LM_HEAD]
    for base, name in ((tied, UNEMBED), (untied, LM_HEAD)):
        tensors = copied(adapter, base, tmp_path / name)
        assert set(tensors) == {name, "base_model.model.x"}
        assert torch.equal(tensors[name], values)


def test_an_index_tells_of_a_head_too(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"lm_head.weight": "m-2.safetensors"}}'
    )
    save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "m-2.safetensors")
    assert has_own_head(tmp_path)


def test_a_plain_folder_has_the_names_of_peft_whatever_they_were(
    adapter: Path, tied: Path, tmp_path: Path
) -> None:
    copied(adapter, tied, tmp_path / "export")
    (tmp_path / "plain").mkdir()
    copy_adapter(tmp_path / "export", tmp_path / "plain")
    assert tensor_names(tmp_path / "plain" / WEIGHTS) == tensor_names(adapter / WEIGHTS)


def test_only_names_change(adapter: Path, tmp_path: Path) -> None:
    """The data, whatever its type, is where the header's offsets say."""
    rename_tensors(
        adapter / WEIGHTS, tmp_path / "renamed", lambda name: f"a longer name than before: {name}"
    )
    before, after = load_file(adapter / WEIGHTS), load_file(tmp_path / "renamed")
    assert all(
        torch.equal(after[f"a longer name than before: {name}"], before[name]) for name in before
    )
    assert len(after) == len(before)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", b"\x09" + bytes(7) + b'{"a": 1']
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(InvalidData, match="no safetensors file"):
        tensor_names(tmp_path / "f")


def test_a_pickle_is_refused_and_an_empty_folder_is_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"adapter_config\.json"):
        check_adapter(tmp_path)
    (tmp_path / "adapter_model.bin").touch()
    with pytest.raises(InvalidData, match="pickle"):
        check_adapter(tmp_path)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@proves("checkpoint:peft")
async def test_peft_computes_our_logits_from_either(tied: Path, tmp_path: Path) -> None:
    """From the plain folder as it is; from a tied model's export with the mapping that
    docs/checkpoints.md names.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    async with running(tied) as engine:
        await trained(engine, config=LoraConfig(rank=4, alpha=16, seed=1))
        await engine.save("a", str(tmp_path / "saved"), False)
        tokens = prompts(1, low=30)[0]
        datum = pair(tokens, weights=[1.0] * (len(tokens) - 1))
        passed = await engine.forward_backward("a", (datum,), CROSS_ENTROPY, forward_only=True)
    for name, copy in (
        ("plain", copy_adapter),
        ("export", lambda a, b: copy_adapter(a, b, for_tinker=tied)),
    ):
        (tmp_path / name).mkdir()
        copy(tmp_path / "saved", tmp_path / name)
        mapping = {"key_mapping": {"model.unembed_tokens": "lm_head"}} if name == "export" else {}
        base: Any = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, str(tmp_path / name), **mapping)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens[:-1]])).logits[0]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
        assert abs(logprobs_of(passed.logprobs[0]) - expected).max() < 5e-5, name
