"""Command ``tawpipe checkpoint``: list, verify and delete checkpoints."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from tawpipe.checkpoint.format import Manifest, damage, read_manifest
from tawpipe.checkpoint.frozen import difference, digests_in, folder_of
from tawpipe.checkpoint.names import MARKER, PARTIAL, complete_states, is_complete, named_states, remove
from tawpipe.checkpoint.resume import RunState, read_run
from tawpipe.checkpoint.store import superfluous
from tawpipe.errors import UserError
from tawpipe.options import CommandParser


def run(argv: Sequence[str]) -> int:
    """Run ``tawpipe checkpoint`` with its subcommand (list, verify or prune), and return the exit code."""
    arguments = _parser().parse_args(argv)
    return arguments.run(arguments, Path(arguments.folder))


def _checkpoints(path: Path, states: Callable[[Path], list[Path]] = complete_states) -> list[Path]:
    """Return the checkpoints at ``path``, at least one.

    Args:
        path: output folder of a run, its folder of checkpoints, or one complete checkpoint.
        states: lists the checkpoints in a folder.

    Raises:
        UserError: there is no checkpoint.
    """
    if is_complete(path):
        return [path]
    if folders := states(path / "checkpoints") or states(path):
        return folders
    raise UserError("FOLDER", str(path), "the output folder of a run with checkpoints, or a checkpoint")


def _list(_: argparse.Namespace, path: Path) -> int:
    """Print every checkpoint with its size, time and step, and whether it is damaged or incomplete; return 0."""
    for folder in _checkpoints(path, named_states):
        try:
            manifest, run = read_manifest(folder), read_run(folder)
        except UserError as error:
            print(f"{folder}  damaged: {error.expected}")
            continue
        size = sum(entry["bytes"] for entry in manifest["files"])
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((folder / MARKER).stat().st_mtime))
        best = f"; lowest validation loss: {run.best['loss']:.4f} after step {run.best['step']}" if run.best else ""
        done = f"step {run.step}, {run.samples} samples, {run.topology}{_trained(run)}{best}"
        print(f"{folder}  {size / 2**20:.1f} MiB  {when}  {done}{_frozen_words(manifest)}")
    for folder in _partial(path):
        print(f"{folder}  incomplete: being written, or left by a crash")
    return 0


def _trained(run: RunState) -> str:
    """Return words about the trained part of the model: adapter and frozen parameters; ``""`` for the whole model."""
    adapter = f", LoRA of rank {run.lora['rank']}" if run.lora else ""
    return adapter + (f", frozen: {' '.join(run.freeze)}" if run.freeze else "")


def _frozen_words(manifest: Manifest) -> str:
    """Return words about the folder of frozen weights that a checkpoint refers to; ``""`` if there is none."""
    count = len(digests_in(manifest))
    return f"; frozen weights: {count} parameters in {folder_of(manifest)}" if count else ""


def _verify(_: argparse.Namespace, path: Path) -> int:
    """Read all files of every checkpoint, and the frozen weights that it refers to; print whether checksums match.

    Frozen weights that cannot be read are printed as not checked, and do not count as a fault.

    Returns:
        The exit code: 1 if a checkpoint is damaged or frozen weights differ, else 0.
    """
    bad, digests_of = 0, cache(_digests_of)
    for folder in _checkpoints(path, named_states):
        problem = problem_of(folder)
        words, differs = f"damaged: {problem}" if problem else "sound", ""
        if not problem and digests_in(manifest := read_manifest(folder)):
            base = Path(manifest["frozen"]["folder"])
            unchecked = "" if base.is_dir() else "the folder is missing"
            try:
                differs = "" if unchecked else difference(manifest, digests_of(base, tuple(digests_in(manifest))))
            except (UserError, OSError, ValueError) as error:
                unchecked = str(error)
            outcome = f" could not be checked: {unchecked}" if unchecked else f": {differs or 'unchanged'}"
            words += _frozen_words(manifest) + outcome
        bad += bool(problem or differs)
        print(f"{folder}  {words}", flush=True)
    return 1 if bad else 0


def _digests_of(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Read parameters from the folder of a model, and return a digest of the values of each, by parameter name.

    Args:
        folder: folder of the model that the run started from.
        names: names of the parameters in the run, which are also the keys of the result. A parameter that the folder
            lacks is left out.
    """
    from tawpipe.model.chain import Chain
    from tawpipe.model.facts import value_digest
    from tawpipe.model.files.build import build_model
    from tawpipe.model.files.pretrained import SafetensorsSource
    from tawpipe.model.units import base_name

    source, digests = SafetensorsSource(Chain(build_model(str(folder), max_positions=1).model), folder), {}
    for name in names:
        with suppress(KeyError):
            digests[name] = value_digest(source.parameter(base_name(name)))
    return digests


