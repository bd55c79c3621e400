"""Errors of the library in terms of the command line: arguments of the library become options.

Settings with equal names on both sides (``schedule.recompute``) are not in this table and keep their names.
"""

from __future__ import annotations

from tawpipe.errors import UserError
from tawpipe.options.names import option_of

OPTIONS = {
    "device": "--device",
    "freeze": "--freeze",
    "injector": "--inject",
    "kernels": "--kernels",
    "local_rank": "--nproc",
    "merge": "--export.merge",
    "model": "--model",
    "modules": "--import",
    "nodes": "--nodes",
    "quantize": "--quantize",
    "resume": "--resume",
    "sequence_length": "--sequence-length",
    "vocab_size": "--tokenizer",
    "where": "--resume",
}
"""Argument of the library -> option, if their names differ."""
GROUPS = ("experts", "lora", "rope")
"""Settings of the library that are groups of options."""


def as_option(error: UserError) -> UserError:
    """Return an error that names the command-line option instead of the library's argument.

    An error whose name is not in the table is returned unchanged, as ``seed`` in the example.

    >>> str(as_option(UserError("local_rank", 2, "at most 1"))), str(as_option(UserError("seed", -1, "0 or more")))
    ('--nproc: got 2; at most 1', 'seed: got -1; 0 or more')
    """
    name, (group, _, setting) = error.setting, error.setting.partition(".")
    option = OPTIONS.get(name) or (option_of(name) if group in GROUPS and setting.isidentifier() else "")
    return UserError(option, error.value, error.expected) if option else error
