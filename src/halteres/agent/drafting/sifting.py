"""Edits that a draft was given once and that can be no more: the policy holds the setting by now, or there is none.

Owns: finding them, setting them aside for good, so that one of them does not stop every call on the draft.
Never: judges a value: what is refused for another reason is mended by an edit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from halteres.agent.caller import Caller
from halteres.agent.drafting.drafts import Draft, editing, load_draft, save_draft
from halteres.config.problem import LockedField, UnknownField
from halteres.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Sifted:
    """A draft, and what was set aside of it."""

    draft: Draft
    discarded: Mapping[str, Any]  # section.field -> value


def sifted(draft: Draft) -> Sifted:
    """The draft with the edits that can still be. Raises as `Draft.resolve`, but for what is wrong with an edit."""
    gone = {key: draft.changes[key] for key in _refused(draft) if _is_gone(draft, key)}
    kept = {key: value for key, value in draft.changes.items() if key not in gone}
    return Sifted(draft=replace(draft, changes=kept) if gone else draft, discarded=gone)


def current(caller: Caller, handle: str | None) -> Sifted:
    """The draft of this handle as it can be now; what is set aside is so for good, and told once."""
    draft = load_draft(caller, handle)
    found = sifted(draft)
    if found.discarded:
        with editing(caller, handle) as now:
            if now == draft:  # else somebody has edited it meanwhile, and has sifted it too
                save_draft(found.draft)
    return found


def _refused(draft: Draft) -> list[str]:
    """Edits that are named in the refusal of the draft's settings."""
    if draft.environment is None or not draft.changes:
        return []
    try:
        draft.resolve()
    except InvalidConfig as error:
        named = {problem["field"] for problem in error.details.get("problems") or ()}
        return [key for key in draft.changes if key in named]
    return []


def _is_gone(draft: Draft, key: str) -> bool:
    try:
        replace(draft, changes={key: draft.changes[key]}).resolve()
    except (LockedField, UnknownField):
        return True
    except InvalidConfig:
        return False
    return False
