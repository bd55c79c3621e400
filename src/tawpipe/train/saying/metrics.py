"""Numbers of a run: metrics.jsonl and peak memory.

Only rank 0 makes a :class:`MetricsWriter`. What trackers are given (tracking.py) has the same names.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tawpipe.files import replace_text

REQUIRED = ("loss", "grad_norm", "learning_rate", "tokens_per_second")
"""Names that every row has besides ``step``."""
Value = float | int | None | Mapping[str, float | None]
"""A number, or numbers by name."""


class MetricsWriter:
    """One row for every step in ``metrics.jsonl``.

    A run that goes on from step n first loses all rows after n, a new one all rows, so that no step is in the file
    twice; the file is replaced at once, so that a crash leaves either the old or the new one. Each row is with the
    system when ``write`` returns; what a full disk does not take is left out, and a row is never there by half.

    Args:
        output: folder of the run; made if it is not there.
        resumed_step: the last step that a checkpoint holds, 0 for a new run.
    """

    def __init__(self, output: Path, *, resumed_step: int = 0) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self.path = output / "metrics.jsonl"
        self.last_step = resumed_step or -1
        cut_after(self.path, self.last_step)
        self._file = self.path.open("ab", buffering=0)
        self._failed = False

    def write(self, step: int, values: Mapping[str, Value]) -> str:
        """Adds the row of a step. None and numbers that are not finite become null.

        Args:
            step: number of the step, from 1, or 0 before any; greater than that of the row before.
            values: at least :data:`REQUIRED`. Usual besides: tokens, seconds, peak_memory_bytes,
                predicted_memory_bytes, mfu, validation_loss, validation_by_position, retrieval_found, retrieval_loss;
                with exact weights or gradients weights_sent and gradients_sent (bytes between nodes since the line
                before, relative to their type);
                under packing balanced documents, rounds (under pipelines the bins of each), imbalance
                (modelled) and compute_imbalance (measured since the line before it).

        Returns:
            why it could not be written, the first time that this happens; else nothing.
        """
        missing = [name for name in REQUIRED if name not in values]
        assert not missing, f"metrics of step {step} lack {missing}"
        assert step > self.last_step, f"metrics of step {step} after those of step {self.last_step}"
        row = {name: finite(value) for name, value in values.items()}
        self.last_step = step
        try:
            self._append((json.dumps({"step": step, **row}, allow_nan=False) + "\n").encode())
        except OSError as error:
            said, self._failed = self._failed, True
            return "" if said else f"{self.path}: {error.strerror or error}"
        return ""

    def _append(self, row: bytes) -> None:
        length = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(row)
            if written != len(row):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(length)
            raise

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def finite(value: Value) -> Any:
    """The same without numbers that JSON has no words for."""
    if isinstance(value, Mapping):
        return {name: finite(part) for name, part in value.items()}
    return value if value is not None and math.isfinite(value) else None


def cut_after(path: Path, step: int) -> None:
    """Removes the rows after ``step``, and a row that a crash left half written, from a file of rows."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row["step"] <= step:
            kept.append(line + "\n")
    replace_text(path, "".join(kept))


def last_step(output: Path) -> int:
    """The last step that ``metrics.jsonl`` has a row of, 0 for none."""
    path = output / "metrics.jsonl"
    steps = [0]
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            steps.append(int(json.loads(line)["step"]))
        except (ValueError, KeyError, TypeError):
            continue  # half written by a crash
    return max(steps)


def peak_memory_bytes(device_type: str) -> int:
    """The most memory that this process has held: on the GPU by torch's allocator, on the CPU resident."""
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    # ru_maxrss counts what a parent held before exec, VmHWM does not.
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
