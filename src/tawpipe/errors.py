"""Errors that belong to the user of the program. They stand below everything, so that every part may raise them."""

from __future__ import annotations

import re


class UserError(Exception):
    """A setting that cannot work. The command line prints it without a traceback and exits with code 2.

    Args:
        setting: the name of the setting as the user writes it: ``--data`` on a command line, an argument's name in the
            library (``options.library`` has its option).
        value: what it was.
        expected: what it may be, or what would be right here; one sentence without a full stop.
        need: what a refused strategy would need, as data (``schedule.refusal``), or why it is refused, in words that
            name no strategy; None where no search for settings asks.
    """

    def __init__(self, setting: str, value: object, expected: str, *, need: object = None) -> None:
        self.setting, self.value, self.expected, self.need = setting, value, expected, need
        super().__init__(f"{setting}: got {value!r}; {expected}")


class RunError(Exception):
    """A run that cannot go on although its settings were right, for example a non-finite loss. Exit code 1."""


REPORT = (
    "this is a fault of tawpipe or of code in the model: please report it with these lines, the command and "
    "the output of `tawpipe doctor`"
)


def is_out_of_memory(error: BaseException) -> bool:
    """True for an error of Python or torch that says that memory could not be had."""
    return isinstance(error, MemoryError) or bool(re.search("out of memory|can't allocate memory", str(error)))


def is_fault(error: Exception) -> bool:
    """True for an error that neither a setting nor a machine without enough memory explains."""
    return not (is_out_of_memory(error) or isinstance(error, UserError | RunError | OSError))
