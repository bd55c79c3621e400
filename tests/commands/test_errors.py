"""Bad input: exit code 2 and one message that names the setting, what it was and what it may be; never a traceback."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tawpipe.cli import main
from tawpipe.errors import RunError, UserError
from tawpipe.launch.gpus import Gpu
from tawpipe.train.settings.checks import validate
from tawpipe.train.settings.config import TrainConfig, load_config, train_options
from tawpipe.train.settings.names import ELSEWHERE

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*TORCHRUN, "TAWPIPE_LOCAL_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The message with which ``tawpipe train`` refuses these words."""
    assert main(["train", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("tawpipe: error: ") and said.err.count("\n") == 1, said.err
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.parametrize(
    ("words", "setting", "value", "expected"),
    [
        ("--steps 0 --evaluation.every 0", "--steps", "0", "at least 1"),
        ("--lora.rank 0", "--lora.rank", "0", "at least 1"),
        ("--lora.dropout 1 --lora.rank 2", "--lora.dropout", "1.0", "below 1"),
        ("--lora.alpha 16", "--lora.alpha", "16", "unset without --lora.rank"),
        ("--lora.adapter nowhere", "--lora.adapter", "'nowhere'", "a folder with an adapter"),
        ("--quantize nf4", "--quantize", "nf4", "none unless something is frozen (--lora.rank trains an adapter alone"),
        ("--quantize fp4", "--quantize", "fp4", "none, nf4, int8"),
        ("--export.merge", "--export.merge", "True", "false without --lora.rank"),
        ("--steps many", "--steps", "'many'", "a whole number at least 0"),
        ("--steps 1.5", "--steps", "1.5", "a whole number"),
        ("--steps 1e3", "--steps", "'1e3'", "a whole number"),
        ("--nodes true", "--nodes", "'true'", "a whole number at least 1 or null"),
        ("--steps", "--steps", "nothing", "a whole number"),
        ("--steps=-3", "--steps", "-3", "at least 0"),
        ("--global-batch -1", "--global-batch", "-1", "at least 1"),
        ("--sequence-length 1", "--sequence-length", "1", "at least 2"),
        ("--learning-rate nan", "--learning-rate", "nan", "above 0"),
        ("--learning-rate inf", "--learning-rate", "inf", "above 0"),
        ("--optimizer.beta2 1.5", "--optimizer.beta2", "1.5", "below 1"),
        ("--optimizer.clip-norm -1", "--optimizer.clip-norm", "-1", "at least 0 or null"),
        ("--dtype float16", "--dtype", "float16", "float32, bfloat16, float64"),
        ("--strict maybe", "--strict", "maybe", "true or false"),
        ("--schedule.strategy here", "--schedule.strategy", "here", "tawpipe-spread, tawpipe-step, tawpipe-striped"),
        ("--schedule.strategy 1f1b --schedule.stages rows", "schedule.stages", "rows", "world, nodes, locals"),
        ("--schedule.strategy solved --schedule.block-times 1/2", "schedule.block_times", "1/2", "times of all blocks"),
        ("--schedule.homes 0,x", "schedule.homes", "0,x", "as in 0,1,2,0"),
        ("--micro-batch 5 --global-batch 4", "--micro-batch", "5", "at most --global-batch, which is 4"),
        ("--max-document 9 --packing split", "--packing", "split", "balanced, which --max-document needs"),
        ("--packing balanced --micro-batch 2", "--micro-batch", "2", "1 under --packing balanced"),
        ("--bin-tokens 600 --micro-batch 2", "--micro-batch", "2", "1 under --packing balanced"),
        ("--max-document 9000", "--max-document", "9000", "at most 4096, the tokens of a step; or --tokens-per-step"),
        ("--tokens-per-step 500", "--tokens-per-step", "500", "at least 512, the tokens of a document"),
        ("--nodes 3 --nproc 4", "--nodes", "3", "a divisor of --nproc, which is 4"),
        ("--nproc 0", "--nproc", "0", "at least 1"),
        ("--resume nowhere", "--resume", "nowhere", "the folder of a checkpoint"),
        ("--resume auto", "--resume", "auto", "--output"),
        ("--validation-fraction 1", "--validation-fraction", "1", "0 up to"),
        ("--device cuda --output runs/x", "--device", "cuda", "cpu or auto"),
    ],
)
def test_impossible_value_is_refused_with_expected_values(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    setting: str,
    value: str,
    expected: str,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    message = refused(capsys, *words.split())
    assert f"{setting}: got" in message and value in message and expected in message


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--micro-bach", "--micro-batch"),
        ("--clip-norm", "--optimizer.clip-norm"),
        ("--modle=x", "--model"),
        ("--step", "--steps"),
        ("--zzzzzz", "tawpipe train --help-all shows all of them"),
        ("--lr", "in tawpipe it is --learning-rate\n"),
        ("--batch-size", "in tawpipe it is --global-batch, "),
        ("--bach-size", "in tawpipe it is --global-batch, "),
        ("--max_seq_length", "in tawpipe it is --sequence-length\n"),
        ("--num-train-epochs", "in tawpipe it is --epochs\n"),
        ("--per-device-train-batch-size", "in tawpipe it is --micro-batch; "),
        ("--bf16", "in tawpipe it is --dtype bfloat16\n"),
        ("--gradient-checkpointing", "in tawpipe it is --schedule.recompute"),
        ("--deepspeed", "in tawpipe it is --schedule.strategy"),
        ("--fsdp", "in tawpipe it is --schedule.strategy"),
        ("--output-dir", "in tawpipe it is --output\n"),
        ("--sede", "did you mean --seed?"),
        ("--nproc-per-node", "in tawpipe it is --nproc, "),
        ("--warmup-steps", "did you mean --optimizer.warmup-steps?"),
    ],
)
def test_unknown_option_suggests_the_nearest_option(capsys: pytest.CaptureFixture[str], word: str, meant: str) -> None:
    message = refused(capsys, word, "3")
    assert word.partition("=")[0].replace("_", "-") in message and meant in message


def test_names_used_by_other_programs_point_to_existing_settings() -> None:
    keys = {leaf.key for leaf in train_options().leaves.values()}
    assert not {name.replace("-", "_") for name in ELSEWHERE} & keys
    for words in ELSEWHERE.values():
        assert set(re.findall(r"{(.*?)}", words)) <= keys, words


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("plan --seq-len 3", "in tawpipe it is --sequence-length"),
        ("plan --sequence-lenght 3", "did you mean --sequence-length?"),
        ("doctor --nproc-per-node 3", "in tawpipe it is --nproc, "),
        ("trace run --rank 3 --reprot x", "'--reprot'; no such option; did you mean --report?"),
        ("checkpoint prune run --kep 3", "did you mean --keep?"),
        ("lab up --raet 3", "did you mean --rate?"),
        ("prove --zzzzzz", "tawpipe prove --help lists all options"),
    ],
)
def test_other_commands_suggest_the_nearest_option(capsys: pytest.CaptureFixture[str], words: str, meant: str) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("tawpipe: error: command line: got '--") and meant in said and said.count("\n") == 1


