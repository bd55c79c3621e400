"""The dtype that a run computes in: what was asked for, or what its devices are fast in."""

from __future__ import annotations

import torch

from tawpipe.runtime.world import World
from tawpipe.schedule.settings import ScheduleSettings

AUTO = "auto"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of weights, gradients and optimizer state at home, where a model computes in ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


def reduce_dtype(dtype: torch.dtype, settings: ScheduleSettings) -> torch.dtype:
    """The type in which gradients travel and are summed up."""
    return dtype if settings.reduce_dtype == "same" else master_dtype(dtype)


def computes_in_bfloat16(device: torch.device) -> bool:
    """True if the device multiplies in bfloat16: a GPU of compute capability 8 or more.

    CPUs have it too, but most convert to float32 and back.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8


def usual_dtype(fast: bool, device: str) -> tuple[str, str]:
    """The dtype that ``auto`` stands for, and why.

    Args:
        fast: every device computes in bfloat16.
        device: type of the devices, cpu or cuda.
    """
    if fast:
        return "bfloat16", "auto: the devices compute in it"
    return "float32", "auto: on the CPU" if device == "cpu" else "auto: some device does not compute in bfloat16"


def chosen_dtype(asked: str, world: World, earlier: str = "") -> tuple[str, str]:
    """The dtype to compute in, and why; the same on all ranks, which all call this.

    Args:
        asked: ``auto``, or the name of a dtype.
        earlier: dtype of the state that a run goes on from. ``auto`` keeps it where the devices compute in it.
    """
    if asked != AUTO:
        return asked, "as --dtype says"
    fast = all(world.gather_numbers(float(computes_in_bfloat16(world.device))))
    if earlier in DTYPES and (fast or earlier != "bfloat16"):
        return earlier, "auto: as in the checkpoint"
    name, why = usual_dtype(fast, world.device.type)
    return name, f"{why}; {earlier} in the checkpoint" if earlier else why
