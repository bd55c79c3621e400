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

FAMILIES = {"qwen3_next": "full", "nemotron_h": "none", "lfm2": "full", "bloom": "none"}
"""Family -> what is computed again."""
LENGTHS = (24, 11, 17, 24, 9)
"""Documents, each in a row that is padded to 24 tokens: the last of four ranks have one row, the first two."""


def test_hybrids_have_the_numbers_of_the_plain_model_on_four_processes(pool):
    for differences in pool.run("test_hybrids:compared", 2, 2):
        assert differences == {family: [] for family in FAMILIES}


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 45, (len(LENGTHS), 24), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(24) < torch.tensor(LENGTHS)[:, None]).long()
    return {"input_ids": ids, "labels": ids, "attention_mask": mask}


def compared(world: World) -> dict[str, list[str]]:
    """What differs in two steps with an update between them, by family, on rank 0."""
    found: dict[str, list[str]] = {}
    for family, recompute in FAMILIES.items():
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
                recompute=recompute,
                world=world,
            )
            losses = [pipeline.step(batch()).loss for _ in range(2)]
            gradients: dict[str, Any] = {name: pipeline.gradient(name) for name, _ in plain.named_parameters()}
            pipeline.close()
            if world.rank:
                found[family] = []
                continue
            optimizer = sgd(plain.parameters())
            for loss in losses:
                optimizer.step()  # of the step before; there is no gradient before the first
                expected = every_family.plain_step(plain, [MicroBatch.from_rows(**batch())])
                found[family] = [] if abs(loss / expected[0] - 1) < 1e-9 else [f"loss {loss} instead of {expected[0]}"]
            found[family] += every_family.differences((losses[-1], gradients), expected)
    return found
