"""Forms in which frozen matrices are stored and sent: blocks of the flat matrix, or blocks of rows and columns.

A form says how many bytes a matrix takes, and makes numbers of them. Blocks of rows and columns are those of published
folders, whose codes and scales are kept as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from tawpipe.model.bits.quantized import BLOCK, NF4, dequantise, pairs_of, passing_bytes
from tawpipe.model.bits.stored import E2M1

INTEGERS = tuple(float(code if code < 8 else code - 16) for code in range(16))
"""Numbers of the codes of 4 bits as two's complements."""
TABLES = {"nf4": NF4, "mxfp4": E2M1, "int4": INTEGERS}
"""Kind of codes of 4 bits -> the numbers that they stand for."""
AT_ONCE, ON_CPU = 2**24, 2**18
"""Number of elements that are dequantised at one time from blocks of rows and columns, on GPUs and on CPUs."""


@dataclass(frozen=True)
class FlatForm:
    """Blocks of 64 numbers of the flat matrix, ``nf4`` or ``int8``; the codes are made here."""

    kind: str

    def code_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a matrix's codes."""
        return -(-prod(shape) // BLOCK) * BLOCK // (2 if self.kind == "nf4" else 1)

    def scale_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a matrix's scales, in fp32."""
        return -(-prod(shape) // BLOCK) * 4

    def passing_bytes(self, shape: Sequence[int]) -> int:
        """Return the temporary bytes that ``dequantise`` takes on CUDA."""
        return passing_bytes(self.kind, prod(shape))

    def dequantise(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the numbers of codes and scales into ``out``, of the matrix's shape."""
        dequantise(self.kind, codes, scales.view(torch.float32), out.view(-1))


@dataclass(frozen=True)
class PlainForm:
    """Numbers of a matrix of a published folder whose codes cannot be kept, or that has none, in ``dtype``."""

    dtype: torch.dtype

    def code_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a matrix, a multiple of 4."""
        return -(-prod(shape) * self.dtype.itemsize // 4) * 4

    def scale_bytes(self, shape: Sequence[int]) -> int:
        """Return 0: there are no scales."""
        return 0

    def passing_bytes(self, shape: Sequence[int]) -> int:
        """Return 0: nothing temporary is made."""
        return 0

    def store(self, values: Tensor, codes: Tensor) -> None:
        """Write the numbers of a matrix into the bytes that are sent."""
        codes.view(self.dtype)[: values.numel()] = values.flatten()

    def dequantise(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the numbers into ``out``, of the matrix's shape."""
        out.copy_(codes.view(self.dtype)[: out.numel()].view(out.shape))


@dataclass(frozen=True)
class BlockForm:
    """Blocks of rows and columns of a published matrix, or of each matrix of a stack.

    Attributes:
        kind: ``fp8`` (e4m3), ``mxfp4``, ``nf4``, ``int4`` or ``int8``.
        block: rows and columns of numbers that share a scale.
        dtype: dtype to which numbers are rounded before the dtype in which blocks compute.
    """

    kind: str
    block: tuple[int, int]
    dtype: torch.dtype

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.kind in TABLES else 8

    def code_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a matrix's codes, a multiple of 4."""
        return -(-prod(shape) * self.bits // 32) * 4

    def grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a matrix's scales."""
        return (*shape[:-2], -(-shape[-2] // self.block[0]), -(-shape[-1] // self.block[1]))

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the scales: powers of 2 for MXFP4, otherwise fp32."""
        return torch.float8_e8m0fnu if self.kind == "mxfp4" else torch.float32

    def scale_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a matrix's scales."""
        return prod(self.grid(shape)) * self.scale_dtype.itemsize

    def passing_bytes(self, shape: Sequence[int]) -> int:
        """Return the temporary bytes that ``dequantise`` takes on CUDA: numbers, scales and indices of one portion."""
        return (12 if self.bits == 4 else 10) * min(prod(shape), max(AT_ONCE, shape[-1] * self.block[0]))

    def store(self, values: tuple[Tensor, Tensor], codes: Tensor, scales: Tensor) -> None:
        """Write codes, one in each uint8, and scales of a matrix into the bytes that are sent."""
        elements = values[0].flatten()
        if self.bits == 4:
            elements = elements[::2] << 4 | elements[1::2]
        codes[: elements.numel()] = elements
        scales.view(self.scale_dtype).copy_(values[1].flatten())

    def dequantise(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the numbers of codes and scales into ``out``, of the matrix's shape, some rows at a time."""
        (rows, columns), grid = self.block, scales.view(self.scale_dtype).float().view(self.grid(out.shape))
        if out.ndim > 2 and out.shape[-2] % rows:  # blocks at the lower edges of the matrices of a stack are smaller
            size = out[0].numel() * self.bits // 8
            for index, matrix in enumerate(out):
                of_matrix = grid[index].flatten().to(self.scale_dtype).view(torch.uint8)
                self.dequantise(codes[index * size : (index + 1) * size], of_matrix, matrix)
            return
        out, grid = out.flatten(0, -2), grid.flatten(0, -2)
        width = out.shape[1] * self.bits  # in bits: rows of an odd number of columns end inside a byte
        step = max(1, (AT_ONCE if out.is_cuda else ON_CPU) // (rows * out.shape[1])) * rows
        for begin in range(0, len(out), step):
            part = out[begin : begin + step]
            wide = grid[begin // rows :][: -(-len(part) // rows)].repeat_interleave(columns, dim=1)[:, : out.shape[1]]
            numbers = self._numbers(codes[begin * width // 8 : (begin + len(part)) * width // 8]).view(len(part), -1)
            numbers *= wide.repeat_interleave(rows, dim=0)[: len(part)]
            part.copy_(numbers.to(self.dtype))

    def _numbers(self, codes: Tensor) -> Tensor:
        """Return the fp32 numbers of codes, before scaling."""
        if self.kind in TABLES:
            return pairs_of(TABLES[self.kind], codes.device).index_select(0, codes.int())
        return codes.view(torch.float8_e4m3fn if self.kind == "fp8" else torch.int8).float()


AnyForm = FlatForm | PlainForm | BlockForm
