"""``tawpipe checkpoint``: the words that follow it on the command line."""

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
    """Runs ``tawpipe checkpoint`` with the words ``argv`` and returns the exit code."""
    arguments = _parser().parse_args(argv)
    return arguments.run(arguments, Path(arguments.folder))


def _checkpoints(path: Path, states: Callable[[Path], list[Path]] = complete_states) -> list[Path]:
    """The checkpoints of a run's output folder, of its folder of checkpoints, or the one itself.

    Args:
        states: lists those in a folder.

    Raises:
        UserError: there is none.
    """
    if is_complete(path):
        return [path]
    if folders := states(path / "checkpoints") or states(path):
        return folders
    raise UserError("FOLDER", str(path), "the output folder of a run with checkpoints, or a checkpoint")


def _list(_: argparse.Namespace, path: Path) -> int:
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
    """What a run trained, where that is not the whole model."""
    adapter = f", LoRA of rank {run.lora['rank']}" if run.lora else ""
    return adapter + (f", frozen: {' '.join(run.freeze)}" if run.freeze else "")


def _frozen_words(manifest: Manifest) -> str:
    """Place of the frozen weights that a state does not hold."""
    count = len(digests_in(manifest))
    return f"; frozen weights: {count} parameters in {folder_of(manifest)}" if count else ""


def _verify(_: argparse.Namespace, path: Path) -> int:
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
    """Digests of those of some parameters that a model's folder has, by their names in a run."""
    from tawpipe.model.chain import Chain
    from tawpipe.model.facts import value_digest
    from tawpipe.model.files.build import build_model
    from tawpipe.model.files.pretrained import SafetensorsSource
    from tawpipe.model.weights import base_name

    source, digests = SafetensorsSource(Chain(build_model(str(folder), max_positions=1).model), folder), {}
    for name in names:
        with suppress(KeyError):
            digests[name] = value_digest(source.parameter(base_name(name)))
    return digests


def problem_of(folder: Path) -> str:
    """The damage of a checkpoint, of which all is read, in words; empty if it is sound."""
    try:
        manifest = read_manifest(folder)
        read_run(folder)
        return damage(folder, manifest, range(len(manifest["files"])))
    except UserError as error:
        return error.expected


def _prune(arguments: argparse.Namespace, path: Path) -> int:
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
    """The steps that checkpoints name as the best until then."""
    steps = []
    for folder in complete:
        with suppress(UserError):
            steps += [run.best["step"]] if (run := read_run(folder)).best else []
    return steps


def _partial(path: Path) -> list[Path]:
    """Checkpoints that were not written to their end."""
    inner = path / "checkpoints"
    return sorted((inner if inner.is_dir() else path).glob(f"step-*{PARTIAL}"))


def _parser() -> argparse.ArgumentParser:
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