def test_stray_word_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'stray'" in refused(capsys, "--steps", "3", "stray")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stpes: 3", ["--config bad.yaml, line 1", "'stpes'", "did you mean steps?"]),
        ("lr: 3", ["'lr'", "in tawpipe it is learning_rate\n"]),
        ("per_device_train_batch_size: 3", ["in tawpipe it is micro_batch; global_batch is"]),
        ("clip_norm: 3", ["'clip_norm'", "did you mean optimizer.clip_norm?"]),
        ("optimizer: {beta3: 1}", ["'optimizer.beta3'", "did you mean optimizer.beta"]),
        ("sequence-length: 3", ["'sequence-length'", "sequence_length"]),
        ("class_path: os.system", ["'class_path'"]),
        ("steps: {class_path: os.system, init_args: {command: 'touch owned'}}", ["--steps", "a whole number"]),
        ("model: {class_path: os.system, init_args: {command: 'touch owned'}}", ["--model", "a text"]),
        ("steps: !!python/object/apply:os.system ['touch owned']", ["--config", "without tags"]),
        ("optimizer: 3", ["optimizer in", "3", "a mapping"]),
        ("optimizer: null", ["optimizer in", "a mapping"]),
        ("- steps", ["--config", "a mapping of settings to values, not list"]),
        ("steps: [1", ["--config", "plain YAML"]),
        ("steps: three", ["--steps in bad.yaml, line 1", "'three'", "a whole number"]),
        ("seed: 1\n\nsteps: -3", ["--steps in bad.yaml, line 3: got -3; a whole number at least 0"]),
        ("optimizer:\n  beta2: 1.5", ["--optimizer.beta2 in bad.yaml, line 2: got 1.5"]),
        ("micro_batch: 9", ["--micro-batch in bad.yaml, line 1: got 9; at most --global-batch"]),
        ("validation_fraction: 1", ["--validation-fraction in bad.yaml, line 1"]),
        ("steps: true", ["--steps", "True", "a whole number"]),
        ("data: 3", ["--data", "3", "a list of texts"]),
        ("data: [1, 2]", ["--data", "a list of texts"]),
        ("data: []", ["--data", "at least one glob"]),
        ("output: 2024", ["--output", "2024", "a text"]),
        ("output: 2024-01-01", ["--output", "'2024-01-01'", "a text"]),
    ],
)
def test_wrong_yaml_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: list[str]
) -> None:
    (tmp_path / "bad.yaml").write_text(text + "\n")
    message = refused(capsys, "--config", "bad.yaml")
    assert all(word in message for word in words), message
    assert not (tmp_path / "owned").exists()


