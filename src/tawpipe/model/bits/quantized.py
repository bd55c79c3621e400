"""Numbers in 4 or 8 bits: the two formats of frozen weights, and which weights have them.

``nf4`` is that of QLoRA (Dettmers et al., 2023) as bitsandbytes has it without double quantisation: blocks of 64
elements, each divided by its largest magnitude, which is kept in fp32, and rounded to the nearest of 16 normal-float
values; two elements in a byte, the first in the upper half. ``int8`` has the same blocks, whose elements are rounded to
127ths of the largest magnitude. What they stand for is computed in fp32 and rounded to the compute dtype: the same bits
on every device.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from tawpipe.errors import UserError

NONE = "none"
FORMS = (NONE, "nf4", "int8")
BLOCK = 64
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
CELLS = 4096
"""Into which numbers from -1 to 1 are sorted, to find the nearest of the table: many times faster than a search."""
READ_AT_ONCE = 2**25
"""Elements that are dequantised at one time on CUDA, at most."""
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Last names of linear modules that choose experts: small, and a choice is no place to round."""


def check_form(form: str) -> None:
    """Raises UserError: there is no such form."""
    if form not in FORMS:
        raise UserError("quantize", form, ", ".join(FORMS))


def matrices_of(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that can be quantised: weights of linear modules and those of experts, three-dimensional;
    no adapters, no routers.
    """
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
    """Write numbers as codes and scales.

    Args:
        values: [n], of any floating type.
        codes: uint8, of whole blocks.
        scales: fp32, one for every block.
    """
    step = _at_once(values, 2**22)
    for begin in range(0, values.numel(), step):
        part = values[begin : begin + step].float()
        blocks = nn.functional.pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)
        largest = blocks.abs().amax(dim=1)  # nan and inf stay what they are
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
    """Write the numbers that codes and scales stand for into ``out`` ([n], of any floating type)."""
    step = _at_once(out, READ_AT_ONCE)
    for begin in range(0, out.numel(), step):
        end = min(begin + step, out.numel())
        last = -(-end // BLOCK)
        part = codes[begin : last * BLOCK] if form == "int8" else codes[begin // 2 : last * BLOCK // 2]
        _dequantise(form, part, scales[begin // BLOCK : last, None], out[begin:end])


def _dequantise(form: str, codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """``dequantise`` at one time; what it takes is gone before the next piece is read."""
    if form == "int8":
        values = codes.view(torch.int8).float()
    else:
        values = _pairs_of_nf4(out.device).index_select(0, codes.int())
    blocks = values.view(-1, BLOCK)
    whole, rest = divmod(out.numel(), BLOCK)
    torch.mul(blocks[:whole], scales[:whole], out=out[: whole * BLOCK].view(-1, BLOCK))
    if rest:
        out[whole * BLOCK :] = (blocks[whole, :rest] * scales[whole]).to(out.dtype)


def passing_bytes(form: str, numel: int) -> int:
    """Bytes that ``dequantise`` takes on CUDA besides what it is given, for a matrix of so many elements: numbers in
    fp32, and of nf4 places in the table of what a byte stands for.
    """
    return min(numel, READ_AT_ONCE) * (6 if form == "nf4" else 4)


def _nearest_of_nf4(scaled: Tensor) -> Tensor:
    """The nearest of the table for numbers from -1 to 1, uint8. A cell of them has at most one border in it."""
    lower, border = _cells_of_nf4(scaled.device)
    cell = ((scaled.nan_to_num(0) + 1) * (CELLS / 2)).int().clamp_(0, CELLS - 1)
    return lower.index_select(0, cell) + (scaled > border.index_select(0, cell)).view(torch.uint8)


@cache
def _cells_of_nf4(device: torch.device) -> tuple[Tensor, Tensor]:
    """The table's place of the number at the beginning of every cell, and the border to the next one."""
    table = torch.tensor(NF4)
    borders = (table[1:] + table[:-1]) / 2
    lower = torch.bucketize(torch.arange(CELLS) / (CELLS / 2) - 1, borders, right=True)
    return lower.to(device, torch.uint8), torch.cat([borders, torch.ones(1)])[lower].to(device)


@cache
def _pairs_of_nf4(device: torch.device) -> Tensor:
    """What every byte stands for: [256, 2]."""
    table = torch.tensor(NF4)
    return torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=1).to(device)


def _at_once(values: Tensor, on_cuda: int) -> int:
    """Elements that are worked on at one time: so small are the temporary copies, however large a matrix is. On CUDA as
    many as keep the device busier than Python.
    """
    return on_cuda if values.is_cuda else 2**18
