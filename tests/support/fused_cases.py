"""Functions for worker processes: runs with stand-ins for fused kernels, which a user cannot choose."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import cases
from tawpipe.model.chain import Chain
from tawpipe.model.fused.operations import EAGER, STAND_IN, Operations
from tawpipe.pipeline import pipeline as pipeline_module
from tawpipe.runtime.world import World


def put_into_pipelines(patch: pytest.MonkeyPatch, operations: Operations = STAND_IN) -> Counter[str]:
    """Let every ``Pipeline`` compute by ``operations``; the number of places of each kind is counted from then on."""
    counts = Counter[str]()

    def choose(chain: Chain, *_: Any) -> str:
        if chain.operations is EAGER:  # that of a check may have some already
            for place, count in chain.compute_by(operations).items():
                counts[place.kind] += count
        return ""

    patch.setattr(pipeline_module, "choose_kernels", choose)
    return counts


def by_stand_ins(world: World, *, case: str, **arguments: Any) -> tuple[Any, dict[str, int]]:
    """The result of a case of ``cases`` whose pipelines compute by stand-ins, and the number of places by kind."""
    with pytest.MonkeyPatch.context() as patch:
        counts = put_into_pipelines(patch)
        return getattr(cases, case)(world, **arguments), dict(counts)
