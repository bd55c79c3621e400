"""The gradient's norm: exact, and the same however gradients are cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tawpipe
from cases import llama
from tawpipe.runtime.homes.home_actions import HomeActions
from tawpipe.runtime.homes.portions import squares_of
from tawpipe.runtime.world import World
from tawpipe.topology import Topology


def test_gradient_norm_is_independent_of_how_tensors_are_cut():
    values = torch.randn(5_000_000, generator=torch.Generator().manual_seed(0))
    norms = [float(squares_of(values.chunk(count)).sum().sqrt()) for count in (1, 2, 6, 1000)]
    exact = float(torch.dot(values.double(), values.double()).sqrt())
    assert all(abs(norm / exact - 1) < 1e-12 for norm in norms)
    assert squares_of([torch.tensor([1.0, float("inf")])]).sum().isinf()
    assert squares_of([torch.tensor([1.0, float("nan")])]).sum().isnan()


def test_rank_with_only_padding_creates_its_zero_on_the_device():
    """From the host it would be a copy that blocks, in every step."""
    end: Any = SimpleNamespace(streaming=None, optimizers=SimpleNamespace(pieces={0: ()}), device=torch.device("meta"))
    assert HomeActions._squares(end, [0, 1]).is_meta


def test_the_norm_of_a_large_gradient_is_exact():
    """An embedding of 4 M elements, whose gradient torch's own fp32 norm would get wrong by 1e-4."""
    config = llama(torch.float32).config
    config.vocab_size, config.num_hidden_layers = 80_000, 1
    config.hidden_size, config.tie_word_embeddings = 48, True
    pipeline = tawpipe.Pipeline(
        type(llama(torch.float32))(config),
        optimizer=tawpipe.adamw(0.0),
        world=World(Topology.grid(1, 1), 0, torch.device("cpu"), None),
        training=tawpipe.TrainingSettings(clip_norm=None),
        loss=lambda logits, labels: (logits.sin() * 1e-2)[labels != -100].sum(),
    )
    ids = torch.arange(12).view(2, 6)
    norm = pipeline.step({"input_ids": ids, "labels": ids}).grad_norm
    pipeline.drain()
    gradients = [pipeline.gradient(name).double() for name in pipeline.parameter_names]  # type: ignore[union-attr]
    assert norm == pytest.approx(float(torch.stack([gradient.norm() for gradient in gradients]).norm()), rel=1e-6)
    pipeline.close()
