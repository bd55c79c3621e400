"""FLOPs that a model needs and that devices can do, for the utilisation that a run reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tawpipe.schedule.balance import LayerKind, Work

if TYPE_CHECKING:
    from tawpipe.model.chain import Chain

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_UNEVEN = (*_EXPERTS, "sliding_window")
"""Names in the configs of models whose tokens do not all meet all weights, or all tokens before them."""

PER_WEIGHT, PER_PAIR = 4.0, 4.5
"""Forward passes in a layer's visits, its recomputation among them: of matrix products, and of attention."""
IN_HEAD = 3.0
"""The same in the head's, which computes nothing twice."""

# Dense bf16 FLOP/s with fp32 accumulation, from the vendors' data sheets (half of what they state with sparsity). The
# first entry whose words all occur in a device's name counts.
_PEAKS: tuple[tuple[str, float], ...] = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("H200 NVL", 835.5e12),
    ("GH200", 989.4e12),
    ("H200", 989.4e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756e12),
    ("H100", 989.4e12),
    ("A100", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362.05e12),
    ("L40", 181.05e12),
    ("L4", 121e12),
    ("RTX 5090", 209.5e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("MI300X", 1307.4e12),
)


KNOWN_DEVICES = tuple(name for name, _ in _PEAKS)
"""Devices whose peak is known."""


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense FLOP/s that a device could reach in ``dtype``, None where that is not known (CPUs, other types).

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bfloat16")
    989400000000000.0
    """
    if dtype != "bfloat16":
        return None
    words = device_name.upper().replace("-", " ").split()
    return next((peak for known, peak in _PEAKS if all(word in words for word in known.upper().split())), None)


def training_flops(
    *, matmul_parameters: int, num_layers: int, attention_width: int, lengths: Iterable[int], window: int | None = None
) -> float:
    """FLOPs of one forward and backward pass over documents, as the model needs them.

    After Chowdhery et al., PaLM, appendix B: 6 for each parameter and token, and 12 L H Q T for each token's attention.
    T is the document's length here, since packed documents do not see each other, and half of it, since a token sees
    only those before it. Recomputation is not counted, so that the quotient is a model FLOPs utilisation.

    Args:
        matmul_parameters: parameters that a token is multiplied with: all but the input embedding; of a mixture of
            experts those of the experts that a token is sent to.
        attention_width: number of query heads times their size.
        lengths: tokens of each document.
        window: tokens that a token sees at most, for sliding attention in all layers.
    """
    tokens, pairs = 0, 0.0
    for length in lengths:
        seen = length if window is None else min(window, length)
        tokens += length
        pairs += seen * seen / 2 + (length - seen) * seen
    return 6.0 * matmul_parameters * tokens + 12.0 * num_layers * attention_width * pairs


def attention_width(config: Any) -> int:
    """Number of query heads times their size, of a model's text config."""
    return config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def key_elements(config: Any) -> int:
    """Elements of a layer's keys and values for one token, of a model's text config. Latent attention (MLA) hands every
    head its own.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    own = attention_width(config) // config.num_attention_heads
    keys = getattr(config, "qk_nope_head_dim", 0) + getattr(config, "qk_rope_head_dim", 0)
    return heads * ((keys or own) + (getattr(config, "v_head_dim", None) or own))


def key_width(config: Any) -> int:
    """Number of key heads times their size, of a model's text config."""
    heads = config.num_attention_heads
    return attention_width(config) * (getattr(config, "num_key_value_heads", None) or heads) // heads


def windows(config: Any) -> list[int | None]:
    """Tokens that a token sees at most, of every layer of a model's text config; None for all before it."""
    own, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if types:
        return [own if "sliding" in kind else None for kind in types]
    return [own if getattr(config, "use_sliding_window", True) else None] * config.num_hidden_layers


def met_elements(chain: Chain, block: int, *, least_dimensions: int = 0, trained: bool = False) -> float:
    """Elements of a block's weights that a token meets: of a mixture's experts the share that it is sent to.

    Args:
        least_dimensions: of the parameters that count; 2 for matrices.
        trained: only those that are.
    """
    config = chain.config.get_text_config()
    experts = next((n for name in _EXPERTS if (n := getattr(config, name, None))), 1)
    met = (getattr(config, "num_experts_per_tok", None) or experts) / experts
    units = [chain.units[unit] for unit in chain.blocks[block].units]
    slots = [slot for unit in units if unit.trainable or not trained for slot in unit.slots]
    counted = [slot for slot in slots if len(slot.shape) >= least_dimensions]
    return sum(slot.numel * (met if ".experts." in slot.name else 1) for slot in counted)


def work_of(chain: Chain) -> Work:
    """FLOPs of a document in a step, forward and backward with the recomputation: what documents are dealt by where
    nothing was measured. Experts count as far as a token meets them.
    """
    config = chain.config.get_text_config()
    # Queries and keys have one width, values may have another (MLA).
    keys = getattr(config, "qk_nope_head_dim", 0) + getattr(config, "qk_rope_head_dim", 0)
    one = attention_width(config) // config.num_attention_heads
    per_pair = config.num_attention_heads * ((keys or one) + (getattr(config, "v_head_dim", None) or one))
    kinds: Counter[tuple[float, float, int | None]] = Counter()
    for number, block in enumerate(chain.blocks):
        if block.kind == "embedding":
            continue
        matrices = met_elements(chain, number, least_dimensions=2)
        if block.kind == "head":
            kinds[2 * IN_HEAD * matrices, 0.0, None] += 1
        elif block.needs_backward:
            kinds[2 * PER_WEIGHT * matrices, PER_PAIR * per_pair, windows(config)[number - 1]] += 1
        else:
            kinds[2 * matrices, float(per_pair), windows(config)[number - 1]] += 1
    return Work(tuple(LayerKind(layers, *kind) for kind, layers in kinds.items()))


def chain_flops(chain: Chain, lengths: Iterable[int], *, at_most: bool = False) -> float | None:
    """``training_flops`` of a model; None for those whose FLOPs are not known here: mixtures of experts, and sliding
    attention.

    Args:
        at_most: count every expert and every token for those, which they do not exceed.
    """
    config = chain.config.get_text_config()
    if not at_most and any(getattr(config, name, None) for name in _UNEVEN):
        return None
    embedding = sum(chain.units[u].numel for u in chain.blocks[0].units if chain.units[u].blocks == (0,))
    return training_flops(
        matmul_parameters=sum(unit.numel for unit in chain.units) - embedding,
        num_layers=len(chain.blocks) - 2,
        attention_width=attention_width(config),
        lengths=lengths,
    )


def mfu(flops: float, seconds: float, *, peak: float | None, num_devices: int) -> float | None:
    """Model FLOPs utilisation from 0 to 1, None where the peak of the device is not known."""
    return None if peak is None else flops / (seconds * peak * num_devices)
