"""The disk is looked at before a run, and ``tawpipe export`` writes from a checkpoint what the run itself does.

Checkpoints of the adapter refer to the frozen weights of its base.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from tawpipe.checkpoint.values import SavedParameters
from tawpipe.cli import main
from tawpipe.commands import export
from tawpipe.errors import UserError
from tawpipe.model.chain import Chain
from tawpipe.model.files.build import build_model
from tawpipe.runtime.dtype import DTYPES
from tawpipe.train import disk
from tawpipe.train.disk import checkpoints_at_most, state_bytes
from tawpipe.train.exporting import export_again
from tawpipe.train.lock import running_in
from tawpipe.train.settings.checks import check_output
from tawpipe.train.settings.config import load_config
from tawpipe.train.settings.optimizers import factory_of

WORDS = (
    *("--data", __file__, "--sequence-length", "32", "--global-batch", "2", "--nproc", "1", "--device", "cpu"),
    *("--sample.tokens", "0", "--evaluation.every", "0", "--validation-fraction", "0", "--plan", "none"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with weights, and an adapter trained on it in 4 bits; both as runs, with checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    steps = ["--steps", "4", "--checkpoint.every", "2", "--checkpoint.keep", "0"]
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    LlamaConfig(**sizes, vocab_size=512, max_position_embeddings=64, tie_word_embeddings=True).save_pretrained(
        folder / "start"
    )
    start = ["--model", str(folder / "start"), "--vocab-size", "300"]
    base = ["train", *start, *steps, *WORDS, "--output", str(folder / "base")]
    assert main(base) == 0
    adapter = ["--model", str(folder / "base" / "model"), "--lora.rank", "2", "--quantize", "nf4", "--export.merge"]
    assert main(["train", *adapter, *steps, *WORDS, "--output", str(folder / "adapter")]) == 0
    return folder


@pytest.mark.parametrize("name", ["base", "adapter"])
def test_export_from_a_checkpoint_equals_the_export_of_the_run(runs: Path, name: str, capsys) -> None:
    written = load_file(runs / name / "model" / "model.safetensors")
    moved = runs / f"{name}-moved"  # a run is where its folder is
    shutil.copytree(runs / name, moved)
    shutil.rmtree(moved / "model")
    assert main(["export", str(moved)]) == 0
    assert "step 4" in capsys.readouterr().out
    again = load_file(moved / "model" / "model.safetensors")
    assert written.keys() == again.keys() and all(written[key].equal(again[key]) for key in written)
    assert (moved / "model" / "tokenizer.json").read_bytes() == (runs / name / "model" / "tokenizer.json").read_bytes()
    assert main(["export", str(moved), "--step", "2", "--output", str(moved / "earlier")]) == 0
    earlier = load_file(moved / "earlier" / "model.safetensors")
    assert not all(earlier[key].equal(written[key]) for key in written)


@pytest.mark.parametrize("name", ["base", "adapter"])
def test_export_in_w4a16_writes_packed_weights(runs: Path, name: str, tmp_path: Path) -> None:
    assert main(["export", str(runs / name), "--format", "w4a16", "--output", str(tmp_path / "few")]) == 0
    names = load_file(tmp_path / "few" / "model.safetensors").keys()
    stem = "model.layers.0.self_attn.q_proj.weight"
    assert {f"{stem}_packed", f"{stem}_scale", f"{stem}_shape", "model.embed_tokens.weight"} <= names
    assert stem not in names and "quantization_config" in (tmp_path / "few" / "config.json").read_text()


def test_quantized_export_of_an_adapter_alone_is_refused(runs: Path, capsys) -> None:
    words = ["--model", str(runs / "base" / "model"), "--lora.rank", "2", "--export.format", "w8a8"]
    assert main(["train", *words, *WORDS, "--output", str(runs / "few")]) == 2
    assert "--export.format: got 'w8a8'; hf, or a merged adapter" in capsys.readouterr().err


def test_impossible_export_is_refused_with_a_reason(runs: Path, tmp_path: Path, capsys) -> None:
    for words, said in (
        (["--step", "3"], "--step: got 3; one of 2, 4"),
        (["--merge"], "--merge: got True; ignored"),
    ):
        assert main(["export", str(runs / "base"), *words]) == 2
        assert said in capsys.readouterr().err
    assert main(["export", str(tmp_path)]) == 2
    assert "which holds config.yaml" in capsys.readouterr().err
    with running_in(runs / "base"):
        assert main(["export", str(runs / "base")]) == 2
    assert "RUN: got" in (said := capsys.readouterr().err) and "no other run is using" in said


@pytest.mark.parametrize("name", ["base", "adapter"])
def test_checkpoint_bytes_are_predicted(runs: Path, name: str) -> None:
    config = load_config(["--config", str(runs / name / "config.yaml")])
    built = build_model(config.model, vocab_size=300, max_positions=32, lora=config.lora)
    said = state_bytes(config, built, Chain(built.model), DTYPES["float32"], factory_of(config))
    written = sum(path.stat().st_size for path in (runs / name / "checkpoints" / "step-00000004").iterdir())
    assert said <= written <= 1.1 * said + 100_000  # names and the manifest come to it


def resumed(runs: Path, output: Path, *words: str, step: int = 2) -> int:
    """The exit code of the adapter's run, resumed from one of its checkpoints into another folder."""
    checkpoint = runs / "adapter" / "checkpoints" / f"step-0000000{step}"
    return main(["train", "--resume", str(checkpoint), "--output", str(output), *words])


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def tampered(base: Path, folder: Path) -> Path:
    """A copy of a model's folder with one other value."""
    shutil.copytree(base, folder)
    values = load_file(folder / "model.safetensors")
    values["model.layers.1.mlp.up_proj.weight"][3, 2] += 1
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_adapter_run_resumed_from_references_ends_with_equal_files(runs: Path, tmp_path: Path) -> None:
    assert resumed(runs, tmp_path / "half") == 0
    for folder in ("checkpoints/step-00000004", "model"):
        expected = files_of(runs / "adapter" / folder)
        assert expected and files_of(tmp_path / "half" / folder) == expected
    copied, model = tmp_path / "copied", ["--model", str(runs / "base" / "model"), "--lora.rank", "2"]
    words = [*model, "--quantize", "nf4", "--export.merge", "--steps", "2", "--checkpoint.frozen", "copy", *WORDS]
    rates = ["--optimizer.schedule", "constant", "--optimizer.warmup-steps", "0"]
    assert main(["train", *words, *rates, "--output", str(copied)]) == 0
    config = load_config(["--config", str(copied / "config.yaml")])
    built = build_model(config.model, vocab_size=300, max_positions=32, lora=config.lora)
    said = state_bytes(config, built, Chain(built.model), DTYPES["float32"], factory_of(config))
    size = sum(map(len, files_of(copied / "checkpoints" / "step-00000002").values()))
    assert said <= size <= 1.1 * said + 100_000
    assert 4 * sum(map(len, files_of(runs / "adapter" / "checkpoints" / "step-00000002").values())) < size
    on = ["--resume", "auto", "--output", str(copied), "--steps", "4", "--checkpoint.frozen", "reference"]
    assert main(["train", *on]) == 0  # the checkpoint that holds all is resumed, and followed by one that does not
    assert 4 * sum(map(len, files_of(copied / "checkpoints" / "step-00000004").values())) < size
    assert main(["train", *words, *rates, "--steps", "4", "--output", str(tmp_path / "whole")]) == 0
    assert files_of(copied / "model") == files_of(tmp_path / "whole" / "model")


