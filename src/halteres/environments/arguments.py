"""The command line of an environment file.

Owns: the verbs, the form of options (`--env.FIELD value` or `--env.FIELD=value`), what is a usage error.
Never: knows which fields exist, converts a value (`configuring`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from halteres.environments.configuring import Overrides, read_file
from halteres.errors import UserError

Verb = Literal["serve", "process", "evaluate", "describe"]

VERBS: tuple[Verb, ...] = ("serve", "process", "evaluate", "describe")
USAGE = f"usage: {{file}} {'|'.join(VERBS)} [--config FILE] [--env.FIELD VALUE] [--openai.FIELD VALUE]"

_IGNORED = ("--slurm", "--testing")  # Atropos's; they choose nothing here
_NOTHING = ("null", "none", "None")


class BadUsage(UserError):
    """Arguments that are no command; the process ends with code 2."""

    code = "usage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """A command and what it overrides, values as text."""

    verb: Verb
    config: Path | None
    overrides: Overrides

    def all_overrides(self) -> Overrides:
        """The file's, with the arguments on top."""
        return self.overrides if self.config is None else self.overrides.over(read_file(self.config))


def parse(arguments: Sequence[str]) -> Arguments:
    """Read the arguments after the file's name.

    Raises:
        BadUsage: no verb, an unknown one, an unknown option, or one without its value.
    """
    known: dict[str, Verb] = {verb: verb for verb in VERBS}
    verb = known.get(arguments[0]) if arguments else None
    if verb is None:
        given = f"'{arguments[0]}' is none of the commands" if arguments else "There is no command"
        raise BadUsage(f"{given}; they are {', '.join(VERBS)}.")
    config: Path | None = None
    sections: dict[str, dict[str, Any]] = {"env": {}, "openai": {}}
    for option, value in _options(arguments[1:]):
        section, _, field = option.removeprefix("--").partition(".")
        if option == "--config":
            config = Path(value)
        elif section in sections and field:
            sections[section][field] = None if value in _NOTHING else value
        elif option not in _IGNORED:
            raise BadUsage(f"There is no option '{option}'.", "Settings are --env.FIELD and --openai.FIELD.")
    return Arguments(verb=verb, config=config, overrides=Overrides(env=sections["env"], openai=sections["openai"]))


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    rest = list(arguments)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if not option.startswith("--"):
            raise BadUsage(f"'{option}' is no option.")
        has_next = bool(rest) and not rest[0].startswith("--")
        if not equals and not has_next and option not in _IGNORED:
            raise BadUsage(f"The option '{option}' needs a value.")
        yield option, value if equals else rest.pop(0) if has_next else "true"
