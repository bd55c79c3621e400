"""Quantisation of frozen weights in 4 or 8 bits: two formats, and the parameters that can have them.

``nf4`` is the format of QLoRA (Dettmers et al., 2023), as in bitsandbytes without double quantisation. Each block of 64
elements is divided by its largest magnitude, which is stored in fp32, and rounded to the nearest of 16 normal-float
values. A byte holds two elements, the first in the upper half. ``int8`` has the same blocks, with elements rounded to
127ths of the largest magnitude. Dequantised numbers are computed in fp32 and rounded to the compute dtype, with
identical bits on every device."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from tawpipe.errors import UserError

AUTO, NONE, PUBLISHED = "auto", "none", "published"
FORMS = (AUTO, NONE, PUBLISHED, "nf4", "int8")
BLOCK = 64
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
CELLS = 4096
"""Number of cells from -1 to 1 into which numbers are sorted to find the nearest table value, much faster than a
search."""
READ_AT_ONCE = 2**25
"""Largest number of elements that are dequantised at one time on CUDA."""
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Last names of linear modules that choose experts. They are not quantised: they are small, and rounding changes
choices."""


def check_form(form: str) -> None:
    """Raise UserError if ``form`` is unknown."""
    if form not in FORMS:
        raise UserError("quantize", form, ", ".join(FORMS))


def matrices_of(model: nn.Module) -> frozenset[str]:
    """Return the names of parameters that can be quantised: weights of linear modules, and stacked experts.

    Experts are parameters with three dimensions. Adapters and routers are left out."""
    from transformers.pytorch_utils import Conv1D

    names = set()
    for path, module in model.named_modules():
        last = path.removesuffix(".base_layer").rpartition(".")[2]
        linear = isinstance(module, nn.Linear | Conv1D) and ".lora_" not in path and last not in ROUTERS
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            if (linear and parameter.ndim == 2) or (parameter.ndim == 3 and "experts" in path.split(".")):
                names.add(name)
    return frozenset(names)


def quantise(form: str, values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Quantise numbers into codes and scales, which are written in place.

    Args:
        form: ``nf4`` or ``int8``.
        values: numbers [n], of any floating-point dtype.
        codes: uint8 output, for whole blocks.
        scales: fp32 output, one for every block.
    """
    step = _at_once(values, 2**22)
    for begin in range(0, values.numel(), step):
        part = values[begin : begin + step].float()
        blocks = nn.functional.pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)
        largest = blocks.abs().amax(dim=1)  # NaN and inf are kept
        if form == "int8":
            largest /= 127
        scaled = (blocks / largest.where(largest > 0, 1.0)[:, None]).flatten()
        first = begin // BLOCK
        scales[first : first + len(largest)] = largest
        if form == "int8":
            codes[begin : begin + scaled.numel()] = scaled.nan_to_num_(0).round_().to(torch.int8).view(torch.uint8)
        else:
            pairs = _nearest_of_nf4(scaled).view(-1, 2)
            codes[begin // 2 : begin // 2 + len(pairs)] = (pairs[:, 0] << 4) | pairs[:, 1]


def dequantise(form: str, codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Write the numbers that codes and scales represent into ``out``, [n] of any floating-point dtype."""
    step = _at_once(out, READ_AT_ONCE)
    for begin in range(0, out.numel(), step):
        end = min(begin + step, out.numel())
        last = -(-end // BLOCK)
        part = codes[begin : last * BLOCK] if form == "int8" else codes[begin // 2 : last * BLOCK // 2]
        _dequantise(form, part, scales[begin // BLOCK : last, None], out[begin:end])


def _dequantise(form: str, codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """Dequantise one portion into ``out``.

    Its temporary memory is freed before the next portion."""
    if form == "int8":
        values = codes.view(torch.int8).float()
    else:
        values = pairs_of(NF4, out.device).index_select(0, codes.int())
    blocks = values.view(-1, BLOCK)
    whole, rest = divmod(out.numel(), BLOCK)
    torch.mul(blocks[:whole], scales[:whole], out=out[: whole * BLOCK].view(-1, BLOCK))
    if rest:
        out[whole * BLOCK :] = (blocks[whole, :rest] * scales[whole]).to(out.dtype)


def passing_bytes(form: str, numel: int) -> int:
    """Return the temporary bytes that ``dequantise`` takes on CUDA for a matrix of ``numel`` elements.

    They hold numbers in fp32, and for nf4 also indices into the table of bytes."""
    return min(numel, READ_AT_ONCE) * (6 if form == "nf4" else 4)


def _nearest_of_nf4(scaled: Tensor) -> Tensor:
    """Return the index (uint8) of the nearest nf4 value for numbers from -1 to 1.

    Each cell of numbers contains at most one border between two table values."""
    lower, border = _cells_of_nf4(scaled.device)
    cell = ((scaled.nan_to_num(0) + 1) * (CELLS / 2)).int().clamp_(0, CELLS - 1)
    return lower.index_select(0, cell) + (scaled > border.index_select(0, cell)).view(torch.uint8)


@cache
def _cells_of_nf4(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return for every cell the table index at its beginning, and the border to the next table value."""
    table = torch.tensor(NF4)
    borders = (table[1:] + table[:-1]) / 2
    lower = torch.bucketize(torch.arange(CELLS) / (CELLS / 2) - 1, borders, right=True)
    return lower.to(device, torch.uint8), torch.cat([borders, torch.ones(1)])[lower].to(device)


@cache
def pairs_of(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the two numbers that every byte represents, [256, 2], from those of the 16 codes of 4 bits."""
    table = torch.tensor(numbers)
    return torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1).to(device)


def _at_once(values: Tensor, on_cuda: int) -> int:
    """Return the number of elements to process at one time, which limits temporary copies.

    On CUDA it is ``on_cuda``, large enough to keep the device busy."""
    return on_cuda if values.is_cuda else 2**18
