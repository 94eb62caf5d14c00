"""How an environment is named: `gsm8k`, `FAMILY:VARIANT` of a family of environments, or either with a file's path.

Owns: taking a name apart and putting it together; what stands for a name in the name of a file.
Never: looks for an environment (`discovery`).
"""

from __future__ import annotations

import re

_WITH_VARIANT = re.compile(r"(.*\.py|[^/:]*):([^/:]*)")


def split_name(name: str) -> tuple[str, str]:
    """The environment's name or file, and the variant; an empty one where none is named.

    >>> split_name("game:Hangman-v0"), split_name("/home/me/a:b/games.py")
    (('game', 'Hangman-v0'), ('/home/me/a:b/games.py', ''))
    """
    found = _WITH_VARIANT.fullmatch(name)
    return (found[1], found[2]) if found else (name, "")


def joined_name(environment: str, variant: str) -> str:
    """The name of a variant; the environment's own where there is none."""
    return f"{environment}:{variant}" if variant else environment


def is_path(name: str) -> bool:
    """Whether it names a file rather than an environment."""
    environment, _ = split_name(name)
    return environment.endswith(".py") or "/" in environment


def reference(asked: str, name: str, file: str) -> str:
    """How settings refer to the environment `name` in `file`, which was asked for as `asked`: by its name where they
    said that, else by its file; with its variant either way."""
    environment, variant = split_name(name)
    return name if split_name(asked)[0] == environment else joined_name(file, variant)


def in_file_name(name: str) -> str:
    """The name as a part of a file's name, which no colon belongs into.

    >>> in_file_name("game:Hangman-v0")
    'game_Hangman-v0'
    """
    return name.replace(":", "_")
