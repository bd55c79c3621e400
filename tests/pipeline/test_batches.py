"""What ``Pipeline.step`` takes for a batch, and what it refuses by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tawpipe.errors import UserError
from tawpipe.pipeline.batches import Deal
from tawpipe.pipeline.pipeline import Pipeline

Batch = dict[str, Tensor]


def small(positions: int = 64) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=positions,
    )
    return LlamaForCausalLM(config)


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    made = Pipeline(small())
    yield made
    made.executor.close()


def rows(dtype: torch.dtype = torch.int64) -> Batch:
    ids = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(12).remainder(7).expand(2, 12)
    return {name: value.to(dtype) for name, value in (("input_ids", ids), ("labels", ids), ("position_ids", positions))}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_whole_numbers_of_any_size_are_taken(pipeline: Pipeline, dtype: torch.dtype) -> None:
    wide = pipeline.evaluate(rows())
    assert pipeline.evaluate(rows(dtype)).loss == wide.loss
    pipeline.step(rows(dtype))
    pipeline.drain()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("input_ids", torch.float32),
        ("labels", torch.bfloat16),
        ("position_ids", torch.float64),
        ("attention_mask", torch.float32),
        ("labels", torch.bool),
        ("input_ids", torch.complex64),
    ],
)
def test_other_numbers_are_refused_by_name(name: str, dtype: torch.dtype) -> None:
    batch = rows() | {"attention_mask": torch.ones(2, 12, dtype=torch.bool)}
    deal = Deal(micro_batch=1, rank=0, world_size=1)
    deal.local(batch)
    with pytest.raises(UserError, match=f"batch: got '{name} of {dtype}'; whole numbers"):
        deal.local(batch | {name: batch[name].to(dtype)})


@pytest.mark.parametrize("skip_limit", [0, 3])
def test_a_step_in_which_nothing_is_learned_is_refused(skip_limit: int) -> None:
    pipeline = Pipeline(small(), skip_limit=skip_limit)
    batch = rows()
    pipeline.step(batch)
    pipeline.step(batch | {"labels": torch.full_like(batch["labels"], -100)})
    with pytest.raises(UserError, match="labels that are all -100"):
        pipeline.drain()
    pipeline.executor.close()


def test_rows_may_be_longer_than_the_positions_that_documents_need() -> None:
    pipeline = Pipeline(small(positions=8))
    pipeline.step(rows())
    pipeline.drain()
    pipeline.close()
