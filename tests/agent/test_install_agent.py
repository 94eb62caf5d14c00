"""`halteres install-agent`: what it writes for each host, what it leaves alone, and that it can be undone."""

from __future__ import annotations

import json
import stat
import sys
import sysconfig
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from mcp import Client, StdioServerParameters

from halteres.agent.agent_clients import MARKER
from halteres.agent.client_settings import BACKUP, Change
from halteres.agent.skills import skills
from halteres.agent.table import TOOLS
from halteres.errors import Conflict

from .transports import body
from .user_home import CODEX, HERMES, HOSTS, UserHome, Written, land

SCRIPT = str(Path(sysconfig.get_path("scripts"), "halteres"))
SKILLS = [skill.name for skill in skills()]

each_host = pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS.keys())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> UserHome:
    return land(tmp_path, monkeypatch, capsys)


def settled(here: UserHome, host: Written, text: str | None = None) -> Path:
    """The host's settings file, with this in it if anything."""
    file = here.home.parent / host.file
    if text is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    return file


WAITS = {client: {"HALTERES_LONGEST_WAIT_S": seconds} for client, seconds in {"codex": "280", "gemini": "540"}.items()}
"""How long a call may wait in hosts whose time-out is known."""


@each_host
def test_a_host_without_settings_gets_a_server_and_the_skills_and_loses_them_again(
    here: UserHome, host: Written
) -> None:
    told = here.install(host.client, *host.scope)
    file = settled(here, host)
    entry = host.servers(file.read_text())["halteres"]
    assert (entry["command"], entry["args"]) == (SCRIPT, ["mcp"])
    own = {"HALTERES_ENVIRONMENTS": str(here.project / "environments")} if host.scope else {}
    assert entry.get("env", {}) == {**own, **WAITS.get(host.client, {})}
    assert told.done("wrote", file)
    for skill in skills():
        copied = here.home.parent / host.skills / skill.name / "SKILL.md"
        assert copied.read_bytes() == skill.file.read_bytes()
        assert told.done("wrote", copied.parent)
    assert "Next: " in told.out
    before = here.files()
    again = here.install(host.client, *host.scope)
    assert here.files() == before
    assert again.done("already there", file) and "wrote" not in again.out and "updated" not in again.out
    gone = here.install(host.client, *host.scope, "--remove")
    assert gone.done("removed", file)
    assert list(here.home.iterdir()) == list(here.project.iterdir()) == []
    assert "nothing of ours is there" in here.install(host.client, *host.scope, "--remove").out


@each_host
def test_what_somebody_wrote_stays_and_comes_back_to_the_byte(here: UserHome, host: Written) -> None:
    file = settled(here, host, host.full)
    before, was = here.files(), host.servers(host.full)
    told = here.install(host.client, *host.scope)
    text = file.read_bytes().decode()
    assert host.servers(text) == {**was, "halteres": host.servers(text)["halteres"]}
    assert comments(text) == comments(host.full)
    backup = file.with_name(file.name + BACKUP)
    assert backup.read_bytes() == host.full.encode()
    assert told.done("as it was:", backup) and told.done("updated", file)
    here.install(host.client, *host.scope, "--remove")
    assert here.files() == before


def comments(text: str) -> list[str]:
    """Comments in their order, and what stands in front of each."""
    return [" ".join(line.split()) for line in text.splitlines() if "#" in line]


@each_host
def test_what_somebody_adds_afterwards_stays_when_we_go(here: UserHome, host: Written) -> None:
    file = settled(here, host, host.full)
    here.install(host.client, *host.scope)
    mixed = host.with_mine(file.read_bytes().decode())
    file.write_bytes(mixed.encode())
    here.install(host.client, *host.scope, "--remove")
    text = file.read_bytes().decode()
    assert host.servers(text) == {**host.servers(host.full), "mine": {"command": "m"}}
    assert comments(text) == comments(mixed)
    assert file.with_name(file.name + BACKUP).exists()  # it is not what the file is now: somebody may want it


