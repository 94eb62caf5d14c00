"""Tenants: who owns a session, and with it models, samplers and checkpoints."""

from __future__ import annotations

import re

from starlette.requests import Request

from halteres.errors import InvalidConfig

Tenant = str  # the owner of an API key, by name
LOCAL: Tenant = "local"  # everybody, on a service without keys
NOBODY: Tenant = ""  # whoever asks for what needs no key, of a service with keys: owns nothing
SCOPE_KEY = "halteres.tenant"  # where the check of keys leaves the tenant in a request's ASGI scope


def tenant_of(request: Request) -> Tenant:
    """Whom a request comes from."""
    return request.scope.get(SCOPE_KEY, LOCAL)


def checked_name(name: str) -> Tenant:
    """The name of a tenant or a key."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,63}", name):
        raise InvalidConfig(
            f"'{name}' cannot name a tenant or a key.",
            "It may have letters, digits and . _ @ + -, up to 64, and begins with a letter, a digit or _.",
            "Choose another name.",
        )
    return name
