"""FLOPs that a model needs and that devices can reach, for the utilisation that a run reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tawpipe.dealing.balance import LayerKind, LayerTime
from tawpipe.model.shapes import EXPERTS, head_size, num_heads, setting_of, share_of_experts

if TYPE_CHECKING:
    import torch

    from tawpipe.model.chain import Chain

_UNEVEN = (*EXPERTS, "sliding_window")
"""Config keys of models in which a token does not use all weights, or does not see all tokens before it."""

PER_WEIGHT, PER_PAIR = 4.0, 4.5
"""Cost of a layer's visits, recomputation included, in forward passes: of matrix products (``PER_WEIGHT``), and of
attention (``PER_PAIR``)."""
IN_HEAD = 3.0
"""Cost of the head's visit in forward passes; the head recomputes nothing."""

# Dense bf16 FLOP/s with fp32 accumulation (half of the number stated with sparsity), and memory bandwidth in bytes per
# second, from the vendors' data sheets. The first entry whose words all occur in a device's name counts.
_PEAKS: tuple[tuple[str, float, float], ...] = (
    ("GB200", 2.5e15, 8e12),
    ("B200", 2.25e15, 8e12),
    ("H200 NVL", 835.5e12, 4.8e12),
    ("GH200", 989.4e12, 4e12),
    ("H200", 989.4e12, 4.8e12),
    ("H100 NVL", 835.5e12, 3.9e12),
    ("H100 PCIe", 756e12, 2e12),
    ("H100", 989.4e12, 3.35e12),
    ("A100", 312e12, 2.039e12),
    ("A40", 149.7e12, 696e9),
    ("A30", 165e12, 933e9),
    ("A10G", 70e12, 600e9),
    ("A10", 125e12, 600e9),
    ("L40S", 362.05e12, 864e9),
    ("L40", 181.05e12, 864e9),
    ("L4", 121e12, 300e9),
    ("GB10", 125e12, 273e9),  # an eighth of the stated FLOP/s, which are sparse and in FP4
    ("RTX 5090", 209.5e12, 1.792e12),
    ("RTX 4090", 165.2e12, 1.008e12),
    ("RTX 3090", 71e12, 936e9),
    ("MI300X", 1307.4e12, 5.3e12),
)


KNOWN_DEVICES = tuple(name for name, *_ in _PEAKS)
"""Devices with a known peak."""


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the dense peak FLOP/s of a device in ``dtype``, or None if it is unknown.

    It is known for bfloat16 on the GPUs in ``KNOWN_DEVICES``.

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bfloat16")
    989400000000000.0
    """
    return _known(device_name, 0) if dtype == "bfloat16" else None


def memory_rate(device_name: str) -> float | None:
    """Return the memory bandwidth of a device in bytes per second, or None if it is unknown.

    >>> memory_rate("NVIDIA A100-SXM4-80GB")
    2039000000000.0
    """
    return _known(device_name, 1)


def _known(device_name: str, place: int) -> float | None:
    """Return the FLOP/s (``place`` 0) or the memory bandwidth (``place`` 1) of a device, or None.

    The first entry whose words all occur in ``device_name`` counts."""
    words = device_name.upper().replace("-", " ").split()
    numbers = (entry[1:] for entry in _PEAKS if all(word in words for word in entry[0].upper().split()))
    return next((of[place] for of in numbers), None)


def training_flops(
    *,
    matmul_parameters: float,
    num_layers: float,
    attention_width: int,
    lengths: Iterable[int],
    window: int | None = None,
) -> float:
    """Return the FLOPs that a model needs for one forward and backward pass over documents, without recomputation.

    After Chowdhery et al., PaLM, appendix B: 6 for each parameter and token, and 12 L H Q T for each token's attention.
    Here T is half the document's length: packed documents do not see each other, and a token sees only tokens before
    it. Recomputation is not counted, so that dividing by time and peak gives the model FLOPs utilisation.

    Args:
        matmul_parameters: parameters that a token is multiplied with: all except the input embedding. In a mixture of
            experts only the experts that a token is sent to count.
        num_layers: number of layers; layers that cost less may count by a fraction.
        attention_width: number of query heads times their size.
        lengths: tokens of each document.
        window: largest number of tokens that a token sees, for sliding attention in all layers.
    """
    tokens, pairs = 0, 0.0
    for length in lengths:
        seen = length if window is None else min(window, length)
        tokens += length
        pairs += seen * seen / 2 + (length - seen) * seen
    return 6.0 * matmul_parameters * tokens + 12.0 * num_layers * attention_width * pairs


def attention_width(config: Any) -> int:
    """Return the number of query heads times their size, from a model's text config."""
    return num_heads(config) * head_size(config)


def key_elements(config: Any) -> int:
    """Return the elements of one layer's keys and values for one token, from a model's text config.

    In latent attention (MLA) every head has its own keys and values."""
    heads = setting_of(config, "num_key_value_heads") or num_heads(config)
    return heads * sum(_pair(config))


