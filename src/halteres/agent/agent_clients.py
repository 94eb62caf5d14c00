"""Agent clients: how each is given our MCP server and our skills, and how both are taken out again.

Claude Code, Codex and Gemini CLI have a command that registers a server; it is run. Cursor's
settings, and the `.mcp.json` of a project, are JSON, in which one entry is set. Hermes loads our
plugin by its entry point, and any other client's settings are shown to be pasted: neither is
edited. No key is written, and nothing that lets tools run unasked.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from halteres.agent.skill_copies import FileChange, Step, content, file_step, skill_copies
from halteres.config import environ
from halteres.documents import DocumentError, decoded, parse_json
from halteres.errors import Conflict, InvalidConfig, ServerError, UserError

NAME: Final = "halteres"
HOME, ENVIRONMENTS, WAIT = "HALTERES_HOME", "HALTERES_ENVIRONMENTS", "HALTERES_LONGEST_WAIT_S"

SERVERS: Final = "mcpServers"
"""The object that lists MCP servers in JSON settings."""

COMMAND_S: Final = 120.0
"""How long a client's own command may take; Gemini's takes 12 s on two busy cores."""

NOT_REGISTERED: Final = re.compile(r"no \S*\s?mcp server|not found in \w+ settings", re.IGNORECASE)
"""What a client says that has no server to remove. Claude Code 2.1.197 exits with 1 then, Codex
0.171.0 and Gemini CLI 0.61.0 with 0; `tests/clients` holds it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServer:
    """How a client starts our server; never with a key in it."""

    command: str  # absolute
    args: tuple[str, ...]
    env: Mapping[str, str]  # HALTERES_HOME, HALTERES_ENVIRONMENTS, where they are not the default

    @property
    def entry(self) -> dict[str, Any]:
        """The entry in a client's JSON settings."""
        entry: dict[str, Any] = {"command": self.command, "args": list(self.args)}
        if self.env:
            entry["env"] = dict(self.env)
        return entry


class Registration(Protocol):
    """One way in which a client learns of a server."""

    def shown(self, server: McpServer) -> str:
        """What is run, written, or to be pasted."""
        ...

    def adding(self, server: McpServer) -> Step | None:
        """Register the server; None where that is left to the user."""
        ...

    def removing(self) -> Step | None:
        """Take our server out; None where it is not registered, or that is left to the user."""
        ...


