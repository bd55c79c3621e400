"""Weights of linear layers in 4 or 8 bits, multiplied by torch's kernels; for generation, where they stay.

``w4`` is what compressed-tensors calls W4A16: groups of 128 along a row share a scale, codes go from -8 to 7, scales
are bf16. ``int8`` has one scale for each row. Where no kernel is fast, as in fp32 on CPUs, and for many tokens at once,
the matrix is dequantised for the time of the product.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tawpipe.errors import UserError
from tawpipe.model.attention.attention_kernel import HALF
from tawpipe.model.bits.quantized import ROUTERS

AUTO, EXACT = "auto", "none"
FORMS = (AUTO, EXACT, "w4", "int8")
GROUP = 128
"""Elements of a row that share a scale, of w4 in memory."""
FEW = 16
"""Tokens up to which a kernel for few bits is faster than a product with what it stands for."""


def quantise_rows(
    weight: Tensor, form: str, dtype: torch.dtype = torch.float32, *, group: int = GROUP
) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix.

    Args:
        weight: [out, in], of any floating type; ``in`` a multiple of ``group`` for w4.
        dtype: of the scales of int8.
        group: elements of a row that share a scale, of w4.

    Returns:
        int8 [out, in]; bf16 [out, in / group] for w4, [out, 1] for int8.
    """
    size, most, dtype = (group, 7.5, torch.bfloat16) if form == "w4" else (weight.shape[1], 127.0, dtype)
    groups = weight.float().unflatten(1, (-1, size))
    scales = (groups.abs().amax(dim=2) / most).to(dtype)
    divisors = scales.float().where(scales > 0, 1.0)
    lowest, highest = (-8, 7) if form == "w4" else (-127, 127)
    codes = (groups / divisors[..., None]).round_().clamp_(lowest, highest).to(torch.int8)
    return codes.flatten(1), scales


def dequantise_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix that codes and scales stand for, [out, in]; computed in fp32 and rounded once."""
    groups = codes.unflatten(1, (scales.shape[1], -1)).float()
    return (groups * scales.float()[..., None]).flatten(1).to(dtype)


class FewBitsLinear(nn.Module):
    """A linear layer whose matrix is in few bits.

    Args:
        codes, scales: as ``quantise_rows`` gives them; scales are rounded to ``dtype``.
        bias: [out], or None.
        dtype: that it computes in.
    """

    def __init__(self, form: str, codes: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.form, self.dtype, self.bias = form, dtype, bias
        self.out_features, self.in_features = codes.shape
        self.kernel, self.scales = has_kernel(form, codes.shape, dtype, codes.device.type), scales.to(dtype)
        self.codes, self.packed, self.scales_and_zeros = codes, codes[:0], self.scales[:0]
        if form == "w4":
            low, high = (codes[:, at::2].view(torch.uint8) & 15 for at in (0, 1))
            self.codes = low | high << 4
            if self.kernel:
                self.packed = _pack(codes)
                self.scales_and_zeros = torch.stack([self.scales.T, torch.zeros_like(self.scales.T)], dim=2)

    def matrix(self) -> Tensor:
        """What the codes stand for, [out, in]."""
        if self.form == "int8":
            return self.codes.to(self.dtype) * self.scales
        # Each code in the upper half of a byte is 16 times what it is, which a scale undoes without rounding.
        codes = torch.stack([self.codes << 4, self.codes & 0xF0], dim=2).view(torch.int8).flatten(1)
        groups = codes.unflatten(1, (self.scales.shape[1], -1)).to(self.dtype)
        return groups.mul_((self.scales / 16)[..., None]).flatten(1)

    def forward(self, given: Tensor) -> Tensor:
        rows = given.reshape(-1, self.in_features)
        if not self.kernel or len(rows) > FEW:
            return F.linear(given, self.matrix(), self.bias)
        kernels = torch.ops.aten
        if self.form == "int8":
            output = kernels._weight_int8pack_mm(rows, self.codes, self.scales[:, 0])
        elif given.device.type == "cpu":
            output = kernels._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP, self.scales_and_zeros)
        else:
            output = kernels._weight_int4pack_mm(rows, self.packed, GROUP, self.scales_and_zeros)
        output = output if self.bias is None else output + self.bias
        return output.view(*given.shape[:-1], self.out_features)


def has_kernel(form: str, shape: Sequence[int], dtype: torch.dtype, device: str) -> bool:
    """True if torch multiplies with such a matrix on this type of device, and faster than with what it stands for: a
    CPU's kernels are many times slower in fp32.
    """
    out, inner = shape
    if device == "cpu":
        return dtype in HALF and out % 16 == 0 and inner % 32 == 0
    return form == "w4" and dtype == torch.bfloat16 and out % 8 == 0 and inner % 1024 == 0


def matrix_bytes(form: str, shape: Sequence[int], dtype: torch.dtype, device: str) -> tuple[int, int, int]:
    """Bytes that a matrix [out, in] in few bits holds, that a product with up to ``FEW`` tokens reads of it, and that
    one with more reads and writes, for which it is dequantised.
    """
    out, inner = shape
    numbers, width = out * inner, dtype.itemsize
    codes, scales = (numbers, out * width) if form == "int8" else (numbers // 2, numbers // GROUP * width)
    many = codes + scales + 2 * numbers * width
    if not has_kernel(form, shape, dtype, device):
        return codes + scales, many, many
    if form == "int8":
        return codes + scales, codes + scales, many
    return 2 * codes + 3 * scales, codes + 2 * scales, many  # the kernel has its own codes, and scales with zeros


def _pack(codes: Tensor) -> Tensor:
    """Codes as the kernel of their device wants them, which counts them from 0 on."""
    above = codes.int() + 8
    if codes.device.type == "cpu":
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(above, 1)
    pairs = (above[:, ::2] << 4 | above[:, 1::2]).to(torch.uint8)
    return torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), 8)


def check_weights_form(form: str) -> None:
    """Raises UserError: there is no such form."""
    if form not in FORMS:
        raise UserError("weights", form, ", ".join(FORMS))


def few_bits_modules(model: nn.Module, form: str, among: Collection[str]) -> dict[str, str]:
    """Weights that can be in few bits -> the linear modules that they are of: no routers, no adapters, no experts that
    are stacked in one parameter.

    Args:
        among: names of parameters.
    """
    modules = dict[str, str]()
    for path, module in model.named_modules():
        name = f"{path}.weight"
        last, adapted = path.rpartition(".")[2], ".lora_" in path or ".base_layer" in path
        divides = form != "w4" or getattr(module, "in_features", 1) % GROUP == 0
        if type(module) is nn.Linear and name in among and last not in ROUTERS and not adapted and divides:
            modules[name] = path
    return modules


def form_of(scales: Tensor) -> str:
    """The form of codes with such scales: those of w4 are bf16."""
    return "w4" if scales.dtype == torch.bfloat16 else "int8"


def put_few_bits(model: nn.Module, path: str, coded: tuple[Tensor, Tensor], like: Tensor) -> None:
    """Replace a linear module by one in few bits, which keeps its bias.

    Args:
        coded: codes and scales, as ``quantise_rows`` gives them.
        like: of the device and the dtype to compute with.
    """
    above, _, leaf = path.rpartition(".")
    parent = model.get_submodule(above)
    codes, scales = (tensor.to(like.device) for tensor in coded)
    layer = FewBitsLinear(form_of(scales), codes, scales, getattr(parent, leaf).bias, like.dtype)
    setattr(parent, leaf, layer)
