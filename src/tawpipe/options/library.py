"""The library's errors in a command's words: they name an argument of the library, and a command has an option for it.

Settings that are called alike on both sides (``schedule.recompute``) are not here: they stay as they are.
"""

from __future__ import annotations

from tawpipe.errors import UserError
from tawpipe.options.names import option_of

OPTIONS = {
    "device": "--device",
    "freeze": "--freeze",
    "injector": "--inject",
    "local_rank": "--nproc",
    "merge": "--export.merge",
    "model": "--model",
    "modules": "--import",
    "nodes": "--nodes",
    "resume": "--resume",
    "sequence_length": "--sequence-length",
    "vocab_size": "--tokenizer",
    "where": "--resume",
}
"""Argument -> option, for arguments that commands call otherwise."""
GROUPS = ("lora", "rope")
"""Settings of the library that are groups of options."""


def as_option(error: UserError) -> UserError:
    """The same error under the name of the option.

    >>> str(as_option(UserError("local_rank", 2, "at most 1"))), str(as_option(UserError("seed", -1, "0 or more")))
    ('--nproc: got 2; at most 1', 'seed: got -1; 0 or more')
    """
    name, (group, _, setting) = error.setting, error.setting.partition(".")
    option = OPTIONS.get(name) or (option_of(name) if group in GROUPS and setting.isidentifier() else "")
    return UserError(option, error.value, error.expected) if option else error
