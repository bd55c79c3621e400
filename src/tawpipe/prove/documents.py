"""Check of attention in packed documents, in the number type of a training run.

It compares the output and every gradient of a layer, per document and parameter, with the layer of transformers in fp32
with an explicit mask. One layer runs in every way in which training runs it: whole, with attention results kept, in
chunks whose borders are inside documents, and over a context-parallel group. This process plays the ranks of the group
one after another, so that a single device suffices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from typing import Any

import torch
import torch.nn.attention as library
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, LlamaConfig, MistralConfig, PreTrainedConfig

from tawpipe.model.attention.attention_kernel import FIXED
from tawpipe.model.attention.chunked import KeyStore
from tawpipe.model.batch import tokens_of
from tawpipe.model.chain import Chain
from tawpipe.model.kernels import flash_in_use
from tawpipe.model.units import Unit
from tawpipe.model.weights import ModuleSource
from tawpipe.plan.cost.bench import Bench, Case
from tawpipe.prove.operators import attention_seen
from tawpipe.prove.outcome import Outcome
from tawpipe.prove.stand_in import read_as_a_gpu_does
from tawpipe.runtime.compute.attention_results import AttentionResults
from tawpipe.runtime.compute.chunks import KeptAttention, LayerInChunks
from tawpipe.runtime.compute.cp_groups import CpTokens, LayerInCpGroup
from tawpipe.runtime.compute.rows import OnDevice
from tawpipe.runtime.world import World

LIMIT = 0.03
"""Maximum relative error in bf16: rounding can cause this much in a gradient that is a small difference of large
numbers."""
BESIDE_LIBRARY = 2.0
"""Factor by which an error may exceed the error of transformers' own layer in this type, if that allows more than
``LIMIT``. On an H100 this applies to the biases of a mixture of experts, whose gradients are sums over a thousand
tokens in bf16."""
SMALL = 0.05
"""Minimum size of a gradient in relative errors, as a share of an equal part of all documents' gradient. The queries of
a single token have a zero gradient, whose rounding is no error."""
OWN = "FA2"
"""Torch's own flash attention."""
LAYER = 1
RANKS = 2


@dataclass(frozen=True)
class Sizes:
    """Sizes of what the check computes.

    Args:
        lengths: tokens of each document of a row.
        chunk: tokens of a chunk. Borders of documents lie inside chunks, and borders of chunks inside documents.
        window: tokens of the attention window, fewer than in the longest document.
        head_dims: head sizes that are tried.
        alone: tokens of an additional row with a single document, of a length for which cuDNN is used if it is the
            fastest; 0 for none.
    """

    lengths: tuple[int, ...]
    chunk: int
    window: int
    head_dims: tuple[int, ...]
    alone: int


SIZES = {
    "cpu": Sizes((1, 7, 40, 150), 64, 130, (16,), 0),
    "cuda": Sizes((1, 7, 130, 1000, 910), 384, 256, (64, 128, 256), FIXED),
}
Gradients = Mapping[str, Tensor]
"""Output and gradients as tensors: ``output``, gradient of the input as ``input``, and gradient of each parameter."""


