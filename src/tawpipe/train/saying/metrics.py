"""Metrics of a run: the file metrics.jsonl, and peak memory.

Only rank 0 makes a :class:`MetricsWriter`. Trackers (``tracking.py``) get the values under the names used here.
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
"""Names that every row has in addition to ``step``."""
Value = float | int | None | Mapping[str, float | None]
"""Number, or numbers by name."""


class MetricsWriter:
    """Writer of ``metrics.jsonl``, one row for every step.

    A run that resumes from step n first deletes all rows after n, and a new run deletes all rows, so that no step is in
    the file twice. The file is replaced atomically: after a crash it is either the old or the new one. Each row is
    passed to the operating system before ``write`` returns. On a full disk a row is left out completely, never written
    in part.

    Args:
        output: output folder of the run; made if it does not exist.
        resumed_step: last step of the checkpoint; 0 for a new run.
    """

    def __init__(self, output: Path, *, resumed_step: int = 0) -> None:
        output.mkdir(parents=True, exist_ok=True)
        self.path = output / "metrics.jsonl"
        self.last_step = resumed_step or -1
        cut_after(self.path, self.last_step)
        self._file = self.path.open("ab", buffering=0)
        self._failed = False

    def write(self, step: int, values: Mapping[str, Value]) -> str:
        """Write the row of a step. None and numbers that are not finite become null.

        Args:
            step: number of the step, from 1, or 0 before any; greater than the step of the previous row.
            values: at least :data:`REQUIRED`. Usual further names: tokens, seconds, peak_memory_bytes,
                predicted_memory_bytes, mfu, validation_loss, validation_by_position, retrieval_found, retrieval_loss.
                With exact weights or gradients: weights_sent and gradients_sent (bytes between nodes since the previous
                row, relative to their type). Under packing balanced: documents, rounds (under pipelines the packed
                micro-batches of each), imbalance (modelled) and compute_imbalance (measured since the previous value).
                With --experts.balance: balance_loss (mean over layers, without coefficient) and busiest_expert (tokens
                of the busiest expert of any layer, relative to an even share).

        Returns:
            the reason why the row could not be written, the first time that this happens; else ``""``.
        """
        missing = [name for name in REQUIRED if name not in values]
        assert not missing, f"metrics of step {step} lack {missing}"
        assert step > self.last_step, f"metrics of step {step} after those of step {self.last_step}"
        row = {name: finite(value) for name, value in values.items()}
        self.last_step = step
        try:
            self._append((json.dumps({"step": step, **row}, allow_nan=False) + "\n").encode())
        except OSError as error:
            failed_before, self._failed = self._failed, True
            return "" if failed_before else f"{self.path}: {error.strerror or error}"
        return ""

    def _append(self, row: bytes) -> None:
        """Write ``row``; if that fails, cut the file back to its earlier length and raise OSError."""
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
    """Return a number, or None for infinity and nan, which JSON cannot represent; numbers by name likewise."""
    if isinstance(value, Mapping):
        return {name: finite(part) for name, part in value.items()}
    return value if value is not None and math.isfinite(value) else None


def cut_after(path: Path, step: int) -> None:
    """Remove the rows after ``step`` from a file of JSON rows, and rows that a crash left incomplete."""
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
    """Return the last step with a row in ``metrics.jsonl`` of the folder ``output``; 0 if there is none."""
    path = output / "metrics.jsonl"
    steps = [0]
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            steps.append(int(json.loads(line)["step"]))
        except (ValueError, KeyError, TypeError):
            continue  # a row that a crash left incomplete
    return max(steps)


def peak_memory_bytes(device_type: str) -> int:
    """Return the peak memory of this process: on a GPU of torch's allocator, on a CPU the resident memory."""
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    # VmHWM is preferred: ru_maxrss includes memory that the parent process held before exec.
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
