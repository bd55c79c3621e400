"""Time the exact coding of changed weights: milliseconds, GB/s and memory, for slices of several sizes.

python -m gpu.coding [--device cuda] [--count 218112000]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu.common import say, seconds_of
from tawpipe.runtime.transport import exact

POWERS = (22, 24, 25, 26)
"""Values of a slice, as a power of two."""


def changed(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return weights as they are and as they were: most differ by a few units in the last place, some by many."""
    torch.manual_seed(0)
    old = (torch.randn(count, device=device) * 0.02).bfloat16()
    new = old.clone()
    bits = new.view(torch.int16)
    bits += (torch.randn(count, device=device) * 1.2).round().to(torch.int16)
    bits[::5000] += 300
    return new, old


def measure(new: Tensor, old: Tensor, power: int) -> None:
    """Code and decode in slices of ``2**power`` values, and print what each part takes."""
    exact.GPU_SEGMENT = 1 << power
    count, device = len(new), new.device
    form = exact.best_form(exact.changes(new, old).tolist(), count)
    message, got = torch.empty(form.message_bytes(count), dtype=torch.uint8, device=device), old.clone()
    exact.encode_change(new, old, form, message)
    exact.decode_change(message, form, got)
    same = torch.equal(got.view(torch.int16), new.view(torch.int16))
    line: dict[str, Any] = {"slice": f"2^{power}", "same_bits": same, "share": round(message.numel() / (2 * count), 3)}
    parts: dict[str, Callable[[], object]] = {
        "changes": lambda: exact.changes(new, old),
        "encode": lambda: exact.encode_change(new, old, form, message),
        "decode": lambda: exact.decode_change(message, form, got),
        "checksum": lambda: exact.checksum(new),
    }
    for name, run in parts.items():
        before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        seconds, issued = seconds_of(run, device)
        line[name] = {
            "ms": round(seconds * 1e3, 1),
            "issued_ms": round(issued * 1e3, 1),
            "gb_s": round(2 * count / seconds / 1e9, 1),
        }
        if device.type == "cuda":
            line[name]["mib"] = round((torch.cuda.max_memory_allocated(device) - before) / 2**20)
    say(**line)


def main() -> None:
    """Measure all sizes of slices."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--count", type=int, default=218_112_000, help="weights; by default those of a layer of 8 B")
    args = parser.parse_args()
    new, old = changed(args.count, torch.device(args.device))
    for power in POWERS:
        measure(new, old, power)


if __name__ == "__main__":
    main()
