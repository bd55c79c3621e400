"""Documents in rows of their own from end to end, for a model that would mix those of a row."""

from __future__ import annotations

from pathlib import Path

import pytest

from family_configs import tiny_config
from runs import command, rows, run
from small import make_small
from tawpipe.cli import main

OWN_ROWS = (
    *("--device", "cpu", "--dtype", "float64", "--micro-batch", "2", "--log.trackers", "none"),
    *("--sample.tokens", "0", "--export.enabled", "false", "--check", "never"),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    make_small(folder, files=60, layers=2, positions=256)
    config = tiny_config("lfm2")
    config.vocab_size = 512
    config.save_pretrained(folder / "model")
    return folder


def alone(home: Path, output: str, *words: str) -> int:
    return main([*command(home, output, *OWN_ROWS, "--nproc", "1", *words)[2:]])


@pytest.mark.slow
def test_a_run_chooses_rows_of_one_document_and_goes_on_the_same_on_other_processes(home, capsys):
    assert alone(home, "one") == 0
    said = capsys.readouterr().out
    assert "packing: none, because layers of type conv carry a state" in said and "documents (one in a row)" in said
    assert "padding: " in said and "6 sequences of up to 64 tokens, micro-batches of 2" in said
    state = str(home / "one" / "checkpoints" / "step-00000002")
    assert alone(home, "again", "--packing", "none", "--resume", state) == 0
    two = run(home, "two", *OWN_ROWS, "--nproc", "2", "--nodes", "1", "--resume", state)
    assert two.returncode == 0, two.stderr
    one = rows(home, "one")[2:]
    for mine, same, other in zip(one, rows(home, "again"), rows(home, "two"), strict=True):
        for name in {"tokens", "loss", "grad_norm", "validation_loss"} & mine.keys():
            assert mine[name] == same[name]
            assert mine[name] == pytest.approx(other[name], rel=1e-6)  # the model's norms are in float32


def test_a_stream_has_such_rows_too(home, capsys):
    assert alone(home, "stream", "--streaming", "true", "--stream-window", "9") == 0
    assert [row["tokens"] > 0 for row in rows(home, "stream")] == [True] * 4
    assert "in the first window 9 documents (one in a row)" in capsys.readouterr().out


def test_what_would_mix_documents_is_refused_with_what_works(home, capsys):
    assert alone(home, "split", "--packing", "split") == 2
    assert (
        "--packing: got 'split'; none, which gives every document a row of its own: layers" in capsys.readouterr().err
    )
    assert alone(home, "bins", "--max-document", "60", "--micro-batch", "1") == 2
    assert "--max-document: got 60; unset: every document needs a row of its own" in capsys.readouterr().err
    assert alone(home, "chunks", "--schedule.sequence-chunk", "16") == 2
    assert "rows of Lfm2ForCausalLM cannot be cut" in capsys.readouterr().err
