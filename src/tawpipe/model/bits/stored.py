"""Tensors in few bits as published folders store them: codes, scales of blocks, and the numbers that they represent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Numbers of the 16 codes of FP4 (two bits of exponent, one of mantissa), for MXFP4 and DeepSeek's experts."""


@dataclass(frozen=True)
class StoredTensor:
    """Codes and scales of a tensor, with the bytes that a folder has.

    A number is (code - zero) * scale, computed in fp32, rounded to ``rounded`` and then to the dtype of the weights, as
    the format's library does.

    Attributes:
        form: ``fp8``, ``mxfp4``, ``nf4``, ``fp4`` (of bitsandbytes), ``int8``, or ``int`` with other bits.
        codes: matrix of codes, or matrices [experts, rows, columns]. Codes of 4 bits lie in bytes; those of
            compressed-tensors in int32 words. For nf4 and fp4 each row is a block of the flat tensor, the last one
            filled up with zeros.
        scales: fp32, one for every block: [..., rows / block[0], columns / block[1]], rounded up.
        block: rows and columns of numbers that share a scale.
        shape: shape of the dense tensor.
        rounded: dtype of the library's result.
        zeros: number of the code that stands for zero, in the shape of ``scales``; None if the scales are symmetric.
        table: numbers of the 16 codes of 4 bits; None for other codes.
        low_first: True if the first of two numbers lies in the lower half of a byte, for ``table``.
        transposed: True if the dense matrices are the transposes of ``codes``.
        factor: number by which the products are multiplied in the end.
        bits: bits of a code in int32 words; 0 for other codes.
    """

    form: str
    codes: Tensor
    scales: Tensor
    block: tuple[int, int]
    shape: tuple[int, ...]
    rounded: torch.dtype = torch.float32
    zeros: Tensor | None = None
    table: Tensor | None = None
    low_first: bool = True
    transposed: bool = False
    factor: float = 1.0
    bits: int = 0

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the tensor in ``dtype``; experts are computed one by one, to need little memory."""
        if self.codes.ndim < 3:
            return (
                self._matrix(self.codes, self.scales, self.zeros, dtype).flatten()[: prod(self.shape)].view(self.shape)
            )
        out = torch.empty(self.shape, dtype=dtype)
        for index, codes in enumerate(self.codes):
            matrix = self._matrix(codes, self.scales[index], None if self.zeros is None else self.zeros[index], dtype)
            out[index] = matrix.T if self.transposed else matrix
        return out

    def elements(self) -> tuple[Tensor, Tensor]:
        """Return the codes, one in each uint8 [shape], and the scales, one for each block of the dense matrices.

        The blocks of nf4 must not cross rows."""
        codes, scales = self.codes, self.scales
        if self.table is not None:
            places = (0, 4) if self.low_first else (4, 0)
            codes = torch.stack([codes >> place & 15 for place in places], dim=-1).flatten(-2)
        elif codes.is_floating_point():
            codes = codes.view(torch.uint8)
        else:
            codes = self.integers(codes).view(torch.uint8) & (15 if self.bits == 4 else 255)
        if self.codes.ndim == 2:
            codes = codes.flatten()[: prod(self.shape)].view(self.shape)
            scales = scales.view(self.shape[0], -1) if self.table is not None else scales
        return (codes.mT, scales.mT) if self.transposed else (codes, scales)

    def integers(self, codes: Tensor) -> Tensor:
        """Return a matrix of integer codes as int8 [rows, columns]; those in int32 words are unpacked."""
        return unpacked(codes, self.bits)[:, : self.shape[-1]] if self.bits else codes

    def _matrix(self, codes: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return one matrix in ``dtype``."""
        if self.table is None:
            numbers = self.integers(codes).float()
        else:
            places = (0, 4) if self.low_first else (4, 0)
            bytes_ = torch.arange(256)
            pairs = torch.stack([self.table[bytes_ >> place & 15] for place in places], dim=1)
            numbers = pairs.index_select(0, codes.flatten().int()).view(*codes.shape[:-1], -1)
        if zeros is not None:
            _by_blocks(numbers, zeros, self.block, Tensor.sub_)
        _by_blocks(numbers, scales, self.block, Tensor.mul_)
        return (numbers.mul_(self.factor) if self.factor != 1.0 else numbers).to(self.rounded).to(dtype)


def _by_blocks(
    numbers: Tensor, values: Tensor, block: tuple[int, int], change: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Change a matrix in place by one value for every block of it; blocks at its right and lower edge may be smaller.

    Args:
        numbers: [rows, columns].
        values: [rows / block[0], columns / block[1]], rounded up.
        block: rows and columns of a block.
        change: function that changes its first argument in place, by a second one of a shape that broadcasts.
    """
    wide = values.repeat_interleave(block[1], dim=1)[:, : numbers.shape[1]]
    blocks = len(numbers) // block[0]
    whole = blocks * block[0]
    change(numbers[:whole].unflatten(0, (blocks, block[0])), wide[:blocks, None])
    if whole < len(numbers):
        change(numbers[whole:], wide[blocks:])


def unpacked(words: Tensor, bits: int = 4) -> Tensor:
    """Unpack int32 words [out, in * bits / 32] into signed codes, int8 [out, in]; the first lies in the lowest bits."""
    places = [(words >> place & (1 << bits) - 1) - (1 << bits - 1) for place in range(0, 32, bits)]
    return torch.stack(places, dim=2).flatten(1).to(torch.int8)
