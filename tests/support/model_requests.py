"""Plans asked for models by name: a preset or a folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tawpipe.model.chain import Chain
from tawpipe.model.files.build import NO_ADAPTER, OWN_ROPE, build_model
from tawpipe.model.settings import LoraSettings, RopeSettings
from tawpipe.plan.cost.measure import Asked, request_of
from tawpipe.plan.cost.request import PlanRequest
from tawpipe.plan.machine.machine import Machine


def chain_of(
    model: str,
    asked: Asked,
    *,
    vocab_size: int | None = None,
    rope: RopeSettings = OWN_ROPE,
    lora: LoraSettings = NO_ADAPTER,
    frozen: Sequence[str] = (),
) -> Chain:
    """The model with positions for what is asked."""
    built = build_model(
        model,
        vocab_size=vocab_size,
        max_positions=asked.row,
        longest=asked.longest,
        rope=rope,
        lora=lora,
        frozen=frozen,
    )
    return Chain(built.model)


def request_for(model: str, machine: Machine, *, here: torch.device | None = None, **given: Any) -> PlanRequest:
    """A request by the arguments of ``Asked`` and of ``chain_of``."""
    of_model = {name: given.pop(name) for name in ("vocab_size", "rope", "lora", "frozen") if name in given}
    asked = Asked(**given)
    return request_of(chain_of(model, asked, **of_model), machine, asked, here=here)
