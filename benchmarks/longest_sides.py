"""The sides of the longest row: one model with the same weights, loss and optimizer, trained by others and by us.

A side takes one row of tokens, trains on it and says the mean loss and the norm of the gradient. All but one recompute
layers in the backward pass; gradients of others stay allocated between steps, so that they count as part of the loaded
model, as our buffers do.

What waits for the backward pass stays on the device, or goes to files: in a folder in memory, which the kernel counts
apart from a process's own (``-host``), or on a disk (``-files``).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from longest_model import CLIP, LOSS_TOKENS, OPTIMIZER, CannotRun, Result, Shape
from longest_others import ChunkedLoss, DeepSpeed, Elsewhere, Fsdp2, HuggingFace, Kept, Ulysses
from tawpipe import Pipeline
from tawpipe.plan.machine import uniform
from tawpipe.plan.measure import Asked, request_of
from tawpipe.plan.predict import memory_of
from tawpipe.prove.models import on_meta
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.strategies.build import build
from tawpipe.simulate import LinkModel


class Ours:
    """This project's runtime, one micro-batch of one row.

    Raises:
        CannotRun: this version has no such setting.
    """

    def __init__(self, shape: Shape, **settings: Any) -> None:
        known = {one.name for one in fields(ScheduleSettings)}
        if missing := [name for name in settings if name not in known]:
            raise CannotRun(f"this version has no schedule.{missing[0]}")
        self.pipeline = Pipeline(
            shape.made(),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, **OPTIMIZER),
            schedule=ScheduleSettings(micro_batches_per_visit=1, loss_chunk_tokens=LOSS_TOKENS, **settings),
            dtype=torch.float32,
            clip_norm=CLIP,
            check="never",
        )

    def step(self, ids: Tensor) -> Result:
        result = self.pipeline.step({"input_ids": ids, "labels": ids})
        self.pipeline.drain()
        return Result(result.loss, result.grad_norm)


OTHERS: dict[str, type[HuggingFace]] = {
    "huggingface": HuggingFace,
    "huggingface-chunked-loss": ChunkedLoss,
    "fsdp2": Fsdp2,
    "deepspeed": DeepSpeed,
    "deepspeed-kept": Kept,
    "deepspeed-x2": Ulysses,
}
OURS = ("tawpipe", "tawpipe-chunked", "tawpipe-chunked-x2")
TWO = ("fsdp2", "deepspeed-x2", "tawpipe-chunked-x2")
"""Systems of two processes."""
PLACES = ("", "host", "files")
"""Where that waits which the backward pass needs; on the device if this is empty."""
SIDES = tuple(
    f"{system}-{place}".removesuffix("-")
    for system in (*OTHERS, *OURS)
    for place in PLACES
    if (system == "deepspeed-kept") <= bool(place) and (system in ("tawpipe", *TWO[1:])) <= (not place)
)
"""Systems with places. Whole rows of ours wait in memory that is not counted apart, and a row on two processes takes
too long where it is longer still."""


def parts_of(side: str) -> tuple[str, str]:
    """A side's system and place."""
    system, _, place = side.rpartition("-")
    return (system, place) if place in PLACES[1:] else (side, "")


def settings_of(side: str, chunk: int, layers: int, folder: str) -> dict[str, Any]:
    """The settings of one of ``OURS``, in a place.

    Args:
        layers: of the model.
        folder: for the files of layers' inputs.
    """
    system, place = parts_of(side)
    settings: dict[str, Any] = {"recompute": "full"}
    if system != "tawpipe":
        settings["sequence_chunk"] = chunk
    if place:
        settings |= {"offloaded_layers": layers, "offload_dir": folder}
    if system in TWO:
        settings["sequence_ranks"] = 2
    return settings


def make_side(side: str, shape: Shape, chunk: int, folder: str) -> HuggingFace | Ours:
    """A side in this process, whose rank torchrun's variables say.

    Args:
        folder: where files may be made; for ``-host`` in memory.
    """
    system, place = parts_of(side)
    if system not in OTHERS:
        return Ours(shape, **settings_of(side, chunk, shape.layers, folder))
    return OTHERS[system](shape, (lambda: Elsewhere(folder)) if place else nullcontext)


def predicted_bytes(side: str, shape: Shape, chunk: int, tokens: int) -> int:
    """What our schedule counts that a step on a row takes besides what is there before it; on one process."""
    settings = settings_of(side, chunk, shape.layers, "")
    asked = ScheduleSettings(micro_batches_per_visit=1, loss_chunk_tokens=LOSS_TOKENS, **settings)
    machine = uniform(1, 1, between=LinkModel(1e9), inside=LinkModel(1e9))
    row = Asked(tokens, 1, dtype=torch.float32, settings=asked, timed=False, profile="measure")
    request = request_of(on_meta(shape.config), machine, row)
    parts = memory_of(request, build(request.step(asked))).parts
    return parts["activations"] + parts["working"]
