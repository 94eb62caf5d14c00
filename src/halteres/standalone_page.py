"""One HTML file that makes no request: modules and styles of the page, and the data that they show.

Owns: how the page's modules become one script, and the policy that lets nothing else run.
Never: reads a run, or knows what a view shows.
Guarantees: no character of the data is read as markup.

The modules lie in dashboard/static, where the page serves the same files one by one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import escape
from pathlib import Path
from typing import Any, Final

import msgspec

STATIC: Final = Path(__file__).parent / "dashboard" / "static"

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([\w.]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const|let)\*? +(\w+))", re.MULTILINE)
_STYLE = re.compile(r'<link rel="stylesheet" href="/ui/([\w.]+)">')


def standalone_page(view: str, data: Any, *, title: str) -> str:
    """A whole HTML document that shows the data by one of the page's modules.

    Args:
        view: the module's file name in dashboard/static. It exports `view(data)`, which returns
            the element to be shown; whatever it imports comes along.
        data: what `view` is given, as JSON; its secrets are struck out already.
        title: of the window.

    Raises:
        ValueError: a module imports or exports in a form that this does not read.
    """
    style = "".join(_text(name) for name in _STYLE.findall(_text("index.html")))
    script = _script(view)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="referrer" content="no-referrer">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        '<body><main id="main" tabindex="-1"></main>'
        "<noscript><p>This file needs JavaScript, which it brings along.</p></noscript>"
        f'<script type="application/json" id="data">{_json(data)}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def _script(view: str) -> str:
    """The module and those that it imports as one script, each in a scope of its own."""
    modules: dict[str, str] = {}
    _add_module(view, modules)
    start = (
        f"document.getElementById('main').append({_scope(view)}"
        ".view(JSON.parse(document.getElementById('data').textContent)));"
    )
    return "\n".join(['"use strict";', *modules.values(), start])


def _add_module(name: str, modules: dict[str, str]) -> None:
    """Add a module to those that are there, behind the modules that it imports."""
    if name in modules:
        return
    text = _text(name)
    for imported in _IMPORT.finditer(text):
        _add_module(imported[2], modules)
    exported = [found[1] for found in _EXPORT.finditer(text)]
    text = _IMPORT.sub(lambda found: _destructuring(found[1], found[2]), text)
    text = _EXPORT.sub("", text)
    if re.search(r"^(?:import|export)\b", text, re.MULTILINE) or "</script" in text:
        raise ValueError(f"{name} has a form of import, export or text that cannot be inlined.")
    names = ", ".join(exported)
    modules[name] = f"const {_scope(name)} = (() => {{\n{text}\nreturn {{ {names} }};\n}})();"


def _destructuring(names: str, module: str) -> str:
    """An import as an assignment: `{ a as b }` becomes `{ a: b }`."""
    return f"const {names.replace(' as ', ': ')} = {_scope(module)};"


def _scope(name: str) -> str:
    """The constant that holds a module's exports."""
    return "module_" + re.sub(r"\W", "_", name.removesuffix(".js"))


def _text(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """What a content security policy knows an inline script or style by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(data: Any) -> str:
    """JSON that ends no element: every < is written as its escape."""
    try:
        text = msgspec.json.encode(data).decode()
    except UnicodeEncodeError:
        # Half a character ("\ud800") cannot be encoded, but can be escaped.
        text = json.dumps(data, default=lambda encoded: json.loads(bytes(encoded)))
        # NaN is no JSON: null, as above
        text = json.dumps(json.loads(text, parse_constant=lambda _: None))
    return text.replace("<", "\\u003c")
