"""A tree of dataclasses as command-line options and as documented YAML.

Every leaf field of the tree is one setting. Its name on the command line has dashes (``--optimizer.clip-norm``), in
YAML underscores and nesting (``optimizer: {clip_norm: 1.0}``). The string under a field is its help in both places.
A command line beats a file, wherever ``--config`` stands; of several files the last one wins.

YAML is read with the safe loader and values are scalars or lists of text: a file can neither name a class nor run code.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from tawpipe.errors import UserError

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

T = TypeVar("T")
Choices = Mapping[str, Mapping[str, str]]


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
        return option_name(self.path)

    @property
    def is_list(self) -> bool:
        return get_origin(self.hint) in (tuple, list)

    @property
    def expected(self) -> str:
        """What the setting may be, in words."""
        if choices := self.metadata.get("choices"):
            return f"one of {', '.join(choices)}"
        words, bounds = describe(self.hint), describe_bounds(self.metadata)
        if not bounds:
            return words
        return f"{words.removesuffix(' or null')} {bounds}" + (" or null" if words.endswith(" or null") else "")


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


def option_name(path: Sequence[str]) -> str:
    """``("optimizer", "clip_norm")`` -> ``--optimizer.clip-norm``"""
    return "--" + ".".join(path).replace("_", "-")


def describe(hint: Any) -> str:
    """What a type allows, in words."""
    origin = get_origin(hint)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(hint))
    if origin in (Union, types.UnionType):
        parts = [describe(part) for part in get_args(hint) if part is not types.NoneType]
        return " or ".join([*parts, "null"] if types.NoneType in get_args(hint) else parts)
    if origin in (tuple, list):
        return "a list of texts"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[hint]


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


def leaves(members: Sequence[Leaf | Group]) -> Iterator[Leaf]:
    for member in members:
        if isinstance(member, Leaf):
            yield member
        else:
            yield from leaves(member.members)


def groups(members: Sequence[Leaf | Group]) -> Iterator[Group]:
    for member in members:
        if isinstance(member, Group):
            yield member
            yield from groups(member.members)


class Options(Generic[T]):
    """The settings of ``cls`` for one command.

    Args:
        cls: a dataclass whose fields are settings (numbers, text, booleans, literals, lists of text) or dataclasses of
            them. Every field has a default.
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
        self.leaves = {leaf.path: leaf for leaf in leaves(self.members)}
        self.groups = list(groups(self.members))
        self._by_option = {leaf.option: leaf for leaf in self.leaves.values()}

    def parse(self, argv: Sequence[str]) -> T:
        """Settings from a command line. ``--help`` and ``--print-config`` print and raise SystemExit(0).

        Raises:
            UserError: an unknown option or key, a value of the wrong type, an unreadable file.
        """
        words = [self._checked_option(word) for word in argv]
        files, words = _take(words, "--config")
        asked_to_print = "--print-config" in words
        words = [word for word in words if word != "--print-config"]

        namespace = self._parser.parse_object({})
        for file in files:
            namespace = self._parser.parse_object(self._checked_mapping(read_mapping(file), file), namespace=namespace)
        config = self._build(self._parser.parse_args(words, namespace=namespace))
        if asked_to_print:
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
    def _parser(self) -> ArgumentParser:
        from jsonargparse import ArgumentParser

        options = self

        class Parser(ArgumentParser):
            def error(self, message: str, ex: Exception | None = None) -> NoReturn:  # type: ignore[override]
                raise options._explain(message) from ex

        parser = Parser(prog=self.prog, description=self.description, print_config=None, exit_on_error=False)
        files = parser.add_argument_group("configuration")
        # Both are taken from the command line before the parser sees it; here they exist for --help.
        files.add_argument("--config", metavar="FILE", default="", help="Read settings from a YAML file.")
        files.add_argument("--print-config", action="store_true", help="Print all settings as YAML and exit.")
        settings = parser.add_argument_group("settings")
        for member in self.members:
            if isinstance(member, Leaf):
                _add(settings, member)
            else:
                group = parser.add_argument_group(".".join(member.path), member.help)
                for leaf in leaves(member.members):
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

    def _checked_mapping(self, values: Mapping[Any, Any], file: str, path: tuple[str, ...] = ()) -> dict[str, Any]:
        """What a file says, once every key is known to exist and to be a group or a setting as it should."""
        groups = {group.path for group in self.groups}
        checked: dict[str, Any] = {}
        for key, value in values.items():
            place = (*path, str(key))
            name = ".".join(place)
            if place in groups:
                if not isinstance(value, Mapping):
                    raise UserError(f"{name} in {file}", value, "a mapping of settings")
                checked[str(key)] = self._checked_mapping(value, file, place)
            elif new := self.renamed.get(name):
                raise UserError(f"--config {file}", name, f"its name of today: {new}")
            elif (leaf := self.leaves.get(place)) is None:
                known = [leaf.key for leaf in self.leaves.values()]
                raise UserError(
                    f"--config {file}", name, f"no such key; {self.suggestion(name, known, '--print-config')}"
                )
            elif leaf.is_list:
                texts = [value] if isinstance(value, str) else value
                if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                    raise UserError(leaf.option, value, leaf.expected)
                checked[str(key)] = texts
            else:
                checked[str(key)] = value
        return checked

    def _explain(self, message: str) -> UserError:
        """The parser's complaint in the form of all others."""
        if match := re.search(r'Parser key "([\w.]+)"', message):
            leaf = self.leaves.get(tuple(match[1].split(".")))
            given = re.search(r"(?:Got value|Given value): (.*)", message)
            if leaf is not None and given is not None:
                return UserError(leaf.option, given[1], leaf.expected)
        if (match := re.search(r"argument (--[\w.-]+): expected", message)) and match[1] in self._by_option:
            return UserError(match[1], "nothing", self._by_option[match[1]].expected)
        if match := re.match(r"unrecognized arguments: (.*)", message):
            return UserError("command line", match[1], "options start with --, and only lists take several values")
        return UserError("command line", message, f"{self.prog} --help shows what there is")

    def _build(self, namespace: Any) -> T:
        def build(cls: type, members: tuple[Leaf | Group, ...], values: Any) -> Any:
            hints = get_type_hints(cls)
            made = {}
            for member in members:
                name = member.path[-1]
                value = getattr(values, name)
                if isinstance(member, Group):
                    value = build(hints[name], member.members, value)
                elif member.is_list:
                    value = get_origin(member.hint)(value)
                elif value is None and type(None) not in get_args(member.hint):  # the parser lets null pass for all
                    raise UserError(member.option, "null", member.expected)
                made[name] = value
            return cls(**made)

        return build(self.cls, self.members, namespace)

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
                value = list(value) if member.is_list else value
                text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
                lines.append(f"{indent}{name}: {text.removesuffix('...' + chr(10)).strip()}")


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


