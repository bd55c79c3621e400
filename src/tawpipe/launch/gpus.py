"""GPUs of this machine, found without torch, which takes seconds to load."""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Gpu:
    """GPU that may be used.

    Args:
        id: name of the GPU in CUDA_VISIBLE_DEVICES.
        capability: CUDA compute capability; None if it is not known.
    """

    id: str
    name: str = "GPU"
    capability: float | None = None


def find_gpus(environ: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """Ask ``nvidia-smi`` for the GPUs of this machine; return those that CUDA_VISIBLE_DEVICES allows.

    Returns ``()`` without this program, if it fails, or if torch is installed without CUDA."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("torch").endswith("+cpu"):
            return ()
    if (program := shutil.which("nvidia-smi", path=environ.get("PATH"))) is None:
        return ()
    query = [program, "--query-gpu=index,uuid,name,compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if answer.returncode:
        return ()
    known: dict[str, Gpu] = {}
    for index, uuid, name, capability in csv.reader(answer.stdout.splitlines(), skipinitialspace=True):
        number = float(capability) if capability.replace(".", "", 1).isdigit() else None
        known[index] = known[uuid] = Gpu(index, name, number)
    allowed = environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return tuple(gpu for key, gpu in known.items() if key == gpu.id)
    ids = [word.strip() for word in allowed.split(",") if word.strip()]
    return tuple(replace(known[id], id=id) if id in known else Gpu(id) for id in ids if id != "-1")