def test_adapter_export_does_not_read_the_base(runs: Path, tmp_path: Path) -> None:
    assert resumed(runs, tmp_path / "alone", "--export.merge", "false") == 0
    written = files_of(tmp_path / "alone" / "model")
    other = tampered(runs / "base" / "model", tmp_path / "other")
    again = ["export", str(tmp_path / "alone"), "--output", str(tmp_path / "again"), "--model", str(other)]
    assert main(again) == 0
    assert written.keys() == {"adapter_model.safetensors"} and files_of(tmp_path / "again") == written


@pytest.mark.slow
def test_moved_base_is_found_and_a_changed_or_missing_base_is_refused(runs: Path, tmp_path: Path, capsys) -> None:
    base, run = runs / "base" / "model", tmp_path / "run"
    moved, other = shutil.copytree(base, tmp_path / "moved"), tampered(base, tmp_path / "other")
    assert resumed(runs, run, "--model", str(moved)) == 0
    assert files_of(run / "model") == files_of(runs / "adapter" / "model")
    assert main(["checkpoint", "list", str(run)]) == main(["checkpoint", "verify", str(run)]) == 0
    listed, verified = capsys.readouterr().out.splitlines()[-2:]
    count = len(build_model(str(base), max_positions=32).model.state_dict()) - 1  # embedding and head are one
    frozen = f"; frozen weights: {count} parameters in {moved}"
    assert listed.endswith(frozen) and verified.endswith(f"sound{frozen}: unchanged")

    again = ["train", "--resume", "auto", "--output", str(run), "--steps", "5"]
    export = ["export", str(run), "--output", str(tmp_path / "again")]
    needed = f"does not hold the frozen weights of this run; expected the weights of {moved} or a copy of them"
    shutil.rmtree(moved)
    for words in (again, [*again, "--dry-run"], export):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert f"--model: got '{moved}'" in said and needed in said
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert f"sound{frozen} could not be checked: the folder is missing" in capsys.readouterr().out

    shutil.copytree(other, moved)
    differs = f"model.layers.1.mlp.up_proj.weight differs (1 of {count} parameters do)"
    for words in (again, export):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert f"--model: got '{moved}'" in said and needed in said and differs in said
    assert main(["checkpoint", "verify", str(run)]) == 1
    assert f"sound{frozen}: {differs}" in capsys.readouterr().out
    assert main([*export, "--model", str(base)]) == 0
    assert files_of(tmp_path / "again") == files_of(run / "model")
    assert main([*again, "--model", str(base)]) == 0


