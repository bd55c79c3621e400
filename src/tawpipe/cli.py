"""The command ``tawpipe``: find the named subcommand, run it, and turn errors into exit codes.

Exit codes: 0 success; 1 the run failed; 2 a setting cannot work; 130 interrupted. Slow imports (torch, transformers)
happen only where they are needed. Help and errors about settings therefore appear at once.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import ModuleType

from tawpipe.commands.brought import brought
from tawpipe.environment import ERROR_PREFIX, USER_ERROR
from tawpipe.errors import RunError, UserError
from tawpipe.extras import VERSION
from tawpipe.launch.torchrun import leave_words, print_refusal
from tawpipe.launch.workers import print_expected_error
from tawpipe.options.library import as_option
from tawpipe.streams import lossy, settle

COMMANDS = {
    "doctor": "show what is installed and measure the links between processes and nodes",
    "prove": "check numbers, memory and speed on these devices, and write one file",
    "plan": "predict the cost of every strategy on given machines, and choose one",
    "train": "train a causal language model; `tawpipe train --help` lists the settings",
    "chat": "chat with a trained model in the terminal",
    "serve": "serve a model over HTTP, in one process or split into stages over several",
    "export": "export the model of a run from a checkpoint, also after an interruption",
    "checkpoint": "list, verify or prune the checkpoints of a run",
    "trace": "draw the timeline of a recorded step: a picture and a trace to zoom into",
    "open": "open the pages of a run, a plan, a recorded step or a comparison in a browser",
}
"""Subcommands of ``tawpipe``, each with its line in the help text.

The module of that name in ``tawpipe.commands`` has a function ``run``. Installed packages can add commands
(``commands.brought``). Packages are searched only if the word on the command line is not in this table.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    A command does not fail because the reader of its output has gone, or because the output's encoding lacks a
    character. A command whose output cannot be written to a full disk fails. A training run is the exception.

    Args:
        argv: the words after ``tawpipe``; by default, the words with which this process was started.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = lossy(sys.stdout, (BrokenPipeError,)), lossy(sys.stderr)
    try:
        return _main(argv)
    finally:
        for stream in (sys.stdout, sys.stderr):
            settle(stream)
        sys.stdout, sys.stderr = before


def _main(argv: Sequence[str] | None) -> int:
    """Run the command line ``argv`` with the present output streams, print errors, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    others = {} if words[:1] and words[0] in COMMANDS else brought()
    parser = _parser(others)
    if not words:
        parser.print_help()
        return 0
    try:
        words = _import_modules(words)
        # The first word chooses the command, which parses all further words.
        name = parser.parse_args(words[:1]).command
        command = others[name] if name in others else importlib.import_module(f"tawpipe.commands.{name}")
        return command.run(words[1:])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except UserError as error:
        print_refusal(as_option(error))
        return USER_ERROR
    except RunError as error:
        return _failed(error)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # a full disk is an expected error
        return _failed(error) if full else _crashed()
    except Exception:
        return _crashed()


def _failed(error: Exception) -> int:
    """Print an expected error, leave it for the launcher, and return exit code 1."""
    print_expected_error(error)
    leave_words(f"{ERROR_PREFIX}{error}")
    return 1


def _crashed() -> int:
    """Print the traceback of the current exception, leave it for the launcher, and return exit code 1."""
    traceback.print_exc()
    leave_words(traceback.format_exc())
    return 1


def _import_modules(words: list[str]) -> list[str]:
    """Import the modules of all ``--import MODULE`` options, and return the words without these options.

    The processes that this one starts import the modules as well.

    Raises:
        UserError: a module does not exist or cannot be imported.
    """
    left: list[str] = []
    rest = iter(words)
    modules: list[str] = []
    for word in rest:
        name, _, value = word.partition("=")
        if name == "--import":
            modules.append(value or next(rest, ""))
        else:
            left.append(word)
    if modules:
        from tawpipe.schedule.strategies.table import import_strategies

        import_strategies(modules)
    return left


def _parser(others: Mapping[str, ModuleType]) -> argparse.ArgumentParser:
    """Build the parser of the first word: all commands with their help lines, ``--import`` and ``--version``.

    Args:
        others: commands of installed packages, by name.
    """
    description = "Train long-context language models where the activations stay and the weights travel."
    parser = argparse.ArgumentParser(prog="tawpipe", description=description)
    parser.add_argument(
        "--import",
        metavar="MODULE",
        dest="modules",
        help="import a module or .py file that registers strategies (works after any command)",
    )
    parser.add_argument("--version", action="version", version=f"tawpipe {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, line in (COMMANDS | {name: module.LINE for name, module in others.items()}).items():
        commands.add_parser(name, help=line, add_help=False)
    return parser
