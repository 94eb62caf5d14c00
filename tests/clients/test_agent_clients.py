"""The real commands of agent clients register our server as `halteres install-agent` runs them, and
take it out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HALTERES = str(Path(sys.executable).with_name("halteres"))

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(
        shutil.which("npm") is None, reason="npm, which brings the clients, is not installed"
    ),
]

CLIENTS = {
    "claude": ("@anthropic-ai/claude-code@2.1.197", ".claude.json"),
    "codex": ("@openai/codex@0.171.0", ".codex/config.toml"),
    "gemini": ("@google/gemini-cli@0.61.0", ".gemini/settings.json"),
}


def servers(file: Path) -> Any:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".toml":
        return tomllib.loads(text).get("mcp_servers", {})
    return json.loads(text).get("mcpServers", {})


@pytest.mark.parametrize("client", CLIENTS)
def test_its_own_command_registers_our_server_twice_alike_and_takes_it_out(
    client: str, tmp_path: Path
) -> None:
    package, settings = CLIENTS[client]
    install = subprocess.run(
        [ROOT / "scripts" / "npm-client", package],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        timeout=600,
    )
    if install.returncode != 0:
        pytest.skip(f"{package} could not be fetched from the npm registry")
    folder = install.stdout.strip()
    home = tmp_path / "home"
    home.mkdir()
    env = {
        "HOME": str(home),
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "HALTERES_HOME": str(tmp_path / "a home"),
    }

    def install_agent(*words: str) -> str:
        command = [HALTERES, "install-agent", "--client", client, *words]
        ended = subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=300
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    for _ in range(2):
        install_agent()
        entry = servers(home / settings)["halteres"]
        assert (entry["command"], entry["args"]) == (HALTERES, ["mcp"])
        assert entry["env"]["HALTERES_HOME"] == str(tmp_path / "a home")
    assert "was not registered" not in install_agent("--remove")
    assert "halteres" not in servers(home / settings)
    assert "was not registered" in install_agent("--remove")
