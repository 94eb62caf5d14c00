"""The rooms talk over their protocols: who may import whom, read off the source.

A numbered room imports what is free to all and itself; `agent`, `runs`, `cli`, `dashboard` may
import anything but what `NOT` says, and no numbered room imports them. torch lives below
`engine/torch` and `rewards/torch`; elsewhere neither it nor what pulls it in is imported at module
level.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import halteres

SOURCE = Path(halteres.__file__).parent
FREE = (
    "errors",
    "types",
    "losses",
    "chat_template",
    "tokenizer",
    "scores",
    "tool_calls",
    "process",
    "next_step",
    "loopback",
    "access_policy",
    "files",
    "documents",
    "models",
    "redaction",
    "short_texts",
    "logins",
    "config",
    "clients",
    "groups",
    "standalone_page",
    "observe.metrics",
    "observe.prometheus",
)
ROOMS = {
    "environments": ("environments", "rollouts", "rewards"),
    "rollouts": ("rollouts",),
    "trajectories": ("trajectories",),
    "training": ("training", "rewards.preference_files", "rewards.preferences"),
    "service": (
        "service",
        "engine.protocol",
        "engine.connection",
        "engine.process",
        "engine.folders",
        "engine.stream_buffer",
        "engine.shapes",
        "engine.vllm",
    ),
    "engine": ("engine",),
    "rewards": ("rewards", "engine.torch", "engine.shapes", "engine.folders", "observe.canvas"),
}
TORCH = ("engine.torch", "rewards.torch")
ANYTHING = ("agent", "runs", "cli", "dashboard", "rl_api_server")
NOT = {
    "runs": ("agent", "dashboard", "cli"),
    "agent": ("cli", "dashboard"),
    "agent.transports": ("cli",),
    "dashboard": ("agent", "cli"),
}
"""What rooms that may import anything may not: the innermost line that fits a module holds."""
BUT = {"dashboard": ("agent.transports.access", "agent.transports.http_routes")}
"""... and what they may of that: the page is let in as its server lets everything in."""
FOUNDATION = {
    "types": (),
    "next_step": (),
    "logins": (),
    "errors": ("next_step", "logins"),
    "losses": ("errors",),
    "files": (),
    "documents": ("errors", "files"),
    "models": ("models", "errors", "files", "tokenizer"),
    "config": ("config", "documents", "errors", "files", "logins", "losses", "models", "process"),
    "chat_template": (),
    "tokenizer": ("errors", "files", "chat_template"),
    "scores": ("tokenizer",),
    "tool_calls": ("documents", "short_texts", "tokenizer"),
    "process": ("config", "errors", "redaction", "logins"),
    "loopback": ("errors",),
    "access_policy": ("errors", "loopback"),
    "redaction": ("config", "errors", "logins"),
    "short_texts": ("redaction",),
    "clients": ("clients", "errors", "logins", "types", "config", "tokenizer", "scores"),
    "standalone_page": (),
    "groups": (
        "groups",
        "clients",
        "files",
        "observe.metrics",
        "standalone_page",
        "tokenizer",
        "types",
    ),
    "observe": ("observe", "errors", "files", "types", "config", "process", "redaction"),
}
HEAVY = (
    "torch",
    "transformers",
    "tinker",
    "peft",
    "accelerate",
    "matplotlib",
    "wandb",
    "trackio",
    "tensorboardX",
)
"""Never at module level outside those two: torch itself, what pulls it in, and what costs half a
second.
"""


Modules = list[tuple[str, ast.Module]]


@pytest.fixture(scope="module")
def modules() -> Modules:
    """Dotted name below halteres, and its tree."""
    names = (
        (".".join(file.relative_to(SOURCE).with_suffix("").parts), file)
        for file in sorted(SOURCE.rglob("*.py"))
    )
    return [(name.removesuffix(".__init__"), ast.parse(file.read_text())) for name, file in names]


@cache
def imported(tree: ast.AST) -> tuple[tuple[str, int], ...]:
    """Every module an import statement below this node names, and its line."""
    found: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the room"
            found += ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
    return tuple(found)


def at_module_level(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Imports executed when the module is imported: not those inside functions or for type checkers
    alone.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield from imported(child)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from at_module_level(child)


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def forbidden(module: str) -> tuple[str, ...]:
    """What a module of a room that may import anything may not import."""
    return (
        NOT[max((room for room in NOT if within(module, (room,))), key=len)]
        if within(module, tuple(NOT))
        else ()
    )


def is_forbidden(module: str, name: str) -> bool:
    """Whether this module of a room that may import anything may not import that."""
    exempt = BUT.get(module.split(".")[0], ())
    return within(name, forbidden(module)) and not within(name, exempt)


def allowed(module: str) -> tuple[str, ...] | None:
    """What a module may import of ours; None: anything."""
    room = module.split(".")[0]
    if room in ANYTHING or module in ("", "__init__", "__main__"):
        return None
    return FREE + ROOMS[room] if room in ROOMS else FOUNDATION[room]


def test_rooms_import_only_what_is_theirs(modules: Modules) -> None:
    wrong = []
    for module, tree in modules:
        may = allowed(module)
        for name, line in imported(tree):
            ours = name.removeprefix("halteres.")
            if not name.startswith("halteres."):
                continue
            if is_forbidden(module, ours) or (may is not None and not within(ours, may)):
                wrong.append(f"{module}:{line} imports {ours}")
    assert not wrong, "\n".join(wrong)


COMMANDS_OF_AN_ENVIRONMENT = ("environments.base", "environments.commands")
"""The one circle: an environment's file is its own command (`YourEnv.cli()`), and commands drive
environments.
"""


@pytest.mark.parametrize("depth", [2, 3, 9], ids=["packages", "packages-of-packages", "modules"])
def test_no_room_has_circles(modules: Modules, depth: int) -> None:
    """Neither its modules nor its sub-packages; what belongs together is one of either."""

    def part(name: str) -> str:
        return ".".join(name.split(".")[:depth])

    known = {module for module, _ in modules}
    needs: dict[str, set[str]] = {}
    for module, tree in modules:
        room = module.split(".")[0]
        names = (name.removeprefix("halteres.") for name, _ in imported(tree))
        inside = (
            name if name in known else name.rpartition(".")[0]
            for name in names
            if within(name, (room,))
        )
        found = {part(name) for name in inside if (module, name) != COMMANDS_OF_AN_ENVIRONMENT}
        needs.setdefault(part(module), set()).update(found - {part(module)})
    TopologicalSorter(needs).prepare()


@pytest.mark.parametrize("package", ["torch", "peft"])
def test_torch_lives_in_two_packages_only(modules: Modules, package: str) -> None:
    wrong = [
        f"{module}:{line} imports {name}"
        for module, tree in modules
        if not within(module, TORCH)
        for name, line in imported(tree)
        if within(name, (package,))
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_heavy_is_imported_with_a_module(modules: Modules) -> None:
    wrong = [
        f"{module}:{line} imports {name}"
        for module, tree in modules
        if not within(module, TORCH)
        for name, line in at_module_level(tree)
        if within(name, HEAVY)
    ]
    assert not wrong, "\n".join(wrong)


def test_peft_is_imported_where_there_is_an_adapter(modules: Modules) -> None:
    """It costs as much as transformers; most reward models have no adapter, no policy needs it."""
    wrong = [
        f"{module}:{line} imports {name}"
        for module, tree in modules
        for name, line in at_module_level(tree)
        if within(name, ("peft",))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_package_is_a_known_room(modules: Modules) -> None:
    rooms = {module.split(".")[0] for module, _ in modules} - {"__init__", "__main__"}
    assert rooms <= set(ROOMS) | set(FOUNDATION) | set(ANYTHING)


READERS_OF_VARIABLES = ("config.environ", "config.atroposlib_runner", "environments.cage_entry")
"""The last two run in a Python that may have none of Halteres."""


@pytest.mark.parametrize("name", ["os.environ", "os.getenv", "os.putenv"])
def test_variables_of_the_environment_are_read_in_one_place(modules: Modules, name: str) -> None:
    attribute = name.split(".")[1]
    wrong = [
        f"{module}:{node.lineno} uses {name}"
        for module, tree in modules
        if module not in READERS_OF_VARIABLES
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == attribute
        and ast.unparse(node.value) == "os"
    ]
    assert not wrong, "\n".join(wrong)


def test_the_rule_sees_what_it_forbids() -> None:
    """A check of the checker."""
    tree = ast.parse(
        "import torch.nn\nfrom halteres.service import app\ndef f():\n    from transformers "
        "import x\n"
    )
    assert [name for name, _ in imported(tree)] == [
        "torch.nn",
        "halteres.service.app",
        "transformers.x",
    ]
    assert [name for name, _ in at_module_level(tree)] == ["torch.nn", "halteres.service.app"]
    assert forbidden("runs.reading.roster") == ("agent", "dashboard", "cli")
    assert within("dashboard.routes", forbidden("agent.call"))
    assert not within("dashboard.routes", forbidden("agent.transports.http.app"))
    assert is_forbidden("dashboard.runs", "agent.status.rl_check_status")
    assert not is_forbidden("dashboard.routes", "agent.transports.access.Guard")
    assert forbidden("cli.main") == forbidden("agents") == ()
    assert not within("service.app", allowed("training.loop") or ())
    assert within("engine.connection.connect", allowed("service.app") or ())
    assert not within("engine.scripted", allowed("service.app") or ())
