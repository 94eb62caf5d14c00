"""The manifest: everything that the Tinker protocol demands of a server, each once, with its
source.

Owns: the list, and `proves`, by which a test says what it shows.
Never: tests anything; `test_requirements.py` holds that both directions are complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .chapters.connecting import CONNECTING
from .chapters.ordering import ORDERING
from .chapters.requirement import Requirement
from .chapters.sampling import SAMPLING
from .chapters.storing import STORING
from .chapters.training import TRAINING

Test = TypeVar("Test", bound=Callable[..., object])

CHAPTERS: dict[str, tuple[Requirement, ...]] = {
    "Connecting": CONNECTING,
    "Promises, order, durability": ORDERING,
    "Training": TRAINING,
    "Sampling and inference": SAMPLING,
    "Checkpoints, exports, records, errors": STORING,
}

REQUIREMENTS = tuple(requirement for chapter in CHAPTERS.values() for requirement in chapter)
BY_ID = {requirement.id: requirement for requirement in REQUIREMENTS}


def proves(*ids: str) -> Callable[[Test], Test]:
    """Mark a test as one that shows these requirements.

    Raises:
        KeyError: the manifest has no such id.
    """
    for one in ids:
        BY_ID[one]

    def marked(test: Test) -> Test:
        return test

    return marked
