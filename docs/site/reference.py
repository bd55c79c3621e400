"""The reference: what the library exports, the settings of a run and the options of every command, from the code."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from docstring_parser import Docstring, parse

import tawpipe
from tawpipe.cli import COMMANDS
from tawpipe.options import Group, Leaf
from tawpipe.train.settings.config import train_options

GENERATED = "*Made from the code when the site is built.*"


def reference_pages() -> dict[str, str]:
    """Names of files with their Markdown."""
    return {"library.md": _library(), "configuration.md": _configuration(), "commands.md": _commands()}


def _library() -> str:
    lines = ["# The library", "", "What `import tawpipe` gives.", "", GENERATED, ""]
    lines += [f"Version {tawpipe.__version__}.", ""]
    for name in sorted(tawpipe.__all__, key=lambda name: name != "Pipeline"):  # the front door first
        lines += _documented(name, getattr(tawpipe, name), level=2)
        if inspect.isclass(getattr(tawpipe, name)):
            for member, value in _public_members(getattr(tawpipe, name)):
                lines += _documented(f"{name}.{member}", value, level=3)
    return "\n".join(lines)


def _public_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Methods and properties that the class itself, or one of this package above it, defines and documents."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("tawpipe"):
            continue
        for name, value in vars(base).items():
            plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            documented = callable(plain) or isinstance(plain, property) or hasattr(plain, "func")
            if not name.startswith("_") and name not in seen and documented and inspect.getdoc(plain):
                seen.add(name)
                yield name, plain


def _documented(name: str, value: Any, *, level: int) -> list[str]:
    """A heading, the signature and the docstring of a class, a function or a property."""
    docstring = parse(inspect.getdoc(value) or "")
    lines = [f"{'#' * level} {name}", ""]
    if callable(value) and (signature := _signature(name, value)):
        lines += ["```python", signature, "```", ""]
    for text in (docstring.short_description, docstring.long_description):
        if text:
            lines += [_markdown(text), ""]
    return lines + _table(docstring, value) + _raised(docstring)


def _signature(name: str, value: Any) -> str:
    """As one would write the call; on several lines where it is long."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    words = [_parameter(one) for one in parameters]
    named = [index for index, one in enumerate(parameters) if one.kind is inspect.Parameter.KEYWORD_ONLY]
    if named and not any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters):
        words.insert(named[0], "*")
    returned = "" if inspect.isclass(value) else _annotation(signature.return_annotation)
    end = f" -> {returned}" if returned else ""
    line = f"{name}({', '.join(words)}){end}"
    return line if len(line) <= 88 else "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){end}"])


def _parameter(one: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(one.kind, "")
    kind = _annotation(one.annotation)
    default = "" if one.default is inspect.Parameter.empty else f"{' = ' if kind else '='}{_value(one.default)}"
    return f"{stars}{one.name}{': ' if kind else ''}{kind}{default}"


def _value(default: Any) -> str:
    """A default value in code; settings that are all as usual without naming them."""
    if dataclasses.is_dataclass(default) and all(
        getattr(default, one.name) == one.default for one in dataclasses.fields(default)
    ):
        return f"{type(default).__name__}()"
    return repr(default)


def _annotation(kind: Any) -> str:
    """A type as it stands in the code; nothing where there is none."""
    if kind is inspect.Signature.empty:
        return ""
    return kind if isinstance(kind, str) else inspect.formatannotation(kind)


def _table(docstring: Docstring, value: Any) -> list[str]:
    """Parameters and fields with what they mean."""
    helps = {one.arg_name: one.description or "" for one in docstring.params}
    if dataclasses.is_dataclass(value):
        from tawpipe.options import field_help

        assert isinstance(value, type)
        helps = {name: text for name, text in field_help(value).items() if text} | helps
    if not helps:
        return []
    rows = [f"| `{name}` | {_cell(text)} |" for name, text in helps.items()]
    return ["| | |", "| --- | --- |", *rows, ""]


def _raised(docstring: Docstring) -> list[str]:
    lines = []
    if docstring.returns and docstring.returns.description:
        lines += [f"Returns: {_markdown(docstring.returns.description)}", ""]
    for one in docstring.raises:
        lines += [f"Raises `{one.type_name}`: {_markdown(one.description or '')}", ""]
    return lines


def _configuration() -> str:
    options = train_options()
    lines = [
        "# Configuration",
        "",
        "Every setting of `tawpipe train`. On the command line a setting is `--name value`.",
    ]
    lines += ["In a YAML file, which `--config FILE` reads, dashes are underscores and the sections are nested:", ""]
    lines += ["```yaml", "steps: 100", "optimizer:", "  clip_norm: 1.0", "```", ""]
    lines += ["A command line beats a file. `tawpipe train --print-config` prints all of it as such a file.", ""]
    lines += [GENERATED, "", "## The run", ""]
    return "\n".join([*lines, *_settings(options.members, level=2)])


def _settings(members: Sequence[Leaf | Group], level: int) -> list[str]:
    leaves = [one for one in members if isinstance(one, Leaf)]
    lines = ["| setting | may be | default | |", "| --- | --- | --- | --- |"] if leaves else []
    for leaf in leaves:
        default = leaf.text(leaf.default)
        lines.append(f"| `{leaf.option}` | {_cell(leaf.expected)} | `{_cell(default)}` | {_cell(leaf.help)} |")
    lines.append("")
    for group in members:
        if isinstance(group, Group):
            lines += [f"{'#' * level} {'.'.join(group.path)}", "", _markdown(group.help), ""]
            lines += _settings(group.members, level + 1)
    return lines


def _commands() -> str:
    """What ``--help`` says of every command but ``train``, whose settings have a page of their own."""
    os.environ["COLUMNS"] = "100"
    lines = ["# Commands", "", "`tawpipe COMMAND --help` prints the same.", "", GENERATED, ""]
    for name, line in COMMANDS.items():
        lines += [f"## tawpipe {name}", "", f"{line[:1].upper()}{line[1:]}.", ""]
        if name == "train":
            lines += ["[All of its settings](configuration.md).", ""]
            continue
        parser = importlib.import_module(f"tawpipe.commands.{name}")._parser()
        lines += ["```text", parser.format_help().rstrip(), "```", ""]
        for action in parser._subparsers._group_actions if parser._subparsers else ():
            for word, one in (action.choices or {}).items():
                lines += [f"### tawpipe {name} {word}", "", "```text", one.format_help().rstrip(), "```", ""]
    return "\n".join(lines)


def _markdown(text: str) -> str:
    """Text of a docstring: double backquotes and roles of Sphinx as code."""
    return re.sub(r"``([^`]+)``", r"`\1`", re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text))


def _cell(text: str) -> str:
    """The same on one line, for a table."""
    return " ".join(_markdown(text).split()).replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
