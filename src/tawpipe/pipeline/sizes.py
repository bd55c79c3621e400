"""What a step of a model costs by its schedule alone: bytes over the links, and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from tawpipe.model.chain import Chain
from tawpipe.model.flops import key_bytes
from tawpipe.runtime.dtype import master_dtype, reduce_dtype
from tawpipe.schedule.footprint import BlockMemory, Costs, Widths, costs
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.step import Schedule
from tawpipe.topology import Topology


def widths_of(
    chain: Chain,
    dtype: torch.dtype,
    settings: ScheduleSettings,
    states: float | tuple[float, ...],
    *,
    exact: int = 0,
) -> Widths:
    """Bytes of the elements of a chain that is quantised, if it is to be.

    Args:
        dtype: in which it computes.
        states, exact: as of ``Widths``.
    """
    return Widths(
        dtype.itemsize,
        reduce_dtype(dtype, settings).itemsize,
        master_dtype(dtype).itemsize,
        states,
        exact=exact,
        unpacked=chain.unpacked_elements,
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
) -> Costs:
    """The costs of a step.

    Args:
        states: tensors of the optimizer for every element, as of ``Widths``.
        tokens: of a micro-batch.
        kept_per_token: bytes that a layer keeps besides its input, by kind of activation.
        nodes: the real ones, where the schedule was built for others.
    """
    settings = schedule.step.settings
    keys, gradients = key_bytes(chain.config.get_text_config(), dtype)
    memory = BlockMemory(chain.width * dtype.itemsize, kept_per_token, keys=keys, key_gradients=gradients)
    sizes = memory.activations(tokens, ranks=settings.sequence_ranks or 1)
    said = costs(schedule, widths_of(chain, dtype, settings, states), activation_bytes=sizes, nodes=nodes)
    return replace(said, activation_bytes=said.activation_bytes + (settings.keep_mib or 0) * 2**20)
