"""Docstrings name modules that exist: who looks for one of them finds it."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import halteres

SOURCE = Path(halteres.__file__).parent
DOTTED = re.compile(r"`((?:halteres\.)?[a-z_]+(?:\.\w+)+)`")
VALUES = {
    "process.communicate",
    "process.wait",
    "config.total_steps",
    "tokenizer.ggml.pre",
}
"""Attributes of values, and keys of a GGUF file, that are called like a room."""


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Texts that stand alone: of modules, classes, functions and constants."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value.value


@cache
def defined(source: str) -> set[str]:
    """Names of a module's own, and those that it passes on."""
    return {
        name
        for node in ast.parse(source).body
        for name in (
            [node.name]
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            else [alias.asname or alias.name for alias in node.names]
            if isinstance(node, ast.Import | ast.ImportFrom)
            else [found.id for found in ast.walk(node) if isinstance(found, ast.Name)]
        )
    }


def missing(name: str, modules: dict[str, str]) -> bool:
    """Whether a name that begins like a room of ours is neither a module nor something in one."""
    if name in VALUES or name.split(".")[0] not in {module.split(".")[0] for module in modules}:
        return False
    module, _, member = name.rpartition(".")
    return name not in modules and (module not in modules or member not in defined(modules[module]))


def read() -> dict[str, str]:
    """Every module's source, by its dotted name below halteres."""
    files = {
        ".".join(file.relative_to(SOURCE).with_suffix("").parts): file
        for file in SOURCE.rglob("*.py")
    }
    return {name.removesuffix(".__init__"): file.read_text() for name, file in files.items()}


def test_every_module_that_a_docstring_names_exists() -> None:
    modules = read()
    wrong = [
        f"{module} names `{name}`"
        for module, source in modules.items()
        if DOTTED.search(source)  # few do, and a tree takes long
        for text in docstrings(ast.parse(source))
        for name in DOTTED.findall(text)
        if missing(name.removeprefix("halteres."), modules)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_rule_sees_what_is_gone() -> None:
    """A check of the checker."""
    modules = {"runs.state": "class RunState: ...\nfrom x import y\nZ = 1", "errors": ""}
    gone = ("runs.estimates", "runs.state.Other", "errors.gone", "runs.gone.deep")
    there = ("runs.state", "runs.state.RunState", "runs.state.y", "runs.state.Z", "numpy.ndarray")
    assert [name for name in (*gone, *there) if missing(name, modules)] == list(gone)
    assert DOTTED.findall("reckons (`footprint`, `halteres.runs.gone`, `a b.c`).") == [
        "halteres.runs.gone"
    ]


def test_the_architecture_names_modules_that_are_here() -> None:
    """In its tables of a room the first column names modules; anywhere, what is written with a
    slash is a path.
    """
    text = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text()
    stems = {path.stem for path in SOURCE.rglob("*.py")} | {
        path.name for path in SOURCE.rglob("*") if path.is_dir()
    }
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    first_column = {
        name.rstrip("/").rpartition("/")[2]
        for row in rows
        for name in re.findall(r"`([a-z_/]+)`", row)
    }
    paths = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+)(?:\.py)?`", text))
    assert first_column <= stems, first_column - stems
    gone = {
        name for name in paths if not ((SOURCE / name).is_dir() or (SOURCE / f"{name}.py").exists())
    }
    assert not {name for name in gone if not name.startswith("tests/")}
    commands = re.findall(r"`python -m (halteres[\w.]*)", text)
    assert commands and not [name for name in commands if importlib.util.find_spec(name) is None]