def documents(world: World) -> Outcome:
    """Check a layer on packed documents against transformers' own layer, for all models, kernels and layouts.

    The check holds if the largest relative error is below ``LIMIT``. It is not decided on a GPU without bf16. A flash
    attention package that was built without some head sizes is named in a hint, and is not a failure."""
    device, sizes = world.device, SIZES[world.device.type]
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
        return Outcome(None, "no kernel for packed documents computes in bf16 here")
    rows = (sizes.lengths, (sizes.alone,))[: 1 + (sizes.alone > 0)]
    errors: dict[str, float] = {}
    lacking: dict[str, str] = {}
    ran: dict[str, dict[str, list[str]]] = {}
    for kernel in kernels(device):
        with using(kernel), read_as_a_gpu_does():
            for (name, config), lengths in product(models(sizes).items(), rows):
                label = f"{kernel}, {name}" + (", one document" if len(lengths) == 1 else "")
                try:
                    differences, ran[label] = of_model(config, replace(sizes, lengths=lengths), device, torch.bfloat16)
                except RuntimeError as error:
                    if kernel == flash_in_use() == OWN or device.type != "cuda":
                        raise
                    lacking[label] = str(error).splitlines()[0]
                    continue
                errors |= {f"{label}, {what}": error for what, error in differences.items()}
    where = max(errors, key=lambda what: errors[what])
    note = f"{len(errors):,} gradients and outputs, largest relative difference {errors[where]:.1e} ({where})"
    if lacking:
        note += f"; not computed by {'; '.join(lacking)}, which torch's own flash attention is taken for"
    worst = dict(sorted(errors.items(), key=lambda item: -item[1])[:20])
    numbers = {"count": len(errors), "worst": worst, "lacking": lacking, "limit": LIMIT, "attention": ran}
    return Outcome(errors[where] < LIMIT, note, numbers, hint=bool(lacking))


def kernels(device: torch.device) -> tuple[str, ...]:
    """Return the flash attentions that this process may use: the activated one and torch's own.

    On a CPU, its only one.
    """
    return tuple(dict.fromkeys((flash_in_use(), OWN))) if device.type == "cuda" else ("the CPU's",)


@contextmanager
def using(kernel: str) -> Iterator[None]:
    """Make torch use the flash attention ``kernel`` within the context; the earlier one is restored at its end."""
    before = flash_in_use()
    if kernel in (before, "the CPU's"):
        yield
        return
    assert kernel == OWN, kernel
    library.restore_flash_attention_impl()
    try:
        yield
    finally:
        library.activate_flash_attention_impl(before)


def models(sizes: Sizes) -> dict[str, PreTrainedConfig]:
    """Return configurations of one-layer models by name, one for each kind of attention that is checked.

    They have shared keys, separate keys, an attention window, soft caps, or sinks."""
    configs: dict[str, PreTrainedConfig] = {}
    for dim in sizes.head_dims:
        configs[f"4 heads of {dim} share keys"] = _config(LlamaConfig, dim, 1)
        configs[f"4 heads of {dim}"] = _config(LlamaConfig, dim, 4)
        configs[f"a window, heads of {dim}"] = _config(MistralConfig, dim, 2, sliding_window=sizes.window)
    dim = sizes.head_dims[0]
    configs["soft caps"] = _config(
        Gemma2Config, dim, 2, sliding_window=sizes.window, query_pre_attn_scalar=dim, layer_types=["full_attention"]
    )
    for name, kind in (("sinks", "full_attention"), ("sinks, a window", "sliding_attention")):
        configs[name] = _config(
            GptOssConfig,
            dim,
            2,
            sliding_window=sizes.window,
            layer_types=[kind],
            num_local_experts=2,
            num_experts_per_tok=2,  # use all experts: rounding could change the selection
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )
    return configs


def _config(kind: Callable[..., PreTrainedConfig], head_dim: int, groups: int, **more: Any) -> PreTrainedConfig:
    """Return the configuration of a model with one layer and four heads.

    Args:
        kind: class of the configuration.
        head_dim: size of a head.
        groups: number of key-value heads.
        **more: further fields.
    """
    hidden = 4 * head_dim
    return kind(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=groups,
        head_dim=head_dim,
        initializer_range=1 / math.sqrt(hidden),
        tie_word_embeddings=False,
        **more,
    )


