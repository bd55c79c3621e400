"""The command from end to end, in processes of its own: what a user does, and what a user does wrong."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, T5Config

from forked_commands import run_tawpipe, started
from processes import wait_for
from runs import TIMEOUT_S, command, environment, rows, run, run_forked
from small import WORDS, make_small
from tawpipe import Pipeline, StepResult
from tawpipe.cli import main
from tawpipe.data.prepare import prepare_data
from tawpipe.data.tokenizer import train_tokenizer
from tawpipe.errors import UserError
from tawpipe.train.judging.sample import Samples
from tawpipe.train.settings.config import load_config
from terminal import Terminal

PROMPTS = ("def return", "class", " ".join(WORDS * 2))
QUIET = ("--export.enabled", "false", "--sample.tokens", "0", "--evaluation.every", "0", "--log.trackers", "none")
TWO = ("--nodes", "2", "--nproc", "2")
"""Half as many processes as without it, for what does not depend on their number."""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A small corpus and a small model's config."""
    folder = tmp_path_factory.mktemp("train")
    make_small(folder, files=60, layers=3, positions=256)
    return folder


@pytest.fixture(scope="module")
def trained(home) -> Path:
    """Four steps on two nodes of two, by a plan that is made at the start; step 3 is recorded."""
    words = ("--sample.temperature", "0", "--sample.prompt", *PROMPTS, "--log.trace-step", "3")
    words += ("--plan", "auto", "--report", str(home / "first.html"))
    done = run_forked(home, "first", *words, few_strategies=True)
    assert done.returncode == 0, done.stderr
    assert "4 processes = 2 nodes x 2" in done.stdout
    assert re.search(r"network .* per node and step", done.stdout) and "sample" in done.stdout
    assert "plan: chosen in" in done.stdout
    assert re.search(r"  model .*, float32 \(auto: on the CPU\), weights: random \(seed 0\)\n", done.stdout)
    return home


def test_output_folder_holds_metrics_config_and_checkpoints(trained):
    output = trained / "first"
    found = rows(trained, "first")
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert all({"loss", "grad_norm", "learning_rate", "tokens_per_second"} <= row.keys() for row in found)
    assert [row["step"] for row in found if "validation_loss" in row] == [2, 4]
    assert all(row["link_use"] > 0 for row in found)  # the plan has measured the links
    assert yaml.safe_load((output / "config.yaml").read_text())["sequence_length"] == 64
    assert not (output / "tensorboard").exists()  # a tracker that nobody has asked for
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]


def test_recorded_step_is_compared_with_the_plan(trained, capsys):
    assert main(["trace", str(trained / "first"), "--out", str(trained / "traced")]) == 0
    said = capsys.readouterr().out
    assert "step predicted" in said and "largest differences from the prediction, computing:" in said
    assert "backward: predicted" in said and "another schedule" not in said
    assert main(["trace", str(trained / "first" / "plan.yaml"), "--out", str(trained / "planned")]) == 0
    page = (trained / "first.html").read_text()
    assert "step-00000003 as recorded" in page and "Predicted step" in page


