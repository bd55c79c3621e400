"""Settings of one command: reading them from the command line and from files, and printing them as help and YAML."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from tawpipe.errors import UserError
from tawpipe.options.files import place_in, read_mapping
from tawpipe.options.names import Names
from tawpipe.options.parser import HELP_ALL, CommandParser
from tawpipe.options.settings import Choices, Group, Leaf, all_of, tree, with_choices
from tawpipe.options.values import kinds_of

T = TypeVar("T")
Values = dict[tuple[str, ...], Any]
"""Values of settings, by path."""


class Options(Generic[T]):
    """Settings of one command, which are the fields of the dataclass ``cls``.

    Args:
        cls: a dataclass whose fields are settings (numbers, text, booleans, literals, lists of text or of numbers) or
            dataclasses of settings. Every field has a default.
        prog: the command as the user types it.
        description: description of the command, for the help.
        choices: tables of values for some settings: key -> value -> meaning.
        leading: keys that ``--help`` shows, each with an example; None shows all.
        elsewhere: names that other programs use for settings, see ``Names``.
    """

    def __init__(
        self,
        cls: type[T],
        *,
        prog: str,
        description: str,
        choices: Choices | None = None,
        leading: Mapping[str, str] | None = None,
        elsewhere: Mapping[str, str] | None = None,
    ) -> None:
        self.cls, self.prog, self.description = cls, prog, description
        self.members = with_choices(tree(cls), choices or {})
        self.leaves = {member.path: member for member in all_of(self.members) if isinstance(member, Leaf)}
        self.groups = [member for member in all_of(self.members) if isinstance(member, Group)]
        self._by_option = {leaf.option: leaf for leaf in self.leaves.values()}
        self._by_key = {leaf.key: leaf for leaf in self.leaves.values()}
        self._leading, self._elsewhere = dict(leading or {}), dict(elsewhere or {})

    def parse(self, argv: Sequence[str], below: Callable[[T, Values], Values] = lambda *_: {}) -> T:
        """Read the settings from a command line. ``--help`` and ``--print-config`` print and raise SystemExit(0).

        Args:
            argv: arguments of the command line.
            below: returns values for settings that the command line and its files do not give. It is called with the
                settings so far, with defaults for the rest, and with the given values.

        Raises:
            UserError: an unknown option or key, a value of the wrong type, an unreadable file.
        """
        arguments = self._arguments(argv)
        values = self.values(arguments.config, vars(arguments))
        config = self.build(values)
        if lower := below(config, values):
            config = self.build({**lower, **values})
        if arguments.print_config:
            print(self.to_yaml(config), end="")
            raise SystemExit(0)
        return config

    def values(self, files: Sequence[str], words: Mapping[str, Any]) -> Values:
        """Return the values in files and in words of the command line, which take precedence.

        Args:
            files: YAML files; a later file takes precedence over an earlier one.
            words: words of the command line, by the keys of their settings.

        Raises:
            UserError: an unknown key, a value of the wrong type, an unreadable file.
        """
        values: Values = {}
        for file in files:
            values |= self.values_in(file)
        return values | {path: leaf.read(words[leaf.key]) for path, leaf in self.leaves.items() if leaf.key in words}

    def build(self, values: Values) -> T:
        """Return an object of ``cls`` with ``values``, and with defaults for all other settings."""
        return self._build(self.cls, self.members, values)

    def values_in(self, file: str) -> Values:
        """Return the values in a YAML file of settings.

        Raises:
            UserError: an unknown key, a value of the wrong type, an unreadable file.
        """
        return self._from_mapping(read_mapping(file), file)

    def located(self, error: UserError, argv: Sequence[str]) -> UserError:
        """Return ``error`` with the file and line of its setting, if a file on the command line ``argv`` sets it."""
        arguments = self._arguments(argv)
        return self.located_in(error, arguments.config, vars(arguments))

    def located_in(self, error: UserError, files: Sequence[str], words: Mapping[str, Any]) -> UserError:
        """Return ``error`` with the file and line of its setting, if one of ``files`` sets it and ``words`` do not.

        Args:
            files: see ``values``.
            words: see ``values``.
        """
        leaf = self._by_key.get(error.setting.removeprefix("--").replace("-", "_"))
        if leaf is None or leaf.key in words:
            return error
        places = [place for file in files if (place := place_in(file, leaf.path))]
        return UserError(f"{error.setting} in {places[-1]}", error.value, error.expected) if places else error

    def _arguments(self, argv: Sequence[str]) -> argparse.Namespace:
        """Split a command line into settings; return their words, not yet converted, by the key of the setting.

        Raises:
            UserError: an unknown option, or an option without its value.
        """
        try:
            arguments, left = self.parser.parse_known_args([self._checked_option(word) for word in argv])
        except argparse.ArgumentError as error:  # the parser raises this for an option without its value only
            leaf = self._by_option.get(error.argument_name or "")
            raise UserError(error.argument_name or "", "nothing", leaf.expected if leaf else "a YAML file") from error
        if left:
            expected = "options start with --, and only lists take several values"
            raise UserError("command line", " ".join(left), expected)
        return arguments

    def to_yaml(self, config: T) -> str:
        """Return all settings in ``config`` as the text of a YAML file, with their help as comments.

        Reading this file gives settings that are equal to ``config``."""
        lines = [f"# Settings of `{self.prog}`: use with --config FILE; command-line options override the file."]
        self._write(lines, self.members, config, indent="")
        return "\n".join(lines) + "\n"

    @cached_property
    def parser(self) -> CommandParser:
        """Parser that splits the command line into settings and prints the help; values stay texts."""
        parser = CommandParser(
            leading={self._by_key[key].option: example for key, example in self._leading.items()},
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
        """Return a word of the command line; an option has dashes instead of underscores in its name.

        Raises:
            UserError: the option does not exist.
        """
        if not word.startswith("--"):
            return word
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name not in self.parser._option_string_actions:
            names = Names([*self._by_key, "config", "print_config", "help"], self._elsewhere, options=True)
            hint = names.meant(name) or f"{self.prog} {HELP_ALL} shows all of them"
            raise UserError("command line", name, f"no such option; {hint}")
        return name + equals + value

    def _from_mapping(self, mapping: Mapping[Any, Any], file: str, above: tuple[str, ...] = ()) -> Values:
        """Convert the nested mapping of a file to values by path.

        Args:
            mapping: mapping of the file, or of a group in it.
            file: name of the file, for messages.
            above: path of the mapping in the file.

        Raises:
            UserError: an unknown key, or a value of the wrong type.
        """
        groups = {group.path for group in self.groups}
        values: Values = {}
        for key, value in mapping.items():
            path = (*above, str(key))
            name = ".".join(path)
            if path in groups:
                if not isinstance(value, Mapping):
                    raise UserError(f"{name} in {place_in(file, path)}", value, "a mapping of settings")
                values |= self._from_mapping(value, file, path)
            elif (leaf := self.leaves.get(path)) is None:
                names = Names(self._by_key, self._elsewhere, options=False)
                hint = names.meant(name) or f"{self.prog} --print-config shows all of them"
                raise UserError(f"--config {place_in(file, path)}", name, f"no such key; {hint}")
            else:
                try:
                    values[path] = leaf.read(value)
                except UserError as error:
                    where = f"{error.setting} in {place_in(file, path)}"
                    raise UserError(where, error.value, error.expected) from error
        return values

    def _build(self, cls: type, members: Sequence[Leaf | Group], values: Mapping[tuple[str, ...], Any]) -> Any:
        """Return an object of ``cls``, in which every group is an object, too. Missing values have their defaults."""
        hints = get_type_hints(cls)
        arguments = {}
        for member in members:
            name = member.path[-1]
            if isinstance(member, Group):
                arguments[name] = self._build(hints[name], member.members, values)
            elif member.path in values:
                arguments[name] = values[member.path]
        return cls(**arguments)

    def _write(self, lines: list[str], members: Sequence[Leaf | Group], values: Any, indent: str) -> None:
        """Append the YAML lines of ``members``, with their help as comments, to ``lines``."""
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


def _add(container: Any, leaf: Leaf) -> None:
    """Add the option of one setting to a parser or an argument group.

    If the option is given without a value, it means ``true`` for a boolean, and ``on`` for a setting that allows
    ``on``. A list takes any number of values.

    Args:
        container: parser or argument group.
        leaf: the setting.
    """
    alone = "true" if leaf.hint is bool else "on" if "on" in get_args(leaf.hint) else None
    nargs = {"nargs": "*"} if leaf.is_list else {"nargs": "?", "const": alone} if alone else {}
    text = f"{leaf.help} ({leaf.expected}; default: {leaf.text(leaf.default)})".replace("%", "%%")
    container.add_argument(leaf.option, dest=leaf.key, metavar=_metavar(leaf.hint), help=text, **nargs)


def _metavar(hint: Any) -> str:
    kind = kinds_of(hint)[0]
    if get_origin(kind) in (tuple, list):
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    return {int: "N", float: "X", bool: "true|false"}.get(kind, "TEXT")
