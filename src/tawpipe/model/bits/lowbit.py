"""Weights of linear layers in 4 or 8 bits for generation, multiplied by torch's kernels.

The weights stay on the device. ``w4`` is the format W4A16 of compressed-tensors: groups of 128 elements along a row
share a bf16 scale, and codes range from -8 to 7. ``int8`` has one scale for each row. If no kernel is fast, as in fp32
on CPUs, and for many tokens at one time, the matrix is dequantised temporarily for the product."""

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
"""Elements of a row that share a scale, for w4 in memory."""
FEW = 16
"""Number of tokens up to which a low-bit kernel is faster than a product with the dequantised matrix."""


def quantise_rows(
    weight: Tensor, form: str, dtype: torch.dtype = torch.float32, *, group: int = GROUP
) -> tuple[Tensor, Tensor]:
    """Quantise a matrix to 4 or 8 bits, and return its codes and scales.

    Args:
        weight: [out, in], of any floating-point dtype. For w4 ``in`` is a multiple of ``group``.
        form: ``w4`` or ``int8``.
        dtype: dtype of the scales of int8.
        group: elements of a row that share a scale, for w4.

    Returns:
        Codes: int8 [out, in], one byte per element also for w4, from -8 to 7. Scales: bf16 [out, in / group] for w4,
        ``dtype`` [out, 1] for int8.
    """
    size, most, dtype = (group, 7.5, torch.bfloat16) if form == "w4" else (weight.shape[1], 127.0, dtype)
    groups = weight.float().unflatten(1, (-1, size))
    scales = (groups.abs().amax(dim=2) / most).to(dtype)
    divisors = scales.float().where(scales > 0, 1.0)
    lowest, highest = (-8, 7) if form == "w4" else (-127, 127)
    codes = (groups / divisors[..., None]).round_().clamp_(lowest, highest).to(torch.int8)
    return codes.flatten(1), scales


def dequantise_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix [out, in] that codes and scales represent, computed in fp32 and rounded once to ``dtype``."""
    groups = codes.unflatten(1, (scales.shape[1], -1)).float()
    return (groups * scales.float()[..., None]).flatten(1).to(dtype)


class FewBitsLinear(nn.Module):
    """A linear layer whose matrix is stored in 4 or 8 bits.

    Args:
        form: ``w4`` or ``int8``.
        codes, scales: result of ``quantise_rows``. Scales are rounded to ``dtype``.
        bias: [out], or None.
        dtype: dtype in which the layer computes.
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
        """Return the dequantised matrix [out, in]."""
        if self.form == "int8":
            return self.codes.to(self.dtype) * self.scales
        # A code in the upper half of a byte is 16 times its value. Dividing the scale by 16 corrects this without
        # rounding.
        codes = torch.stack([self.codes << 4, self.codes & 0xF0], dim=2).view(torch.int8).flatten(1)
        groups = codes.unflatten(1, (self.scales.shape[1], -1)).to(self.dtype)
        return groups.mul_((self.scales / 16)[..., None]).flatten(1)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, self.in_features)
        if not self.kernel or len(rows) > FEW:
            return F.linear(inputs, self.matrix(), self.bias)
        kernels = torch.ops.aten
        if self.form == "int8":
            output = kernels._weight_int8pack_mm(rows, self.codes, self.scales[:, 0])
        elif inputs.device.type == "cpu":
            output = kernels._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP, self.scales_and_zeros)
        else:
            output = kernels._weight_int4pack_mm(rows, self.packed, GROUP, self.scales_and_zeros)
        output = output if self.bias is None else output + self.bias
        return output.view(*inputs.shape[:-1], self.out_features)


def has_kernel(form: str, shape: Sequence[int], dtype: torch.dtype, device: str) -> bool:
    """Return True if torch has a kernel for this matrix that is faster than a product with the dequantised matrix.

    CPU kernels are many times slower in fp32.

    Args:
        form: ``w4`` or ``int8``.
        shape: [out, in] of the matrix.
        dtype: dtype of the product.
        device: device type, cpu or cuda.
    """
    out, inner = shape
    if device == "cpu":
        return dtype in HALF and out % 16 == 0 and inner % 32 == 0
    return form == "w4" and dtype == torch.bfloat16 and out % 8 == 0 and inner % 1024 == 0


def matrix_bytes(form: str, shape: Sequence[int], dtype: torch.dtype, device: str) -> tuple[int, int, int]:
    """Return bytes of a matrix in 4 or 8 bits: stored, moved by a small product, and moved by a large product.

    A small product has up to ``FEW`` tokens, and reads the second number of bytes. A large product reads and writes the
    third number, because the matrix is dequantised for it.

    Args:
        form: ``w4`` or ``int8``.
        shape: [out, in] of the matrix.
        dtype: dtype of the product.
        device: device type, cpu or cuda.
    """
    out, inner = shape
    numbers, width = out * inner, dtype.itemsize
    codes, scales = (numbers, out * width) if form == "int8" else (numbers // 2, numbers // GROUP * width)
    many = codes + scales + 2 * numbers * width
    if not has_kernel(form, shape, dtype, device):
        return codes + scales, many, many
    if form == "int8":
        return codes + scales, codes + scales, many
    return 2 * codes + 3 * scales, codes + 2 * scales, many  # the kernel has its own codes, and scales with zero points


def _pack(codes: Tensor) -> Tensor:
    """Return codes in the layout of their device's kernel, which counts them from 0 to 15."""
    above = codes.int() + 8
    if codes.device.type == "cpu":
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(above, 1)
    pairs = (above[:, ::2] << 4 | above[:, 1::2]).to(torch.uint8)
    return torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), 8)


def check_weights_form(form: str) -> None:
    """Raise UserError if ``form`` is unknown."""
    if form not in FORMS:
        raise UserError("weights", form, ", ".join(FORMS))


def few_bits_modules(model: nn.Module, form: str, among: Collection[str]) -> dict[str, str]:
    """Return weights that can be stored in 4 or 8 bits -> the names of their linear modules.

    Routers, adapters and experts stacked in one parameter are left out.

    Args:
        model: the model.
        form: form of the codes, ``w4`` or another one.
        among: names of the parameters that are considered.
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
    """Return the form of codes with these scales: ``w4`` for bf16 scales, otherwise ``int8``."""
    return "w4" if scales.dtype == torch.bfloat16 else "int8"


def put_few_bits(model: nn.Module, path: str, coded: tuple[Tensor, Tensor], like: Tensor) -> None:
    """Replace a linear module of ``model`` by one in 4 or 8 bits, which keeps its bias.

    Args:
        model: the model, changed in place.
        path: name of the linear module.
        coded: codes and scales, as ``quantise_rows`` returns them.
        like: tensor with the device and the dtype in which the module computes.
    """
    above, _, leaf = path.rpartition(".")
    parent = model.get_submodule(above)
    codes, scales = (tensor.to(like.device) for tensor in coded)
    layer = FewBitsLinear(form_of(scales), codes, scales, getattr(parent, leaf).bias, like.dtype)
    setattr(parent, leaf, layer)
