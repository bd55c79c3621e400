"""The command ``tawpipe``: finds the command that is meant, runs it and turns errors into exit codes.

Exit codes: 0 done; 1 the run failed; 2 a setting cannot work; 130 interrupted. What takes long to import (torch,
transformers) is imported where it is needed, so that help and complaints about settings come at once.
"""

from __future__ import annotations

import argparse
import errno
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tawpipe.environment import USER_ERROR
from tawpipe.errors import RunError, UserError
from tawpipe.launch.workers import print_expected_error

if TYPE_CHECKING:
    from tawpipe.train.config import TrainConfig


@dataclass(frozen=True)
class Command:
    """A word after ``tawpipe``: its line in the help, and what runs it with the words that follow."""

    help: str
    run: Callable[[Sequence[str]], int]


def train(argv: Sequence[str]) -> int:
    """``tawpipe train``: starts the processes on this machine, or is one of those that a launcher started."""
    from tawpipe.launch.gpus import find_gpus
    from tawpipe.launch.launcher import in_this_process, launch, local_shape, started_by_local_launcher
    from tawpipe.topology import LaunchEnvironment
    from tawpipe.train.checks import check_output, check_output_name, validate
    from tawpipe.train.config import load_config, with_output_named

    config = load_config(argv)
    launched = LaunchEnvironment.read(os.environ)
    if started_by_local_launcher():
        # The launcher has checked everything; rank 0 may be writing into the output folder already.
        assert launched is not None
        return _train_here(config)

    gpus = find_gpus() if config.device != "cpu" else ()
    validate(config, gpus=gpus)
    if launched is not None:
        check_output_name(config)
        if launched.rank == 0:
            check_output(config)
        return _train_here(config)

    config = with_output_named(config)
    shape = local_shape(config.nodes, config.nproc, num_gpus=len(gpus))
    check_output(config)
    if shape.nproc == 1 and not config.max_restarts:
        with in_this_process(gpus=gpus):
            return _train_here(config)
    # The word that names the folder comes last and so beats one given before.
    command = [sys.executable, "-m", "tawpipe", "train", *argv, f"--output={config.output}"]
    return launch(command, shape, gpus=gpus, patience_s=config.timeouts.grace_s, max_restarts=config.max_restarts)


def _train_here(config: TrainConfig) -> int:
    """One process of the run, under the variables of a launcher."""
    from tawpipe.train.run import run

    return run(config)


def lab(argv: Sequence[str]) -> int:
    """``tawpipe lab``: clusters emulated on one machine, and what is measured in them."""
    from tawpipe.commands.lab import lab as run

    return run(argv)


def checkpoint(argv: Sequence[str]) -> int:
    """``tawpipe checkpoint``: what checkpoints there are, whether they are sound, and which may go."""
    from tawpipe.commands.checkpoint import checkpoint as run

    return run(argv)


def trace(argv: Sequence[str]) -> int:
    """``tawpipe trace``: a recorded step as a picture and for trace viewers."""
    from tawpipe.commands.trace import trace as run

    return run(argv)


def doctor(argv: Sequence[str]) -> int:
    """``tawpipe doctor``: what is here, and how fast its links are."""
    from tawpipe.commands.doctor import doctor as run

    return run(argv)


def plan(argv: Sequence[str]) -> int:
    """``tawpipe plan``: what every strategy would cost, and which one is best."""
    from tawpipe.commands.plan import plan as run

    return run(argv)


COMMANDS = {
    "doctor": Command("say what is here, and measure the links between processes and nodes", doctor),
    "plan": Command("predict what every strategy would cost on some machines, and choose one", plan),
    "train": Command("train a causal language model; `tawpipe train --help` lists the settings", train),
    "checkpoint": Command("list, verify or prune the checkpoints of a run", checkpoint),
    "trace": Command("show when everything in a recorded step ran: a picture and a trace to zoom into", trace),
    "lab": Command("make a cluster with unequal links out of one machine, and measure in it", lab),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns the exit code.

    Args:
        argv: the words after ``tawpipe``; those of this process by default.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not words:
        parser.print_help()
        return 0
    try:
        # The first word decides; what follows belongs to the command.
        command = COMMANDS[parser.parse_args(words[:1]).command]
        return command.run(words[1:])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except UserError as error:
        print_expected_error(error)
        return USER_ERROR
    except RunError as error:
        print_expected_error(error)
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            traceback.print_exc()
        else:  # wherever it is met: nothing but the user can help
            print_expected_error(error)
        return 1
    except Exception:
        traceback.print_exc()
        return 1


def _parser() -> argparse.ArgumentParser:
    description = "Train long-context language models where the activations stay and the weights travel."
    parser = argparse.ArgumentParser(prog="tawpipe", description=description)
    parser.add_argument("--version", action="version", version=f"tawpipe {importlib.metadata.version('tawpipe')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.help, add_help=False)
    return parser