def test_exported_model_has_the_validation_loss_of_the_run(trained):
    """Plain transformers, document by document, finds the validation loss that the run wrote after its last step."""
    output = trained / "first"
    config = load_config(["--config", str(output / "config.yaml")])
    data = prepare_data(config, sequence_length=config.sequence_length, seed=config.seed, model=config.model)
    assert data.validation is not None
    batches = min(config.evaluation.batches, len(data.validation) // config.global_batch)
    assert batches >= 1
    model = AutoModelForCausalLM.from_pretrained(output / "model")
    total, tokens = 0.0, 0
    for number in range(batches * config.global_batch):
        row = data.validation.sample(number)
        for end, length in zip(accumulate(row.lengths), row.lengths, strict=True):
            unshifted = row.labels.roll(1, dims=1)  # the model shifts by itself
            ids, labels = (part[:, end - length : end] for part in (row.input_ids, unshifted))
            if count := int((labels[:, 1:] != -100).sum()):
                with torch.no_grad():
                    total += float(model(ids, labels=labels).loss) * count
                tokens += count
    assert total / tokens == pytest.approx(rows(trained, "first")[-1]["validation_loss"], rel=1e-5)
    words = " ".join(WORDS)
    assert AutoTokenizer.from_pretrained(output / "model")(words).input_ids == data.tokenizer(words).input_ids


def test_samples_equal_texts_generated_by_transformers(trained):
    """Texts of three lengths, which grow together on four processes."""
    model: Any = AutoModelForCausalLM.from_pretrained(trained / "first" / "model")
    tokenizer = AutoTokenizer.from_pretrained(trained / "first" / "model")
    texts = [json.loads(line) for line in (trained / "first" / "samples.jsonl").read_text().splitlines()]
    assert [one["prompt"] for one in texts] == [*PROMPTS]
    for one in texts:
        ids = tokenizer(one["prompt"], return_tensors="pt").input_ids
        written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        assert one["text"] == tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.slow
def test_single_process_has_the_losses_of_several(trained):
    assert alone(trained, "same", "--export.enabled", "false", "--sample.tokens", "0") == 0
    same_losses(trained, "same")


def same_losses(trained: Path, name: str) -> None:
    for mine, other in zip(rows(trained, name), rows(trained, "first"), strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)


@pytest.mark.slow
def test_resumed_run_has_identical_losses(trained):
    shutil.copytree(trained / "first", trained / "again")
    shutil.rmtree(trained / "again" / "checkpoints" / "step-00000004")
    done = run_forked(trained, "again", "--resume", "auto", "--plan", "auto", few_strategies=True)
    assert done.returncode == 0, done.stderr
    assert "weights: resumed from" in done.stdout and "step 2, 12 samples consumed" in done.stdout
    assert "weights: random" not in done.stdout
    assert "float32 (auto: as in the checkpoint)" in done.stdout
    before, after = rows(trained, "first"), rows(trained, "again")
    assert [row["loss"] for row in after] == [row["loss"] for row in before]


def test_resume_from_an_older_step_removes_newer_checkpoints(trained):
    """After a resume from step 2, the step 4 of the first run must not be what auto chooses."""
    shutil.copytree(trained / "first", trained / "back")
    older = str(trained / "back" / "checkpoints" / "step-00000002")
    words = ("--steps", "3", "--checkpoint.every", "1", "--export.enabled", "false")
    assert alone(trained, "back", "--resume", older, *words) == 0
    found = sorted(path.name for path in (trained / "back" / "checkpoints").iterdir())
    assert found == ["step-00000002", "step-00000003"]


@pytest.mark.slow
def test_a_failed_start_does_not_block_the_next(trained):
    assert alone(trained, "typo", "--data", "nothing/*.txt") == 2
    assert alone(trained, "typo", "--steps", "1", "--export.enabled", "false", "--sample.tokens", "0") == 0


def test_missing_model_folder_is_named(home, capsys):
    assert alone(home, "nomodel", "--model", str(home / "missing")) == 2
    said = capsys.readouterr().err
    assert "--model" in said and "missing" in said


@pytest.mark.slow
def test_run_under_torchrun_trains(trained):
    """Whose own imports are there already; those of its workers are not."""
    words = command(trained, "torchrun", *QUIET, "--steps", "2", "--schedule.step-cache", "2")
    words = ["--nproc-per-node", "2", *words]
    done = run_tawpipe(words, environment(), TIMEOUT_S, program="torch.distributed.run")
    assert done.returncode == 0, done.stderr
    assert "--schedule.step-cache has no effect on one node" in done.stdout
    assert "2 processes = 1 node x 2" in done.stdout


def on_machines(words: list[str], places: list[tuple[int, int, int]], own: dict[int, list[str]]) -> list[Any]:
    """The ends of a run's processes, as another launcher starts them.

    Args:
        places: node, local rank and processes on its node, of every rank.
        own: further words of a node.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with contextlib.ExitStack() as ended:
        processes = []
        for rank, (node, local, size) in enumerate(places):
            place = {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": node}
            variables = {key: str(value) for key, value in {"RANK": rank, "WORLD_SIZE": len(places), **place}.items()}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            both = [*words, *own.get(node, [])]
            processes.append(ended.enter_context(started(both, environment() | variables)))
        return [process.end(TIMEOUT_S) for process in processes]


@pytest.mark.slow
def test_machines_with_other_settings_are_refused_by_name(trained):
    words = command(trained, "others", *QUIET, "--steps", "2")[2:]
    done = on_machines(words, [(0, 0, 1), (1, 0, 1)], {1: ["--learning-rate", "0.5"]})
    assert [one.returncode for one in done] == [2, 2], done
    for one in done:
        assert "the same on every rank; --learning-rate is 0.5 instead of null on rank 1 (" in one.stderr


@pytest.mark.slow
def test_nodes_of_different_sizes_train_together(trained):
    """Two processes on one machine and one on another: three groups of one. Each machine has a cache of its own."""
    words = command(trained, "uneven", *QUIET, "--steps", "2")[2:]
    own = {1: ["--cache-dir", str(trained / "other-cache")]}
    done = on_machines(words, [(0, 0, 2), (0, 1, 2), (1, 0, 1)], own)
    assert [one.returncode for one in done] == [0, 0, 0], done
    assert "3 processes = 2 nodes of 2, 1, scheduled as 3 groups of 1" in done[0].stdout
    assert [row["loss"] for row in rows(trained, "uneven")] == pytest.approx(
        [row["loss"] for row in rows(trained, "first")[:2]], rel=1e-4
    )


@pytest.mark.slow
def test_killed_worker_ends_the_run_and_is_named_on_stderr(trained):
    words = command(trained, "killed", "--nproc", "2", "--steps", "100000", *QUIET)[2:]
    with started(words, environment()) as process:
        assert wait_for(lambda: "\nstep" in process.stdout, TIMEOUT_S)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)  # they start in the order of their ranks
        done = process.end(TIMEOUT_S)
        assert done.returncode == 1
        assert "rank 1" in done.stderr and "SIGKILL" in done.stderr
        assert not any(Path(f"/proc/{pid}/environ").exists() for pid in children)


def expect_refusal(done, *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.slow
def test_errors_found_by_workers_are_reported_and_leave_no_files(home, capsys):
    assert alone(home, "r1", "--data", "nothing/*.txt") == 2
    said = capsys.readouterr().err
    assert "--data" in said and "nothing/*.txt" in said
    T5Config(vocab_size=512).save_pretrained(home / "t5")
    assert alone(home, "r2", "--model", str(home / "t5")) == 2
    said = capsys.readouterr().err
    assert "--model" in said and "t5" in said
    small = LlamaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    small.save_pretrained(home / "small")
    assert alone(home, "r3", "--model", str(home / "small")) == 2
    said = capsys.readouterr().err
    assert "--tokenizer" in said and "300" in said
    assert not any(path.is_file() for name in ("r1", "r2", "r3") for path in (home / name).rglob("*")), "left behind"


def alone(home: Path, output: str, *words: str) -> int:
    """A run of one process, in this one."""
    quiet = ("--nproc", "1", "--device", "cpu", "--log.trackers", "none", "--checkpoint.every", "0")
    return main([*command(home, output, *quiet, *words)[2:]])


def test_console_names_the_source_of_the_weights(home, capsys):
    config = LlamaConfig.from_pretrained(home / "model")
    AutoModelForCausalLM.from_config(config).save_pretrained(home / "with-weights", max_shard_size="50KB")
    files = len(list((home / "with-weights").glob("*.safetensors")))
    words = ("--steps", "1", "--export.enabled", "false", "--sample.tokens", "0")
    assert alone(home, "without", "--model", str(home / "with-weights"), *words) == 2
    assert "--tokenizer" in (said := capsys.readouterr().err) and "weights but no tokenizer" in said
    train_tokenizer(["some words"], 300).save_pretrained(home / "with-weights")
    assert alone(home, "weighted", "--model", str(home / "with-weights"), *words) == 0
    assert f", weights: {home / 'with-weights'}, {files} safetensors files\n" in capsys.readouterr().out and files > 1
    (home / "with-weights" / "model.safetensors.index.json").rename(home / "with-weights" / "pytorch_model.bin")
    assert alone(home, "pickled", "--model", str(home / "with-weights"), *words) == 2
    assert "--model" in capsys.readouterr().err


def test_data_without_learned_tokens_ends_the_run_before_it_starts(home, capsys):
    chat = [{"role": "user", "content": "word " * 500}, {"role": "assistant", "content": "yes"}]
    (home / "cut.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    assert alone(home, "cut", "--data", str(home / "cut.jsonl"), "--packing", "fit") == 2
    said = capsys.readouterr()
    assert "--data" in said.err and "--sequence-length" in said.err and "step" not in said.out
    assert not (home / "cut" / "model").exists()


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [pytest.param("true", marks=pytest.mark.slow), "false"])
def test_rows_may_exceed_model_positions_if_documents_do_not(home, capsys, few_strategies, streaming):
    """Of a model with a table of positions, whose padding and whose sample must not reach behind its end either."""
    GPT2Config(vocab_size=512, n_embd=32, n_layer=2, n_head=2, n_positions=160).save_pretrained(home / "table")
    words = ("--model", str(home / "table"), "--streaming", streaming, "--packing", "fit", "--sequence-length", "400")
    words += ("--plan", "auto")
    sample = ("--sample.tokens", "3", "--sample.prompt", "def " * 200)
    assert alone(home, f"long-{streaming}", *words, "--steps", "2", *sample) == 0, capsys.readouterr().err
    assert "1 process = 1 node x 1" in (said := capsys.readouterr().out) and "planning" not in said
    short = (home / "corpus" / "0.txt").read_text()
    (home / "later.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in [short] * 6 + ["a b " * 900]))
    later = ("--data", str(home / "later.jsonl"), "--stream-window", "2", "--validation-fraction", "0")
    assert alone(home, f"later-{streaming}", *words, "--steps", "3", *later) == 2
    said = capsys.readouterr().err
    assert "--sequence-length: got 400; at most 160 for" in said and "longest document in a row has 400" in said


@pytest.mark.slow
def test_export_without_disk_space_is_an_error_without_a_traceback(home, capsys, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("safetensors.torch.save_file", full)
    assert alone(home, "roomless", "--steps", "1") == 1
    said = capsys.readouterr().err
    assert "could not be exported" in said and "No space left on device" in said and "Traceback" not in said
    assert not list((home / "roomless").glob("model*"))


def test_failing_displays_and_recordings_do_not_end_the_run(home, capfd, monkeypatch):
    """A page, a recording, a file, a tokenizer that fail, and a log without the letters of a prompt."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr(sys, "stdout", log)
    monkeypatch.setattr("tawpipe.train.page.write_page", full)
    monkeypatch.setattr("tawpipe.runtime.watch.recording.Recording.write", lambda *_, **__: json.loads(""))
    monkeypatch.setattr("tawpipe.train.judging.sample.FILE", ".")
    written, calls = Samples._written, count()
    monkeypatch.setattr(Samples, "_written", lambda *given: json.loads("") if next(calls) == 0 else written(*given))
    words = ("--sample.every", "1", "--sample.tokens", "2", "--sample.prompt", "Größe 漢")
    words += ("--steps", "3", "--log.trace-step", "1", "--report", str(home / "page.html"))
    assert alone(home, "pageless", *QUIET, *words) == 0
    assert len(rows(home, "pageless")) == 3
    said = log.buffer.getvalue().decode("latin-1")
    assert "step 1 was not recorded by rank 0; training continues: Expecting value" in said
    assert "page.html: not shown, training continues: OSError: [Errno 28] No space left on device" in said
    assert said.count("samples: not shown, training continues: JSONDecodeError") == 1
    assert "sample                   'Größe \\u6f22': " in said and "peak memory per process" in said
    assert re.search(r"not shown +\. \(4 times\), recording, samples, .*page.html\n", said)
    assert "Error" not in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signal_after_the_last_step_still_exports_the_model(home, number, monkeypatch):
    """It comes while the last texts are written; the model is still exported."""
    write = Samples.write
    monkeypatch.setattr(Samples, "write", lambda *given: (signal.raise_signal(number), write(*given))[1])
    name = f"signal-{number}"
    code = alone(home, name, "--steps", "1", "--evaluation.every", "0")
    assert code == (130 if number == signal.SIGINT else 0)
    assert (home / name / "samples.jsonl").is_file() and (home / name / "model" / "config.json").is_file()


def test_error_while_generating_samples_ends_the_run(home, capsys, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("of the model")

    monkeypatch.setattr(Pipeline, "generate", fails)
    assert alone(home, "mute", *QUIET, "--steps", "1", "--sample.tokens", "2") == 1
    assert "RuntimeError: of the model" in capsys.readouterr().err


def test_tokens_per_second_use_the_time_between_step_ends(home, monkeypatch):
    """As on a GPU that is as fast as its host: a step ends before anybody has read the one before it."""
    results: list[StepResult] = []
    step = Pipeline.step

    def ended(*given: Any, **named: Any) -> StepResult:
        results.append(step(*given, **named))
        results[-1].wait()
        return results[-1]

    monkeypatch.setattr(Pipeline, "step", ended)
    assert alone(home, "ended", "--steps", "5", "--check", "never", *QUIET) == 0
    ends, written = [result.ended_s for result in results], rows(home, "ended")
    assert [row["seconds"] for row in written][2:] == [after - before for before, after in pairwise(ends[1:])]
    assert all(row["tokens_per_second"] * row["seconds"] == pytest.approx(6 * 64) for row in written)


def test_nan_weight_is_named(home, capsys):
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(home / "model"))
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 4] = float("nan")
    model.save_pretrained(home / "poisoned")
    train_tokenizer(["some words"], 300).save_pretrained(home / "poisoned")
    assert alone(home, "poisoned-run", "--model", str(home / "poisoned"), "--steps", "1", *QUIET) == 2
    said = capsys.readouterr().err
    assert "model.layers.1.mlp.up_proj.weight" in said and "learning-rate" not in said


