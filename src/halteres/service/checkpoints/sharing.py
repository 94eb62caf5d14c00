"""Sharing weights between owners.

Owns: what is said of weights access tokens.
Never: decides whose weights are public (`store` does).
"""

from __future__ import annotations

from halteres.errors import UserError


def refuse_token(token: str | None) -> None:
    """Weights are shared by publishing them; there are no access tokens, and none is ignored."""
    if token:
        raise UserError(
            "This service has no weights access tokens.",
            "Weights of another owner can be read here only while they are public.",
            "Ask their owner to publish them (tinker checkpoint publish PATH), and send no token.",
        )
