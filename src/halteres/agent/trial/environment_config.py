"""What a tested environment is told: its config file and its command.

Owns: which of the draft's settings hold in a test, and which the test sets.
Never: starts anything, names a key or the endpoint.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from halteres.agent.trial.folder import TestFolder
from halteres.agent.trial.request import Candidate, Request
from halteres.models import TINY, builtin_path

PATIENCE = {"rollout_retries": 1, "max_failed_groups": 3, "max_dropped_groups": 6}
"""A scorer that fails shall not ask for thousands of answers before it is told."""

FOREIGN_TOKENS = 8
"""An answer of another model may be so many times longer in the draft's tokens: no group is dropped for that."""


def command_of(folder: TestFolder, request: Request, candidate: Candidate, address: str) -> tuple[str, ...]:
    """Write what the environment reads into its folder, which is made here; the command that runs it."""
    work = folder.work(candidate)
    work.mkdir()
    if not candidate.tokenizer:
        candidate = msgspec.structs.replace(candidate, tokenizer=str(character_tokenizer(work / "characters")))
    config = work / "config.yaml"
    config.write_text(yaml.safe_dump(_config(folder, request, candidate, address), sort_keys=False))
    if request.prompts:
        return _asking(folder, request, candidate, config)
    return request.program.command("process", "--config", str(config))


def character_tokenizer(folder: Path) -> Path:
    """Make a tokenizer folder in which every byte of a text is a token: the built-in model's, without its merges."""
    source = builtin_path(TINY)
    assert source is not None, "it is part of the package"  # noqa: S101 - for the type checker
    folder.mkdir()
    whole = json.loads((source / "tokenizer.json").read_text())
    special = {token["content"] for token in whole["added_tokens"]}
    vocabulary = {text: number for text, number in whole["model"]["vocab"].items() if len(text) == 1 or text in special}
    whole["model"] |= {"vocab": vocabulary, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    for name in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder)
    return folder


def variables_of(candidate: Candidate) -> dict[str, str]:
    """Variables that an environment of atroposlib's needs to be tested with a model that tells no tokens."""
    return {} if candidate.is_local else {"ATROPOS_ALLOW_DUMMY_MANAGED_SERVER": "1"}


def _asking(folder: TestFolder, request: Request, candidate: Candidate, config: Path) -> tuple[str, ...]:
    """Free prompts: through our own program, which runs in the environment's interpreter where it is one of ours."""
    prompts = config.with_name("prompts.json")
    prompts.write_text(json.dumps(request.prompts))
    python = sys.executable if request.is_foreign else request.interpreter
    files = (str(config), str(prompts), str(folder.groups(candidate)))
    scorer = () if request.is_foreign else (request.environment_file, request.class_name)
    return (python, "-m", "halteres.agent.trial.asker", *files, *scorer)


def _config(folder: TestFolder, request: Request, candidate: Candidate, address: str) -> dict[str, Any]:
    server = {
        "model_name": candidate.base,
        "tokenizer_name": candidate.tokenizer,  # atroposlib would look for the model's on the hub
        "base_url": address,
        "api_key": "x",
        "server_type": "sglang" if candidate.is_local else "openai",
        "timeout": request.model_within_s,
        "health_check": False,
    }
    wanted = {
        "total_steps": request.num_steps,
        "group_size": request.group_size,
        "batch_size": -1,
        "ensure_scores_are_not_same": False,  # whether they vary is what is asked
        "include_messages": True,
        "use_wandb": False,
        "wandb_name": candidate.wandb_run,
        "tokenizer_name": candidate.tokenizer,
        "data_path_to_save_groups": str(folder.groups(candidate)),
    }
    ours = {} if request.is_foreign else _ours(request, candidate) | {"run_dir": str(folder.work(candidate))}
    env = json.loads(json.dumps({**request.env, **wanted, **ours}))  # values of types that YAML has no word for
    return {"env": env, "openai": [server], "slurm": False, "testing": False}


def _ours(request: Request, candidate: Candidate) -> dict[str, Any]:
    """What our own BaseEnv has besides."""
    env: Mapping[str, Any] = request.env
    limits = {name: min(env.get(name, most), most) for name, most in PATIENCE.items()}
    limits["max_dropped_groups"] = PATIENCE["max_dropped_groups"]  # 0 would be: never
    asked = {"max_new_tokens": request.max_tokens, "temperature": request.temperature}
    own = {name: value for name, value in asked.items() if value is not None}
    if not candidate.is_local and env.get("max_token_length", 0) > 0:
        own["max_token_length"] = FOREIGN_TOKENS * env["max_token_length"]
    return {**limits, **own}
