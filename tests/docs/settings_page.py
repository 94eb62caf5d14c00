"""docs/settings.md: every setting of a run, with meaning, unit, range and default, read from the
models.

Owns: the page.
Never: says anything of a setting that its model does not.

    scripts/settings            writes the page
    scripts/settings --check    exits with 1 if it would be another one
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import halteres.environments
from halteres.agent.drafts import Setting, followed
from halteres.config import environ
from halteres.config.edits import ALIASES
from halteres.config.file_training import FileTraining
from halteres.config.settings import ENV_WIRING, SECTIONS, wiring_of
from halteres.environments.base import BaseEnv
from halteres.environments.config import APIServerConfig, BaseEnvConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"

HEAD = """# Settings

Written by `scripts/settings` from the models in `halteres.config.settings` and `halteres.environments.config`. Do not
edit.

```sh
halteres train arithmetic --set trainer.total_steps=60 --set env.group_size=16
halteres train arithmetic --set total_steps=60         # the bare name, where one section alone has it
halteres train arithmetic --config run.yaml            # sections run, env, inference, trainer; or Atropos's
halteres rl get-current-config --detail full           # every setting of your draft, with its present value
```

An agent sets them with `rl_edit_config("total_steps", 60)`. Where several places set a value, the last of these
holds: the defaults below, the environment's own (`config_init`), the file, `--set` or an edit, what the operator's
[policy](agent-tools.md#the-operators-policy) locks. `config.resolved.json` in the run's directory has every value that
held, and where it came from.

What `--set` and `edit-config` are given is read by the setting's type. A text is taken as it is
typed: `run.name=run #3`, `env.system_prompt=Answer: in one line`; in quotation marks it is the text
between them. `null` is a value where the type allows `None`, numbers are decimal, a list is `'[a,
b]'`, an object `'{a: 1}'`. A file is UTF-8, a YAML, JSON or TOML text of at most 1 MB, in which no
key is given twice. *Filled in* means that the run writes the value itself; setting it is refused
with the reason.
"""

DATA_HEAD = """Of a training on a file alone (`halteres sft`, `halteres dpo`), which has no `env`, and of `run`,
`inference` and `trainer` what is no matter of sampling. `batch_size` is 16 for dpo.
[sft](algorithms/sft.md), [dpo](algorithms/dpo.md)."""

ENV_HEAD = """Every environment has these fields; environments written for atroposlib have those of its own class,
with the same names. A run wants a `group_size` of 2 or more, and a `batch_size` that is a multiple of it. "serve" and
"process" are verbs of an environment's file, run by hand: [environments.md](environments.md)."""

OPENAI_HEAD = """Where an environment samples. A run fills these in; they are yours to set when you run an environment's
file by hand (`python FILE process --openai.base_url http://127.0.0.1:8001/runs/look/v1`)."""

VARIABLES_HEAD = """Variables that name a secret (`…_KEY`, `…_TOKEN`, `…_PASSWORD`) reach only the process that needs them."""

OTHER_NAMES = """The names of Atropos's and tinker-atropos's files are understood, too: {names}."""


def rendered() -> str:
    """The page."""
    parts = [HEAD]
    for section in ("run", "inference", "trainer"):
        model = SECTIONS[section]
        parts.append(
            _section(section, inspect.getdoc(model) or "", _table(section, model, wiring_of(model)))
        )
    data = {"digest": "the run writes it when it begins"}
    parts.append(_section("data", DATA_HEAD, _table("data", FileTraining, data)))
    names = ", ".join(f"`{name}` is `{key}`" for name, key in ALIASES.items())
    env = _table("env", BaseEnvConfig, ENV_WIRING)
    parts.append(_section("env", ENV_HEAD, env, OTHER_NAMES.format(names=names)))
    parts += [_environment(kind) for kind in shipped()]
    parts.append(_section("openai", OPENAI_HEAD, _table("openai", APIServerConfig, {})))
    parts.append(f"## Variables\n\n{VARIABLES_HEAD}\n\n{_variables()}\n")
    return "\n".join(parts)


def shipped() -> list[type[BaseEnv]]:
    """The environments that come with the package, by name."""
    for module in pkgutil.iter_modules(halteres.environments.__path__, "halteres.environments."):
        if not module.name.endswith(("__main__", "cage_entry", "gym_worker", "python_worker")):
            importlib.import_module(module.name)
    kinds = [
        kind
        for kind in _below(BaseEnv)
        if kind.name and kind.__module__.startswith("halteres.environments.")
    ]
    return sorted(kinds, key=lambda kind: str(kind.name))


def _below(kind: type[BaseEnv]) -> Iterator[type[BaseEnv]]:
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)


