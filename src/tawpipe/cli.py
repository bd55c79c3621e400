"""The command ``tawpipe``: finds the command that is meant, runs it and turns errors into exit codes.

Exit codes: 0 done; 1 the run failed; 2 a setting cannot work; 130 interrupted. What takes long to import (torch,
transformers) is imported where it is needed, so that help and complaints about settings come at once.
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
"""The words after ``tawpipe``, each with its line in the help; the module of that name in ``commands`` has ``run``.

Installed packages bring others (``commands.brought``), which are looked for when the word is none of these.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code.

    No command ends because a reader of its output has gone, or lacks a letter. One whose output a full disk does not
    take has failed, but for a training run.

    Args:
        argv: the words after ``tawpipe``; those of this process by default.
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
    words = list(sys.argv[1:] if argv is None else argv)
    others = {} if words[:1] and words[0] in COMMANDS else brought()
    parser = _parser(others)
    if not words:
        parser.print_help()
        return 0
    try:
        words = _import_modules(words)
        # The first word decides; what follows belongs to the command.
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
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)  # wherever it is met: nothing but the user can help
        return _failed(error) if full else _crashed()
    except Exception:
        return _crashed()


def _failed(error: Exception) -> int:
    print_expected_error(error)
    leave_words(f"{ERROR_PREFIX}{error}")
    return 1


def _crashed() -> int:
    traceback.print_exc()
    leave_words(traceback.format_exc())
    return 1


def _import_modules(words: list[str]) -> list[str]:
    """The words without ``--import MODULE``, whose modules are imported; for the processes that this one starts, too.

    Raises:
        UserError: a module that is not there, or that cannot be imported.
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
