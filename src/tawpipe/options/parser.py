"""Argument parser of the commands: ``argparse`` with a short and a full help, and hints for mistyped options."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from tawpipe.errors import UserError
from tawpipe.options.names import Names

HELP_ALL = "--help-all"


class CommandParser(argparse.ArgumentParser):
    """Parser of one command.

    Args:
        leading: options that ``--help`` shows, each with an example value; ``--help-all`` shows all options. Empty if
            ``--help`` shows all.
        elsewhere: names that other programs use for options, see ``Names``.
    """

    def __init__(
        self, *, leading: Mapping[str, str] | None = None, elsewhere: Mapping[str, str] | None = None, **rest: Any
    ) -> None:
        self._leading, self._elsewhere = dict(leading or {}), dict(elsewhere or {})
        if self._leading:
            rest.setdefault("usage", "%(prog)s [--OPTION VALUE ...]")
        super().__init__(**rest)
        if self._leading:
            self.add_argument(HELP_ALL, action=_HelpAll, help="show all options and exit")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parse the arguments of a command line.

        Raises:
            UserError: an option does not exist.
            SystemExit: argparse refuses the arguments for another reason, or has printed help.
        """
        self._check_options(sys.argv[1:] if args is None else args)
        return super().parse_args(args, namespace)

    def _check_options(self, words: Sequence[str]) -> None:
        """Check that all options in ``words`` exist, before argparse checks anything.

        Raises:
            UserError: an option does not exist. The message suggests the option that was probably meant.
        """
        within = self._chosen(words)
        known = [name for parser in (within, self) for name in parser._option_string_actions if name.startswith("--")]
        for word in words:
            option = word.partition("=")[0]
            if option.startswith("--") and not any(name.startswith(option) for name in known):
                names = Names([name.removeprefix("--") for name in known], self._elsewhere, options=True)
                hint = names.meant(option) or f"{within.prog} --help lists all options"
                raise UserError("command line", option, f"no such option; {hint}")

    def format_help(self) -> str:
        """Return the help: the leading options with examples, or all options if there are no leading ones."""
        return self._short_help() if self._leading else super().format_help()

    def whole_help(self) -> str:
        """Return the help of all options, in their groups."""
        return super().format_help()

    def _short_help(self) -> str:
        """Return the help with the leading options only, and the name of the option that shows all."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        formatter.start_section("the most used settings, with examples")
        formatter.add_arguments(list(self._examples()))
        formatter.end_section()
        number = sum(bool(action.option_strings) for action in self._actions)
        formatter.add_text(f"{self.prog} {HELP_ALL} shows all {number} options.")
        return formatter.format_help()

    def _examples(self) -> Iterator[argparse.Action]:
        """Yield the leading options, each with an example value and the first sentence of its help."""
        for option, example in self._leading.items():
            action = copy.copy(self._option_string_actions[option])
            action.metavar, action.option_strings = example, [option]
            action.nargs = None if action.nargs in ("*", "?") else action.nargs
            action.help = first_sentence(action.help or "")
            yield action

    def _chosen(self, words: Sequence[str]) -> argparse.ArgumentParser:
        """Return the parser of the subcommand in ``words``; this parser if there is none."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and words:
                return action.choices.get(words[0], self)
        return self


def first_sentence(text: str) -> str:
    """Return ``text`` up to its first full stop, without the full stop.

    >>> first_sentence("One of them. There are two."), first_sentence("A, B, ...")
    ('One of them', 'A, B, ...')
    """
    first = text.partition(". ")[0]
    return first if first.endswith("..") else first.removesuffix(".")


class _HelpAll(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, *, help: str, **_: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, CommandParser)
        print(parser.whole_help(), end="")
        parser.exit()
