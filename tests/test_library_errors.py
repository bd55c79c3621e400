"""Errors of the library name its arguments, and a command says its option for each of them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

import tawpipe
from tawpipe.checkpoint.format import read_manifest
from tawpipe.cli import main
from tawpipe.errors import UserError
from tawpipe.model.settings import ExpertSettings, LoraSettings, RopeSettings
from tawpipe.options.library import GROUPS, OPTIONS, as_option
from tawpipe.runtime.watch.faults import Fault
from tawpipe.runtime.world import pick_device
from tawpipe.schedule.strategies.table import import_strategies
from tawpipe.train.settings.config import train_options

ROOMS = ("checkpoint", "model", "pipeline", "runtime", "schedule", "simulate")
SOURCE = Path(tawpipe.__file__).parent
KNOWN = {"--import", *(leaf.option for leaf in train_options().leaves.values())}


def test_every_library_setting_is_a_command_option() -> None:
    assert KNOWN.issuperset(OPTIONS.values())
    for group, settings in zip(GROUPS, (ExpertSettings, LoraSettings, RopeSettings), strict=True):
        for field in fields(settings):
            name = f"{group}.{field.name}"
            assert as_option(UserError(name, 0, "1")).setting in KNOWN, name


def test_other_error_names_are_not_changed_to_options() -> None:
    """What is no argument with another name stays as it is: options, keys of a schedule, a place in a file."""
    for name in ("--model", "schedule.recompute", "batch", "lora.rank in run.yaml, line 3", "command line"):
        error = UserError(name, 0, "1")
        assert as_option(error) is error


def test_library_errors_never_name_an_option() -> None:
    """Neither where it is made nor by a name of the module that stands for its setting."""
    for path in (path for room in ROOMS for path in (SOURCE / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_error = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UserError"
            setting = node.args[0] if isinstance(node, ast.Call) and is_error and node.args else None
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").lower() == "setting":
                setting = node.value
            begins = [part.value for part in ast.walk(setting) if isinstance(part, ast.Constant)] if setting else []
            assert not any(str(text).startswith("--") for text in begins), f"{path}:{getattr(node, 'lineno', 0)}"


@pytest.mark.parametrize(
    ("refused", "argument", "option"),
    [
        (lambda folder: pick_device("gpu", 0), "device: got 'gpu'", "--device: got 'gpu'"),
        (lambda folder: tawpipe.connect(nodes=2, device="cpu"), "nodes: got 2", "--nodes: got 2"),
        (lambda folder: read_manifest(folder), "where: got ", "--resume: got "),
        (lambda folder: LoraSettings(targets=[]).check(), "lora.targets: got []", "--lora.targets: got []"),
        (lambda folder: RopeSettings(beta_fast=8.0).check(), "rope.beta_fast: got 8.0", "--rope.beta-fast: got 8.0"),
        (lambda folder: Fault.parse("nothing"), "injector: got 'nothing'", "--inject: got 'nothing'"),
        (lambda folder: import_strategies(["nowhere.to.be"]), "modules: got 'nowhere", "--import: got 'nowhere"),
    ],
)
def test_call_error_names_the_argument_and_command_error_the_option(
    refused: Callable[[Path], object], argument: str, option: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as caught:
        refused(tmp_path)
    assert str(caught.value).startswith(argument)
    assert str(as_option(caught.value)).startswith(option)


def test_command_prints_its_option_in_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "tiny", "--data", __file__, "--vocab-size", "300", "--steps", "1", "--global-batch", "2"]
    assert main(["train", *words, "--sequence-length", "8", "--rope.beta-fast", "8"]) == 2
    assert "tawpipe: error: --rope.beta-fast: got 8.0; unset under --rope.scaling none" in capsys.readouterr().err
