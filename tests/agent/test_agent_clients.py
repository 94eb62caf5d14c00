"""`halteres install-agent`: each client's own command or JSON file, what stays, and that it can be
undone.

The commands of the clients are stand-ins here, which note how they were called; `tests/clients` has
the real ones.
"""

from __future__ import annotations

import json
import shlex
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml
from mcp import Client, StdioServerParameters

from halteres.agent.skills import skills
from halteres.agent.table import TOOLS

from .transports import body
from .user_home import UserHome, land

SCRIPT = str(Path(sysconfig.get_path("scripts"), "halteres"))
SKILLS = [skill.name for skill in skills()]

JSON_FILES = {
    ("claude", "--project"): "project/.mcp.json",
    ("cursor",): "home/.cursor/mcp.json",
    ("cursor", "--project"): "project/.cursor/mcp.json",
}
each_json_file = pytest.mark.parametrize(
    ("words", "file"), JSON_FILES.items(), ids=[" ".join(words) for words in JSON_FILES]
)
COMMANDS = {
    ("claude",): (
        ["claude", "mcp", "remove", "--scope", "user", "halteres"],
        ["claude", "mcp", "add", "--scope", "user", "halteres", "--", SCRIPT, "mcp"],
    ),
    ("codex",): (
        ["codex", "mcp", "remove", "halteres"],
        ["codex", "mcp", "add", "halteres", "--", SCRIPT, "mcp"],
    ),
    ("gemini",): (
        ["gemini", "mcp", "remove", "--scope", "user", "halteres"],
        [
            *("gemini", "mcp", "add", "--env", "HALTERES_LONGEST_WAIT_S=540", "--scope", "user"),
            *("halteres", SCRIPT, "--", "mcp"),
        ],
    ),
}
each_command = pytest.mark.parametrize(
    ("words", "called"), COMMANDS.items(), ids=[" ".join(words) for words in COMMANDS]
)
THEIRS = {"theme": "é", "mcpServers": {"time": {"command": "uvx", "args": ["mcp-server-time"]}}}


@pytest.fixture
def here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> UserHome:
    return land(tmp_path, monkeypatch, capsys)


def settings_file(here: UserHome, file: str, text: str | None = None) -> Path:
    """A client's settings file, with this in it if anything."""
    path = here.home.parent / file
    if text is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


def servers(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))["mcpServers"]


@each_json_file
def test_a_client_without_settings_gets_a_server_and_the_skills_and_loses_them_again(
    here: UserHome, words: tuple[str, ...], file: str
) -> None:
    report = here.install(*words)
    path = settings_file(here, file)
    entry = servers(path)["halteres"]
    assert (entry["command"], entry["args"]) == (SCRIPT, ["mcp"])
    own = (
        {"HALTERES_ENVIRONMENTS": str(here.project / "environments")}
        if "--project" in words
        else {}
    )
    assert entry.get("env", {}) == own
    assert report.done("wrote", path)
    assert "Next: " in report.out
    before = here.files()
    again = here.install(*words)
    assert here.files() == before
    assert again.done("already there", path)
    assert "wrote" not in again.out
    assert here.install(*words, "--remove").done("removed", path)
    assert list(here.home.iterdir()) == list(here.project.iterdir()) == []
    assert "nothing of ours is there" in here.install(*words, "--remove").out


@each_json_file
def test_what_else_is_in_a_json_file_stays(
    here: UserHome, words: tuple[str, ...], file: str
) -> None:
    path = settings_file(here, file, "\ufeff" + json.dumps(THEIRS))
    here.install(*words)
    now = json.loads(path.read_text(encoding="utf-8"))
    assert {**now, "mcpServers": {"time": now["mcpServers"]["time"]}} == THEIRS
    here.install(*words, "--remove")
    assert json.loads(path.read_text(encoding="utf-8")) == THEIRS


