"""What is written into a host's settings: how to start `halteres mcp`.

Owns: the command of this installation, the variables that go with it, the entry among a host's servers.
Never: writes a key, nor any variable but our own three; changes what somebody else wrote into our entry.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from halteres.agent.hosts.host import CannotEdit, Drop, Edit, Keys, Put, Server, Settings
from halteres.config import environ

NAME: Final = "halteres"
HOME, ENVIRONMENTS, WAIT = "HALTERES_HOME", "HALTERES_ENVIRONMENTS", "HALTERES_LONGEST_WAIT_S"


def this_server(project: Path | None) -> Server:
    """The server of this installation. A project's agents find the environments in its folder `environments`."""
    command, *args = _program()
    return Server(command=command, args=(*args, "mcp"), env=dict(_variables(project)))


def _program() -> tuple[str, ...]:
    script = Path(sysconfig.get_path("scripts"), NAME)
    if script.is_file() and os.access(script, os.X_OK):
        return (str(script),)
    return (sys.executable, "-m", NAME)


def _variables(project: Path | None) -> Iterator[tuple[str, str]]:
    """Hosts start their servers with few variables of the user's: what was set by hand must be handed on."""
    if environ.is_set(HOME):
        yield HOME, str(environ.home())
    *folders, _ = environ.environment_folders()  # the last one follows from the home
    own = [project / "environments"] if project else []
    if folders := list(dict.fromkeys(map(str, [*own, *folders]))):
        yield ENVIRONMENTS, os.pathsep.join(folders)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEntry:
    """Our entry among a host's MCP servers."""

    among: Keys  # where the host lists its servers
    once: Mapping[str, Any] = field(default_factory=dict)  # said when the entry is made; whoever changes it later, may
    longest_wait_s: int | None = None  # a little less than the host gives a call, where that is known; said once, too

    @property
    def keys(self) -> Keys:
        """Where the entry is."""
        return (*self.among, NAME)

    def enter(self, settings: Settings, server: Server) -> Sequence[Edit]:
        """Command, arguments and our two variables are as they must be; whatever else stands there stays."""
        there = value_at(settings, self.keys)
        if there is None:
            wait = {WAIT: str(self.longest_wait_s)} if self.longest_wait_s else {}
            env = {"env": {**server.env, **wait}} if server.env or wait else {}
            return [Put(self.keys, {"command": server.command, "args": list(server.args), **self.once, **env})]
        if not isinstance(there, dict) or "command" not in there:
            raise CannotEdit(f"It has a server '{NAME}' that is not started by a command, so not one of ours")
        return [*self._command(there, server), *self._env(there, server)]

    def leave(self, settings: Settings) -> Sequence[Edit]:
        """Without the entry."""
        return [Drop(self.keys)] if value_at(settings, self.keys) is not None else []

    def carried(self, settings: Settings) -> Sequence[Edit]:
        """The entry as it stands."""
        there = value_at(settings, self.keys)
        return [] if there is None else [Put(self.keys, there)]

    def _command(self, there: Settings, server: Server) -> Iterator[Edit]:
        for name, value in (("command", server.command), ("args", list(server.args))):
            if there.get(name) != value:
                yield Put((*self.keys, name), value)

    def _env(self, there: Settings, server: Server) -> Iterator[Edit]:
        env = there.get("env") or {}
        for name in (HOME, ENVIRONMENTS):
            wanted, keys = server.env.get(name), (*self.keys, "env", name)
            if wanted is not None and env.get(name) != wanted:
                yield Put(keys, wanted)
            elif wanted is None and name in env:
                yield Drop(keys)


def value_at(settings: Settings, keys: Keys) -> Any:
    """What stands there; None where nothing does."""
    value: Any = settings
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
