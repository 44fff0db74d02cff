"""Reads the configuration file as plain dictionaries: YAML, ``--set`` and ``${env:...}``."""

from __future__ import annotations

import os
import re
from typing import Any, Final

import yaml

from stratoscope.collector.component import Kind
from stratoscope.collector.config_schema import Expanded, Problems

_ENV: Final = re.compile(r"\$\$|\$\{env:([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


class ConfigError(Exception):
    """The configuration cannot be used; ``problems`` names every key that is wrong, and why."""

    def __init__(self, problems: Problems) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class _UniqueKeyLoader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
    """A loader for which a repeated key is an error, not a silent loss."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key_node, _ in node.value:
            name = key_node.value
            if not isinstance(name, str) or key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if name in seen:
                raise yaml.YAMLError(f"line {key_node.start_mark.line + 1}: key {name!r} appears twice")
            seen.add(name)
        return super().construct_mapping(node, deep)


def read(path: str) -> dict[str, Any]:
    """The mapping that a YAML file holds. Raises :class:`ConfigError`."""
    try:
        with open(path, encoding="utf-8") as file:
            tree = yaml.load(file, Loader=_UniqueKeyLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError([f"{path}: is not valid YAML: {error}"]) from error
    if not isinstance(tree, dict):
        raise ConfigError([f"{path}: must be a mapping with the sections {', '.join(Kind)}, service"])
    return tree


def override(tree: dict[str, Any], text: str, problems: Problems) -> None:
    """Apply one ``a.b.c=value`` (or ``a::b::c=value``) to ``tree``; the value is YAML."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        problems.append(f"--set {text}: must be key=value, such as processors.batch.timeout=1s")
        return
    path = name.split("::" if "::" in name else ".")
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError as error:
        problems.append(f"--set {text}: the value is not valid YAML: {error}")
        return
    at = tree
    for depth, part in enumerate(path[:-1]):
        if at.get(part) is None:
            at[part] = {}
        at = at[part]
        if not isinstance(at, dict):
            problems.append(f"--set {text}: {'.'.join(path[: depth + 1])} is not a mapping")
            return
    at[path[-1]] = parsed


def expand(value: Any, path: str, problems: Problems) -> Any:
    """A copy with environment variables replaced; a missing one is a problem at its key."""
    if isinstance(value, dict):
        return {k: expand(v, f"{path}.{k}" if path else str(k), problems) for k, v in value.items()}
    if isinstance(value, list):
        return [expand(item, path, problems) for item in value]
    if not isinstance(value, str) or "$" not in value:
        return value

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        found = os.environ.get(match[1]) or match[2]  # like sh: an empty variable takes the default
        if found is None and match[1] not in os.environ:
            hint = f"set it, or write ${{env:{match[1]}:-default}}"
            problems.append(f"{path}: environment variable {match[1]} is not set; {hint}")
        return found or ""

    whole = _ENV.fullmatch(value)
    result = _ENV.sub(replace, value)
    return Expanded(result) if whole and whole[0] != "$$" else result
