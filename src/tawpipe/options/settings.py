"""Settings as leaves of a tree of dataclasses, each with its path in the tree, its type and its help."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from tawpipe.errors import UserError
from tawpipe.options.values import Open, describe, describe_bounds, kinds_of, read_scalar

Choices = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Leaf:
    """Setting: its path in the tree, its type, default and help."""

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
        """Return a value of the setting as YAML on one line."""
        if isinstance(value, Open):
            return value.word
        value = list(value) if self.is_list else value
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
        return text.removesuffix("...\n").strip()

    @property
    def expected(self) -> str:
        """Description of the values that the setting allows."""
        if choices := self.metadata.get("choices"):
            return f"one of {', '.join(choices)}"
        words = describe(self.hint, describe_bounds(self.metadata))
        return f"{words} or {self.default.word}" if isinstance(self.default, Open) else words

    def read(self, value: object) -> Any:
        """Convert a value from a file or the command line to the setting's type, and return it. Bounds are not checked.

        An ``Open`` default is returned for None and for its own word.

        Raises:
            UserError: the value has another type.
        """
        if isinstance(self.default, Open) and value in (None, "null", self.default.word):
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
        why = self.metadata.get("refused", {}).get(plain if isinstance(plain, str) else None, "")
        raise UserError(self.option, plain, f"{why}; {self.expected}" if why else self.expected)

    def check(self, value: object) -> None:
        """Raise UserError if ``value`` is a number outside the setting's bounds."""
        if not isinstance(value, int | float) or isinstance(value, bool | Open):
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
    """Nested dataclass of settings. The first paragraph of its docstring is its help."""

    path: tuple[str, ...]
    help: str
    members: tuple[Leaf | Group, ...]


def tree(cls: type, path: tuple[str, ...] = ()) -> tuple[Leaf | Group, ...]:
    """Return the settings of a dataclass: its own fields in order, then fields of its bases, then groups.

    Args:
        cls: the dataclass.
        path: path of the dataclass in a larger tree.
    """
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


def with_choices(members: Sequence[Leaf | Group], choices: Choices) -> tuple[Leaf | Group, ...]:
    """Return a copy of the settings in which the values in ``choices`` are allowed values and part of the help.

    Args:
        members: settings and groups.
        choices: key of a setting -> value -> meaning. Settings without an entry are unchanged.
    """
    changed: list[Leaf | Group] = []
    for member in members:
        if isinstance(member, Group):
            member = dataclasses.replace(member, members=with_choices(member.members, choices))
        elif known := choices.get(member.key):
            words = "; ".join(f"{value}: {meaning}" for value, meaning in known.items())
            metadata = {**member.metadata, "choices": tuple(known)}
            member = dataclasses.replace(member, help=f"{member.help} {words}.", metadata=metadata)
        changed.append(member)
    return tuple(changed)


def field_help(cls: type) -> dict[str, str]:
    """Return the help of every field: the string below it, or its line under ``Args:`` in the class docstring."""
    from docstring_parser import parse_from_object

    helps: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            for entry in parse_from_object(base).params:
                helps[entry.arg_name] = " ".join((entry.description or "").split())
    return helps


def all_of(members: Sequence[Leaf | Group]) -> Iterator[Leaf | Group]:
    """Yield every setting and every group of a tree; each group is followed by its own members."""
    for member in members:
        yield member
        if isinstance(member, Group):
            yield from all_of(member.members)
