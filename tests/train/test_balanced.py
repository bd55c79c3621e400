"""Documents of uneven lengths from end to end: the same steps on any number of processes, before and after a resume."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from runs import command, rows, run_forked
from schedules import llama
from small import make_small
from tawpipe.cli import main
from tawpipe.dealing.balance import LayerKind, LayerTime, deal
from tawpipe.dealing.dealer import Dealer
from tawpipe.errors import UserError
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.strategies.build import step_of
from tawpipe.schedule.strategies.table import find
from tawpipe.topology import Topology
from tawpipe.train.settings.config import TrainConfig
from tawpipe.train.settings.decided import BatchShape

BALANCED = (
    *("--packing", "balanced", "--max-document", "200", "--tokens-per-step", "600", "--device", "cpu"),
    *("--dtype", "float64", "--log.trackers", "none", "--sample.tokens", "0", "--export.enabled", "false"),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("balanced")
    make_small(folder, files=60, layers=2, positions=256)
    (folder / "corpus" / "long.txt").write_text("weights travel and activations stay " * 100)
    return folder


@pytest.fixture(scope="module")
def one(home) -> list[dict]:
    """What a run of one process has written."""
    assert alone(home, "one") == 0
    return rows(home, "one")


def alone(home: Path, output: str, *words: str) -> int:
    return main([*command(home, output, *BALANCED, "--nproc", "1", *words)[2:]])


@pytest.mark.slow
def test_balanced_steps_are_equal_on_any_process_count_and_after_resume(home, one):
    two = run_forked(home, "two", *BALANCED, "--nproc", "2", "--nodes", "1", "--report", str(home / "two.html"))
    assert two.returncode == 0, two.stderr
    assert "long.txt" in two.stdout and "documents in" in two.stdout
    assert "Lengths of documents" in (home / "two.html").read_text()
    assert alone(home, "again", "--resume", str(home / "two" / "checkpoints" / "step-00000002")) == 0
    assert all(row["documents"] > 1 and row["imbalance"] == 1 for row in one)
    assert len({row["tokens"] for row in one}) > 1
    for other, steps in (("two", one), ("again", one[2:])):
        for mine, theirs in zip(steps, rows(home, other), strict=True):
            assert [mine[name] for name in ("step", "tokens", "documents")] == [
                theirs[name] for name in ("step", "tokens", "documents")
            ]
            for name in {"loss", "grad_norm", "validation_loss"} & mine.keys():
                assert mine[name] == pytest.approx(theirs[name], rel=1e-6)  # the model's norms are in float32
    assert all(1 <= row["imbalance"] < 2 and row["compute_imbalance"] >= 1 for row in rows(home, "two"))


@pytest.mark.slow
def test_pipeline_with_sliced_documents_takes_equal_steps(home, one):
    words = ("--nproc", "2", "--nodes", "1", "--schedule.strategy", "1f1b", "--bin-tokens", "90")
    piped = run_forked(home, "piped", *BALANCED, *words)
    assert piped.returncode == 0, piped.stderr
    assert "packed micro-batches of at most 90 tokens" in piped.stdout and "checked against" in piped.stdout
    for mine, theirs in zip(one, rows(home, "piped"), strict=True):
        assert (mine["tokens"], mine["documents"]) == (theirs["tokens"], theirs["documents"])
        for name in {"loss", "grad_norm", "validation_loss"} & mine.keys():
            assert mine[name] == pytest.approx(theirs[name], rel=1e-6)  # the model's norms are in float32
        assert theirs["imbalance"] > 1 and theirs["compute_imbalance"] >= 1 and theirs["predicted_memory_bytes"]
    assert "packed micro-batches per pipeline (" in piped.stdout and " rounds" not in piped.stdout
    there = ("--resume", str(home / "piped" / "checkpoints" / "step-00000002"))
    other = ("--nproc", "4", "--nodes", "2", "--schedule.strategy", "1f1b", "--schedule.stages", "nodes")
    goes_on = run_forked(home, "other", *BALANCED, *other, "--bin-tokens", "60", *there)
    assert goes_on.returncode == 0, goes_on.stderr
    whole = ("--schedule.strategy", "tawpipe-spread", "--bin-tokens", "300")
    assert alone(home, "together", *whole, *there) == 0
    for output in ("other", "together"):
        for mine, theirs in zip(one[2:], rows(home, output), strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-6)


def test_document_larger_than_a_pack_is_named_with_ways_out(home, capsys):
    assert alone(home, "small", "--bin-tokens", "50") == 2
    said = capsys.readouterr().err
    assert "--bin-tokens: got 50; at least 200" in said and "long.txt" in said
    assert "--max-document 50" in said and "--schedule.sequence-ranks" in said
    assert alone(home, "far", "--max-document", "300") == 2
    assert "--max-document: got 300; at most 256" in capsys.readouterr().err


def test_dealer_worker_deals_as_the_main_process_and_may_die():
    draw, dealer = random.Random(0), Dealer()
    by = partial(deal, world_size=4, cap=800, work=LayerTime((LayerKind(2, 50.0, 1.0, window=64),)), ranks=2)
    lengths = [draw.randint(1, 1000) for _ in range(50)]
    assert dealer(lengths, by) == by(lengths) and dealer._worker is not None
    with pytest.raises(UserError, match="1601"):
        dealer([1601], by)
    assert dealer(lengths, by) == by(lengths) and dealer._worker is not None
    dealer._worker.process.kill()
    assert dealer(lengths, by) == by(lengths) and dealer._worker is None
    dealer.close()


def test_few_documents_are_dealt_in_process_unless_a_search_is_needed():
    use = find("generated")
    step = step_of(llama(4), Topology.grid(2, 1), ScheduleSettings(), ((),) * 2, strategy=use)
    work, lengths = LayerTime((LayerKind(2, 50.0, 1.0),)), [300, 20, 70, 5]
    for dealing, asks in (
        (partial(deal, world_size=2, cap=400, work=work), False),
        (use.dealing(step, cap=400, work=work), True),
    ):
        dealer = Dealer()
        assert dealer(lengths, dealing) == dealing(lengths) and (dealer._worker is not None) == asks
        dealer.close()


@pytest.mark.parametrize("world_size", [1, 2, 7, 64])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tokens", [600, 5000])
def test_packs_hold_any_document_and_rows_hold_the_tokens_of_a_step(world_size, ranks, tokens):
    schedule = ScheduleSettings(sequence_ranks=ranks)
    config = TrainConfig(tokens_per_step=tokens, max_document=600, schedule=schedule)
    batch = BatchShape.of(config, "balanced", world_size)
    assert batch.bin_tokens * ranks == batch.row_tokens >= 600 and batch.bin_tokens <= 900
    assert batch.rows * batch.row_tokens >= tokens or world_size % ranks
    assert (batch.step_tokens, batch.document_tokens) == (tokens, 600)
    said = replace(config, bin_tokens=batch.bin_tokens)
    assert BatchShape.of(said, "balanced", world_size) == batch
