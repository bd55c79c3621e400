"""Model folders in 4 or 8 bits, in the format of compressed-tensors: W4A16 and W8A8, which transformers and vLLM read.

``w4a16`` ("pack-quantized"): matrices of linear layers in 4 bits. Groups of 128 numbers along a row share a bf16 scale;
groups of 64 or 32 are used if they fit more matrices. An int32 holds eight numbers, the first in the lowest bits, each
plus 8. ``w8a8`` ("int-quantized"): int8 with a scale for each row. Inference also rounds each token's activations to
int8. Embeddings, heads, norms and routers stay unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from typing import Any

import torch
from torch import Tensor, nn

from tawpipe.errors import UserError
from tawpipe.model.bits.lowbit import quantise_rows
from tawpipe.model.bits.quantized import matrices_of

PLAIN = "hf"
FORMATS = {"w4a16": "w4", "w8a8": "int8"}
"""Format of a folder -> form of its matrices in ``lowbit``."""
GROUPS = (128, 64, 32)
"""Group sizes that are tried for w4a16: numbers along a row that share a scale."""
LEAST_SHARE = 0.5
"""Smallest share of a model's numbers that must be in 4 bits for w4a16."""
PACKED, SCALE, SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"
WEIGHT = ".weight"
PER_WORD = 8
"""Numbers in one int32, for w4a16."""


class FewBitsFolder:
    """Tensors and settings of an exported folder whose matrices are in 4 or 8 bits.

    Experts stacked in one parameter of the model are single matrices in the folder.

    Args:
        format: ``w4a16`` or ``w8a8``.
        model: the model, whose linear layers are quantised.
        layers: names of the parameters of its layers.
        split: names of parameters that are several tensors in a folder.
        on_disk: function from any other parameter's name to its name in the folder.
        dtype: dtype of the tensors that are not quantised, and of the scales of w8a8.

    Raises:
        UserError: no linear layer can be quantised, too small a share of the model would be, or the model has experts
            in a form that transformers would not load.
    """

    def __init__(
        self,
        format: str,
        model: Any,
        layers: Set[str],
        split: Set[str],
        on_disk: Callable[[str], str],
        dtype: torch.dtype,
    ) -> None:
        self.words: str
        """Line about the matrices that are quantised."""
        linear = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Linear)}
        of_layers = [(name, model.get_parameter(name)) for name in matrices_of(model) & layers]
        experts = {name: parameter for name, parameter in of_layers if parameter.ndim == 3}

        def fitting(group: int) -> dict[str, Tensor]:
            """Return the matrices of layers whose rows groups of ``group`` numbers divide; for w8a8 all matrices."""
            whole = format == "w8a8"
            return {n: p for n, p in of_layers if (n in linear or n in experts) and (whole or _fits(group, p))}

        group = max(
            GROUPS, key=lambda group: sum(p.numel() for p in fitting(group).values())
        )  # the first of equal ones
        fits = fitting(group)
        chosen = {name for name in fits if name in linear}
        odd = [name for name in experts if name not in split or name not in fits]
        total = sum(parameter.numel() for name, parameter in model.named_parameters() if ".lora_" not in name)
        share = sum(parameter.numel() for parameter in fits.values()) / max(1, total)
        if not chosen or odd or (experts and format != "w4a16") or (format == "w4a16" and share < LEAST_SHARE):
            why = f"{PLAIN} for {type(model).__name__}: it has no such linear layer"
            if odd:
                why = f"{PLAIN} for {type(model).__name__}, whose {odd[0]} is no stack of matrices with rows of 32 n"
            elif chosen and experts and format != "w4a16":
                why = f"{PLAIN} or w4a16: transformers loads no other experts in few bits"
            elif chosen:
                why = f"{PLAIN} for {type(model).__name__}: {share:.0%} of its numbers would be in few bits, the "
                why += "others are embeddings, heads and matrices whose rows no group of 32 divides"
            raise UserError("format", format, why)
        self._group, matrices = group, sum(len(p) if p.ndim == 3 else 1 for p in fits.values())
        bits = f"4 bits, in groups of {group}" if format == "w4a16" else "8 bits"
        self.words = f"{matrices} matrices with {share:.0%} of the model's numbers are in {bits}"
        self._form, self._dtype, self._experts = FORMATS[format], dtype, bool(experts)
        self._names = {on_disk(name) for name in chosen}
        embeddings = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Embedding)}
        self._embeddings = {on_disk(name) for name in embeddings - linear}
        self._stays = {on_disk(name) for name in linear - chosen if ".lora_" not in name}

    def tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) to write for one tensor: the tensor itself, or its codes, scales and shape.

        Matrices that stay as they are, except embeddings, are added to the list ``ignore`` of ``settings``.

        Args:
            name: name of the tensor in a folder of full precision.
            tensor: its values.
        """
        matrix = tensor.ndim == 2 and name.endswith(WEIGHT)
        if name not in self._names and not (matrix and self._experts and ".experts." in name):
            if matrix and name not in self._embeddings:
                self._stays.add(name)
            yield name, tensor
            return
        stem = name.removesuffix(WEIGHT)
        codes, scales = quantise_rows(tensor, self._form, self._dtype, group=self._group)
        if self._form == "w4":
            yield stem + PACKED, packed(codes)
            yield stem + SHAPE, torch.tensor(tensor.shape)
        else:
            yield name, codes
        yield stem + SCALE, scales

    @property
    def settings(self) -> dict[str, Any]:
        """The ``quantization_config`` for config.json.

        Read it after all tensors are written."""
        symmetric = {"type": "int", "symmetric": True}
        if self._form == "w4":
            weights = symmetric | {"num_bits": 4, "strategy": "group", "group_size": self._group, "dynamic": False}
            group, name = {"targets": ["Linear"], "weights": weights, "input_activations": None}, "pack-quantized"
        else:
            weights = symmetric | {"num_bits": 8, "strategy": "channel", "dynamic": False}
            tokens = symmetric | {"num_bits": 8, "strategy": "token", "dynamic": True}
            group, name = {"targets": ["Linear"], "weights": weights, "input_activations": tokens}, "int-quantized"
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": name,
            "config_groups": {"group_0": group},
            "ignore": sorted(name.removesuffix(WEIGHT) for name in self._stays),
        }


def _fits(group: int, parameter: Tensor) -> bool:
    """Return True if groups of ``group`` divide the rows of a matrix, or both sizes of stacked matrices."""
    return all(size % group == 0 for size in parameter.shape[1:])


def packed(codes: Tensor) -> Tensor:
    """Pack codes from -8 to 7, int8 [out, in], into int32 [out, in / 8]."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // PER_WORD, dtype=torch.int32)
    for place in range(PER_WORD):
        words |= (codes[:, place::PER_WORD].to(torch.int32) + 8) << 4 * place
    return words
