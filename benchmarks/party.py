"""How a benchmark's driver and its parties talk: one line `go` in, one JSON line out, one step at a
time.

Owns: that channel. Only the standard library: a party may live in an environment without Halteres.
Never: measures; the driver does, from outside, the same for every party.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


class Channel:
    """The party's side. What libraries print goes to standard error."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def say(self, **facts: Any) -> None:
        """One line to the driver."""
        self._answers.write(json.dumps(facts) + "\n")
        self._answers.flush()

    def wait(self) -> bool:
        """Wait for `go`; False where the driver is done."""
        return sys.stdin.readline() == "go\n"


def work() -> dict[str, Any]:
    """The work, as the driver wrote it on the command line."""
    return json.loads(sys.argv[1])
