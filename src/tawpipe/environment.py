"""Interface between a launcher and the processes it starts: environment variables, exit codes and prefixes of lines.

Both import this module, so that neither has to load the other to read a constant.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from tawpipe.errors import UserError

LOCAL_LAUNCHER = "TAWPIPE_LOCAL_LAUNCHER"
"""Environment variable that the launcher of one machine sets to 1, so that its workers can distinguish it from
torchrun."""
LAUNCH = "TAWPIPE_LAUNCH"
"""Environment variable with a word that distinguishes one launch from another. All starts of a launch share it."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable with the number of earlier starts of this run. torchrun defines it; the local launcher sets it
too."""
LOOPBACK = "127.0.0.1"
"""Address at which the workers of the local launcher connect to each other."""

USER_ERROR = 2
"""Exit code of a process that found a setting which cannot work."""
ERROR_PREFIX = "tawpipe: error: "
"""Beginning of the message of an expected error on standard error."""
STUCK = "tawpipe: stuck: "
"""Beginning of the lines in which a worker reports what it waits for in a step that takes too long."""
ENDS = "; this process ends"
"""Text in a ``STUCK`` line of a worker that ends itself because of the wait."""
EVERYONE = "all ranks: "
"""Beginning of the text of a ``STUCK`` line that holds the conclusion from the reports of all ranks."""
SECOND_S = 1.0
"""Minimum seconds between a first and a second signal. A signal that arrives earlier is a copy of the first: schedulers
signal every process, and launchers forward signals."""

CUDA_VARIABLES = {
    # The default is 8 connections. Lanes and NCCL need about 12 streams, and streams that share a connection wait for
    # each other needlessly.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # Make all connections of collectives when a group is created. Making one during a step blocks every lane of the
    # process, because one thread issues all of them. A warm-up with small tensors would not make all connections, as
    # the size selects the algorithm. runtime/transport/transport.py measures the memory of each group.
    "NCCL_RUNTIME_CONNECT": "0",
    # Torch's allocator then extends segments as needed, instead of keeping segments of every size that steps used.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
"""Environment variables for CUDA, NCCL and torch's allocator that the lanes of this project need.

Values that the user has set are kept.
"""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Alternative names of torch's allocator variable, which torch has renamed over time."""


def missing_cuda_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the entries of ``CUDA_VARIABLES`` that ``environ`` does not set under any of their names."""
    present = {"PYTORCH_ALLOC_CONF"} if any(name in environ for name in ALLOCATOR) else set[str]()
    return {name: value for name, value in CUDA_VARIABLES.items() if name not in environ and name not in present}


def set_cuda_variables(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the entries of ``CUDA_VARIABLES`` that ``environ`` lacks. Call before CUDA starts in this process."""
    environ.update(missing_cuda_variables(environ))


def started_by_local_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if the launcher of one machine, not torchrun, started this process."""
    return environ.get(LOCAL_LAUNCHER) == "1"


def restart_count() -> int:
    """Return the number of earlier starts of this run, or 0 if the launcher has not set it."""
    text = os.environ.get(RESTARTS, "0")
    return int(text) if text.isdecimal() else 0


@dataclass(frozen=True)
class LaunchEnvironment:
    """Ranks of this process and sizes of the world and of its node, as torchrun or the local launcher set them."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> LaunchEnvironment | None:
        """Read the launcher's variables from ``environ``; return None in a process that no launcher started.

        Raises:
            UserError: some of the variables are missing or not numbers.
        """
        if "RANK" not in environ and "WORLD_SIZE" not in environ:
            return None
        values = []
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            text = environ.get(name)
            if text is None or not text.isdecimal():
                raise UserError(
                    name, text, "torchrun sets it to a number; start with torchrun, or unset RANK and WORLD_SIZE"
                )
            values.append(int(text))
        return cls(*values)
