"""The words between a launcher and the processes that it starts: variables, exit codes, beginnings of lines.

It stands below both, so that neither has to load the other to read a constant.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from tawpipe.errors import UserError

LOCAL_LAUNCHER = "TAWPIPE_LOCAL_LAUNCHER"
"""Set to 1 by the launcher of one machine, so that its workers can tell it from torchrun."""
LAUNCH = "TAWPIPE_LAUNCH"
"""A word that tells the starts of one launch from those of another."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Starts of this run before the present one: torchrun's variable, which the local launcher sets as well."""
LOOPBACK = "127.0.0.1"
"""The address at which the workers of the local launcher meet."""

USER_ERROR = 2
"""Exit code of a process that found a setting which cannot work."""
ERROR_PREFIX = "tawpipe: error: "
"""The beginning of an expected error's message on standard error."""
STUCK = "tawpipe: stuck: "
"""The beginning of the lines by which a worker says what it waits for in a step that takes too long."""
ENDS = "; this process ends"
"""Words of such a line of a worker that ends because of it."""
EVERYONE = "all ranks: "
"""Beginning of such a line's text where it says what follows from those of all ranks."""
SECOND_S = 1.0
"""A signal that comes sooner after the first is the same one: schedulers tell every process, launchers pass it on."""

CUDA_VARIABLES = {
    # Streams beyond the number of connections share one, and then wait for each other without need: lanes and NCCL's
    # own streams are about 12, and the default is 8 connections.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # All connections of collectives when a group is made, not in the middle of a step, where making one blocks every
    # lane of a process: they have one issuing thread. Sizes choose algorithms, so that warming up with few numbers
    # would not make all of them. What it costs in memory is measured, for each group (runtime/transport/transport.py).
    "NCCL_RUNTIME_CONNECT": "0",
    # Torch's allocator maps memory to a segment as it grows, instead of keeping segments of all sizes that steps had.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
"""What CUDA, NCCL and torch's allocator read when they start, as this project's lanes need it; what a user has set
stays."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names of one variable: the older ones are read first."""


def missing_cuda_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Those of ``CUDA_VARIABLES`` that a user has not set, under any of their names."""
    said = {"PYTORCH_ALLOC_CONF"} if any(name in environ for name in ALLOCATOR) else set[str]()
    return {name: value for name, value in CUDA_VARIABLES.items() if name not in environ and name not in said}


def set_cuda_variables(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set ``CUDA_VARIABLES`` where they are not set; before CUDA starts in this process."""
    environ.update(missing_cuda_variables(environ))


def started_by_local_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get(LOCAL_LAUNCHER) == "1"


def restart_count() -> int:
    """Starts of this run before the present one."""
    text = os.environ.get(RESTARTS, "0")
    return int(text) if text.isdecimal() else 0


@dataclass(frozen=True)
class LaunchEnvironment:
    """The place of this process among the others, as torchrun or the local launcher gives it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> LaunchEnvironment | None:
        """The launcher's variables, or None in a process that no launcher started.

        Raises:
            UserError: some of the variables are there and others are missing or no numbers.
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
