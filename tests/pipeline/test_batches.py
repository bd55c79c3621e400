"""What ``Pipeline.step`` takes for a batch, and what it refuses by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pipelines import grouped
from tawpipe.errors import UserError
from tawpipe.pipeline.batch import Deal
from tawpipe.pipeline.pipeline import Pipeline
from tawpipe.schedule.settings import ScheduleSettings

Batch = dict[str, Tensor]
EARLY = ScheduleSettings(early_updates=True)


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
def test_integer_batches_of_any_width_are_accepted(pipeline: Pipeline, dtype: torch.dtype) -> None:
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
def test_batches_of_floats_are_refused_by_name(name: str, dtype: torch.dtype) -> None:
    batch = rows() | {"attention_mask": torch.ones(2, 12, dtype=torch.bool)}
    deal = Deal(micro_batch=1, rank=0, world_size=1)
    deal.local(batch)
    with pytest.raises(UserError, match=f"batch: got '{name} of {dtype}'; whole numbers"):
        deal.local(batch | {name: batch[name].to(dtype)})


@pytest.mark.parametrize("knobs", [{}, {"skip_limit": 3}, {"schedule": EARLY, "clip_norm": None}])
@pytest.mark.parametrize("fused", [False, True])
def test_step_without_labels_is_skipped_and_reported_once(
    knobs: dict[str, Any], fused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As if it had not been: no decay, no momentum, and the next step is none the worse."""
    batch, weights = rows(), list[Tensor]()
    empty = batch | {"labels": torch.full_like(batch["labels"], -100)}
    for given in ([empty, batch, empty, batch], [batch, batch]):
        make = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, fused=fused)  # noqa: E731
        pipeline = Pipeline(small(), optimizer=make, **grouped(knobs))
        results = [pipeline.step(one) for one in given]
        assert [one.tokens > 0 for one in results] == [one is batch for one in given]
        pipeline.drain()
        assert pipeline.without_labels == len(given) - 2
        weights.append(pipeline.parameter("lm_head.weight"))  # type: ignore[arg-type]
        pipeline.close()
    assert torch.equal(*weights)
    assert ["no label to learn" in one.message for one in caplog.records] == [True]  # once


def test_rows_may_exceed_the_position_count_if_documents_do_not() -> None:
    pipeline = Pipeline(small(positions=8))
    pipeline.step(rows())
    pipeline.drain()
    pipeline.close()
