"""What others save may wait in files: the same gradients, and none of it is memory of the process; which sides there
are, and their page."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from longest import page
from longest_probe import file_bytes
from longest_sides import FAMILIES, PLACES, SIDES, ChunkedLoss, Elsewhere, HuggingFace, Shape, parts_of, row

SMALL = Shape(hidden=32, layers=2, heads=2, key_heads=1, intermediate=48, vocabulary=64)


@pytest.mark.parametrize("strides", ["dense", "permuted", "with gaps", "a scalar", "nothing"])
def test_tensor_saved_to_a_file_is_restored_exactly(tmp_path: Path, strides: str):
    drawn = torch.randn(3, 4, 6)
    saved = {
        "dense": drawn,
        "permuted": drawn.permute(2, 0, 1),
        "with gaps": drawn[:, ::2, 1:4],
        "a scalar": torch.tensor(1.5),
        "nothing": torch.empty(0, 3),
    }[strides]
    elsewhere = Elsewhere(str(tmp_path))
    back = elsewhere.unpack(elsewhere.pack(saved))
    assert torch.equal(back, saved)
    if strides != "with gaps":
        assert back.stride() == saved.stride()


def test_saved_activations_stay_in_files_until_backward_uses_them(tmp_path: Path):
    layer = nn.Linear(64, 64)
    with Elsewhere(str(tmp_path)):
        loss = layer(torch.randn(1024, 64)).square().sum()
    there = file_bytes(os.getpid(), str(tmp_path))
    assert 2 * 1024 * 64 * 4 <= there <= 3 * 1024 * 64 * 4  # the layer's input and output, and no weights
    assert not list(tmp_path.iterdir()), "the files have no names"
    loss.backward()
    assert layer.weight.grad is not None
    del loss
    assert not file_bytes(os.getpid(), str(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_side_computes_equal_losses_wherever_checkpoints_are_kept(family: str, tmp_path: Path):
    shape = replace(SMALL, family=family)
    ids = row(shape, 48)
    steps = [
        [*side.step(ids), *side.step(ids)]
        for side in (HuggingFace(shape), ChunkedLoss(shape), ChunkedLoss(shape, lambda: Elsewhere(str(tmp_path))))
    ]
    assert steps[0] == pytest.approx(steps[1], rel=1e-5) and steps[1] == steps[2]


def test_shape_is_read_from_its_written_numbers():
    shape = Shape.read(SMALL.numbers, "qwen3_5")
    assert shape == replace(SMALL, family="qwen3_5") and "linear_attention" in shape.config.layer_types


def test_every_side_names_a_system_and_a_place():
    assert len(set(SIDES)) == len(SIDES)
    assert all(parts_of(side)[1] in PLACES for side in SIDES)
    assert parts_of("deepspeed-x2") == ("deepspeed-x2", "") and parts_of("fsdp2-host") == ("fsdp2", "host")
    assert {"deepspeed", "deepspeed-host", "deepspeed-files", "tawpipe-chunked-host"} < set(SIDES)


def test_page_compares_with_the_best_rival_in_the_same_place():
    """With the best of the others in the same place, on as many processes."""
    tokens = {"huggingface": (10, 20), "deepspeed": (40, 50), "deepspeed-x2": (900, None), "tawpipe-chunked": (60, 200)}
    rows = [
        {"side": system, "system": system, "processes": 2 if system.endswith("x2") else 1, "place": place}
        | {"tokens": number, "peak_gib": 1.0, "elsewhere_gib": 0.0, "seconds": 1.0, "binds": "memory", "why_not": "no"}
        for system, numbers in tokens.items()
        for place, number in zip(("device", "host"), numbers, strict=True)
    ]
    shape = {"hidden": 1, "layers": 1, "heads": 1, "key_heads": 1, "intermediate": 1, "vocabulary": 1}
    settings = {"memory_gib": 1, "shape": shape, "chunk": 1, "loss_tokens": 1, "threads": 1, "most_seconds": 1}
    content = {"settings": settings | {"within": 0.1}, "rows": rows, "equality": None, "count": []}
    text = page(content | {"command": "longest.py", "date": "today", "versions": {"torch": "2"}})
    assert "1.50 of deepspeed (without offloading), 4.00 of deepspeed (the host's memory)" in text
    assert "| deepspeed-x2 | 2 | 900 | - | - |" in text