class ClientCommandFailed(ServerError):
    """The command of an agent client that registers servers ended with an error."""

    code = "client_command_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRun:
    """A command of a client, and one before it whose failure does not matter."""

    may_fail: tuple[str, ...]
    command: tuple[str, ...]

    def make(self) -> None:
        """Run both.

        Raises:
            ClientCommandFailed: the command failed, with what it printed; or one of both took too
                long.
        """
        _run(self.may_fail)
        ended = _run(self.command)
        if ended.returncode != 0:
            raise _ended_with_error(ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalRun:
    """A client's command that takes our server out."""

    command: tuple[str, ...]

    def make(self) -> Step:
        """Run it; returns whether there was a server to remove.

        Raises:
            ClientCommandFailed: it failed for another reason, with what it printed; or it took too
                long.
        """
        ended = _run(self.command)
        how = shlex.join(self.command)
        if NOT_REGISTERED.search(ended.stdout):
            return Step(verb="absent", what=NAME, why=how)
        if ended.returncode != 0:
            raise _ended_with_error(ended)
        return Step(verb="remove", what=NAME, why=how)


def _run(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            timeout=COMMAND_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _command_failed(command, f"{error}.") from error


def _ended_with_error(ended: subprocess.CompletedProcess[str]) -> ClientCommandFailed:
    printed = " ".join(ended.stdout.split())[-300:]
    return _command_failed(ended.args, f"It exited with {ended.returncode}: {printed}")


def _command_failed(command: Sequence[str], why: str) -> ClientCommandFailed:
    next_ = "Run it by hand to see what it needs, then try again."
    return ClientCommandFailed(f"`{shlex.join(command)}` failed.", why, next_)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByCommand:
    """A client whose own command edits its settings."""

    add: Callable[[McpServer], tuple[str, ...]]
    remove: tuple[str, ...]

    def shown(self, server: McpServer) -> str:
        """The command that registers the server."""
        return shlex.join(self.add(server))

    def adding(self, server: McpServer) -> Step:
        """Remove an earlier registration, which Claude Code would not replace, and add this one."""
        self._require()
        run = CommandRun(may_fail=self.remove, command=self.add(server))
        return Step(verb="run", what=self.shown(server), changes=(run,))

    def removing(self) -> Step:
        """Run the client's command; that there was nothing to remove is no error."""
        self._require()
        run = RemovalRun(command=self.remove)
        return Step(verb="run", what=shlex.join(self.remove), changes=(run,))

    def _require(self) -> None:
        command = self.remove[0]
        if shutil.which(command) is None:
            raise UserError(
                f"There is no command `{command}` on PATH.",
                "It edits its client's settings, so that we need not.",
                "Install the client, or add --print to see what to run where it is.",
            )


@dataclass(frozen=True, slots=True)
class InJsonFile:
    """A client whose settings are JSON: one entry of `mcpServers` is ours, all else stays.

    Raises, in every method but `shown`:
        InvalidConfig: the file is not JSON; file and line are named.
        Conflict: it is, and has something else where our entry belongs.
        NotWritable: it cannot be read.
    """

    file: Path
    within: Path

    def shown(self, server: McpServer) -> str:
        """The entry, as it would stand in a file of its own."""
        return _json({SERVERS: {NAME: server.entry}})

    def adding(self, server: McpServer) -> Step:
        """Set our entry. Variables and other fields that a user added to it stay."""
        document = self._read()
        entry = self._servers(document).get(NAME, {})
        if not isinstance(entry, dict) or ("url" in entry and "command" not in entry):
            raise self._conflict(f"it has another server '{NAME}'")
        env = entry.get("env") or {}
        if not isinstance(env, dict):
            raise self._conflict("'env' of its entry is not an object")
        env = {name: value for name, value in env.items() if name not in (HOME, ENVIRONMENTS)}
        env.update(server.env)
        others = {name: value for name, value in entry.items() if name != "env"}
        document[SERVERS] = {**self._servers(document), NAME: {**others, **server.entry}}
        if env:
            document[SERVERS][NAME]["env"] = env
        return self._step(document)

    def removing(self) -> Step | None:
        """Remove our entry, and the file if nothing else is in it."""
        document = self._read()
        servers = self._servers(document)
        if NAME not in servers:
            return None
        del servers[NAME]
        if not servers:
            del document[SERVERS]
        return self._step(document)

    def _step(self, document: dict[str, Any]) -> Step:
        before = content(self.file)
        after: bytes | None = _json(document).encode()
        if not document:
            after = None
        elif before is not None and document == self._read():
            after = before
        change = FileChange(file=self.file, before=before, after=after, within=self.within)
        return file_step(self.file, change)

    def _read(self) -> dict[str, Any]:
        try:
            text = decoded(content(self.file) or b"")
            document = {}
            if text.strip():
                document = parse_json(text)
        except DocumentError as error:
            raise InvalidConfig(
                f"{self.file} cannot be read: {error}.",
                "Nothing was changed.",
                "Repair the file, then try again; or paste what --print shows.",
            ) from error
        if not isinstance(document, dict):
            raise self._conflict("it is not a JSON object")
        return document

    def _servers(self, document: dict[str, Any]) -> dict[str, Any]:
        servers = document.get(SERVERS, {})
        if not isinstance(servers, dict):
            raise self._conflict(f"'{SERVERS}' is not an object")
        return servers

    def _conflict(self, why: str) -> Conflict:
        return Conflict(
            f"{self.file} was left as it is: {why}.",
            "",
            ("Edit it by hand; --print shows what belongs there."),
        )


@dataclass(frozen=True, slots=True)
class ByHand:
    """A client whose settings we do not edit: the user is shown what belongs there."""

    text: Callable[[McpServer], str]

    def shown(self, server: McpServer) -> str:
        """What belongs in the client's settings."""
        return self.text(server)

    def adding(self, server: McpServer) -> Step | None:
        """Nothing to do here."""

    def removing(self) -> Step | None:
        """Nothing to do here."""


def this_server(project: Path | None, wait_s: int | None = None) -> McpServer:
    """The server of this installation. A project's agents find the environments in its folder
    `environments`.

    Args:
        project: the folder of the project; None for all that the user does.
        wait_s: how long a call may wait, a little less than the client's own time-out, where that
            is longer than our default.
    """
    script = Path(sysconfig.get_path("scripts"), NAME)
    command, args = sys.executable, ("-m", NAME)
    if script.is_file() and os.access(script, os.X_OK):
        command, args = str(script), ()
    env: dict[str, str] = {}
    # Clients start their servers with few of the user's variables: what the user set must be handed
    # on.
    if environ.is_set(HOME):
        env[HOME] = str(environ.home())
    # The last folder follows from the home.
    *folders, _ = environ.environment_folders()
    if project:
        folders.insert(0, project / "environments")
    if folders:
        env[ENVIRONMENTS] = os.pathsep.join(dict.fromkeys(map(str, folders)))
    if wait_s:
        env[WAIT] = str(wait_s)
    return McpServer(command=command, args=(*args, "mcp"), env=env)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one client is registered and looks for skills: for one user, or within one project."""

    registration: Registration
    skills: Path | None  # None: the client gets them in another way
    within: Path  # this folder is never removed, however empty
    then: str  # what the user does next


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentClient:
    """One agent client."""

    name: str  # as --client has it
    title: str
    place: Callable[[Path | None], Place]  # of a project's folder, or of the user. Raises UserError
    wait_s: int | None = None  # see `this_server`
    mcp_name: str = ""  # how its name begins in the MCP handshake, where `wait_s` is known


def _claude(project: Path | None) -> Place:
    if project:
        return Place(
            registration=InJsonFile(project / ".mcp.json", project),
            skills=project / ".claude" / "skills",
            within=project,
            then=(
                "start Claude Code in this folder and approve the server `halteres` when it asks; "
                "/mcp shows it."
            ),
        )
    scope = ("--scope", "user")

    def add(server: McpServer) -> tuple[str, ...]:
        env = _flags("--env", server)
        return ("claude", "mcp", "add", *scope, NAME, *env, "--", server.command, *server.args)

    own = environ.claude_config_dir()
    return Place(
        registration=ByCommand(add=add, remove=("claude", "mcp", "remove", *scope, NAME)),
        skills=(own or Path.home() / ".claude") / "skills",
        within=own or Path.home(),
        then="restart Claude Code; /mcp shows the server.",
    )


def _codex(project: Path | None) -> Place:
    """Its command knows the user's settings alone, and sets no time-outs: its own are 10 s for a
    start, 60 s for a call.
    """
    if project:
        raise UserError(
            "Codex is set up for all projects at once.",
            "`codex mcp add` does not edit the settings of one project.",
            "Leave --project out, in this folder: export HALTERES_ENVIRONMENTS=$PWD/environments "
            "first.",
        )

    def add(server: McpServer) -> tuple[str, ...]:
        return (
            "codex",
            "mcp",
            "add",
            NAME,
            *_flags("--env", server),
            "--",
            server.command,
            *server.args,
        )

    return Place(
        registration=ByCommand(add=add, remove=("codex", "mcp", "remove", NAME)),
        # `$CODEX_HOME/skills` is deprecated (codex-rs, core-skills/src/loader.rs).
        skills=Path.home() / ".agents" / "skills",
        within=Path.home(),
        then="restart Codex; /mcp shows the server.",
    )


def _cursor(project: Path | None) -> Place:
    root = project or Path.home()
    return Place(
        registration=InJsonFile(root / ".cursor" / "mcp.json", root),
        # Only newer versions read `.agents/skills`.
        skills=root / ".cursor" / "skills",
        within=root,
        then="open Cursor's settings, Tools & MCP, and switch `halteres` on if it is off.",
    )


def _gemini(project: Path | None) -> Place:
    scope = ("--scope", "project" if project else "user")

    def add(server: McpServer) -> tuple[str, ...]:
        # Options first: behind the server's command they would be taken for its arguments.
        return (
            "gemini",
            "mcp",
            "add",
            *_flags("--env", server),
            *scope,
            NAME,
            server.command,
            "--",
            *server.args,
        )

    root = project or Path.home()
    return Place(
        registration=ByCommand(add=add, remove=("gemini", "mcp", "remove", *scope, NAME)),
        # It prefers this folder to its own, and shares the copies with Codex.
        skills=root / ".agents" / "skills",
        within=root,
        then="restart Gemini CLI here; /mcp shows the server.",
    )


def _hermes(project: Path | None) -> Place:
    """The plugin brings skills of its own, and gives the tools their old names."""
    if project:
        raise UserError(
            "Hermes has no settings of a project.",
            ("It reads its config.yaml alone."),
            "Leave --project out.",
        )
    then = (
        "`pip install 'halteres[mcp]'` in Hermes's own environment, if it is not this one; "
        "then restart Hermes."
    )
    return Place(registration=ByHand(_hermes_settings), skills=None, within=Path.home(), then=then)


def _hermes_settings(server: McpServer) -> str:
    file = (environ.hermes_home() or Path.home() / ".hermes") / "config.yaml"
    return (
        f"# In {file}; the plugin is found where Halteres is installed.\nplugins:\n  "
        f"enabled:\n    - {NAME}\n"
    )


def _any(project: Path | None) -> Place:
    root = project or Path.home()
    return Place(
        registration=ByHand(lambda server: _json({SERVERS: {NAME: server.entry}})),
        # The folder that the Agent Skills format names.
        skills=root / ".agents" / "skills",
        within=root,
        then="put this block into your client's settings, and restart it.",
    )


_ALL = (
    AgentClient(name="claude", title="Claude Code", place=_claude),
    AgentClient(name="codex", title="Codex", place=_codex),
    AgentClient(name="cursor", title="Cursor", place=_cursor),
    # Its own time-out of a call is ten minutes.
    AgentClient(
        name="gemini",
        title="Gemini CLI",
        place=_gemini,
        wait_s=540,
        mcp_name="gemini-cli-mcp-client",
    ),
    AgentClient(name="hermes", title="Hermes Agent", place=_hermes),
    AgentClient(name="generic", title="Any MCP client", place=_any),
)
CLIENTS: Final[Mapping[str, AgentClient]] = {client.name: client for client in _ALL}


def host_wait_s(mcp_name: str) -> int | None:
    """How long a call of the MCP client of this name may wait, in seconds; None: not known, or no
    longer than usual.
    """
    for client in _ALL:
        if client.mcp_name and mcp_name.startswith(client.mcp_name):
            return client.wait_s
    return None


@dataclass(frozen=True, slots=True)
class Installation:
    """Our server and skills in one client: of a project (its folder, absolute), or of the user.

    Raises, in every method:
        UserError: the client has no such place; its command is missing; its settings are broken.
    """

    client: AgentClient
    project: Path | None = None

    @property
    def place(self) -> Place:
        """Where the client is registered and looks for skills."""
        return self.client.place(self.project)

    def adding(self) -> tuple[Step, ...]:
        """Skills first: the registration is what switches us on."""
        place = self.place
        registered = place.registration.adding(self._server())
        copies = ()
        if place.skills:
            copies = skill_copies(place.skills, place.within)
        steps = [copy.adding(self.client.name) for copy in copies]
        if registered:
            return (*steps, registered)
        return tuple(steps)

    def removing(self) -> tuple[Step, ...]:
        """Remove what is ours, the copies first: a client's command may fail. No step where nothing
        of ours is.
        """
        place = self.place
        registered = place.registration.removing()
        copies = ()
        if place.skills:
            copies = skill_copies(place.skills, place.within)
        steps = [*(copy.removing(self.client.name) for copy in copies), registered]
        return tuple(step for step in steps if step)

    def shown(self) -> str:
        """What is run for the client, written into its settings, or to be pasted there."""
        return self.place.registration.shown(self._server())

    def _server(self) -> McpServer:
        return this_server(self.project, self.client.wait_s)


def carry_out(steps: tuple[Step, ...]) -> Iterator[Step]:
    """Make every change, in order; yields each step once it is made, as it turned out. What was
    made before one fails stays; the same command again does the rest.

    Raises:
        NotWritable, ClientCommandFailed: of the first change that cannot be made.
    """
    for step in steps:
        outcomes = [change.make() for change in step.changes]
        yield next(filter(None, outcomes), step)


def _flags(flag: str, server: McpServer) -> tuple[str, ...]:
    return tuple(word for name, value in server.env.items() for word in (flag, f"{name}={value}"))


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
