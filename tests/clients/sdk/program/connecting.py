"""Steps: connect, ask what there is, make a model, find its tokenizer."""

from __future__ import annotations

from .connection import Connection, wait
from .steps import Facts, Step


def connect(scene: Connection) -> Facts:
    return {"client": type(scene.service).__name__}


def capabilities(scene: Connection) -> Facts:
    asked = scene.rest.get_server_capabilities() if scene.sdk >= (0, 38) else None
    found = wait(asked) if asked else scene.service.get_server_capabilities()
    names = [model.model_name for model in found.supported_models]
    assert scene.model in names, f"{scene.model} is not among {names}"
    return {"models": names}


def create_model(scene: Connection) -> Facts:
    run = scene.training.model_id
    session, _, number = run.rpartition(":train:")
    assert session and number.isdigit(), f"a training run's id is SESSION:train:NUMBER, not {run}"
    return {"run": run.replace(session, "SESSION")}


def get_info(scene: Connection) -> Facts:
    info = scene.training.get_info()
    assert info.model_id == scene.training.model_id
    assert info.model_data.model_name == scene.model, info
    assert info.is_lora and info.lora_rank == 8, info
    return {"model_name": info.model_data.model_name, "lora_rank": info.lora_rank}


def tokenizer(scene: Connection) -> Facts:
    found = scene.training.get_tokenizer()
    text = "Two and two is four."
    tokens = found.encode(text)
    assert tokens and found.decode(tokens) == text, (tokens, found.decode(tokens))
    return {"tokens": len(tokens)}


def lora_options(scene: Connection) -> Facts:
    narrow = scene.trainer(train_mlp=False, train_unembed=False)
    info = narrow.get_info()
    assert info.lora_rank == 4, info
    return {"lora_rank": info.lora_rank}


STEPS = (
    Step("connect", connect, proves=("connect:start-up",)),
    Step("get_server_capabilities", capabilities, proves=("connect:capabilities",)),
    Step("create_lora_training_client", create_model, proves=("id:training-run",)),
    Step("get_info", get_info),
    Step("training get_tokenizer", tokenizer, proves=("session:tokenizer",)),
    Step("create_lora_training_client, attention alone", lora_options, proves=("lora:options",)),
)
