"""What a step of a model costs by its schedule alone: bytes over the links, and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from tawpipe.model.chain import Chain
from tawpipe.model.flops import key_bytes
from tawpipe.model.units import Unit
from tawpipe.runtime.dtype import master_dtype, reduce_dtype
from tawpipe.runtime.homes.storage import matrices_in
from tawpipe.schedule.landing import SLICE
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.sizes.footprint import BlockMemory, Costs, Widths, costs
from tawpipe.schedule.spec import EXACT_WIDTH
from tawpipe.schedule.step import Schedule
from tawpipe.topology import Topology


def largest_matrix(unit: Unit) -> int:
    """Elements of the largest matrix of a unit."""
    return max(slot.numel // matrices_in(slot.shape)[0] for slot in unit.slots)


def widths_of(
    chain: Chain,
    dtype: torch.dtype,
    settings: ScheduleSettings,
    states: float | tuple[float, ...],
    *,
    exact: int = 0,
    whole: bool = False,
    change: float = EXACT_WIDTH,
) -> Widths:
    """Bytes of the elements of a chain that is quantised, if it is to be.

    Args:
        dtype: in which it computes.
        states, exact, change: as of ``Widths``.
        whole: the optimizer wants whole matrices.
    """
    return Widths(
        dtype.itemsize,
        reduce_dtype(dtype, settings).itemsize,
        master_dtype(dtype).itemsize,
        states,
        exact=exact,
        unpacked=chain.unpacked_elements,
        slice=max([SLICE, *(largest_matrix(unit) for unit in chain.units if whole and unit.trainable)]),
        change=change,
    )


def step_costs(
    chain: Chain,
    schedule: Schedule,
    dtype: torch.dtype,
    states: float | tuple[float, ...],
    *,
    tokens: int,
    kept_per_token: Mapping[str, float],
    nodes: Topology,
    whole: bool = False,
    change: float = EXACT_WIDTH,
) -> Costs:
    """The costs of a step.

    Args:
        states: tensors of the optimizer for every element, as of ``Widths``.
        tokens: of a micro-batch.
        kept_per_token: bytes that a layer keeps besides its input, by kind of activation.
        nodes: the real ones, where the schedule was built for others.
        whole: the optimizer wants whole matrices.
        change: as of ``Widths``.
    """
    settings = schedule.step.settings
    keys, gradients = key_bytes(chain.config.get_text_config(), dtype)
    memory = BlockMemory(chain.width * dtype.itemsize, kept_per_token, keys=keys, key_gradients=gradients)
    sizes = memory.activations(tokens, ranks=settings.sequence_ranks or 1)
    widths = widths_of(chain, dtype, settings, states, whole=whole, change=change)
    said = costs(schedule, widths, activation_bytes=sizes, nodes=nodes)
    return replace(said, activation_bytes=said.activation_bytes + (settings.keep_mib or 0) * 2**20)