@each_host
def test_our_entry_is_brought_up_to_date_and_keeps_what_somebody_wrote_into_it(
    here: UserHome, host: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALTERES_HOME", str(here.home / "old"))
    here.install(host.client, *host.scope)
    file = settled(here, host)
    old = file.read_text().replace(SCRIPT, "/elsewhere/halteres").replace("120", "300  # mine")
    file.write_text(old.replace('"command": ', '"disabled": true, "command": '))
    notes = file.read_text().count("# mine")
    first = host.servers(file.read_text())["halteres"]
    assert first["env"]["HALTERES_HOME"] == str(here.home / "old")
    monkeypatch.delenv("HALTERES_HOME")
    monkeypatch.setenv("HALTERES_ENVIRONMENTS", "/some/folder")
    assert here.install(host.client, *host.scope).done("updated", file)
    now = host.servers(file.read_text())["halteres"]
    own = f"{here.project / 'environments'}:" if host.scope else ""
    assert file.read_text().count("# mine") == notes
    assert now == {
        **first,
        "command": SCRIPT,
        "env": {**WAITS.get(host.client, {}), "HALTERES_ENVIRONMENTS": f"{own}/some/folder"},
    }
    assert not file.with_name(file.name + BACKUP).exists()  # what was there before us was nothing


BROKEN = {
    "claude": [('{\n "a": 1,\n "mcpServers" {}\n}', 3), ('{\n // mine\n "a": 1}', 2), ('{"a": 1,}', 1), ("[]", 1)],
    "codex": [('a = 1\n[mcp_servers\nb = "c"\n', 2), ("a = ", 1), ('a = """\n', 1)],
    "hermes": [("a: 1\nb: [\n", 3), ("a: 1\n\tb: 2\n", 2), ("- a\n", 1)],
}


@pytest.mark.parametrize(
    ("client", "text", "line"), [(client, text, line) for client, cases in BROKEN.items() for text, line in cases]
)
@pytest.mark.parametrize("more", [(), ("--remove",), ("--print",)])
def test_a_broken_file_is_refused_with_its_line_and_nothing_is_changed(
    here: UserHome, client: str, text: str, line: int, more: tuple[str, ...]
) -> None:
    file = settled(here, HOSTS[client], text)
    before = here.files()
    told = here.run("install-agent", "--client", client, *more)
    assert told.code == 1 and told.err.startswith(f"error: {file}:{line} cannot be read: ")
    assert "Traceback" not in told.err
    assert here.files() == before


def test_a_file_that_is_no_text_is_refused(here: UserHome) -> None:
    file = settled(here, HOSTS["cursor"])
    file.parent.mkdir()
    file.write_bytes(b'{\n"a": "\xff"}')
    told = here.run("install-agent", "--client", "cursor")
    assert (told.code, f"{file}:2 cannot be read: it is no UTF-8" in told.err) == (1, True)


UNSAFE = [
    ("cursor", '{"mcpServers": ["a"]}'),
    ("cursor", '{"mcpServers": {"halteres": {"url": "http://127.0.0.1:8765/mcp"}}}'),
    ("codex", 'text = """\n[mcp_servers.halteres]\n"""\n[[mcp_servers]]\na = 1\n'),
    ("hermes", "base: &base\n  time: {command: uvx}\nmcp_servers: *base\n"),
]


@pytest.mark.parametrize(("client", "text"), UNSAFE)
def test_what_cannot_be_edited_without_harm_is_left_and_the_entry_is_shown_instead(
    here: UserHome, client: str, text: str
) -> None:
    file = settled(here, HOSTS[client], text)
    before = here.files()
    told = here.run("install-agent", "--client", client)
    assert told.code == 1 and told.err.startswith(f"error: {file} was left as it is: ")
    assert here.files() == before


@pytest.mark.parametrize(
    ("client", "text"),
    [
        ("codex", 'mcp_servers = { time = { command = "uvx" } }\n'),
        ("hermes", "mcp_servers: {time: {command: uvx}}\n"),
        ("hermes", "{model: x, mcp_servers: {time: {command: uvx}}}\n"),
    ],
)
def test_servers_in_braces_get_ours_among_them(here: UserHome, client: str, text: str) -> None:
    file = settled(here, HOSTS[client], text)
    here.install(client)
    written = file.read_text()
    assert "uvx" in written and SCRIPT in written
    here.install(client, "--remove")
    assert file.read_text() == text


def test_a_byte_order_mark_and_line_ends_of_windows_stay(here: UserHome) -> None:
    file = settled(here, HOSTS["gemini"], "\ufeff" + HOSTS["gemini"].full)
    here.install("gemini")
    text = file.read_bytes().decode()
    assert text.startswith("\ufeff{\r\n") and text.count("\n") == text.count("\r\n")


@each_host
def test_print_shows_the_entry_and_writes_nothing(here: UserHome, host: Written) -> None:
    file = settled(here, host, host.full)
    before = here.files()
    told = here.install(host.client, *host.scope, "--print")
    assert host.servers(told.out)["halteres"]["command"] == SCRIPT
    assert "would update" in told.err and str(file) in told.err
    assert "uvx" not in told.out + told.err  # whatever else is in the file may be nobody's business
    assert here.files() == before
    assert "nothing of ours is there" in here.install(host.client, *host.scope, "--remove", "--print").out
    here.install(host.client, *host.scope)
    before = here.files()
    assert "would remove" in here.install(host.client, *host.scope, "--remove", "--print").out
    assert here.files() == before


def test_any_other_host_gets_a_block_to_paste(here: UserHome) -> None:
    told = here.install("generic", "--project")
    entry = json.loads(told.out)["mcpServers"]["halteres"]
    assert entry["env"] == {"HALTERES_ENVIRONMENTS": str(here.project / "environments")}
    assert "put this block into your host's settings" in told.err
    assert sorted(path.name for path in (here.project / ".agents" / "skills").iterdir()) == SKILLS
    here.install("generic", "--project", "--remove")
    assert list(here.project.iterdir()) == []


@each_host
def test_no_secret_reaches_a_file_or_the_screen(here: UserHome, host: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENROUTER_API_KEY", "WANDB_API_KEY", "TINKER_API_KEY", "HALTERES_TOKEN", "HF_TOKEN"):
        monkeypatch.setenv(name, "hunter2-and-more")
    told = [here.install(host.client, *host.scope, *more) for more in ((), ("--print",))]
    assert "hunter2" not in "".join(one.out + one.err for one in told)
    assert not any(b"hunter2" in held or b"API_KEY" in held for held in _settings(here).values())


def _settings(here: UserHome) -> dict[str, bytes]:
    return {name: held for name, held in here.files().items() if not name.endswith("SKILL.md")}


def test_the_variables_of_hosts_say_where_their_settings_are(here: UserHome, monkeypatch: pytest.MonkeyPatch) -> None:
    for client, variable, file in (
        ("claude", "CLAUDE_CONFIG_DIR", ".claude.json"),
        ("codex", "CODEX_HOME", "config.toml"),
        ("hermes", "HERMES_HOME", "config.yaml"),
    ):
        monkeypatch.setenv(variable, str(here.home / client))
        here.install(client)
        assert b"halteres" in (here.home / client / file).read_bytes()
    assert (here.home / "claude" / "skills" / SKILLS[0]).is_dir()
    assert (here.home / "hermes" / "skills" / SKILLS[0]).is_dir()


def test_permissions_and_links_of_a_file_stay(here: UserHome) -> None:
    file = settled(here, HOSTS["claude"])
    kept = here.home / "dotfiles" / "claude.json"
    kept.parent.mkdir()
    kept.write_text('{"secret": "x"}')
    kept.chmod(0o600)
    file.symlink_to(kept)
    here.install("claude")
    assert file.is_symlink() and "halteres" in kept.read_text()
    backup = file.with_name(file.name + BACKUP)
    assert [stat.S_IMODE(one.stat().st_mode) for one in (kept, backup)] == [0o600, 0o600]
    here.install("claude", "--remove")
    assert file.is_symlink() and kept.read_text() == '{"secret": "x"}' and not backup.exists()


def test_a_backup_is_made_once(here: UserHome, monkeypatch: pytest.MonkeyPatch) -> None:
    file = settled(here, HOSTS["codex"], CODEX)
    here.install("codex")
    monkeypatch.setenv("HALTERES_HOME", "/somewhere/else")
    here.install("codex")
    assert file.with_name(file.name + BACKUP).read_text() == CODEX
    here.install("codex", "--remove")
    assert file.read_text() == CODEX


def test_a_file_that_changes_while_we_work_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    change = Change(file=file, before=None, after=b"{}")
    file.write_text('{"by": "somebody"}')
    with pytest.raises(Conflict, match="changed just now"):
        change.make()
    assert file.read_text() == '{"by": "somebody"}'


def test_a_folder_that_cannot_be_written_is_one_sentence(here: UserHome) -> None:
    (here.home / ".codex").write_text("a file where a folder must be")
    told = here.run("install-agent", "--client", "codex")
    assert told.code == 1 and told.err.startswith(f"error: {here.home}/.codex/config.toml cannot be used. Not a direct")


class TestSkills:
    def test_one_that_somebody_edited_is_neither_overwritten_nor_removed(self, here: UserHome) -> None:
        here.install("claude")
        mine = here.home / ".claude" / "skills" / "train-with-rl" / "SKILL.md"
        mine.write_text("My own way.")
        assert f"{mine.parent} (edited since it was installed)" in here.install("claude").out
        assert f"{mine.parent} (edited since it was installed)" in here.install("claude", "--remove").out
        assert [path.name for path in mine.parent.parent.iterdir()] == ["train-with-rl"]
        assert mine.read_text() == "My own way." and [path.name for path in mine.parent.iterdir()] == ["SKILL.md"]

    def test_one_of_the_same_name_that_is_not_ours_stays(self, here: UserHome) -> None:
        theirs = here.home / ".claude" / "skills" / "debug-a-run" / "SKILL.md"
        theirs.parent.mkdir(parents=True)
        theirs.write_text("Somebody else's.")
        assert f"{theirs.parent} (there is another one of this name)" in here.install("claude").out
        here.install("claude", "--remove")
        assert [*here.files().values()] == [b"Somebody else's."]

    def test_an_older_copy_of_ours_is_brought_up_to_date(self, here: UserHome, monkeypatch: pytest.MonkeyPatch) -> None:
        older = here.home / "package"
        for name in SKILLS:
            (older / name).mkdir(parents=True)
            (older / name / "SKILL.md").write_text(f"---\nname: {name}\ndescription: d\n---\nAs it was.\n")
            (older / name / "notes.md").write_text("No longer part of it.")
        with monkeypatch.context() as patch:
            patch.setattr("halteres.agent.skills.FOLDER", older)
            here.install("codex")
        told = here.install("codex")
        for skill in skills():
            copied = here.home / ".agents" / "skills" / skill.name
            assert told.done("updated", copied)
            assert sorted(path.name for path in copied.iterdir()) == [MARKER, "SKILL.md"]
            assert (copied / "SKILL.md").read_bytes() == skill.file.read_bytes()

    def test_a_copy_that_two_hosts_read_goes_with_the_second(self, here: UserHome) -> None:
        here.install("codex")
        assert here.install("gemini").done("already there", here.home / ".agents" / "skills" / SKILLS[0])
        assert "(it is for codex too)" in here.install("gemini", "--remove").out
        assert (here.home / ".agents" / "skills" / SKILLS[0] / "SKILL.md").is_file()
        here.install("codex", "--remove")
        assert list(here.home.iterdir()) == []


class TestHermes:
    @pytest.fixture(autouse=True)
    def hermes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As if Hermes were in this environment."""
        module = types.ModuleType("hermes_cli")
        module.__spec__ = sys.__spec__
        monkeypatch.setitem(sys.modules, "hermes_cli", module)

    ENABLED = (
        HERMES,
        "",
        "plugins:\n  enabled: [disk-cleanup]\n",
        "plugins:\n  enabled: []  # none yet\n",
        "plugins:\n  disabled: [x]\n",
        "plugins:\n",
    )

    @pytest.mark.parametrize("text", ENABLED)
    def test_the_plugin_is_enabled_beside_others_and_disabled_again(self, here: UserHome, text: str) -> None:
        file = settled(here, HOSTS["hermes"], text)
        was = yaml.safe_load(text) or {}
        here.install("hermes", "--plugin")
        now = yaml.safe_load(file.read_text())
        others = (was.get("plugins") or {}).get("enabled") or []
        assert now["plugins"]["enabled"] == ["halteres", *others]
        assert "halteres" not in now.get("mcp_servers", {})
        assert not (here.home / ".hermes" / "skills").exists()  # the plugin brings them
        before = here.files()
        here.install("hermes", "--plugin")
        assert here.files() == before
        here.install("hermes", "--remove")
        assert file.read_text() == text and [*here.files()] == [HOSTS["hermes"].file]

    def test_one_way_in_takes_the_place_of_the_other(self, here: UserHome) -> None:
        """Or the agent would have every tool twice."""
        file = settled(here, HOSTS["hermes"], HERMES)
        here.install("hermes")
        here.install("hermes", "--plugin")
        now = yaml.safe_load(file.read_text())
        assert list(now["mcp_servers"]) == ["time"] and now["plugins"]["enabled"] == ["halteres", "disk-cleanup"]
        here.install("hermes")
        now = yaml.safe_load(file.read_text())
        assert list(now["mcp_servers"]) == ["halteres", "time"] and now["plugins"]["enabled"] == ["disk-cleanup"]
        here.install("hermes", "--plugin", "--remove")
        assert file.read_text() == HERMES

    def test_the_plugin_needs_hermes_in_the_same_environment(
        self, here: UserHome, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delitem(sys.modules, "hermes_cli")
        told = here.run("install-agent", "--client", "hermes", "--plugin")
        assert told.code == 1 and "Hermes is not installed in" in told.err
        assert here.files() == {}

    def test_it_has_no_settings_of_a_project(self, here: UserHome) -> None:
        told = here.run("install-agent", "--client", "hermes", "--project")
        assert (told.code, here.files()) == (1, {})
        assert told.err == (
            "error: Hermes has no settings of a project. It reads its config.yaml alone. Leave --project out.\n"
        )


def test_the_plugin_is_for_hermes(here: UserHome) -> None:
    told = here.run("install-agent", "--client", "codex", "--plugin")
    assert (told.code, here.files()) == (1, {})
    assert told.err.startswith("error: --plugin is for Hermes.")


def test_without_the_extra_nothing_is_installed(here: UserHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    told = here.run("install-agent", "--client", "codex")
    assert (told.code, here.files()) == (1, {})
    assert "pip install 'halteres[mcp]'" in told.err


@pytest.mark.runs
async def test_what_is_written_starts_the_tools(here: UserHome) -> None:
    """As Codex does: the command, its arguments, a few variables of the user's and those of the entry."""
    assert here.run("init").code == 0
    here.install("codex", "--project")
    entry = tomllib.loads((here.project / ".codex" / "config.toml").read_text())["mcp_servers"]["halteres"]
    home = {"HALTERES_HOME": str(here.home / ".halteres")}  # where ~/.halteres is, if HOME reached the server
    await _lists_the_tools_and_finds_the_example(entry, home)


@pytest.mark.runs
async def test_without_a_script_the_module_is_started(here: UserHome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(here.home))
    here.run("init")
    here.install("cursor", "--project")
    entry = json.loads((here.project / ".cursor" / "mcp.json").read_text())["mcpServers"]["halteres"]
    assert (entry["command"], entry["args"]) == (sys.executable, ["-m", "halteres", "mcp"])
    await _lists_the_tools_and_finds_the_example(entry, {"HALTERES_HOME": str(here.home / ".halteres")})


async def _lists_the_tools_and_finds_the_example(entry: dict[str, Any], home: dict[str, str]) -> None:
    server = StdioServerParameters(command=entry["command"], args=entry["args"], env={**entry["env"], **home})
    async with Client(server, mode="legacy") as client:
        listed = await client.list_tools()
        assert [tool.name for tool in listed.tools] == [tool.name for tool in TOOLS]
        found = body(await client.call_tool("rl_list_environments", {"query": "sums"}))
        assert [one["file_path"] for one in found["environments"]] == [
            str(Path(entry["env"]["HALTERES_ENVIRONMENTS"], "example.py"))
        ]
