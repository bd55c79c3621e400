"""Predicted memory and network bytes of one training step, computed from its schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from tawpipe.model.chain import Chain
from tawpipe.model.flops import key_bytes
from tawpipe.model.units import Unit
from tawpipe.runtime.dtype import master_dtype, reduce_dtype
from tawpipe.runtime.homes.storage import matrices_in
from tawpipe.schedule.landing import PORTION_SIZE
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.sizes.footprint import BlockMemory, Costs, Widths, costs
from tawpipe.schedule.spec import EXACT_WIDTH
from tawpipe.schedule.step import Schedule
from tawpipe.topology import Topology


def largest_matrix(unit: Unit) -> int:
    """Return the number of elements of the largest matrix among the parameters of ``unit``."""
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
    """Return the bytes per element of weights, gradients and masters of ``chain``.

    Args:
        chain: the model; quantised before the call if it will be quantised.
        dtype: dtype in which weights travel and blocks compute.
        settings: schedule settings, which may choose another dtype for summed gradients.
        states: tensors per parameter that the optimizer keeps; one number, or one for each unit.
        exact: bytes of a frozen weight's exact value in host memory; see ``Widths``.
        whole: True if the optimizer needs whole matrices; host updates then run on portions as large as the largest
            trainable matrix.
        change: bytes per weight that travels as the change since the last step; see ``Widths``.
    """
    return Widths(
        dtype.itemsize,
        reduce_dtype(dtype, settings).itemsize,
        master_dtype(dtype).itemsize,
        states,
        exact=exact,
        unpacked=chain.unpacked_elements,
        slice=max([PORTION_SIZE, *(largest_matrix(unit) for unit in chain.units if whole and unit.trainable)]),
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
    """Return the memory and the network traffic of one step of ``chain`` under ``schedule``.

    Args:
        chain: the model.
        schedule: schedule of the step.
        dtype: dtype in which weights travel and blocks compute.
        states: tensors per parameter that the optimizer keeps; see ``Widths``.
        tokens: tokens of a micro-batch.
        kept_per_token: bytes per token that a layer keeps in addition to its input, by kind of activation.
        nodes: the real nodes, for the traffic between them; the schedule may have been built for other ones.
        whole: True if the optimizer needs whole matrices.
        change: bytes per weight that travels as the change since the last step; see ``Widths``.
    """
    settings = schedule.step.settings
    keys, gradients = key_bytes(chain.config.get_text_config(), dtype)
    memory = BlockMemory(chain.width * dtype.itemsize, kept_per_token, keys=keys, key_gradients=gradients)
    sizes = memory.activations(tokens, ranks=settings.sequence_ranks or 1)
    widths = widths_of(chain, dtype, settings, states, whole=whole, change=change)
    estimate = costs(schedule, widths, activation_bytes=sizes, nodes=nodes)
    return replace(estimate, activation_bytes=estimate.activation_bytes + (settings.keep_mib or 0) * 2**20)
