"""YAML within bounds: what it holds is what the safe loader makes of it, and nothing that is raised is raw."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from halteres.config.files import resolve_settings
from halteres.config.yaml_reader import MAX_DEPTH, MAX_NODES, parse_yaml
from halteres.environments.config import read_file
from halteres.errors import InvalidConfig


@pytest.mark.parametrize(
    "text",
    [
        *("", "# nothing", "a: 1", "[1, 2.5, null, true, x]", "a: &x {b: [1]}\nc: *x", "a: |\n  two\n  lines\n"),
        *("base: &b {x: 1}\nnext: {<<: *b, y: 2}", "a: 2024-02-29", "'\\ud800'", '"\\U0001F600"', "a: 1e-3"),
    ],
)
def test_a_text_within_the_bounds_is_read_as_the_safe_loader_reads_it(text: str) -> None:
    assert parse_yaml(text) == yaml.safe_load(text)


def test_the_bounds_are_those_of_the_module() -> None:
    assert parse_yaml("[" * (MAX_DEPTH - 1) + "1" + "]" * (MAX_DEPTH - 1))
    with pytest.raises(ValueError, match="nested"):
        parse_yaml("[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH)
    with pytest.raises(ValueError, match="values"):
        parse_yaml(f"[&a [{'1, ' * 999}1]{', *a' * (MAX_NODES // 1000)}]")


@pytest.mark.parametrize(
    "text",
    [
        *("env: " + "[" * 5000, "env: &a {b: *a}", 'env: {a: "\\ud800"}', "env: {a: 2024-13-45}", "env: {a: !!bool x}"),
        *("env: {a: " + "9" * 5000 + "}", "env: [", "env: !!python/name:os.abort"),
    ],
    ids=range(8),
)
def test_a_config_file_that_is_damaged_or_hostile_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(InvalidConfig, match=r"config\.yaml"):
        read_file(file)
    with pytest.raises(InvalidConfig, match=r"config\.yaml"):
        resolve_settings(None, file, ())