def key_bytes(config: Any, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of one layer's keys and values for one token, and the bytes of their gradients.

    Gradients are summed in fp32 or wider."""
    elements = key_elements(config)
    return elements * dtype.itemsize, elements * max(4, dtype.itemsize)


def _pair(config: Any) -> tuple[int, int]:
    """Return the elements of one key and of one value, which differ in latent attention (MLA)."""
    keys = (setting_of(config, "qk_nope_head_dim") or 0) + (setting_of(config, "qk_rope_head_dim") or 0)
    return keys or head_size(config), setting_of(config, "v_head_dim") or head_size(config)


def key_width(config: Any) -> int:
    """Return the number of key heads times their size, from a model's text config."""
    return head_size(config) * (setting_of(config, "num_key_value_heads") or num_heads(config))


def windows(config: Any) -> list[int | None]:
    """Return for every layer the largest number of tokens that a token sees, or None for all tokens before it.

    Args:
        config: a model's text config.
    """
    window, types = setting_of(config, "sliding_window"), getattr(config, "layer_types", None)
    if types:
        chunk = getattr(config, "attention_chunk_size", None)
        return [window if "sliding" in kind else chunk if "chunked" in kind else None for kind in types]
    return [window if getattr(config, "use_sliding_window", True) else None] * config.num_hidden_layers


def active_elements(chain: Chain, block: int, *, least_dimensions: int = 0, trained: bool = False) -> float:
    """Return the elements of a block's weights that are used in computing one token.

    Experts count by the share of them that a token is sent to.

    Args:
        chain: the model.
        block: index of the block.
        least_dimensions: parameters with fewer dimensions do not count; 2 counts matrices only.
        trained: count trainable parameters only.
    """
    share = share_of_experts(chain.config.get_text_config())
    units = [chain.units[unit] for unit in chain.blocks[block].units]
    counted = [unit for unit in units if unit.trainable or not trained]
    return sum(unit.active_elements(share, least_dimensions=least_dimensions) for unit in counted)


def work_of(chain: Chain) -> LayerTime:
    """Return the FLOPs of one document in a training step as a function of its length, recomputation included.

    Documents are assigned to ranks by this work if nothing was measured. Experts count by the share of them that a
    token is sent to."""
    config = chain.config.get_text_config()
    per_pair = num_heads(config) * sum(_pair(config))
    kinds: Counter[tuple[float, float, int | None]] = Counter()
    for number, block in enumerate(chain.blocks):
        if block.kind == "embedding":
            continue
        passes = IN_HEAD if block.kind == "head" else PER_WEIGHT if block.needs_backward else 1.0
        matrices, trained = (active_elements(chain, number, least_dimensions=2, trained=only) for only in (False, True))
        # Frozen weights need no gradients.
        flops = 2 * (matrices * passes - (matrices - trained) * (passes > 1))
        if block.kind == "head":
            kinds[flops, 0.0, None] += 1
        else:
            pairs = PER_PAIR * per_pair if block.needs_backward else float(per_pair)
            kinds[flops, pairs, windows(config)[number - 1]] += 1
    return LayerTime(tuple(LayerKind(layers, *kind) for kind, layers in kinds.items()))


def chain_flops(chain: Chain, lengths: Iterable[int], *, at_most: bool = False) -> float | None:
    """Return ``training_flops`` of a model, less the gradients of frozen weights, which are not computed.

    Args:
        chain: the model.
        lengths: tokens of each document.
        at_most: return an upper bound for mixtures of experts and sliding attention, which counts every expert and
            every token. Otherwise the result for such models is None.
    """
    config = chain.config.get_text_config()
    if not at_most and any(getattr(config, name, None) for name in _UNEVEN):
        return None
    # A weight takes part in three products, a frozen one in two: no gradient of its own is computed.
    back = [block.needs_backward for block in chain.blocks]
    shares = [1.0 if unit.trainable else (1 + any(back[block] for block in unit.blocks)) / 3 for unit in chain.units]
    return training_flops(
        matmul_parameters=sum(
            unit.numel * share for unit, share in zip(chain.units, shares, strict=True) if unit.blocks != (0,)
        ),
        num_layers=sum(1.0 if needed else 1 / 3 for needed in back[1:-1]),
        attention_width=attention_width(config),
        lengths=lengths,
    )


def mfu(flops: float, seconds: float, *, peak: float | None, num_devices: int) -> float | None:
    """Return the model FLOPs utilisation, from 0 to 1, or None if ``peak`` is unknown.

    Args:
        flops: FLOPs of the model, on all devices together.
        seconds: time in which they were computed.
        peak: FLOP/s that one device can reach.
        num_devices: number of devices.
    """
    return None if peak is None else flops / (seconds * peak * num_devices)
