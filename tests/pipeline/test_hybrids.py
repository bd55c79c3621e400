"""Models with state spaces, linear attention and convolutions over several processes: the plain model's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import every_family
from model_families import keep_fp64
from pipelines import make_pipeline
from tawpipe.model.batch import MicroBatch
from tawpipe.runtime.world import World

IN_CHUNKS = {"sequence_chunk": 7, "recompute": "selective"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_next", {}),
    ("lfm2", IN_CHUNKS | {"offloaded_layers": 2}),
    ("nemotron_h", {"strategy": "generated", "block_times": "0/0/0,10/20/10,3/6/3,6/12/6,2/4/2,4/8/0"}),
    ("bloom", {"recompute": "none"}),
    ("falcon_h1", IN_CHUNKS | {"strategy": "tawpipe-whole"}),
    ("nemotron_h", {"strategy": "zero-bubble", "stages": "locals"}),
    ("nemotron_h", {"sequence_chunk": 5}),
    ("jamba", {"strategy": "1f1b"}),
    ("qwen3_next", {"strategy": "1f1b", "recompute": "none"}),
    ("jamba", {"recompute": "none:1,selective:2,none", "offloaded_layers": 3}),
]
QUICK = CASES[:2]
TOLERANCE = 1e-10
ROWS = ((24,), (11, 13), (1, 17, 6), (6, 7, 11), (23, 1))
"""Documents of the rows: the last of four ranks have one row, the first two."""


@pytest.mark.slow
def test_hybrid_models_match_the_plain_model_on_four_processes(pool):
    for differences in pool.run("test_hybrids:compared", 2, 2, cases=QUICK):
        assert differences == [[]] * len(QUICK)


@pytest.mark.slow
def test_hybrid_models_in_chunks_and_pipelines_match_the_plain_model(pool):
    for differences in pool.run("test_hybrids:compared", 2, 2, cases=CASES[len(QUICK) :], timeout_s=600):
        assert differences == [[]] * (len(CASES) - len(QUICK))


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 45, (len(ROWS), 24), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[place for length in row for place in range(length)] for row in ROWS])
    return {"input_ids": ids, "labels": ids, "position_ids": positions}


def compared(world: World, cases: list[tuple[str, dict[str, Any]]]) -> list[list[str]]:
    """What differs in two steps with an update between them, by case, on rank 0."""
    found: list[list[str]] = []
    for family, knobs in cases:
        with pytest.MonkeyPatch.context() as patch:
            keep_fp64(patch)
            plain = every_family.random_model(family)
            sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.01)  # noqa: E731
            pipeline = make_pipeline(
                every_family.random_model(family),
                dtype=torch.float64,
                clip_norm=None,
                optimizer=sgd,
                check="never",
                **knobs,
                world=world,
            )
            losses = [pipeline.step(batch()).loss for _ in range(2)]
            gradients: dict[str, Any] = {name: pipeline.gradient(name) for name, _ in plain.named_parameters()}
            pipeline.close()
            if world.rank:
                found.append([])
                continue
            optimizer = sgd(plain.parameters())
            differing, expected = [], (0.0, {})
            for loss in losses:
                optimizer.step()  # of the step before; there is no gradient before the first
                expected = every_family.plain_step(plain, [MicroBatch.from_rows(**batch())])
                differing = [] if abs(loss / expected[0] - 1) < TOLERANCE else [f"loss {loss} instead of {expected[0]}"]
            found.append(differing + every_family.differences((losses[-1], gradients), expected, TOLERANCE))
    return found