def of_model(
    config: PreTrainedConfig, sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> tuple[dict[str, float], dict[str, list[str]]]:
    """Run a model's layer in all layouts, and compare output and gradients with transformers' own layer in fp32.

    Args:
        config: configuration of the model.
        sizes: documents and chunks.
        device: device to compute on.
        dtype: number type to check.

    Returns:
        Relative errors by layout, document and parameter; and the attention operators that ran, by layout. An error is
        divided by a tolerance that follows from the error of transformers' layer in ``dtype``, see ``counted``.
    """
    lengths = sizes.lengths
    bench = _OwnValues(Chain(_fp32_model(config, dtype)), device, dtype)
    generator = torch.Generator().manual_seed(1)
    hidden, arriving = (
        torch.randn(1, sum(lengths), config.hidden_size, generator=generator).to(device, dtype) for _ in range(2)
    )

    def by_library(kind: torch.dtype) -> list[Gradients]:
        """Return output and gradients of every document, computed by transformers' own layer in the type ``kind``."""
        model, window = _cast(_fp32_model(config, dtype).to(device), kind), getattr(config, "sliding_window", None)
        parts = zip(hidden.to(kind).split(lengths, 1), arriving.to(kind).split(lengths, 1), strict=True)
        return [_of_document(model, part, gradient, window) for part, gradient in parts]

    wanted, rounded = by_library(torch.float32), by_library(dtype)
    errors: dict[str, float] = {}
    ran: dict[str, list[str]] = {}
    least = {name: SMALL * sum(float(gradients[name].norm()) ** 2 for gradients in wanted) ** 0.5 for name in wanted[0]}
    for way, run in ways(sizes.chunk).items():
        of_documents = _of_way(bench, run, lengths, hidden, arriving)
        with attention_seen() as ran[way]:  # record the first document only: all run the same operators
            first = next(of_documents)
        in_all_ways = zip(lengths, wanted, rounded, chain([first], of_documents), strict=True)
        for length, expected, of_library, computed in in_all_ways:
            for name, value in computed.items():
                size = max(float(expected[name].norm()), least[name] / math.sqrt(len(lengths)))
                usual = float((of_library[name].float() - expected[name]).norm()) / size
                error = float((value - expected[name]).norm()) / size
                errors[f"{way}, document of {length}, {name}"] = counted(error, usual)
    return errors, ran


def counted(error: float, usual: float) -> float:
    """Return ``error``, divided by a tolerance if transformers' own error ``usual`` is large.

    Returns infinity if the error is not a finite number.

    >>> counted(0.04, 0.01), counted(0.04, 0.03), counted(0.04, math.inf), counted(math.nan, 0.0)
    (0.04, 0.02, 0.04, inf)
    """
    allowed = BESIDE_LIBRARY * usual / LIMIT if math.isfinite(usual) else 0.0
    return error / max(1.0, allowed) if math.isfinite(error) else math.inf


def _fp32_model(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """Build the model in fp32, with random weights that are exactly representable in ``dtype``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation="eager").float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return model


def _cast(model: Any, dtype: torch.dtype) -> Any:
    """Convert the parameters to ``dtype`` in place and return the model. Rotary angles are still computed in fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _of_document(model: Any, hidden: Tensor, arriving: Tensor, window: int | None) -> Gradients:
    """Run the model's first layer by transformers on one document, forward and backward; return output and gradients.

    Args:
        model: the model.
        hidden: input, [1, tokens, hidden].
        arriving: gradient of the output.
        window: attention window in tokens, or None.
    """
    layer: nn.Module = model.model.layers[0]
    layer.zero_grad()
    positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
    before = positions.mT - positions
    hides = (before < 0) | (before >= (window if window and "full" not in _kind(model) else hidden.shape[1]))
    mask = torch.zeros_like(before, dtype=hidden.dtype).masked_fill(hides, torch.finfo(hidden.dtype).min)[None, None]
    angles = model.model.rotary_emb(hidden, positions)
    leaf = hidden.detach().requires_grad_()
    output = layer(leaf, attention_mask=mask, position_ids=positions, position_embeddings=angles)
    output = output[0] if isinstance(output, tuple) else output
    output.backward(arriving)
    assert leaf.grad is not None
    named = {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}
    return {"output": output.detach(), "input": leaf.grad, **named}


def _kind(model: Any) -> str:
    """Return the attention type of the model's first layer, or an empty text."""
    return (getattr(model.config, "layer_types", None) or [""])[0]


class _OwnValues(Bench):
    """Bench whose blocks have the values of the model instead of random ones."""

    def __init__(self, chain: Chain, device: torch.device, dtype: torch.dtype) -> None:
        self._source = ModuleSource(chain)
        super().__init__(chain, device, dtype, 1024)

    def values(self, unit: int) -> Tensor:
        chain_unit: Unit = self.chain.units[unit]
        return self._source.unit(chain_unit).to(self.device, self.dtype)


Way = Callable[[Bench, Case, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function that runs a layer forward on hidden states and backward from a gradient; returns output and input
gradient."""


def ways(chunk: int) -> dict[str, Way]:
    """Return the functions that run a layer forward and backward, by the name of the layout.

    A layer runs on the whole row, with kept attention results, in chunks, or over a context-parallel group (``sets``).

    Args:
        chunk: tokens of a chunk; in a context-parallel group, half of them.
    """
    return {
        "whole": _whole,
        "attention kept": _kept,
        "chunks": partial(_in_chunks, size=chunk, keeps=False),
        "chunks, attention kept": partial(_in_chunks, size=chunk, keeps=True),
        "sets": partial(_in_cp_groups, size=0),
        "sets, chunks": partial(_in_cp_groups, size=chunk // 2),
    }


def _of_way(bench: Bench, run: Way, lengths: Sequence[int], hidden: Tensor, arriving: Tensor) -> Iterator[Gradients]:
    """Run the layer once for every document in turn, and yield output and gradients of this document.

    Each run computes the whole row, but only this document's part of the output receives a gradient.

    Args:
        bench: runs blocks of the model.
        run: function that runs the layer.
        lengths: tokens of each document.
        hidden: input, [1, tokens, hidden].
        arriving: gradient of the output.
    """
    begin = 0
    with bench.case(LAYER, lengths, in_chunks=True) as case:
        for length in lengths:
            span, only = slice(begin, begin + length), torch.zeros_like(arriving)
            only[:, span] = arriving[:, span]
            output, gradient = run(bench, case, hidden, only)
            gradients = {"output": output[:, span].float(), "input": gradient[:, span].float()}
            for unit, flat in case.sums.items():
                for slot in bench.chain.units[unit].slots:
                    gradients[slot.name.removeprefix("model.layers.0.")] = slot.view(flat).clone()
                flat.zero_()
            yield gradients
            begin += length


def _whole(bench: Bench, case: Case, hidden: Tensor, arriving: Tensor) -> tuple[Tensor, Tensor]:
    """Run the layer forward and backward on the whole row; return output and input gradient."""
    return _at_once(partial(bench.chain.layer, LAYER, calls=case.calls), hidden, arriving)


def _kept(bench: Bench, case: Case, hidden: Tensor, arriving: Tensor) -> tuple[Tensor, Tensor]:
    """Run the layer on the whole row, recomputing all but attention; return output and input gradient."""
    layer, results = partial(bench.chain.layer, LAYER, calls=case.calls), AttentionResults()
    results.keep(lambda: layer(hidden))
    return _at_once(lambda leaf: results.reuse(lambda: layer(leaf)), hidden, arriving)


def _at_once(layer: Callable[[Tensor], Tensor], hidden: Tensor, arriving: Tensor) -> tuple[Tensor, Tensor]:
    """Run a layer function forward and backward on the whole row; return output and input gradient."""
    leaf = hidden.detach().requires_grad_()
    with torch.enable_grad():
        output = layer(leaf)
    torch.autograd.backward(output, arriving)
    assert leaf.grad is not None
    return output.detach(), leaf.grad


def _in_chunks(
    bench: Bench, case: Case, hidden: Tensor, arriving: Tensor, *, size: int, keeps: bool
) -> tuple[Tensor, Tensor]:
    """Run the layer forward and backward in chunks; return output and input gradient.

    Args:
        bench: runs blocks of the model.
        case: documents of the row.
        hidden: input, [1, tokens, hidden].
        arriving: gradient of the output.
        size: tokens of a chunk.
        keeps: keep attention results for the backward pass.
    """
    layer = LayerInChunks(bench.chain, LAYER, case.calls, size, _draw)
    kept = KeptAttention(partial(_rows, bench.device), hidden.shape[1]) if keeps else None
    output, gradient = OnDevice(torch.empty_like(hidden)), arriving.clone()
    layer.forward(OnDevice(hidden), output, kept)
    layer.backward(OnDevice(hidden), gradient, wanted=True, kept=kept)
    return output.tensor, gradient


def _in_cp_groups(bench: Bench, case: Case, hidden: Tensor, arriving: Tensor, *, size: int) -> tuple[Tensor, Tensor]:
    """Run the layer as ``RANKS`` ranks of a context-parallel group would; return output and input gradient of the row.

    The ranks run one after another in this process. Gathered keys and summed gradients are passed on directly instead
    of by communication.

    Args:
        bench: runs blocks of the model.
        case: documents of the row.
        hidden: input, [1, tokens, hidden].
        arriving: gradient of the output.
        size: tokens of a chunk; 0 for no chunks.
    """
    lengths = case.batch.lengths
    places = [CpTokens(lengths, RANKS, place) for place in range(RANKS)]
    layers = [
        LayerInCpGroup(bench.chain, LAYER, case.calls, size or dealt.most, _draw, dealt, KeyStore(1, sum(lengths)))
        for dealt in places
    ]
    inputs = [OnDevice(tokens_of(hidden, dealt.own).contiguous()) for dealt in places]
    keys = [layer.keys(rows) for layer, rows in zip(layers, inputs, strict=True)]
    gathered = [torch.stack([keys[place][part][place] for place in range(RANKS)]) for part in range(2)]
    outputs, gradients, sums = list[Tensor](), list[Tensor](), list[list[Tensor]]()
    for layer, rows, dealt in zip(layers, inputs, places, strict=True):
        output = OnDevice(torch.empty_like(rows.tensor))
        layer.gather(list(gathered))
        layer.forward(rows, output)
        gradient = tokens_of(arriving, dealt.own).clone()
        layer.backward(rows, gradient, wanted=True)
        outputs.append(output.tensor)
        gradients.append(gradient)
        sums.append(layer.key_gradients())
    for place, (layer, rows) in enumerate(zip(layers, inputs, strict=True)):
        added = [torch.stack([of_rank[part][place] for of_rank in sums]).sum(0) for part in range(2)]
        layer.keys_backward(rows, added, gradients[place])
    return _in_row(places, outputs, hidden), _in_row(places, gradients, hidden)


def _in_row(places: Sequence[CpTokens], parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Join the tokens of all ranks in the order of the row, and return the row.

    Args:
        places: tokens that each rank owns.
        parts: tensor of each rank, [1, own tokens, hidden].
        like: tensor with the shape and type of the row.
    """
    row = torch.empty_like(like)
    for dealt, part in zip(places, parts, strict=True):
        at = 0
        for begin, end in dealt.own:
            row[:, begin:end] = part[:, at : at + end - begin]
            at += end - begin
    return row


def _draw(_: int, run: Callable[[], Tensor]) -> Tensor:
    """Run ``run`` directly; stands for the function that fixes the random state of a chunk."""
    return run()


def _rows(device: torch.device, _: str, shape: Sequence[int], dtype: torch.dtype) -> OnDevice:
    """Return uninitialised rows of this shape on the device. The name of the rows is not used."""
    return OnDevice(torch.empty(tuple(shape), dtype=dtype, device=device))