def test_error_names_the_command_line_or_the_file_line_that_set_a_value(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "good.yaml").write_text("steps: 3\n")
    assert "--steps: got -3" in refused(capsys, "--config", "good.yaml", "--steps=-3")
    (tmp_path / "bad.yaml").write_text("seed: 1\nsteps: -5\n")
    assert "--steps in bad.yaml, line 2: got -5" in refused(capsys, "--config", "good.yaml", "--config", "bad.yaml")


def test_unreadable_config_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "'missing.yaml'" in refused(capsys, "--config", "missing.yaml")
    (tmp_path / "latin.yaml").write_bytes("model: é\n".encode("latin-1"))
    assert "'latin.yaml'" in refused(capsys, "--config", "latin.yaml")
    assert "--config: got 'nothing'" in refused(capsys, "--steps", "3", "--config")


def test_unwritable_output_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "--output: got 'file/run'" in refused(capsys, "--output", "file/run")
    assert "--output: got '/proc/run'" in refused(capsys, "--output", "/proc/run")


def test_a_run_that_is_refused_leaves_no_folder_behind(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "there").mkdir()
    for folder in ("new/run", "there"):
        words = "--data", "empty.txt", "--output", folder, "--nproc", "1", "--device", "cpu"
        assert main(["train", *words]) == 2 and "--data: got" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["there"]


@pytest.mark.parametrize("left", ["config.yaml", "metrics.jsonl", "checkpoints"])
def test_output_folder_of_another_run_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, left: str) -> None:
    (tmp_path / "run" / left).mkdir(parents=True)
    message = refused(capsys, "--output", "run")
    assert left in message and "--resume auto" in message
    (tmp_path / "elsewhere").mkdir()
    assert left in refused(capsys, "--output", "run", "--resume", "elsewhere")


def test_process_counts_that_conflict_with_torchrun_are_refused() -> None:
    for words in (["--nodes", "2"], ["--nproc", "4"]):
        with pytest.raises(UserError, match=rf"{words[0]}: got {words[1]}; unset under torchrun.*--virtual-nodes"):
            validate(load_config(words), environ=TORCHRUN)
        validate(load_config([*words, "--virtual-nodes"]), environ=TORCHRUN)
        validate(load_config(words), environ={**TORCHRUN, "TAWPIPE_LOCAL_LAUNCHER": "1"})
    with pytest.raises(UserError, match="--nodes: got 3; a divisor of the 4 processes"):
        validate(load_config(["--nodes", "3", "--virtual-nodes"]), environ=TORCHRUN)
    with pytest.raises(UserError, match="--nproc: got 2; 4, as many as torchrun started"):
        validate(load_config(["--nproc", "2", "--virtual-nodes"]), environ=TORCHRUN)


def test_output_with_time_placeholder_is_refused_under_torchrun(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert "named in full under torchrun" in refused(capsys)


def test_bfloat16_is_refused_on_a_gpu_without_support() -> None:
    config = TrainConfig(dtype="bfloat16")
    with pytest.raises(UserError, match="--dtype: got 'bfloat16'; float32 on V100"):
        validate(config, gpus=[Gpu("0", "V100", 7.0)])
    validate(config, gpus=[Gpu("0", "A100", 8.0)])
    validate(TrainConfig(dtype="bfloat16", device="cpu"))


def test_every_kind_of_error_has_its_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends_with(error: BaseException) -> int:
        def run(argv: object) -> int:
            raise error

        monkeypatch.setattr("tawpipe.commands.train.run", run)
        return main(["train"])

    assert ends_with(UserError("--a", 1, "2")) == 2
    assert ends_with(RunError("the loss is not finite")) == 1
    assert ends_with(KeyboardInterrupt()) == 130
    assert ends_with(OSError(errno.ENOSPC, "No space left on device")) == 1
    assert "Traceback" not in capsys.readouterr().err
    assert ends_with(OSError(errno.ENOENT, "ours")) == 1
    assert "Traceback" in capsys.readouterr().err
    assert ends_with(ValueError("ours")) == 1
    assert "Traceback" in capsys.readouterr().err


def test_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "'trian'" in capsys.readouterr().err


def test_settings_are_refused_before_torch_is_imported() -> None:
    script = (
        "import sys; from tawpipe.cli import main; code = main(['train', '--steps', '-1']); "
        "print(code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    environ = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environ)
    assert answer.stdout.split() == ["2", "False", "False"]
