"""Models that would mix the documents of a row, from end to end: any packing, on any number of processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from family_configs import tiny_config
from runs import command, rows, run_forked
from small import make_small
from tawpipe.cli import main

USUAL = (
    *("--device", "cpu", "--dtype", "float64", "--log.trackers", "none"),
    *("--sample.tokens", "0", "--export.enabled", "false", "--check", "never"),
)
BALANCED = (*USUAL, "--packing", "balanced", "--max-document", "60", "--tokens-per-step", "400")
FAMILIES = "lfm2", "bloom"


@pytest.fixture(scope="module")
def homes(tmp_path_factory) -> dict[str, Path]:
    made = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        make_small(folder, files=60, layers=2, positions=256)
        config = tiny_config(family)
        config.vocab_size = 512
        config.save_pretrained(folder / "model")
        made[family] = folder
    return made


def alone(home: Path, output: str, *words: str) -> int:
    return main([*command(home, output, *words)[2:], "--nproc", "1"])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_balanced_in_turn_models_match_on_two_processes_and_after_resume(homes, family, capsys):
    home = homes[family]
    two = run_forked(home, "two", *BALANCED, "--nproc", "2", "--nodes", "1")
    assert two.returncode == 0, two.stderr
    assert alone(home, "one", *BALANCED) == 0
    state = str(home / "two" / "checkpoints" / "step-00000002")
    assert alone(home, "again", *BALANCED, "--resume", state) == 0
    one = rows(home, "one")
    assert all(row["documents"] > 1 for row in one) and len({row["tokens"] for row in one}) > 1
    for other, steps in (("two", one), ("again", one[2:])):
        for mine, theirs in zip(steps, rows(home, other), strict=True):
            assert mine["tokens"] == theirs["tokens"]
            for name in {"loss", "grad_norm", "validation_loss"} & mine.keys():
                assert mine[name] == pytest.approx(theirs[name], rel=1e-6)  # the model's norms are in float32


@pytest.mark.parametrize(
    ("family", "packing"),
    [
        ("bloom", "split"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("bloom", "none"), ("lfm2", "split"), ("lfm2", "fit"))
        ),
    ],
)
def test_every_packing_trains_models_that_mix_documents(homes, family, packing, capsys):
    words = "--packing", packing, "--micro-batch", "2"
    assert alone(homes[family], packing, *USUAL, *words) == 0
    assert ("documents (one per row)" in capsys.readouterr().out) == (packing == "none")
    assert rows(homes[family], packing)[-1]["loss"] > 0


@pytest.mark.slow
def test_stream_without_packing_has_rows_of_one_document(homes, capsys):
    words = "--streaming", "true", "--stream-window", "9", "--packing", "none"
    assert alone(homes["lfm2"], "stream", *USUAL, *words) == 0
    assert "first window: 9 documents (one per row)" in capsys.readouterr().out


def test_sequence_chunks_are_refused_for_in_turn_models(homes, capsys):
    assert alone(homes["bloom"], "chunks", *USUAL, "--schedule.sequence-chunk", "16") == 2
    assert "rows of BloomForCausalLM cannot be cut" in capsys.readouterr().err
