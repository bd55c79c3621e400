"""Documents of uneven lengths, dealt by the time that they take: the numbers of one process, however they are dealt."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

import model_families
from borders import llama, piped
from tawpipe import Pipeline, TrainingSettings
from tawpipe.errors import UserError
from tawpipe.model.batch import MicroBatch

LIMIT = 1e-10
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("nodes", "local", "ranks"),
    [
        pytest.param(1, 1, 1, marks=SLOW),
        pytest.param(1, 2, 2, marks=SLOW),
        (2, 2, 2),
    ],
)
def test_documents_in_packs_match_one_process(pool, nodes, local, ranks):
    """Caps below the longest document, which is then shared; layers that keep what memory holds; chunks; offloaded
    inputs; rounds of which some ranks have nothing.
    """
    cap = -(-40 // ranks)
    settings = [
        {"seed": 1, "bin_tokens": cap, "strategy": "tawpipe-spread", "keep_mib": 1},
        {"seed": 2, "bin_tokens": 60, "strategy": "hsdp", "micro_batches_per_visit": 2},
        {"seed": 3, "bin_tokens": cap + 3, "strategy": "tawpipe-whole", "sequence_chunk": 7, "offloaded_layers": 3},
        {"seed": 4, "bin_tokens": 400, "strategy": "flat", "offloaded_layers": 2, "keep_mib": 1},
    ]
    waiting = {"seed": 5, "bin_tokens": 44, "recompute": "none", "offloaded_layers": 3, "micro_batches_per_visit": 2}
    chosen = [*settings, waiting] if local == 1 else settings[:2] if nodes == 2 else settings[local // 2 - 1 :: 2]
    for results in pool.run(
        "documents:exact", nodes, local, settings=[{"sequence_ranks": ranks} | one for one in chosen]
    ):
        assert max(worst for worst, _ in results) < LIMIT, results
        if ranks > 1 and chosen[0]["bin_tokens"] < 40:
            assert all(shared for shared, _ in results[0][1]), results


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=SLOW)])
def test_documents_dealt_by_speed_match_one_process(pool, number):
    settings = [
        {"seed": 1, "bin_tokens": 60, "strategy": "tawpipe-spread", "device_speeds": "2x1,2x0.5"},
        {"seed": 2, "bin_tokens": 30, "strategy": "hsdp", "device_speeds": "1,0.5,0.2,1", "sequence_ranks": 2},
        {"seed": 3, "bin_tokens": 44, "micro_batches_per_visit": 2, "device_speeds": "3,1,3,1", "keep_mib": 1},
    ]
    for results in pool.run("documents:exact", 2, 2, settings=settings[number : number + 1]):
        assert max(worst for worst, _ in results) < LIMIT, results


@pytest.mark.parametrize(
    ("strategy", "every"),
    [
        ("tawpipe-striped", ("", "0,0,0,0,0,0,0")),
        pytest.param("tawpipe-whole", ("", "1,1,0,1,1,1,1"), marks=SLOW),
    ],
)
def test_homes_by_memory_change_no_bit(pool, strategy, every):
    """All units with one node, or most of them, beside homes in turn. The norm's parts are added up by process."""
    knobs = {"seed": 1, "bin_tokens": 60, "strategy": strategy, "clip_norm": None}
    first, other = (pool.run("documents:trained", 2, 1, homes=homes, **knobs)[0] for homes in every)
    assert first[0] == other[0] and first[1] == pytest.approx(other[1], rel=1e-12)
    shared = [name for name, value in first[2].items() if value is not None and other[2][name] is not None]
    assert shared and all(torch.equal(first[2][name], other[2][name]) for name in shared)


@pytest.mark.slow
def test_delays_in_every_lane_change_no_bit_of_packed_documents(pool):
    knobs = {"seed": 1, "bin_tokens": 24, "sequence_ranks": 2, "strategy": "tawpipe-spread", "keep_mib": 1}
    once, again = (pool.run("documents:trained", 2, 2, delays=delays, **knobs)[0] for delays in (0.0, 0.003))
    assert once[:2] == again[:2] and once[3] == again[3]
    assert all(torch.equal(value, again[2][name]) for name, value in once[2].items())


def test_dealing_without_bin_tokens_is_refused():
    with piped_pipeline() as pipeline, pytest.raises(UserError, match=r"bin_tokens: got 0; the most tokens"):
        pipeline.deal([3])


def test_document_longer_than_a_pack_is_refused():
    with piped_pipeline(bin_tokens=8) as pipeline, pytest.raises(UserError, match=r"one of 9 tokens.*at most 8"):
        pipeline.deal([3, 9])


def test_kept_layers_follow_the_tokens_of_a_pack():
    """Of a short bin all layers keep what they compute, of a long one few."""
    with piped_pipeline(bin_tokens=4096, keep_mib=1) as pipeline:
        schedule = pipeline.schedule(1)
        layers = pipeline.spec.num_layers
        kept = [pipeline._steps.layers_kept(schedule, {0: one_document(tokens)})[0] for tokens in (16, 512, 4096)]
        assert kept[0] == set(range(1, layers + 1)) > kept[2]
        assert all(one == set(range(layers - len(one) + 1, layers + 1)) for one in kept)


@pytest.mark.parametrize("mib", [0, 8])
def test_kept_layers_are_not_recomputed(mib):
    with closing(piped(llama(), bin_tokens=32, keep_mib=mib)) as pipeline:
        layers, runs, layer = pipeline.spec.num_layers, [], pipeline.chain.layer
        pipeline.chain.layer = lambda block, *given, **named: runs.append(block) or layer(block, *given, **named)
        for _ in range(2):  # in the first step every block runs once more
            runs.clear()
            pipeline.step(pipeline.part_of_documents([20], lambda _: one_document(20)))
            pipeline.drain()
        assert len(runs) == layers * (1 if mib else 2)


def test_documents_with_other_lengths_than_declared_are_refused():
    with piped_pipeline(bin_tokens=32) as pipeline, pytest.raises(UserError, match="5 tokens in documents 0'; 6, as"):
        pipeline.part_of_documents([6], lambda _: one_document(5))
    for lengths in ([], [3, 0]):
        with piped_pipeline(bin_tokens=32) as pipeline, pytest.raises(UserError, match="at least one token"):
            pipeline.deal(lengths)


def test_ready_schedule_of_rows_refuses_documents():
    with piped_pipeline() as pipeline:
        ready = pipeline.schedule(1)
    made = Pipeline(llama()(), schedule=ready, training=TrainingSettings(bin_tokens=32), dtype=torch.float64)
    with closing(made) as pipeline, pytest.raises(UserError, match="a ready one"):
        pipeline.part_of_documents([6], lambda _: one_document(6))


def test_model_whose_kept_bytes_are_unknown_keeps_no_layers():
    """Experts: what a layer keeps cannot be counted before the first step, and the run goes on all the same."""
    model = model_families.real_model(model_families.family_config("qwen3_moe"))
    with closing(piped(model, bin_tokens=32, keep_mib=8)) as pipeline:
        documents = [one_document(tokens) for tokens in (20, 9, 4)]
        result = pipeline.step(pipeline.part_of_documents([20, 9, 4], documents.__getitem__))
        assert result.tokens == 19 + 8 + 3


def one_document(tokens: int) -> MicroBatch:
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    return MicroBatch.of_documents(ids, ids, [tokens])


def piped_pipeline(**knobs):
    return closing(piped(llama(), **knobs))