def _environment(kind: type[BaseEnv]) -> str:
    """What an environment has beside the common fields, and which defaults it changes."""
    config, common = kind.config_init()[0], BaseEnvConfig()
    own = {name for name in type(config).model_fields if name not in BaseEnvConfig.model_fields}
    changed = [
        f"`{name}` {_shown(value)}"
        for name, value in config.model_dump(mode="json").items()
        if name not in own
        and name not in ENV_WIRING
        and value != common.model_dump(mode="json")[name]
    ]
    text = [f"### {kind.name}", (inspect.getdoc(kind) or "").partition("\n")[0]]
    if changed:
        text.append(f"Its defaults: {', '.join(changed)}.")
    if own:
        text.append(
            _table("env", type(config), {}, only=own, defaults=config.model_dump(mode="json"))
        )
    return "\n\n".join(text) + "\n"


def _section(name: str, *parts: str) -> str:
    return "\n\n".join([f"## {name}", *parts]) + "\n"


def _table(
    section: str,
    model: type[BaseModel],
    wiring: Mapping[str, str],
    only: set[str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> str:
    schema = model.model_json_schema()
    rows = [
        _row(
            Setting(
                key=f"{section}.{name}",
                name=name,
                schema=field,
                default=(defaults or {}).get(name, field.get("default")),
                current=None,
                is_edited=False,
            ),
            wiring.get(name),
        )
        for name, field in followed(schema)
        if only is None or name in only
    ]
    return "\n".join(
        ["| setting | meaning | type and range | default |", "|---|---|---|---|", *rows]
    )


def _row(setting: Setting, filled_in: str | None) -> str:
    told = setting.full
    kind = [told.type, *filter(None, (told.range,))]
    if allowed := told.allowed:
        kind = [" or ".join(f"`{value}`" for value in allowed)]
    meaning = told.description + (f". *Filled in: {filled_in}.*" if filled_in else "")
    cells = (f"`{setting.name}`", meaning, "; ".join(kind), _shown(setting.default))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _shown(value: Any) -> str:
    return "" if value is None else f"`{json.dumps(value, ensure_ascii=False)}`"


def _variables() -> str:
    rows = [f"| `{name}` | {text[0].upper()}{text[1:]} |" for name, text in sorted(variables())]
    return "\n".join(["| variable | meaning |", "|---|---|", *rows])


def variables() -> Iterator[tuple[str, str]]:
    """Every variable that a user may set, with its meaning: the functions of `environ` begin their
    docstrings so.
    """
    functions: list[Callable[..., Any]] = [
        one for _, one in inspect.getmembers(environ, inspect.isfunction)
    ]
    for function in functions:
        text = " ".join((inspect.getdoc(function) or "").split())
        if (named := re.match(r"([A-Z]+_[A-Z_]+)(?: \(|:|,)", text)) and named[
            1
        ] != "HALTERES_LIFELINE_FD":
            yield named[1], text.partition(": ")[2]


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(
        prog="scripts/settings", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--check", action="store_true", help="compare with the committed page instead of writing it"
    )
    check, page = parser.parse_args().check, rendered()
    if not check:
        PAGE.write_text(page)
        sys.stderr.write(f"Written: {PAGE.relative_to(PAGE.parents[1])}\n")
        return 0
    if PAGE.is_file() and PAGE.read_text() == page:
        return 0
    sys.stderr.write(
        "docs/settings.md is not what the models say. Run scripts/settings and look at the "
        "changes.\n"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