def _take(words: list[str], option: str) -> tuple[list[str], list[str]]:
    """The values of an option that may be given several times, and the words that are left."""
    values, left = [], []
    rest = iter(words)
    for word in rest:
        if word == option:
            value = next(rest, None)
            if value is None:
                raise UserError(option, "nothing", "a YAML file")
            values.append(value)
        elif word.startswith(option + "="):
            values.append(word.partition("=")[2])
        else:
            left.append(word)
    return values, left


def _add(container: Any, leaf: Leaf) -> None:
    """Declares one setting. A boolean may stand alone on the command line and then means true."""
    extra: dict[str, Any] = {"type": str, "nargs": "*", "metavar": "TEXT"} if leaf.is_list else {"type": leaf.hint}
    if leaf.hint is bool:
        extra |= {"nargs": "?", "const": True}
    elif not leaf.is_list and get_origin(leaf.hint) is not Literal:
        extra["metavar"] = _metavar(leaf.hint)
    default = list(leaf.default) if leaf.is_list else leaf.default
    container.add_argument(leaf.option, default=default, help=leaf.help, **extra)


def _metavar(hint: Any) -> str:
    kinds = [part for part in (get_args(hint) or (hint,)) if part is not types.NoneType]
    return {int: "N", float: "X"}.get(kinds[0], "TEXT")
