"""Every row that the lab can measure, by name: this project's strategies, and the rivals as they are shipped."""

from __future__ import annotations

from typing import Any

from tawpipe.errors import UserError
from tawpipe.lab import ours
from tawpipe.lab.contender import Contender, Maker
from tawpipe.lab.ours_real import PipelineContender
from tawpipe.lab.ours_timed import OurContender
from tawpipe.lab.rivals import deepspeed, fsdp, pipelining
from tawpipe.lab.workload import RealWorkload, Workload
from tawpipe.topology import Topology


def _make_ours(name: str, workload: Workload, topology: Topology, rank: int, **knobs: Any) -> Contender:
    if isinstance(workload, RealWorkload):
        return PipelineContender(name, workload, topology, rank, **knobs)
    return OurContender(name, workload, topology, rank, **knobs)


def makers() -> dict[str, Maker]:
    """Row -> what makes its contender."""
    return {
        **dict.fromkeys(fsdp.NAMES, fsdp.make),
        **dict.fromkeys(deepspeed.NAMES, deepspeed.make),
        **dict.fromkeys(pipelining.NAMES, pipelining.make),
        **dict.fromkeys(ours.rows(), _make_ours),
    }


def make(name: str, workload: Workload, topology: Topology, rank: int, **knobs: Any) -> Contender:
    """The contender called ``name`` on this rank; see `Maker`.

    Raises:
        UserError: there is no such row.
    """
    known = makers()
    if name not in known:
        raise UserError("strategy", name, f"one of {', '.join(known)}")
    return known[name](name, workload, topology, rank, **knobs)
