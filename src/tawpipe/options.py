"""A tree of dataclasses as command-line options and as documented YAML.

Every leaf field of the tree is one setting. Its name on the command line has dashes (``--optimizer.clip-norm``), in
YAML underscores and nesting (``optimizer: {clip_norm: 1.0}``). The string under a field is its help in both places.
A command line beats a file, wherever ``--config`` stands; of several files the last one wins.

YAML is read with the safe loader and values are scalars or lists of them: a file can neither name a class nor run code.
A value is refused where it is read, so that the message can name the setting and say what it may be.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import math
import re
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from tawpipe.errors import UserError

T = TypeVar("T")
Choices = Mapping[str, Mapping[str, str]]


class Open:
    """A number that nobody has set: ``null`` for the user, and for whoever computes with it what is usual, until the
    run knows what suits.
    """


class _OpenInt(Open, int):
    pass


class _OpenFloat(Open, float):
    pass


def open_number(usual: Any) -> Any:
    """The default of a setting that the run chooses where it is not set; a number like ``usual``.

    >>> open_number(60) + 1, isinstance(open_number(60), Open)
    (61, True)
    """
    return (_OpenFloat if isinstance(usual, float) else _OpenInt)(usual)


@dataclass(frozen=True)
class Leaf:
    """One setting: where it is in the tree, what it may be and what it is for."""

    path: tuple[str, ...]
    hint: Any
    default: Any
    help: str
    metadata: Mapping[str, Any]

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def option(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def is_list(self) -> bool:
        return get_origin(self.hint) in (tuple, list)

    def text(self, value: Any) -> str:
        """A value of the setting in YAML, on one line."""
        value = None if isinstance(value, Open) else value
        value = list(value) if self.is_list else value
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
        return text.removesuffix("...\n").strip()

    @property
    def expected(self) -> str:
        """The values that the setting may have, in words."""
        if choices := self.metadata.get("choices"):
            return f"one of {', '.join(choices)}"
        words = describe(self.hint, describe_bounds(self.metadata))
        return f"{words} or null" if isinstance(self.default, Open) else words

    def read(self, value: object) -> Any:
        """The setting's value from what a file or a word of the command line says.

        Raises:
            UserError: it is of another type. Bounds are not looked at.
        """
        if isinstance(self.default, Open) and value in (None, "null"):
            return self.default
        if self.is_list:
            with contextlib.suppress(ValueError, OverflowError):
                items = value if isinstance(value, list) else [value]
                return get_origin(self.hint)(read_scalar(get_args(self.hint)[0], item) for item in items)
        else:
            for kind in sorted(kinds_of(self.hint), key=lambda kind: kind is not types.NoneType):
                with contextlib.suppress(ValueError, OverflowError):
                    return read_scalar(kind, value)
        plain = value if isinstance(value, str | int | float | list | dict) else "null" if value is None else str(value)
        raise UserError(self.option, plain, self.expected)

    def check(self, value: object) -> None:
        """Raise UserError for a number out of the setting's bounds."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            return
        bounds = self.metadata
        fits = (
            math.isfinite(value)
            and value >= bounds.get("minimum", -math.inf)
            and value > bounds.get("above", -math.inf)
            and value <= bounds.get("maximum", math.inf)
            and value < bounds.get("below", math.inf)
        )
        if not fits:
            raise UserError(self.option, value, self.expected)


@dataclass(frozen=True)
class Group:
    """A nested dataclass: the head of its docstring is its help."""

    path: tuple[str, ...]
    help: str
    members: tuple[Leaf | Group, ...]


