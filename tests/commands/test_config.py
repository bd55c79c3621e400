"""Settings: what a command line and YAML say is what the run gets, and what is printed can be fed back."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tawpipe import __version__
from tawpipe.cli import COMMANDS, main
from tawpipe.errors import UserError
from tawpipe.options import describe
from tawpipe.options.names import option_of
from tawpipe.train.settings.config import TrainConfig, config_text, load_config, train_options, with_output_named
from tawpipe.train.settings.names import LEADING

CONTRACT = ["model", "data", "tokenizer", "nodes", "nproc", "sequence-length", "global-batch", "micro-batch"]
CONTRACT += ["steps", "seed", "dtype", "learning-rate", "output", "resume"]


def test_defaults_of_the_command_line_are_those_of_the_dataclass() -> None:
    assert load_config([]) == TrainConfig()


def test_every_name_of_the_settings_contract_is_an_option() -> None:
    options = {leaf.option for leaf in train_options().leaves.values()}
    assert {f"--{name}" for name in CONTRACT} <= options


def test_printed_config_reads_back_as_an_equal_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    changed = ["--steps", "7", "--data", "a/*.txt", "b c.jsonl", "--optimizer.clip-norm", "null", "--dtype", "bfloat16"]
    changed += ["--learning-rate", "3e-5", "--strict", "--sample.prompt", "one: 'two' # ünï", "--tokenizer", "1.50"]
    assert main(["train", *changed, "--print-config"]) == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    config = load_config(changed)
    assert config != TrainConfig()
    assert load_config(["--config", str(file)]) == config


def test_print_config_puts_help_above_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--print-config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    keys = [index for index, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")]
    assert len(keys) == len(train_options().leaves) + len(train_options().groups)
    assert all(lines[index - 1].lstrip().startswith("# ") for index in keys)


def test_example_train_yaml_equals_print_config() -> None:
    """In a process of its own: here other tests may have brought strategies, which would be listed."""
    example = Path(__file__).parents[2] / "examples" / "train.yaml"
    command = [sys.executable, "-m", "tawpipe", "train", "--print-config"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8").stdout
    assert example.read_text(encoding="utf-8") == printed, f"write it anew: {' '.join(command[1:])} > {example}"


def test_saved_config_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(["--output", str(tmp_path / "new" / "run"), "--nproc", "3", "--nodes", "3"])
    config.output_path.mkdir(parents=True)
    (config.output_path / "config.yaml").write_text(config_text(config))
    assert load_config(["--config", str(config.output_path / "config.yaml")]) == config


@pytest.mark.parametrize("before", [True, False])
def test_command_line_overrides_the_file_in_any_order(tmp_path: Path, before: bool) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("steps: 5\nseed: 6\noptimizer: {beta1: 0.5, beta2: 0.6}\n")
    overrides = ["--steps=9", "--optimizer.beta1", "0.7"]
    config = load_config([*overrides, "--config", str(file)] if before else ["--config", str(file), *overrides])
    assert (config.steps, config.seed) == (9, 6)
    assert (config.optimizer.beta1, config.optimizer.beta2) == (0.7, 0.6)
    assert config.optimizer.eps == TrainConfig().optimizer.eps


@pytest.mark.parametrize("name", ["seed", "plan", "inject", "dtype", "validation_fraction"])
def test_null_is_refused_for_settings_that_need_a_value(tmp_path: Path, name: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"{name}: null\n")
    with pytest.raises(UserError, match=rf"--{name.replace('_', '-')} in .*/a\.yaml, line 1: got 'null'"):
        load_config(["--config", str(file)])
    assert load_config(["--nodes", "null"]).nodes is None


def test_last_of_several_config_files_wins(tmp_path: Path) -> None:
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("steps: 5\noptimizer: {beta1: 0.5}\n")
    second.write_text("steps: 6\noptimizer: {beta2: 0.6}\n")
    config = load_config(["--config", str(first), f"--config={second}"])
    assert (config.steps, config.optimizer.beta1, config.optimizer.beta2) == (6, 0.5, 0.6)


def test_yaml_reads_exponents_null_and_single_values_as_lists(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("learning_rate: 3e-4\ndata: one.txt\noptimizer: {clip_norm: null}\nvirtual_nodes: true\n")
    config = load_config(["--config", str(file)])
    assert (config.learning_rate, config.data, config.optimizer.clip_norm) == (3e-4, ["one.txt"], None)
    assert config.virtual_nodes is True


def test_number_lists_are_read_from_command_line_and_yaml(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("rope: {scaling: longrope, short_factor: 1, long_factor: [1, 2.5]}\n")
    words = ["--rope.scaling", "longrope", "--rope.short-factor", "1", "--rope.long-factor", "1", "2.5"]
    config = load_config(words)
    assert load_config(["--config", str(file)]) == config
    assert (config.rope.short_factor, config.rope.long_factor) == ([1.0], [1.0, 2.5])
    assert main(["train", *words, "--print-config"]) == 0
    file.write_text(capsys.readouterr().out)
    assert load_config(["--config", str(file)]) == config
    for wrong in (["--rope.long-factor", "1", "two"], ["--rope.long-factor", "1,2"]):
        with pytest.raises(UserError, match=r"--rope\.long-factor: .*; a list of numbers"):
            load_config(wrong)


def test_impossible_rotary_settings_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    cases = {"--rope.factor: got 0.5; a number at least 1": ["--rope.scaling", "yarn", "--rope.factor", "0.5"]}
    cases["--rope.scaling: got 'dynamic'; one of none, linear"] = ["--rope.scaling", "dynamic", "--rope.factor", "2"]
    cases["--rope.factor: got 2.0; unset under --rope.scaling none"] = ["--rope.factor", "2"]
    for message, words in cases.items():
        assert main(["train", *words]) == 2
        assert message in capsys.readouterr().err


def test_empty_config_file_keeps_all_defaults(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("# nothing\n")
    assert load_config(["--config", str(file)]) == TrainConfig()


def test_booleans_may_stand_alone_and_underscores_are_taken_for_dashes() -> None:
    config = load_config(["--virtual-nodes", "--micro_batch", "2", "--export.enabled", "false", "--strict=true"])
    assert (config.virtual_nodes, config.micro_batch, config.export.enabled, config.strict) == (True, 2, False, True)


def test_prompt_text_may_contain_an_option_name() -> None:
    given = load_config(["--sample.prompt", "what is --plan.improve off", "--plan.improve=off"])
    assert given.sample.prompt == ["what is --plan.improve off"] and given.plan_improve == "off"


def test_start_time_names_the_output_folder_once() -> None:
    named = with_output_named(TrainConfig(output="a/{time}"))
    assert "{" not in named.output and named.output.startswith("a/2")
    assert with_output_named(named) == named


def test_runs_started_in_one_second_get_separate_folders(tmp_path: Path) -> None:
    config, now, made = TrainConfig(output=f"{tmp_path}/{{time}}"), time.gmtime(0), []
    for _ in range(3):
        made.append(Path(with_output_named(config, now=now).output))
        made[-1].mkdir()
    assert [path.name for path in made] == ["19700101-000000", "19700101-000000-2", "19700101-000000-3"]


def test_settings_are_values_of_plain_types() -> None:
    """So that no file can name a class, and every setting has words for what it may be."""
    for leaf in train_options().leaves.values():
        assert describe(leaf.hint)
        assert leaf.read(yaml.safe_load(leaf.text(leaf.default))) == leaf.default
    assert all(dataclasses.is_dataclass(getattr(TrainConfig(), group.path[0])) for group in train_options().groups)


def test_help_all_lists_every_setting_with_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help-all"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{leaf.option} " in shown for leaf in train_options().leaves.values())
    assert "--micro_batch" not in shown
    assert f"\n{(train_options().groups[0].path[0])}:\n" in shown


def test_help_shows_ten_settings_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    examples = [f"{option_of(key)} {example}" for key, example in LEADING.items()]
    assert len(examples) == 10 and all(f"  {example}" in shown for example in examples)
    assert len(re.findall(r"^  --", shown, re.MULTILINE)) == 10
    assert shown.rstrip().endswith(f"--help-all shows all {len(train_options().leaves) + 4} options.")
    words = [word.strip("'") for example in examples for word in example.split()]
    config = load_config(words)
    assert (config.learning_rate, config.lora.rank, config.data) == (1e-5, 16, ["corpus/*.parquet"])


@pytest.mark.parametrize("command", ["train", "plan"])
def test_help_is_shorter_than_help_all(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    short = capsys.readouterr().out
    assert main([command, "--help-all"]) == 0
    whole = capsys.readouterr().out
    assert short.count("\n") < 45 < whole.count("\n")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main([command, "--help"]) == 0
    assert f"usage: tawpipe {command}" in capsys.readouterr().out


def test_program_prints_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "train" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tawpipe {__version__}\n"


def test_a_source_tree_that_is_not_installed_has_a_version(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    assert main(["--version"]) == 0 and __version__ in capsys.readouterr().out
