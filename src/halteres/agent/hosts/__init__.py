"""Agent hosts: programs whose agents call the tools, and what they must be told of us.

Owns: which hosts there are.
Never: writes (`change` does, once everything is planned).

    host          the nouns: a host, where its files lie, how its settings are written
    registration  what is written into a host's settings: how to start `halteres mcp`
    json_text, toml_text, yaml_text
                  edits of a settings file that leave every other byte of it as it was
    settings      one settings file: the change that registers us, the change that takes us out again
    copies        the skills in a host's folder
    change        a change of one file, made whole or not at all, with a backup
    install       all of it: a plan, which can be shown or carried out
    claude, codex, cursor, gemini, hermes, generic
                  one host each
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from halteres.agent.hosts.claude import CLAUDE
from halteres.agent.hosts.codex import CODEX
from halteres.agent.hosts.cursor import CURSOR
from halteres.agent.hosts.gemini import GEMINI
from halteres.agent.hosts.generic import GENERIC
from halteres.agent.hosts.hermes import HERMES
from halteres.agent.hosts.host import Host

HOSTS: Final[Mapping[str, Host]] = {host.name: host for host in (CLAUDE, CODEX, CURSOR, GEMINI, HERMES, GENERIC)}
