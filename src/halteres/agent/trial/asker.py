"""The process that asks free prompts: `python -m halteres.agent.trial.asker CONFIG PROMPTS OUT [FILE CLASS]`.

Owns: finding the environment's class in its file and making it with its settings; one line for each prompt in OUT.
Never: runs in a process that holds a key: it executes the environment's file, as `python FILE process` would.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from halteres import process
from halteres.agent.trial.asking import Asking, Scoring
from halteres.environments.base import BaseEnv, make_sampler, tokenizer_folder
from halteres.environments.commands import author_error, settings_of
from halteres.environments.config import APIServerConfig, BaseEnvConfig
from halteres.environments.configuring import read_file
from halteres.environments.single_turn import SingleTurnEnv
from halteres.errors import EnvironmentFailed, HalteresError
from halteres.observe.metrics import append_row
from halteres.rollouts.sampler import Sampler
from halteres.text import load_tokenizer


async def ask(config: Path, prompts: Sequence[str], out: Path, scorer: Sequence[str]) -> None:
    """Answer every prompt into `out`, in order."""
    asking = _asking(config, Path(scorer[0]), scorer[1]) if scorer else Asking(_sampler(config))
    try:
        await asking.prepare()
        for pending in [asyncio.create_task(asking.settled(prompt)) for prompt in prompts]:
            append_row(out, await pending)
    finally:
        await asking.close()


def _asking(config: Path, file: Path, class_name: str) -> Asking:
    made = environment_of(config, file, class_name)
    return Scoring(made) if isinstance(made, SingleTurnEnv) else Asking(made.server, made.config.system_prompt)


def environment_of(config: Path, file: Path, class_name: str) -> BaseEnv:
    """The environment of this class in this file, made with the settings of a config file."""
    kind = _kind(file, class_name)
    settings = settings_of(kind, read_file(config)).checked()
    return kind(settings.env, [settings.openai])


def _kind(file: Path, class_name: str) -> type[BaseEnv]:
    """The environment's class in its file."""
    name = "halteres_asked"
    sys.path.insert(0, str(file.parent))
    defined = runpy.run_path(str(file), run_name=name).values()
    kinds = [one for one in defined if isinstance(one, type) and issubclass(one, BaseEnv) and one.__module__ == name]
    named = [kind for kind in kinds if kind.__name__ == class_name] or kinds
    if not named:
        raise EnvironmentFailed(f"{file} defines no environment.")
    return named[-1]


def _sampler(config: Path) -> Sampler:
    """For an environment that is not ours: its config says where to sample, and nothing else of it counts."""
    told = read_file(config)
    env = BaseEnvConfig(tokenizer_name=told.env["tokenizer_name"], max_token_length=-1)
    tokenizer = load_tokenizer(str(tokenizer_folder(env.tokenizer_name)))
    return make_sampler(env, APIServerConfig(**told.openai), tokenizer)


def main() -> int:
    """Exit code 0, or 1 with one sentence on stderr."""
    process.begin("env", torch=True)
    config, prompts, out, *scorer = sys.argv[1:]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            asyncio.run(ask(Path(config), json.loads(Path(prompts).read_bytes()), Path(out), scorer))
    except HalteresError as error:
        return _complain(error)
    except Exception as error:  # noqa: BLE001 - the environment's file runs here; its failure is the answer
        return _complain(author_error(Path(scorer[0] if scorer else __file__), "be asked", error))
    return 0


def _complain(error: HalteresError) -> int:
    sys.stderr.write(f"error: {' '.join(error.sentence.split())}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