def test_run_without_disk_space_is_refused_before_it_starts(runs: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: SimpleNamespace(free=10 << 20))
    output = runs / "no-room"
    words = ["train", "--model", "tiny", "--vocab-size", "300", "--steps", "9", *WORDS, "--output", str(output)]
    assert main([*words, "--checkpoint.every", "2"]) == 2
    said = capsys.readouterr().err
    assert "--output: got" in said and "3 checkpoints of" in said and "10.0 MiB free" in said
    assert not list(output.glob("*"))


@pytest.mark.parametrize(
    ("changes", "done", "there", "most"),
    [
        ({"every": 3, "keep": 2}, 0, 0, 3),  # the oldest goes when the third is there
        ({"every": 3, "keep": 2}, 6, 2, 1),
        ({"every": 3, "keep": 0}, 0, 0, 4),  # 3, 6, 9 and the last
        ({"every": 20, "keep": 2}, 0, 0, 1),
        ({"every": 0}, 0, 0, 0),
        ({"every": 1, "keep": 2, "keep_every": 4}, 0, 0, 5),
        ({"every": 3, "keep": 2}, 10, 2, 0),  # all steps are done
    ],
)
def test_number_of_simultaneous_checkpoints_is_counted(
    changes: dict[str, int], done: int, there: int, most: int
) -> None:
    config = load_config(["--steps", "10"])
    config = replace(config, checkpoint=replace(config.checkpoint, **changes))
    assert checkpoints_at_most(config, done=done, existing=there) == most


def test_folder_that_is_not_a_run_is_named(tmp_path: Path):
    again = partial(export_again, tmp_path, step=None, merge=False, folder=None)
    for asked in (again, partial(export.run, [str(tmp_path)])):
        with pytest.raises(UserError, match="the output folder of a run"):
            asked()


def test_saved_parameters_refuse_another_model(runs: Path):
    state = max((runs / "base" / "checkpoints").glob("step-*"))
    units = Chain(build_model("tiny", vocab_size=301, max_positions=64).model).units
    with pytest.raises(UserError, match="embed_tokens"):
        SavedParameters(state, units, DTYPES["float32"])


def test_export_into_its_own_source_folder_is_refused(runs: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"--output: .*--model is read from this one"):
        export_again(runs / "adapter", step=None, merge=False, folder=runs / "base" / "model")
    model = shutil.copytree(runs / "base" / "model", tmp_path / "model")
    for name in (str(model), "tiny"):  # a folder of a model, and one where a model lies that no run has written
        config = load_config(["--model", name, "--output", str(tmp_path)])
        with pytest.raises(UserError, match=r"another folder: --model|a folder without model/"):
            check_output(config, make=False)
        check_output(replace(config, export=replace(config.export, enabled=False)), make=False)


@pytest.mark.parametrize("name", ["config.yaml", "notes.txt"])
def test_export_refuses_to_replace_a_folder_with_other_files(tmp_path: Path, name: str):
    """Neither a run's nor a user's: what is there would go."""
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match="which is replaced"):
        export_again(tmp_path, step=None, merge=False, folder=tmp_path)
    assert (tmp_path / name).read_text() == "mine"
