"""Refusals of what a pipeline cannot run, before anything is allocated: settings, a model, a strategy for it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tawpipe.errors import UserError
from tawpipe.model.bits.quantized import NONE
from tawpipe.model.chain import Chain
from tawpipe.pipeline.check import CHOICES
from tawpipe.runtime.dtype import AUTO, DTYPES
from tawpipe.runtime.homes.optimizer import OptimizerFactory
from tawpipe.runtime.homes.unit_optimizers import refuse_cut_matrices
from tawpipe.schedule.settings import ScheduleSettings
from tawpipe.schedule.step import StepSpec
from tawpipe.topology import Topology


def refuse_values(
    *, micro_batch: int, dtype: torch.dtype | str, clip_norm: float | None, seed: int, check: str
) -> None:
    """Raise UserError for a value that a pipeline cannot have."""
    if check not in CHOICES:
        raise UserError("check", check, ", ".join(CHOICES))
    if micro_batch < 1:
        raise UserError("micro_batch", micro_batch, "at least 1")
    # fp16 would need loss scaling: gradients of single tokens are below its range.
    if dtype not in (AUTO, *DTYPES.values()):
        raise UserError("dtype", dtype, "torch.float32, torch.bfloat16, torch.float64 or 'auto'")
    if clip_norm is not None and not clip_norm > 0:
        raise UserError("clip_norm", clip_norm, "above 0, or None for no clipping")
    if seed < 0:
        raise UserError("seed", seed, "0 or more")


def refuse_settings(
    settings: ScheduleSettings,
    *,
    clip_norm: float | None,
    compile_layers: bool,
    quantize: str,
    dtype: torch.dtype | None = None,
    on_gpus: bool = False,
) -> None:
    """Raise UserError for settings that contradict each other, whatever the model.

    Args:
        dtype: in which weights travel; None where that is not known yet.
        on_gpus: devices are GPUs.
    """
    if clip_norm is not None and settings.early_updates:
        raise UserError("schedule.early_updates", True, "false while clip_norm is set: clipping waits for the norm")
    if compile_layers and settings.sequence_chunk:
        expected = "false with schedule.sequence_chunk: every chunk would be compiled anew"
        raise UserError("compile_layers", True, expected)
    if compile_layers and (settings.sequence_ranks or 1) > 1:
        expected = "false with schedule.sequence_ranks: keys and values are made by a layer that is left half-way"
        raise UserError("compile_layers", True, expected)
    compression = settings.weights_compression
    if quantize != NONE and compression not in ("none", "exact"):
        expected = f"none or exact with quantize={quantize}: what is frozen travels in fewer bits already"
        raise UserError("schedule.weights_compression", compression, expected)
    if compression == "exact" and dtype not in (None, torch.bfloat16):
        expected = f"none with {str(dtype).removeprefix('torch.')}: changes of its numbers are not small; or bfloat16"
        raise UserError("schedule.weights_compression", compression, expected)
    if (compression := settings.gradients_compression) == "exact" and (on_gpus or dtype is torch.float64):
        expected = "none with float64: only fp32 and bf16 are coded"
        if on_gpus:
            expected = (
                "none, int8 or fp8 on GPUs: how long a message is shows when its gradient is there, and the thread "
                "that issues everything would wait for each"
            )
        raise UserError("schedule.gradients_compression", compression, expected)


def refuse_cut_rows(chain: Chain, settings: ScheduleSettings) -> None:
    """Raise UserError if rows are to be cut that this model needs whole."""
    for name, value, most, why in (
        ("sequence_chunk", settings.sequence_chunk or 0, 0, chain.why_not_chunks),
        ("sequence_ranks", settings.sequence_ranks or 1, 1, chain.why_not_sets),
    ):
        if why and value > most:
            expected = f"unset: rows of {chain.name} cannot be cut, because {why}"
            raise UserError(f"schedule.{name}", value, expected)
    if chain.mixing and settings.sequence_chunk == 1:
        expected = "0, or at least 2: a state goes from chunk to chunk, and code for one token changes it in place"
        raise UserError("schedule.sequence_chunk", 1, expected)


def refuse_host(
    step: StepSpec,
    wanted: Sequence[float],
    free: Sequence[float],
    lockable: Sequence[float],
    machines: Topology,
    *,
    one_memory: bool,
) -> None:
    """Raise UserError where homes in the host's memory do not fit there, or are where they gain nothing.

    Args:
        step: any of the strategy.
        wanted: of every rank, the bytes that its homes take in the host's memory.
        free: of every rank, the bytes that its machine could give, 0 where that is not known.
        lockable: of every rank, the bytes that it may lock, 0 where that is enough.
        one_memory: some device's memory is its host's.
    """
    setting, level = "schedule.host_homes", step.settings.host_homes
    if one_memory:
        raise UserError(setting, level, "none: the device and its host have one memory, and nothing is gained")
    less = "none, or state" if level == "all" else "none"
    for number, ranks in enumerate(machines.nodes):
        needed, there = sum(wanted[rank] for rank in ranks), min(free[rank] for rank in ranks)
        if there and needed > there:
            more = math.ceil(len(machines.nodes) * needed / there)
            spread = f"; spread over {more} such machines homes would fit"
            if any(len(home.copies) > 1 for home in step.homes):
                spread = f"; {step.strategy.name} keeps all of them on every machine, which the other strategies do not"
            expected = (
                f"{less}, or {needed / 2**30:.1f} GiB of free memory on machine {number}, which has "
                f"{there / 2**30:.1f} GiB besides what other processes hold{spread}"
            )
            raise UserError(setting, level, expected)
    for rank, most in enumerate(lockable):
        if most and wanted[rank] > most:
            expected = (
                f"{less}, or processes that may lock {wanted[rank] / 2**30:.1f} GiB of memory for copies to and from "
                f"the GPU: rank {rank} may lock {most / 2**30:.3g} GiB (ulimit -l; docker run --ulimit memlock=-1)"
            )
            raise UserError(setting, level, expected)


def refuse_strategy(chain: Chain, step: StepSpec, *, optimizer: OptimizerFactory, compile_layers: bool) -> None:
    """Raise UserError for a strategy under which this model, or this optimizer, cannot run.

    Args:
        step: any of the strategy.
    """
    strategy = step.strategy
    if compile_layers and strategy.splits:
        expected = f"false under {strategy.name}, whose backward passes are taken apart"
        raise UserError("compile_layers", True, expected)
    if strategy.axis and (why := chain.why_not_staged):
        expected = f"a strategy whose weights travel for {chain.name}: {why}"
        raise UserError("schedule.strategy", strategy.name, expected)
    refuse_cut_matrices(optimizer, chain.units, step.homes, step.settings.strategy)