def test_batches_without_labels_are_skipped_in_steps_and_evaluations(home, capsys):
    """Questions that fill rows: of many a batch of one row nothing is learned."""
    chat = [{"role": "user", "content": "word " * 300}, {"role": "assistant", "content": "yes"}]
    (home / "long.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 10)
    words = ("--data", str(home / "long.jsonl"), "--validation-data", str(home / "long.jsonl"))
    words += ("--validation-fraction", "0", "--global-batch", "1", "--packing", "split", "--steps", "12", *QUIET)
    assert alone(home, "unlearned", *words, "--evaluation.every", "12", "--evaluation.batches", "12") == 0
    said, found = capsys.readouterr(), rows(home, "unlearned")
    empty = [row["step"] for row in found if row["loss"] is None]
    assert 0 < len(empty) < 12 and all((row["tokens"] == 0) == (row["loss"] is None) for row in found)
    assert said.out.count("no token to learn: skipped") == len(empty)
    assert re.search(rf"skipped +{len(empty)} steps", said.out)
    assert found[-1]["validation_loss"] > 0


def test_unwritable_output_folder_is_refused(home):
    (home / "file").write_text("in the way")
    expect_refusal(run(home, "file/output"), "--output")


@pytest.mark.slow
def test_unreadable_data_files_are_named_and_skipped(home, capfd):
    mixed = home / "mixed"
    mixed.mkdir()
    for path in list((home / "corpus").iterdir())[:30]:
        shutil.copy(path, mixed)
    (mixed / "latin.txt").write_bytes("Grüße aus Köln".encode("latin-1") * 10)
    assert alone(home, "mixed-run", "--data", str(mixed / "*.txt"), "--steps", "1") == 0
    assert "latin.txt" in "".join(capfd.readouterr())


# bad days


@pytest.fixture(scope="module")
def full_disk(trained) -> tuple[str, list[float]]:
    """What a run of two processes says that once finds no room for a checkpoint, and its losses."""
    done = run_forked(trained, "full", *QUIET, *TWO, "--inject", "rank=1,step=2,at=save,kind=disk-full")
    assert done.returncode == 0, done.stderr
    return done.stdout, [row["loss"] for row in rows(trained, "full")]


@pytest.mark.slow
def test_killed_process_restarts_with_unchanged_losses(trained, full_disk):
    words = ("--max-restarts", "1", "--checkpoint.background", "false", "--inject", "rank=1,step=3,at=update,kind=kill")
    done = run_forked(trained, "restarted", *words, *QUIET, *TWO)
    assert done.returncode == 0, done.stderr
    assert "restart 1 of at most 1" in done.stderr and "resumed from" in done.stdout
    assert [row["loss"] for row in rows(trained, "restarted")] == full_disk[1]
    assert not list((trained / "restarted" / "checkpoints").glob("*.incomplete"))


def listening(pid: int) -> set[str]:
    """Addresses, as the kernel writes them, that a process and its children listen at."""
    family = [pid]
    for one in family:
        for task in Path(f"/proc/{one}/task").iterdir():
            family += map(int, (task / "children").read_text().split())
    sockets = set()
    for one in family:
        for handle in Path(f"/proc/{one}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(str(handle.readlink()))
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}


@pytest.mark.slow
def test_sigterm_and_ctrl_c_end_a_run_with_a_checkpoint(trained):
    """And so does ctrl-C the run that goes on, by the command that the first one has named, on a terminal."""
    words = [
        sys.executable,
        *command(trained, "stopped", "--nproc", "2", "--steps", "100000", "--resume", "auto", *QUIET),
    ]
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("step"):
                break
        if sys.platform.startswith("linux"):
            assert listening(process.pid) <= {"0100007F"}, "others can reach it"
        assert "no sound checkpoint in" in said and "starting at step 0" in said
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr
    finally:
        process.kill()
    assert stderr.count("tawpipe: stopping: the current step ends") == 1 and "press again to end at once" in stderr
    step, folder, words = stopped_at(stdout)
    assert Path(folder).is_dir() and "SIGTERM" not in stdout + stderr

    terminal = Terminal()
    settings = {"TERM": "xterm", "TTY_INTERACTIVE": "1"}
    with started(words[1:], environment() | settings, terminal=os.ttyname(terminal.slave)) as ends:
        assert wait_for(lambda: "loss" in terminal.screen[-1], TIMEOUT_S), terminal.text
        terminal.close_slave()
        assert f"step {step}," in "".join(terminal.screen)
        terminal.press(b"\x03")
        assert ends.wait(60) == 128 + signal.SIGINT
    terminal.finish()
    said = "\n".join(terminal.screen)
    assert said.count("stopping: the current step ends") == 1
    later, folder, again = stopped_at(said)
    assert later > step and Path(folder).is_dir() and again == words
    assert all(word not in said for word in ("SIGTERM", "SIGINT", "KeyboardInterrupt", "error"))


def stopped_at(said: str) -> tuple[int, str, list[str]]:
    """The step after which a run has stopped, the folder with its state, and the command that goes on."""
    found = re.search(r"stopped after step (\d+); checkpoint of step (\d+): (.*)\. To resume from there: (.*)", said)
    assert found and found[1] == found[2], said
    return int(found[1]), found[3], shlex.split(found[4])


@pytest.mark.slow
def test_dying_run_names_its_last_checkpoint_and_resume_command(trained):
    dies = ("--inject", "rank=1,step=4,at=forward,kind=kill", "--checkpoint.background", "false")
    done = run_forked(trained, "died", *QUIET, *TWO, *dies)
    assert done.returncode == 1 and "was killed by SIGKILL" in done.stderr
    folder = trained / "died" / "checkpoints" / "step-00000002"
    go_on = f"tawpipe train --config {trained / 'died' / 'config.yaml'} --resume auto"
    assert done.stderr.splitlines()[-1] == f"tawpipe: checkpoint of step 2: {folder}. To resume from there: {go_on}"


@pytest.mark.slow
def test_fault_matrix_case_kill_push_passes(tmp_path):
    cases = ("kill:push",)
    words = ["matrix", "--topologies", "2 x 1", "--out", str(tmp_path / "out"), "--cases", *cases]
    script = str(Path(__file__).parents[2] / "benchmarks" / "faults.py")
    done = run_tawpipe(words, environment(), 300, program=script)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "cases.json").read_text())["cases"]
    assert len(found) == len(cases)
    assert [one["left_behind"] for one in found] == [[]] * len(cases)