def problem_of(folder: Path) -> str:
    """Read a checkpoint completely; return words about its damage, or ``""`` if it is intact."""
    try:
        manifest = read_manifest(folder)
        read_run(folder)
        return damage(folder, manifest, range(len(manifest["files"])))
    except UserError as error:
        return error.expected


def _prune(arguments: argparse.Namespace, path: Path) -> int:
    """Delete old checkpoints, and with ``--incomplete`` also incomplete ones, and print their folders; return 0.

    The newest ``--keep`` checkpoints, those of ``--keep-every`` and the best one stay.

    Raises:
        UserError: an argument cannot work, or no intact checkpoint would remain. Nothing is deleted then.
    """
    for name, least in (("keep", 1), ("keep_every", 0)):
        if getattr(arguments, name) < least:
            raise UserError(f"--{name.replace('_', '-')}", getattr(arguments, name), f"at least {least}")
    if is_complete(path):
        raise UserError("FOLDER", str(path), "the output folder of a run, not one checkpoint")
    complete = _checkpoints(path)
    old = superfluous(complete, keep=arguments.keep, keep_every=arguments.keep_every, best=_best(complete))
    if old and not any(not problem_of(kept) for kept in reversed(complete) if kept not in old):
        expected = f"enough to keep a sound checkpoint; {complete[-1].name}: {problem_of(complete[-1])}"
        raise UserError("--keep", arguments.keep, expected)
    for folder in [*old, *(_partial(path) if arguments.incomplete else ())]:
        remove(folder)
        print(f"removed {folder}")
    if not old:
        print("no complete checkpoint to remove")
    return 0


def _best(complete: Sequence[Path]) -> list[int]:
    """Return the steps that the checkpoints name as their best so far; a damaged checkpoint is skipped."""
    steps = []
    for folder in complete:
        with suppress(UserError):
            steps += [run.best["step"]] if (run := read_run(folder)).best else []
    return steps


def _partial(path: Path) -> list[Path]:
    """Return the folders of checkpoints that were not written completely."""
    inner = path / "checkpoints"
    return sorted((inner if inner.is_dir() else path).glob(f"step-*{PARTIAL}"))


def _parser() -> argparse.ArgumentParser:
    """Build the parser of the options and subcommands of ``tawpipe checkpoint``."""
    parser = CommandParser(prog="tawpipe checkpoint", description="List, verify and prune the checkpoints of a run.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, run, words in (
        ("list", _list, "list size, time and position of every checkpoint"),
        (
            "verify",
            _verify,
            "compare all files and frozen weights with their checksums; exit code 1 if one differs",
        ),
        (
            "prune",
            _prune,
            ("remove older checkpoints except the best; only while no run writes there, and if a sound one remains"),
        ),
    ):
        command = commands.add_parser(name, help=words, description=words)
        command.add_argument("folder", metavar="FOLDER", help="the output folder of a run, or a checkpoint")
        command.set_defaults(run=run)
        if name == "prune":
            command.add_argument(
                "--keep", type=int, required=True, metavar="N", help=("number of newest checkpoints to keep")
            )
            command.add_argument(
                "--keep-every", type=int, default=0, metavar="N", help="also keep the checkpoint of every Nth step"
            )
            command.add_argument("--incomplete", action="store_true", help="also remove incomplete checkpoints")
    return parser
