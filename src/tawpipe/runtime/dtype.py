"""Choice of the dtype that a run computes in: the requested dtype, or a fast one for the devices."""

from __future__ import annotations

import torch

from tawpipe.runtime.world import World
from tawpipe.schedule.settings import ScheduleSettings

AUTO = "auto"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of master weights, gradients and optimizer state for a model that computes in ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


def reduce_dtype(dtype: torch.dtype, settings: ScheduleSettings) -> torch.dtype:
    """Return the dtype in which gradients are sent and summed.

    Returns ``dtype`` if the setting ``reduce_dtype`` is ``same``, else the master dtype.
    """
    return dtype if settings.reduce_dtype == "same" else master_dtype(dtype)


def computes_in_bfloat16(device: torch.device) -> bool:
    """Return True if the device multiplies matrices in bfloat16: a GPU of compute capability 8.0 or more.

    Returns False for CPUs: they support bfloat16, but most convert to float32 and back.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8


def usual_dtype(fast: bool, device: str) -> tuple[str, str]:
    """Return the dtype that ``auto`` stands for, and the reason as text.

    Args:
        fast: True if every device computes in bfloat16.
        device: Type of the devices, ``cpu`` or ``cuda``.
    """
    if fast:
        return "bfloat16", "auto: the devices compute in it"
    return "float32", "auto: on the CPU" if device == "cpu" else "auto: some device does not compute in bfloat16"


def chosen_dtype(asked: str, world: World, earlier: str = "") -> tuple[str, str]:
    """Return the name of the dtype to compute in, and the reason as text. Both are equal on all ranks.

    Call on all ranks: with ``auto`` they exchange what their devices support.

    Args:
        asked: ``auto``, or the name of a dtype.
        earlier: Dtype in the checkpoint that the run resumes from, or ``""``. With ``auto`` the run keeps it, except
            bfloat16 on devices that do not compute in it.
    """
    if asked != AUTO:
        return asked, "as --dtype says"
    fast = all(world.gather_numbers(float(computes_in_bfloat16(world.device))))
    if earlier in DTYPES and (fast or earlier != "bfloat16"):
        return earlier, "auto: as in the checkpoint"
    name, why = usual_dtype(fast, world.device.type)
    return name, f"{why}; {earlier} in the checkpoint" if earlier else why
