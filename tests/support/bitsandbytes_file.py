"""Writes what bitsandbytes makes of small matrices in 4 bits, and what it reads from that, as a file for tests.

It is no dependency of the tests: peft imports it wherever it is installed, which takes a second in each process.

python tests/support/bitsandbytes_file.py tests/model/bitsandbytes.safetensors   # with bitsandbytes 0.50.2 installed
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

SHAPES = (16, 128), (70, 26)
CASES = [(form, nested, shape) for form in ("nf4", "fp4") for nested in (False, True) for shape in SHAPES]


def main(path: str) -> None:
    import bitsandbytes.functional as functional  # pyright: ignore[reportMissingImports]

    drawn, tensors = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for number, (form, nested, shape) in enumerate(CASES):
        values = (torch.randn(shape, generator=drawn) * 0.02).bfloat16()
        codes, state = functional.quantize_4bit(values, quant_type=form, compress_statistics=nested)
        parts: dict[str, Any] = {"weight": codes} | {
            f"weight.{key}": part for key, part in state.as_dict(packed=True).items()
        }
        parts |= {"dense": functional.dequantize_4bit(codes, state), "values": values}
        tensors |= {f"{number}.{key}": part.contiguous() for key, part in parts.items()}
    save_file(tensors, path)


def case_of(path: Path, number: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return the parts of a case by name, the numbers that bitsandbytes reads from them, and the original values."""
    start = f"{number}."
    parts = {key.removeprefix(start): value for key, value in load_file(path).items() if key.startswith(start)}
    return parts, parts.pop("dense"), parts.pop("values")


if __name__ == "__main__":
    main(sys.argv[1])
