"""Errors that belong to the user of the program. They stand below everything, so that every part may raise them."""

from __future__ import annotations


class UserError(Exception):
    """A setting that cannot work. The command line prints it without a traceback and exits with code 2.

    Args:
        setting: the name of the setting as the user writes it: ``--data`` on a command line, an argument's name in the
            library (``options.library`` has its option).
        value: what it was.
        expected: what it may be, or what would be right here; one sentence without a full stop.
    """

    def __init__(self, setting: str, value: object, expected: str) -> None:
        self.setting, self.value, self.expected = setting, value, expected
        super().__init__(f"{setting}: got {value!r}; {expected}")


class RunError(Exception):
    """A run that cannot go on although its settings were right, for example a non-finite loss. Exit code 1."""
