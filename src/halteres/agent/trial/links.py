"""Links to a test's files under the names that the seeds gave them: inference_tests/test_{environment}_{model}.*

Owns: those links below H/logs, and below HERMES_HOME/logs/rl_training where that is set; the newest test has them.
Never: fails a test because of a link; touches what is no link.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from halteres.agent.trial.folder import TestFolder
from halteres.agent.trial.request import Request
from halteres.config import environ


def link_test(folder: TestFolder, request: Request) -> None:
    """Make the links. What they lead to may not be there yet."""
    hermes = environ.hermes_home()
    for logs in (environ.home() / "logs", *((hermes / "logs" / "rl_training",) if hermes else ())):
        for one in request.candidates:
            for file in (folder.groups(one), folder.log(one)):
                _link(logs / "inference_tests" / file.name, file)


def _link(link: Path, target: Path) -> None:
    with contextlib.suppress(OSError):  # the folder is not ours to write
        link.parent.mkdir(parents=True, exist_ok=True)
        if link.is_symlink():
            link.unlink()
        link.symlink_to(target)
