"""Folders in few bits, in the form of compressed-tensors: W4A16 and W8A8, as transformers and vLLM read them.

``w4a16`` ("pack-quantized"): matrices of linear layers in 4 bits, groups of 128 numbers along a row share a bf16 scale,
or of 64 or 32 where more matrices have such ones; eight numbers in an int32, the first in the lowest bits, each plus 8.
``w8a8`` ("int-quantized"): int8 with a scale for each row; who computes rounds each token's activations to int8, too.
Embeddings, heads, norms and routers stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tawpipe.errors import UserError
from tawpipe.model.bits.lowbit import GROUP, dequantise_rows, quantise_rows
from tawpipe.model.bits.quantized import matrices_of

PLAIN = "hf"
FORMATS = {"w4a16": "w4", "w8a8": "int8"}
"""Formats of a folder, and what ``lowbit`` calls its matrices."""
GROUPS = (128, 64, 32)
"""Numbers along a row that share a scale, of w4a16."""
LEAST_SHARE = 0.5
"""Share of a model's bytes that must be in few bits."""
PACKED, SCALE, SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"
WEIGHT = ".weight"
PER_WORD = 8
"""Numbers in an int32, of w4a16."""


class FewBitsFolder:
    """What is different in a folder in few bits. Experts that are stacked in one parameter are matrices there.

    Args:
        model: whose linear layers are meant.
        layers: names of the parameters of its layers.
        split: names of those parameters that are several tensors in a folder.
        on_disk: gives the name that any other has there.
        dtype: of what stays, and of the scales of w8a8.

    Raises:
        UserError: no linear layer can be in few bits; or experts, in a form that transformers would not load.
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
        """A line about what is in few bits."""
        linear = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Linear)}
        of_layers = [(name, model.get_parameter(name)) for name in matrices_of(model) & layers]
        experts = {name: parameter for name, parameter in of_layers if parameter.ndim == 3}

        def fitting(group: int) -> dict[str, Tensor]:
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
        """What is written for a tensor: itself, or codes with their scales."""
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
        """The ``quantization_config`` of its config.json, when all tensors are written."""
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
    """True if groups divide the rows of a matrix, or of each of some stacked ones whichever way round."""
    return all(size % group == 0 for size in parameter.shape[1:])


def packed(codes: Tensor) -> Tensor:
    """Codes from -8 to 7, int8 [out, in], as int32 [out, in / 8]."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // PER_WORD, dtype=torch.int32)
    for place in range(PER_WORD):
        words |= (codes[:, place::PER_WORD].to(torch.int32) + 8) << 4 * place
    return words


def unpacked(words: Tensor) -> Tensor:
    """The inverse of ``packed``."""
    places = [(words >> 4 * place & 15) - 8 for place in range(PER_WORD)]
    return torch.stack(places, dim=2).flatten(1).to(torch.int8)


class FewBitsTensors:
    """The tensors of a folder under the names that they have in full precision.

    Args:
        files: tensor -> the file that holds it.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        stems = [name.removesuffix(SCALE) for name in files if name.endswith(SCALE)]
        self._few = {stem + WEIGHT: stem + key for stem in stems for key in (WEIGHT, PACKED) if stem + key in files}
        """Matrix in few bits -> what its codes are called."""
        extra = {name.removesuffix(WEIGHT) + part for name in self._few for part in (PACKED, SCALE, SHAPE)}
        self.files = {name: file for name, file in files.items() if name not in extra}
        self.files |= {name: files[name.removesuffix(WEIGHT) + SCALE] for name in self._few}
        """Name -> a file; of matrices in few bits that with their scales."""

    def codes(self, name: str, opened: Callable[[Path], Any]) -> tuple[Tensor, Tensor] | None:
        """Codes and scales of a matrix as ``lowbit.quantise_rows`` gives them; None if it has no such ones."""
        if name not in self._few:
            return None
        codes, scales = self._stored(name, opened)
        if self._few[name] == name:
            return codes, scales.float()
        as_ours = scales.shape[1] * GROUP == codes.shape[1] and scales.equal(scales.bfloat16().to(scales.dtype))
        return (codes, scales.bfloat16()) if as_ours else None

    def tensor(self, name: str, opened: Callable[[Path], Any]) -> Tensor:
        """A tensor, in fp32 if it is in few bits."""
        if name in self._few:
            return dequantise_rows(*self._stored(name, opened), torch.float32)
        return opened(self._files[name]).get_tensor(name)

    def _stored(self, name: str, opened: Callable[[Path], Any]) -> tuple[Tensor, Tensor]:
        """Codes of a matrix, int8 [out, in], and its scales as they are."""
        keys = self._few[name], name.removesuffix(WEIGHT) + SCALE
        codes, scales = (opened(self._files[key]).get_tensor(key) for key in keys)
        return codes if keys[0] == name else unpacked(codes), scales

    def shape(self, name: str, opened: Callable[[Path], Any]) -> tuple[int, ...]:
        """The shape of a tensor in full precision, read from the head of its file."""
        key = self._few.get(name, name)
        shape = tuple(opened(self._files[key]).get_slice(key).get_shape())
        return (*shape[:-1], shape[-1] * PER_WORD) if key != name else shape