@pytest.mark.slow
def test_hanging_process_is_named(trained):
    words = ("--timeouts.step-s", "4", "--inject", "rank=1,step=3,at=forward,kind=hang")
    done = run_forked(trained, "hung", *QUIET, *TWO, *words)
    assert done.returncode == 1
    own = [line for line in done.stderr.splitlines() if line.startswith("tawpipe: stuck: rank ")]
    assert [line.partition(":")[0] for line in own]
    assert any("rank 1 (node 1): " in line and "waits for no other rank: COMPUTE is in FORWARD" in line for line in own)
    assert any("rank 0 (node 0): " in line and " with rank 1, " in line for line in own)
    verdict = next(line for line in done.stderr.splitlines() if line.startswith("tawpipe: error: "))
    assert verdict.startswith(
        "tawpipe: error: no rank has failed; step 3 took longer than 4 s; the others wait for rank 1"
    )
    assert "exit code" not in done.stderr


@pytest.mark.slow
def test_full_disk_costs_only_one_checkpoint(trained, full_disk):
    assert "could not be written; training continues without it: rank 1: No space left on device" in full_disk[0]
    assert [path.name for path in (trained / "full" / "checkpoints").iterdir()] == ["step-00000004"]


@pytest.mark.slow
def test_nonfinite_step_is_skipped_if_requested(trained):
    words = ("--optimizer.nonfinite", "skip", "--inject", "rank=1,step=2,at=backward,kind=nan")
    done = run_forked(trained, "skipped", *QUIET, *words, "--plan", str(trained / "first" / "plan.yaml"))
    assert done.returncode == 0, done.stderr
    assert "step 2: loss" in done.stdout and "the update was skipped, 1 of at most 10 in a row" in done.stdout
    found = rows(trained, "skipped")
    assert len(found) == 4 and found[1]["grad_norm"] is None and found[3]["loss"] is not None
    assert found[0]["loss"] == rows(trained, "first")[0]["loss"]  # as on the same plan


