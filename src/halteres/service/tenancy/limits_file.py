"""An operator's changes to the limits.

Owns: the file in the state directory, the form of `--limit`, the units of figures.
Never: knows what a limit limits.

    halteres serve --limit requests_per_s=50 --limit checkpoint_bytes=200G

    STATE/limits.yaml:
        default: {requests_per_s: 50}
        tenants:
          alice: {models: 8, checkpoint_bytes: 20G}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from halteres.errors import InvalidConfig, unknown
from halteres.service.tenancy.limits import Allowances, Limits

FILE = "limits.yaml"

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def read_allowances(state: Path, options: Sequence[str] = ()) -> Allowances:
    """The limits in a state directory's file, and what the command line says of the default ones.

    Raises:
        InvalidConfig: a limit is unknown or no number, or the file is none.
    """
    told = _read(state / FILE)
    default = _changed(Limits(), {**_part(told, "default"), **dict(map(_named, options))})
    tenants = {name: _changed(default, _part({name: own}, name)) for name, own in _part(told, "tenants").items()}
    if strange := set(told) - {"default", "tenants"}:
        raise unknown(InvalidConfig, f"part of {FILE}", sorted(strange)[0], ("default", "tenants"))
    return Allowances(default=default, tenants=tenants)


def _read(file: Path) -> dict[str, Any]:
    try:
        told = yaml.safe_load(file.read_text()) or {}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"The file {file} cannot be read.", f"{' '.join(str(error).split())}.") from error
    if not isinstance(told, dict):
        raise InvalidConfig(f"The file {file} holds no limits.", next="Give it `default:` and `tenants:`.")
    return told


def _part(told: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = told.get(name) or {}
    if not isinstance(part, dict):
        raise InvalidConfig(f"'{name}' in {FILE} is no mapping.", next="Write NAME: VALUE below it.")
    return part


def _named(option: str) -> tuple[str, str]:
    name, equals, value = option.partition("=")
    if not equals:
        raise InvalidConfig(f"'{option}' is no limit.", next="Write it as NAME=VALUE.")
    return name.strip(), value


def _changed(limits: Limits, told: Mapping[str, Any]) -> Limits:
    known = {one.name: float if one.name == "requests_per_s" else int for one in fields(Limits)}
    for name in told:
        if name not in known:
            raise unknown(InvalidConfig, "limit", str(name), known)
    return replace(limits, **{name: known[name](_number(name, value)) for name, value in told.items()})


def _number(name: str, value: object) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)(?:i?b)?", str(value).strip().lower())
    number = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if isinstance(value, bool) or number <= 0:
        raise InvalidConfig(f"The limit {name} is '{value}'.", "It is a number above 0; 20G is 20 * 2**30.")
    return number
