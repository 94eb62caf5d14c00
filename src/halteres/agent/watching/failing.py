"""How a run failed, in the words of an answer.

Owns: the sentence with its remedy, the exit, the end of the log, the checkpoint to go on from.
Never: says which call comes next (`following`).
"""

from __future__ import annotations

import json
import re
from typing import Any

from halteres.agent.shortening import clipped
from halteres.agent.watching.log_lines import cleaned
from halteres.agent.watching.looking import Look
from halteres.agent.wording import in_calls

LINES = 8
ERROR_LENGTH = 300
ANSWER_LENGTH, LEAST_LENGTH = 1340, 300
"""Characters of a whole answer, and how many of them the log has at least."""

LONGEST, SHORTEST = 160, 24
"""Characters of a line of the log: the newest are told first, the others have what room is left."""

_ELSEWHERE = re.compile(r"(?<=\.) Its log: \S+\.(?= |$)|: halteres train --resume \w+")
"""What many a sentence ends with and the answer tells beside it: `logs`, and the call of `next`."""

_STAMP = re.compile(r"^\d{4}-\d\d-\d\d[ T][\d:.,]+Z? (?:[a-z]+ (?=[A-Z]+ ))?")


def failure_facts(look: Look) -> dict[str, Any]:
    """What a failed run tells beside the rest; nothing for any other."""
    if look.state.status != "failed":
        return {}
    sentence = _ELSEWHERE.sub("", look.state.error or "The run failed.")
    return {
        "error": clipped(in_calls(sentence), ERROR_LENGTH),
        "code": look.state.code or "internal",
        "exit": look.culprit.facts if look.culprit else None,
        "resumable": look.state.resumable,
        "last_checkpoint": look.last_checkpoint,
    }


def log_tail(look: Look, told: dict[str, Any]) -> list[str]:
    """The last lines of whoever failed, as long as they may be beside what is told already."""
    written = look.run.log_tail(look.culprit.process if look.culprit else "supervisor", 3 * LINES)
    lines = [_STAMP.sub("", line) for text in written if (line := cleaned(text))][-LINES:]
    room = max(LEAST_LENGTH, ANSWER_LENGTH - len(json.dumps(told, ensure_ascii=False, separators=(",", ":"))))
    kept: list[str] = []
    for older, line in zip(reversed(range(len(lines))), reversed(lines), strict=True):
        kept.append(clipped(line, max(SHORTEST, min(LONGEST, room - SHORTEST * older))))
        room -= len(kept[-1]) + len('"",')
    return kept[::-1]
