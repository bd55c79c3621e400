"""The flight recorder: torch's own record of what NCCL was given, written when a rank hangs.

The watchdog says at which action of the schedule a rank is; the record says the same of the communicators under it:
group, sequence number, sizes, and whether an operation was begun or only issued. Torch would write it when its own time
limit is over, which the watchdog does not wait for. ``torchfrtrace FOLDER --prefix rank_`` compares those of all ranks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ENTRIES = 4000
"""Operations that a rank remembers: some steps of a few hundred each."""
PREFIX = "rank_"


def keep_record() -> None:
    """Remember operations from now on. Before the first group is made; what a user has set stays."""
    if os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE") is None:  # the name before torch 2.9, which still counts
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(ENTRIES))


def write_record(folder: Path, rank: int) -> str:
    """Write a file for this rank; how to read it, or why there is none, or nothing where no NCCL is.

    Stacks of Python are left out, as the watchdog cannot know whether they could be walked.
    """
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_nccl_trace", None)
    if dump is None:
        return ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = dump(includeCollectives=True, includeStackTraces=False, onlyActive=False)
        (folder / f"{PREFIX}{rank}").write_bytes(content)
    except (OSError, RuntimeError) as error:
        return f"the flight record could not be written: {error}"
    return f"the flight record is in {folder}; with those of all ranks: torchfrtrace {folder} --prefix {PREFIX}"