def test_what_a_user_added_to_our_entry_stays_when_it_is_brought_up_to_date(
    here: UserHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = {
        "command": "/old",
        "args": [],
        "env": {"HALTERES_HOME": "/old", "MINE": "1"},
        "disabled": True,
    }
    path = settings_file(
        here, "home/.cursor/mcp.json", json.dumps({"mcpServers": {"halteres": mine}})
    )
    monkeypatch.setenv("HALTERES_HOME", "/new")
    here.install("cursor")
    entry = servers(path)["halteres"]
    assert entry == {
        **mine,
        "command": SCRIPT,
        "args": ["mcp"],
        "env": {"MINE": "1", "HALTERES_HOME": "/new"},
    }


@pytest.mark.parametrize(
    "text",
    [
        '{"mcpServers": {}, // of mine\n}',
        '{"mcpServers":\n',
        "[]",
        '{"mcpServers": []}',
        '{"mcpServers": {"halteres": {"url": "http://127.0.0.1:1/mcp"}}}',
        '{"mcpServers": {"halteres": 3}}',
    ],
)
def test_a_file_that_cannot_be_edited_is_refused_and_left(here: UserHome, text: str) -> None:
    path = settings_file(here, "home/.cursor/mcp.json", text)
    ended = here.run("install-agent", "--client", "cursor")
    assert ended.code == 1
    assert str(path) in ended.err and "--print" in ended.err
    assert here.files() == {"home/.cursor/mcp.json": text.encode()}


@each_command
def test_a_client_with_a_command_is_registered_by_it(
    here: UserHome, words: tuple[str, ...], called: tuple[list[str], list[str]]
) -> None:
    remove, add = called
    report = here.install(*words)
    assert here.commands() == [remove, add]
    assert "ran" in report.out and "Next: " in report.out
    removed = here.install(*words, "--remove").out
    assert here.commands() == [remove, add, remove]
    assert outcome(removed, remove) == "removed"
    assert list(here.home.iterdir()) == []


def outcome(report: str, command: list[str]) -> str:
    """What is said of a removal by this command."""
    ending = f"halteres ({shlex.join(command)})"
    [line] = [one for one in report.splitlines() if one.endswith(ending)]
    return line.removesuffix(ending).strip()


ABSENT = {
    "claude": (1, 'No MCP server named "halteres" in user scope'),
    "codex": (0, "No MCP server named 'halteres' found."),
    "gemini": (0, 'Server "halteres" not found in user settings.'),
}
"""How each client's command ends where there is nothing to remove, and what it prints."""


def stand_in(here: UserHome, client: str, code: int, printed: str) -> None:
    """The client's command prints this and exits with that."""
    script = f"#!/bin/sh\necho {shlex.quote(printed)} >&2\nexit {code}\n"
    (here.commands_folder / client).write_text(script, encoding="utf-8")


@each_command
def test_a_removal_says_whether_the_server_was_registered(
    here: UserHome, words: tuple[str, ...], called: tuple[list[str], list[str]]
) -> None:
    stand_in(here, words[0], *ABSENT[words[0]])
    removed = here.install(*words, "--remove").out
    assert outcome(removed, called[0]) == "was not registered"
    assert "nothing of ours is there" not in removed


@each_command
def test_a_removal_that_fails_takes_the_skills_out_and_is_an_error_with_the_commands_words(
    here: UserHome, words: tuple[str, ...], called: tuple[list[str], list[str]]
) -> None:
    here.install(*words)
    stand_in(here, words[0], 3, "settings.json cannot be read")
    ended = here.run("install-agent", "--client", *words, "--remove")
    assert ended.code == 1
    assert "It exited with 3: settings.json cannot be read" in ended.err
    assert "removed" in ended.out and here.files() == {}


def test_what_the_user_set_is_handed_on(here: UserHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALTERES_HOME", "/a home")
    monkeypatch.setenv("HALTERES_ENVIRONMENTS", "/mine")
    for client in ("claude", "codex", "gemini"):
        here.install(client)
        *_, add = here.commands()
        env = [add[at + 1] for at, word in enumerate(add) if word == "--env"]
        assert env[:2] == ["HALTERES_HOME=/a home", "HALTERES_ENVIRONMENTS=/mine"]


def test_gemini_is_registered_for_one_project_and_codex_is_not(here: UserHome) -> None:
    here.install("gemini", "--project")
    *_, add = here.commands()
    assert f"HALTERES_ENVIRONMENTS={here.project}/environments" in add
    assert add[add.index("--scope") + 1] == "project"
    ended = here.run("install-agent", "--client", "codex", "--project")
    assert ended.code == 1 and "Leave --project out" in ended.err


def test_a_command_that_fails_is_an_error_with_its_words(here: UserHome) -> None:
    (here.commands_folder / "codex").write_text(
        "#!/bin/sh\necho no room >&2\nexit 3\n", encoding="utf-8"
    )
    ended = here.run("install-agent", "--client", "codex")
    assert ended.code == 1
    assert "It exited with 3: no room" in ended.err


def test_a_client_whose_command_is_missing_is_refused_before_anything_is_written(
    here: UserHome,
) -> None:
    (here.commands_folder / "gemini").unlink()
    ended = here.run("install-agent", "--client", "gemini")
    assert ended.code == 1
    assert "no command `gemini`" in ended.err
    assert here.files() == {}
    assert here.install("gemini", "--print").out.startswith("gemini mcp add ")


@pytest.mark.parametrize("words", [*JSON_FILES, *COMMANDS, ("hermes",), ("generic",)], ids=" ".join)
def test_print_shows_what_belongs_there_and_does_nothing(
    here: UserHome, words: tuple[str, ...]
) -> None:
    assert "halteres" in here.install(*words, "--print").out
    assert here.files() == {} and here.commands() == []
    here.install(*words)
    before, called = here.files(), here.commands()
    here.install(*words, "--remove", "--print")
    assert here.files() == before and here.commands() == called


@pytest.mark.parametrize("words", [*JSON_FILES, *COMMANDS, ("hermes",), ("generic",)], ids=" ".join)
def test_no_secret_reaches_a_file_a_command_or_the_screen(
    here: UserHome, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "OPENROUTER_API_KEY",
        "WANDB_API_KEY",
        "TINKER_API_KEY",
        "HALTERES_TOKEN",
        "HF_TOKEN",
    ):
        monkeypatch.setenv(name, "hunter2-and-more")
    ended = [here.install(*words, *more) for more in ((), ("--print",))]
    assert "hunter2" not in "".join(one.out + one.err for one in ended)
    assert "hunter2" not in str(here.commands())
    assert not any(b"hunter2" in held for held in here.files().values())


def test_any_other_client_gets_a_block_to_paste(here: UserHome) -> None:
    ended = here.install("generic", "--project")
    entry = json.loads(ended.out)["mcpServers"]["halteres"]
    assert entry["env"] == {"HALTERES_ENVIRONMENTS": str(here.project / "environments")}
    assert "put this block into your client's settings" in ended.err
    assert sorted(path.name for path in (here.project / ".agents" / "skills").iterdir()) == SKILLS
    here.install("generic", "--project", "--remove")
    assert list(here.project.iterdir()) == []


def test_hermes_is_shown_its_setting_and_nothing_of_it_is_edited(
    here: UserHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin brings its own skills, and is found by its entry point."""
    monkeypatch.setenv("HERMES_HOME", str(here.home / "hermes"))
    ended = here.install("hermes")
    assert yaml.safe_load(ended.out) == {"plugins": {"enabled": ["halteres"]}}
    assert f"{here.home}/hermes/config.yaml" in ended.out
    assert here.files() == {}
    ended = here.run("install-agent", "--client", "hermes", "--project")
    assert ended.code == 1 and "Leave --project out" in ended.err


def test_a_settings_folder_that_a_variable_names_has_the_skills(
    here: UserHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(here.home / "claude"))
    here.install("claude")
    assert (here.home / "claude" / "skills" / SKILLS[0]).is_dir()


def test_a_json_file_that_is_a_link_stays_one_and_keeps_its_permissions(here: UserHome) -> None:
    kept = here.home / "dotfiles" / "mcp.json"
    kept.parent.mkdir()
    kept.write_text('{"secret": "x"}', encoding="utf-8")
    kept.chmod(0o600)
    file = settings_file(here, "home/.cursor/mcp.json")
    file.parent.mkdir()
    file.symlink_to(kept)
    here.install("cursor")
    assert file.is_symlink() and "halteres" in kept.read_text(encoding="utf-8")
    assert kept.stat().st_mode & 0o777 == 0o600


def test_without_the_extra_nothing_is_installed(
    here: UserHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ended = here.run("install-agent", "--client", "codex")
    assert (ended.code, here.files(), here.commands()) == (1, {}, [])
    assert "pip install 'halteres[mcp]'" in ended.err


@pytest.mark.runs
async def test_what_is_written_starts_the_tools(here: UserHome) -> None:
    """As Claude Code does: the command, its arguments, a few of the user's variables and those of
    the entry.
    """
    assert here.run("init").code == 0
    here.install("claude", "--project")
    await _lists_the_tools_and_finds_the_example(here, here.project / ".mcp.json")


@pytest.mark.runs
async def test_without_a_script_the_module_is_started(
    here: UserHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(here.home))
    here.run("init")
    here.install("cursor", "--project")
    file = here.project / ".cursor" / "mcp.json"
    entry = servers(file)["halteres"]
    assert (entry["command"], entry["args"]) == (sys.executable, ["-m", "halteres", "mcp"])
    await _lists_the_tools_and_finds_the_example(here, file)


async def _lists_the_tools_and_finds_the_example(here: UserHome, file: Path) -> None:
    entry = servers(file)["halteres"]
    # Where ~/.halteres would be if HOME reached the server.
    env = {**entry["env"], "HALTERES_HOME": str(here.home / ".halteres")}
    server = StdioServerParameters(command=entry["command"], args=entry["args"], env=env)
    async with Client(server, mode="legacy") as client:
        listed = await client.list_tools()
        assert [tool.name for tool in listed.tools] == [tool.name for tool in TOOLS]
        found = body(await client.call_tool("rl_list_environments", {"query": "sums"}))
        assert [one["file_path"] for one in found["environments"]] == [
            str(Path(entry["env"]["HALTERES_ENVIRONMENTS"], "example.py"))
        ]