@pytest.mark.slow
def test_run_resumes_from_memory_checkpoints_of_the_nodes(trained, full_disk, tmp_path):
    words = ("--max-restarts", "1", "--checkpoint.every", "0", "--inject", "rank=1,step=4,at=forward,kind=kill")
    words += ("--checkpoint.memory-every", "1", "--checkpoint.memory-dir", str(tmp_path))
    done = run_forked(trained, "memory", *words, *QUIET, *TWO)
    assert done.returncode == 0, done.stderr
    assert "resumed from memory: step" in done.stdout
    assert [row["loss"] for row in rows(trained, "memory")] == full_disk[1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--inject", "rank=1,step=9,at=push,kind=kill"), "at most|up to --steps"),
        (("--inject", "rank=1,step=3,at=save,kind=kill"), "a step that is saved"),
        (("--inject", "nonsense"), "injector"),
        (("--optimizer.nonfinite", "skip", "--schedule.early-updates", "true", "--optimizer.clip-norm", "0"), "skip"),
        (("--checkpoint.memory-every", "1", "--checkpoint.memory-dir", "/nowhere"), "--checkpoint.memory-dir"),
        (("--schedule.offload-dir", "/nowhere", "--schedule.sequence-chunk", "64"), "--schedule.offload-dir"),
    ],
)
def test_impossible_faults_are_refused_by_the_settings(home, words, reason):
    from tawpipe.train.settings.checks import validate

    with pytest.raises(UserError, match=reason):
        validate(load_config([*command(home, "refused", *words)[3:]]), environ={})
