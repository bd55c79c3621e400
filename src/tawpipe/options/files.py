"""Files of settings: reading them with the safe loader, and finding the line of a setting."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tawpipe.errors import UserError


class StrictLoader(yaml.SafeLoader):
    """Safe loader that refuses a key given twice. The base class takes the last value without a message."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the node of a mapping; raise an error with both line numbers if a key is given twice."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                line, before = key.start_mark.line + 1, lines.get((key.tag, key.value))
                if before is not None:
                    words = f"{key.value!r} stands in line {before} already"
                    raise yaml.MarkedYAMLError(problem=words, problem_mark=key.start_mark)
                lines[key.tag, key.value] = line
        return node


class NumberLoader(StrictLoader):
    """Strict loader that reads 1e14 and 1.25e14 as numbers; the base class takes them as texts."""


NumberLoader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"\d+(\.\d*)?[eE][-+]?\d+$"), [*"0123456789"])


def read_mapping(file: str) -> dict[Any, Any]:
    """Read the mapping at the top level of a YAML file; an empty file gives an empty mapping.

    Raises:
        UserError: the file cannot be read, is not YAML, has a key twice, or contains no mapping.
    """
    try:
        values = yaml.load(Path(file).read_text(encoding="utf-8"), Loader=StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", None) or error
        raise UserError("--config", file, f"a YAML file that can be read: {reason}") from error
    except yaml.YAMLError as error:
        raise UserError("--config", file, f"plain YAML without tags: {_in_words(error)}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError("--config", file, f"a mapping of settings to values, not {type(values).__name__}")
    return values


def _in_words(error: yaml.YAMLError) -> str:
    """Return the text of an error in a YAML file for the user, with the number of its line."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    problem = error.problem or ""
    if "\\t" in problem:
        return f"line {error.problem_mark.line + 1} has a tab; use spaces"
    mark = error.context_mark or error.problem_mark  # the line at which the faulty part begins
    return f"line {mark.line + 1}: {problem}"


def place_in(file: str, path: Sequence[str]) -> str:
    """Return ``FILE, line N`` for the key at ``path`` in a YAML file; ``""`` if the file does not have the key."""
    node = yaml.compose(Path(file).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    line = None
    for name in path:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        matching = [(key, value) for key, value in pairs if key.value == name]
        if not matching:
            return ""
        key, node = matching[-1]
        line = key.start_mark.line + 1
    return f"{file}, line {line}"
