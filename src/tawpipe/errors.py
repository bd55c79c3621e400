"""Errors that the user of the program has to solve. This module imports none of the package's other modules."""

from __future__ import annotations

import re


class UserError(Exception):
    """Setting that cannot work. The command line prints it without a traceback and exits with code 2.

    Args:
        setting: name of the setting as the user writes it: ``--data`` on a command line, the argument's name in the
            library (``options.library`` maps it to the option).
        value: value that the user gave.
        expected: values that are allowed, or the right value here; one sentence without a full stop.
        need: requirement of a refused strategy as data (``schedule.refusal``), or the reason of the refusal in words
            that name no strategy. None if no search over settings uses it.
    """

    def __init__(self, setting: str, value: object, expected: str, *, need: object = None) -> None:
        self.setting, self.value, self.expected, self.need = setting, value, expected, need
        super().__init__(f"{setting}: got {value!r}; {expected}")


class RunError(Exception):
    """Failure of a run whose settings were right, for example a non-finite loss. The exit code is 1."""


REPORT = (
    "this is a fault of tawpipe or of code in the model: please report it with these lines, the command and "
    "the output of `tawpipe doctor`"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` is a ``MemoryError`` or its text says that memory could not be allocated."""
    return isinstance(error, MemoryError) or bool(re.search("out of memory|can't allocate memory", str(error)))


def is_fault(error: Exception) -> bool:
    """Return True if neither a setting nor the machine explains ``error``, so that it is a fault of the program.

    UserError, RunError, OSError and errors for lack of memory are not faults.
    """
    return not (is_out_of_memory(error) or isinstance(error, UserError | RunError | OSError))