def bounded(
    default: Any,
    *,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field whose number must lie within bounds. ``None`` passes where the type allows it."""
    bounds = {"minimum": minimum, "above": above, "maximum": maximum, "below": below}
    return dataclasses.field(default=default, metadata={k: v for k, v in bounds.items() if v is not None})


def describe_bounds(metadata: Mapping[str, Any]) -> str:
    words = {"minimum": "at least", "above": "above", "maximum": "at most", "below": "below"}
    return " and ".join(f"{words[name]} {metadata[name]:g}" for name in words if name in metadata)


def describe(hint: Any, bounds: str = "") -> str:
    """The values that a type allows, in words.

    >>> describe(int | None, "at least 1"), describe(Literal["a", "b"])
    ('a whole number at least 1 or null', 'one of a, b')
    """
    words = {int: f"a whole number {bounds}".strip(), float: f"a number {bounds}".strip(), bool: "true or false"}
    words |= {str: "a text", types.NoneType: "null"}

    def one(kind: Any) -> str:
        if get_origin(kind) is Literal:
            return "one of " + ", ".join(map(str, get_args(kind)))
        if get_origin(kind) in (tuple, list):
            return "a list of " + {str: "texts", int: "whole numbers", float: "numbers"}[get_args(kind)[0]]
        return words[kind]

    return " or ".join(map(one, kinds_of(hint)))


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """The types that a hint allows: ``int | None`` -> ``(int, NoneType)``."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""The words that YAML has for them."""


def read_scalar(kind: Any, value: object) -> Any:
    """A value from YAML, or a word, as ``kind`` has it.

    >>> read_scalar(float, "3e-4"), read_scalar(bool, "true"), read_scalar(types.NoneType, "null")
    (0.0003, True, None)

    Raises:
        ValueError: it is none.
    """
    text = value if isinstance(value, str) else None
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
    elif kind is types.NoneType:
        if value is None or text == "null":
            return None
    elif kind is str:
        if text is not None:
            return text
    elif kind is bool:
        answer = BOOLEANS.get(text.lower()) if text else value
        if isinstance(answer, bool):
            return answer
    elif text is not None or type(value) in (int, kind):
        return kind(value)
    raise ValueError(value)


def tree(cls: type, path: tuple[str, ...] = ()) -> tuple[Leaf | Group, ...]:
    """The settings of a dataclass: its own in the order of their definition, those of its bases, the groups."""
    hints = get_type_hints(cls)
    helps = field_help(cls)
    inherited = {
        item.name for base in cls.__mro__[1:] if dataclasses.is_dataclass(base) for item in dataclasses.fields(base)
    }
    members: list[Leaf | Group] = []
    for item in sorted(dataclasses.fields(cls), key=lambda item: item.name in inherited):
        hint, place = hints[item.name], (*path, item.name)
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            doc = textwrap.dedent(hint.__doc__ or "").strip().split("\n\n")[0]
            members.append(Group(place, " ".join(doc.split()), tree(hint, place)))
        else:
            default = item.default if item.default is not dataclasses.MISSING else item.default_factory()  # type: ignore[misc]
            assert helps.get(item.name), f"{cls.__name__}.{item.name} has no help"
            members.append(Leaf(place, hint, default, helps[item.name], item.metadata))
    return tuple(sorted(members, key=lambda member: isinstance(member, Group)))


def _with_choices(members: Sequence[Leaf | Group], choices: Choices) -> tuple[Leaf | Group, ...]:
    """The same settings, with values from tables in their help and in what is expected of them."""
    made: list[Leaf | Group] = []
    for member in members:
        if isinstance(member, Group):
            member = dataclasses.replace(member, members=_with_choices(member.members, choices))
        elif known := choices.get(member.key):
            words = "; ".join(f"{value}: {meaning}" for value, meaning in known.items())
            metadata = {**member.metadata, "choices": tuple(known)}
            member = dataclasses.replace(member, help=f"{member.help} {words}.", metadata=metadata)
        made.append(member)
    return tuple(made)


def field_help(cls: type) -> dict[str, str]:
    """The help of every field: the string below it, or its line under ``Args:`` in the docstring of the class."""
    from docstring_parser import parse_from_object

    helps: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            for entry in parse_from_object(base).params:
                helps[entry.arg_name] = " ".join((entry.description or "").split())
    return helps


def all_of(members: Sequence[Leaf | Group]) -> Iterator[Leaf | Group]:
    """The members of a tree, those of its groups included."""
    for member in members:
        yield member
        if isinstance(member, Group):
            yield from all_of(member.members)


class Options(Generic[T]):
    """The settings of ``cls`` for one command.

    Args:
        cls: a dataclass whose fields are settings (numbers, text, booleans, literals, lists of text or of numbers) or
            dataclasses of them. Every field has a default.
        prog: the command as the user types it.
        renamed: keys of earlier versions, with what takes their place.
        choices: of settings whose values stand in a table: key -> value -> what it means.
    """

    def __init__(
        self,
        cls: type[T],
        *,
        prog: str,
        description: str,
        renamed: Mapping[str, str] | None = None,
        choices: Choices | None = None,
    ) -> None:
        self.cls, self.prog, self.description, self.renamed = cls, prog, description, dict(renamed or {})
        self.members = _with_choices(tree(cls), choices or {})
        self.leaves = {one.path: one for one in all_of(self.members) if isinstance(one, Leaf)}
        self.groups = [one for one in all_of(self.members) if isinstance(one, Group)]
        self._by_option = {leaf.option: leaf for leaf in self.leaves.values()}

    def parse(self, argv: Sequence[str]) -> T:
        """Settings from a command line. ``--help`` and ``--print-config`` print and raise SystemExit(0).

        Raises:
            UserError: an unknown option or key, a value of the wrong type, an unreadable file.
        """
        try:
            given, left = self._parser.parse_known_args([self._checked_option(word) for word in argv])
        except argparse.ArgumentError as error:  # an option without its value: the parser judges nothing else
            leaf = self._by_option.get(error.argument_name or "")
            raise UserError(error.argument_name or "", "nothing", leaf.expected if leaf else "a YAML file") from error
        if left:
            expected = "options start with --, and only lists take several values"
            raise UserError("command line", " ".join(left), expected)
        values: dict[tuple[str, ...], Any] = {}
        for file in given.config:
            values |= self._from_mapping(read_mapping(file), file)
        words = vars(given)
        values |= {path: leaf.read(words[leaf.key]) for path, leaf in self.leaves.items() if leaf.key in words}
        config = self._build(self.cls, self.members, values)
        if given.print_config:
            print(self.to_yaml(config), end="")
            raise SystemExit(0)
        return config

    def to_yaml(self, config: T) -> str:
        """All settings with their help as comments. Feeding it back gives an equal ``config``."""
        lines = [f"# Settings of `{self.prog}`: use with --config FILE; options on the command line beat the file."]
        self._write(lines, self.members, config, indent="")
        return "\n".join(lines) + "\n"

    def suggestion(self, unknown: str, names: Sequence[str], separator: str) -> str:
        """The known name that was probably meant: close as a whole, or the last part of a nested one."""
        ends = [name for name in names if re.split(r"\.|^--", name)[-1] == unknown.removeprefix("--")]
        close = ends or difflib.get_close_matches(unknown, names, n=1, cutoff=0.6)
        return f"did you mean {close[0]}?" if close else f"{self.prog} {separator} shows all of them"

    @cached_property
    def _parser(self) -> argparse.ArgumentParser:
        """Splits words into settings and prints the help; what a word means is read afterwards."""
        parser = argparse.ArgumentParser(
            prog=self.prog,
            usage="%(prog)s [--config FILE] [--SETTING VALUE ...]",
            description=self.description,
            argument_default=argparse.SUPPRESS,
            exit_on_error=False,
            allow_abbrev=False,
        )
        files = parser.add_argument_group("configuration")
        files.add_argument(
            "--config", metavar="FILE", action="append", default=[], help="Read settings from a YAML file."
        )
        files.add_argument(
            "--print-config", action="store_true", default=False, help="Print all settings as YAML and exit."
        )
        settings = parser.add_argument_group("settings")
        for member in self.members:
            if isinstance(member, Leaf):
                _add(settings, member)
            else:
                group = parser.add_argument_group(".".join(member.path), member.help)
                for leaf in all_of(member.members):
                    if isinstance(leaf, Leaf):
                        _add(group, leaf)
        return parser

    def _checked_option(self, word: str) -> str:
        """An option with the dashes that it is known by; ``--micro_batch`` is taken for ``--micro-batch``."""
        if not word.startswith("--"):
            return word
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        known = [*self._by_option, "--config", "--print-config", "--help"]
        if new := self.renamed.get(name.removeprefix("--").replace("-", "_")):
            raise UserError("command line", name, f"its name of today: {new}")
        if name not in known:
            raise UserError("command line", name, f"no such option; {self.suggestion(name, known, '--help')}")
        return name + equals + value

    def _from_mapping(
        self, mapping: Mapping[Any, Any], file: str, above: tuple[str, ...] = ()
    ) -> dict[tuple[str, ...], Any]:
        """The settings that a file gives, each under its path."""
        groups = {group.path for group in self.groups}
        values: dict[tuple[str, ...], Any] = {}
        for key, value in mapping.items():
            path = (*above, str(key))
            name = ".".join(path)
            if path in groups:
                if not isinstance(value, Mapping):
                    raise UserError(f"{name} in {file}", value, "a mapping of settings")
                values |= self._from_mapping(value, file, path)
            elif new := self.renamed.get(name):
                raise UserError(f"--config {file}", name, f"its name of today: {new}")
            elif (leaf := self.leaves.get(path)) is None:
                known = [leaf.key for leaf in self.leaves.values()]
                raise UserError(
                    f"--config {file}", name, f"no such key; {self.suggestion(name, known, '--print-config')}"
                )
            else:
                values[path] = leaf.read(value)
        return values

    def _build(self, cls: type, members: Sequence[Leaf | Group], values: Mapping[tuple[str, ...], Any]) -> Any:
        hints = get_type_hints(cls)
        made = {}
        for member in members:
            name = member.path[-1]
            if isinstance(member, Group):
                made[name] = self._build(hints[name], member.members, values)
            elif member.path in values:
                made[name] = values[member.path]
        return cls(**made)

    def _write(self, lines: list[str], members: Sequence[Leaf | Group], values: Any, indent: str) -> None:
        for member in members:
            name = member.path[-1]
            value = getattr(values, name)
            lines.append("")
            lines += textwrap.wrap(member.help, 110, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
            if isinstance(member, Group):
                lines.append(f"{indent}{name}:")
                self._write(lines, member.members, value, indent + "  ")
            else:
                lines.append(f"{indent}{name}: {member.text(value)}")


def read_mapping(file: str) -> dict[Any, Any]:
    """The mapping at the top of a YAML file; an empty file is an empty one.

    Raises:
        UserError: the file cannot be read, is no YAML, or holds something else than a mapping.
    """
    try:
        values = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            "--config", file, f"a readable YAML file ({getattr(error, 'strerror', None) or error})"
        ) from error
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise UserError("--config", file, f"plain YAML without tags ({where})") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError("--config", file, f"a mapping of settings to values, not {type(values).__name__}")
    return values


def _add(container: Any, leaf: Leaf) -> None:
    """Declares one setting. A boolean may stand alone on the command line and then means true."""
    nargs = {"nargs": "*"} if leaf.is_list else {"nargs": "?", "const": "true"} if leaf.hint is bool else {}
    text = f"{leaf.help} ({leaf.expected}; default: {leaf.text(leaf.default)})".replace("%", "%%")
    container.add_argument(leaf.option, dest=leaf.key, metavar=_metavar(leaf.hint), help=text, **nargs)


def _metavar(hint: Any) -> str:
    kind = kinds_of(hint)[0]
    if get_origin(kind) in (tuple, list):
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    return {int: "N", float: "X", bool: "true|false"}.get(kind, "TEXT")
