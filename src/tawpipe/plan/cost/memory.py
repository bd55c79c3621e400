"""Bytes that the blocks of a model need while they compute: measured on a device, or estimated from their widths."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from tawpipe.model.attention.attention_kernel import FIXED, recurs
from tawpipe.model.attention.chunked import PAST_KEYS
from tawpipe.model.chain import Chain
from tawpipe.model.flops import attention_width, key_bytes, key_width
from tawpipe.model.fused.operations import EAGER
from tawpipe.model.shapes import num_heads
from tawpipe.plan.cost.bench import Bench, Case
from tawpipe.runtime.compute.attention_results import AttentionResults
from tawpipe.runtime.compute.chunks import KeptAttention
from tawpipe.runtime.compute.recompute import attention_bytes, keep_graph
from tawpipe.runtime.compute.rows import OnDevice, Rows
from tawpipe.runtime.compute.split import DeferredProducts
from tawpipe.runtime.peak import Peak, peaks
from tawpipe.schedule.sizes.footprint import BlockMemory

logger = logging.getLogger(__name__)
MOST_TOKENS = 2048
"""Tokens of the longest row that is run on a CPU. Memory grows linearly with the tokens, because no kernel stores a
matrix of attention scores."""
BOUNDARIES_PER_TOKEN = 128
"""Boundary activations per token that must fit in free GPU memory for a row to be run. A layer needs half of that."""
MEASURED_CHUNK = 512
"""Tokens of the smaller of the two chunk sizes that are run. The other is twice as large. Memory of larger chunks is
extrapolated linearly."""
DOCUMENTS = 8
"""Documents in a measured row, where rows are packed."""


def measure_memory(bench: Bench, *, tokens: int, packed: bool = False) -> BlockMemory:
    """Run a block of every kind at two lengths, and return its memory as ``fixed + per_token * tokens``.

    Blocks run as the runtime runs them. Of several kinds of layers the largest numbers are returned.

    Args:
        bench: the blocks, with random weights.
        tokens: tokens of a micro-batch, at most.
        packed: True if rows contain several documents, which attention may compute one by one.
    """
    working: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
    kept: dict[str, float] = {"graph": 0, "kept": 0, "attention": 0, "products": 0, "ctx": 0, "lin": 0}
    at_once: dict[str, int] = {}
    unpacking = 0
    longest = _longest(bench, tokens)
    for (kind, *_), blocks in bench.kinds().items():
        if bench.is_packed(blocks[0]):
            unpacking = max(unpacking, _steady([bench.unpack(blocks[0])], bench.device)[0].most)
        most = min(tokens, 2 * bench.chunk if kind == "head" else longest)
        several = DOCUMENTS if packed and most >= 4 * DOCUMENTS else 1
        long, short = ((max(1, size // several),) * several for size in (most, max(1, most // 2)))
        first, second = (_weigh(bench, blocks[0], shape) for shape in (short, long))
        span = sum(long) - sum(short)
        for name, amount in second.items():
            per_token = (amount - first[name]) / span if span else amount / sum(long)
            if name in kept:
                kept[name] = max(kept[name], per_token)
                continue
            line = amount - per_token * sum(long), per_token
            before = working[kind].get(name, line)
            working[kind][name] = max(line, before, key=lambda line: line[0] + line[1] * tokens)
        if kind == "head" and most < 2 * bench.chunk:  # only one chunk was run, so the fit holds for one chunk
            at_once[kind] = max(most, bench.chunk)
    keys = key_bytes(bench.chain.config.get_text_config(), bench.dtype)
    return BlockMemory(bench.boundary, kept, dict(working), at_once, *keys, unpacking=unpacking)


def _longest(bench: Bench, tokens: int) -> int:
    """Return the number of tokens of the longest row to run, from which rows of ``tokens`` tokens are extrapolated.

    In rows with fewer tokens than the layer's width, a weight gradient is larger than the activations of all tokens.
    The peak then falls at another moment than in long rows. Therefore a GPU runs rows of at least twice the width if
    memory allows, and a warning is logged otherwise. The length is odd if ``tokens`` is one of the lengths that do not
    recur, because these use another kernel, which needs more memory."""
    most, width = MOST_TOKENS, bench.chain.width
    if bench.device.type == "cuda":
        capacity = torch.cuda.mem_get_info(bench.device)[0] // (BOUNDARIES_PER_TOKEN * bench.boundary)
        most = max(most, 2 * FIXED * min(ceil(width / FIXED), capacity // (2 * FIXED)))
    if most < min(tokens, 2 * width):
        words = "memory of layers is measured with rows of %d tokens, not %d: longer rows may take more than predicted"
        logger.warning(words, most, 2 * width)
    return most if recurs(tokens) else most - 1


def _weigh(bench: Bench, block: int, lengths: Sequence[int]) -> dict[str, float]:
    """Run one block on documents of ``lengths``, measure its peaks of memory, and return bytes by name.

    Names are those of ``BlockMemory.working`` and ``BlockMemory.kept``."""
    with bench.case(block, lengths) as case:
        if case.spec.kind == "layer":
            return _weigh_layer(bench, block, case)
        if case.spec.kind == "head":
            with torch.set_grad_enabled(case.spec.needs_backward):
                bench.head(case)  # the first run allocates what later chunks reuse
                (once,) = _steady([partial(bench.head, case)], bench.device)
            gradient = case.hidden.nbytes if case.spec.needs_backward else 0
            return {"backward full": once.most - gradient}
        return _weigh_embedding(bench, case)


def _weigh_embedding(bench: Bench, case: Case) -> dict[str, float]:
    """Run the embedding; return by name the working memory of its passes, and (``ctx``) the bytes that layers share."""
    spec, chain, held = case.spec, bench.chain, list[Any]()
    keeps = spec.needs_backward and not spec.backward_reads_weights

    def forward() -> None:
        """Run the embedding and keep its results in ``held``."""
        batch = case.batch.to(bench.device)
        with torch.set_grad_enabled(keeps):
            hidden, calls = chain.embed(batch)
        held[:] = [batch, hidden.detach(), calls, get_gradient_edge(hidden) if keeps else None]

    def backward() -> None:
        edge = held[-1] or get_gradient_edge(chain.embed(held[0])[0])
        torch.autograd.backward(edge, case.hidden)

    parts = [forward, backward] if spec.needs_backward else [forward]
    first, *rest = _steady([*parts, held.clear], bench.device)[:-1]
    weighed: dict[str, float] = {"forward full": first.most - first.after, "ctx": first.after - case.hidden.nbytes}
    if rest:
        weighed["backward full"] = rest[0].most - rest[0].before
    return weighed


def _weigh_layer(bench: Bench, block: int, case: Case) -> dict[str, float]:
    """Run a layer; return by name its working memory and the bytes that it keeps, for each recomputation mode."""
    chain, size = bench.chain, case.hidden.nbytes
    layer = partial(chain.layer, block, calls=case.calls)
    wanted = block > chain.spec.first_backward
    weighed: dict[str, float] = {"attention": attention_bytes(chain, lambda: layer(case.hidden))}
    held, results = list[Any](), AttentionResults(catches=chain.own_code)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "none": lambda leaf: keep_graph(layer, leaf, case.spec.units, case.weights),
        "selective": lambda leaf: results.keep(lambda: layer(leaf)),
        "elementwise": lambda leaf: keep_graph(layer, leaf, case.spec.units, case.weights, notes=True),
    }

    def alone() -> None:
        held.append(layer(case.hidden))
        held.clear()

    def forward(way: Callable[[Tensor], Tensor]) -> None:
        """Run the layer and keep its input, graph edge and output in ``held``."""
        leaf = case.hidden.detach().requires_grad_(wanted)
        output = way(leaf)
        held[:] = [leaf, get_gradient_edge(output) if output.grad_fn else None, output.detach()]

    def backward() -> None:
        """Run the backward pass, after a forward pass if no graph is kept."""
        if not held:
            forward(layer)
        edge = held[1] or get_gradient_edge(results.reuse(lambda: layer(held[0])))
        held[1:] = []
        results.forget()
        torch.autograd.backward(edge, case.hidden)

    def once(kept: str) -> list[Peak]:
        """Run all parts with ``kept`` as recomputation mode, and return the peak of each part.

        Parts are forward pass, freeing the output, backward pass and freeing the rest."""
        return _steady([partial(forward, ways[kept]), lambda: held.pop(), backward, held.clear], bench.device)

    gradient = size if wanted else 0
    with torch.no_grad():
        (once_more,) = _steady([alone], bench.device)
    weighed["forward full"] = once_more.most - size
    if not chain.blocks[block].needs_backward:
        return weighed
    again = _steady([backward, held.clear], bench.device)[0]
    weighed["backward full"] = again.most - gradient
    weighed["lin"] = _kept_for_weights(chain, case, layer)
    for name, kind in (("none", "graph"), ("selective", "kept"), ("elementwise", "products")):
        if (name == "selective" and not weighed["attention"]) or (kind == "products" and chain.operations is EAGER):
            continue
        forward_peak, _, back, _ = once(name)
        weighed[kind] = forward_peak.after  # counts the input instead of the output, which belongs to the next block
        weighed[f"forward {name}"] = forward_peak.most - forward_peak.after - size
        weighed[f"backward {name}"] = back.most - back.before - gradient
    return weighed


def _kept_for_weights(chain: Chain, case: Case, layer: Callable[[Tensor], Tensor]) -> int:
    """Return the bytes that a layer's backward pass for inputs keeps for the one for weights.

    The layer runs once, forward and backward."""
    deferred, leaf = DeferredProducts(chain.parameters_of(case.spec.units)), case.hidden.detach().requires_grad_()
    with torch.enable_grad():
        output = deferred.around(layer)(leaf)
    torch.autograd.grad(output, leaf, torch.ones_like(output))
    return deferred.bytes


def measure_chunks(bench: Bench, smallest: int) -> dict[str, tuple[float, float, float]]:
    """Measure layers whose rows run in chunks, and return the fitted coefficients of ``BlockMemory.in_chunks``.

    Every kind of layer runs on rows of two lengths with one chunk size, and with a second chunk size. Rows are much
    longer than chunks, so that memory for the whole row affects the peak. The past of the last chunk is as large as any
    that a kernel sees at one time.

    Args:
        smallest: smallest chunk size that the plan considers.
    """
    lines: dict[str, tuple[float, float, float]] = {}
    least = min(smallest, MEASURED_CHUNK)
    most = 2 * least
    for (kind, *_), blocks in bench.kinds().items():
        if kind != "layer":
            continue
        long = PAST_KEYS + 6 * least
        shapes = (long - least, least), (long, least), (long, most)
        weighed = [_weigh_chunks(bench, blocks[0], *shape) for shape in shapes]
        for name, amount in weighed[1].items():
            per_token = (amount - weighed[0][name]) / least
            per_chunk_token = (weighed[2][name] - amount) / (most - least)
            line = amount - per_token * long - per_chunk_token * least, per_chunk_token, per_token
            lines[name] = max(line, lines.get(name, line), key=lambda line: line[0] + line[1] * most + line[2] * long)
    return lines


def _weigh_chunks(bench: Bench, block: int, tokens: int, size: int) -> dict[str, float]:
    """Run a layer on one row of ``tokens`` tokens in chunks of ``size``, and return its bytes by name.

    Kept bytes are the results of attention or the states of mixers. The gradient of the input overwrites the gradient
    of the output."""
    with bench.case(block, (tokens,), in_chunks=True) as case:
        layer, held, hidden_bytes = bench.layer_in_chunks(block, case, size), list[Any](), case.hidden.nbytes
        wanted, weighed = block > bench.chain.spec.first_backward, dict[str, float]()
        gradient = case.hidden.clone()

        def rows(_: str, shape: Sequence[int], dtype: torch.dtype) -> Rows:
            return OnDevice(torch.empty(tuple(shape), dtype=dtype, device=bench.device))

        def forward(kept: KeptAttention | None) -> None:
            """Run the layer in chunks and keep its output, and ``kept``, in ``held``."""
            output = OnDevice(torch.empty_like(case.hidden))
            layer.forward(OnDevice(case.hidden), output, kept)
            held[:] = [output, kept]

        def backward() -> None:
            layer.backward(OnDevice(case.hidden), gradient, wanted=wanted, kept=held[0])

        for name, make in (("full", lambda: None), ("selective", lambda: KeptAttention(rows, tokens))):
            first, left, back, _ = _steady(
                [lambda make=make: forward(make()), lambda: held.pop(0), backward, held.clear], bench.device
            )
            kept = left.after if name == "selective" else 0
            weighed[f"forward {name}"] = first.most - hidden_bytes - kept
            if name == "selective":
                weighed["kept"] = kept
            if bench.chain.blocks[block].needs_backward:
                weighed[f"backward {name}"] = back.most - back.before - (hidden_bytes if wanted else 0)
    return weighed


def _steady(parts: Sequence[Callable[[], object]], device: torch.device) -> list[Peak]:
    """Run ``parts`` one after another and return the peak of memory of each (``peaks``).

    On a GPU the parts run once before, because libraries allocate workspaces on first use and keep them."""
    if device.type == "cuda":
        for part in parts:
            part()
    return peaks(parts, device)


LEAST_CHUNK = 2048
"""Tokens of the smallest chunk that a plan chooses on its own."""


def estimate_memory(chain: Chain, *, dtype: torch.dtype, chunk_tokens: int) -> BlockMemory:
    """Estimate the memory of all blocks from the widths of a layer, as Hugging Face's eager code computes it.

    All numbers are per token. A norm keeps its input in fp32, the result before its weight, and its output. Attention
    keeps queries, keys, values and output. A gated MLP keeps three intermediates, and its backward pass makes three
    gradients before any of them is freed. Logits exist in three copies in fp32 and one in the dtype of the run.

    With chunks these numbers hold for one chunk. Keys and values exist for the whole row, and in the backward pass
    their gradients in fp32.

    Args:
        chunk_tokens: tokens whose logits exist at one time.
    """
    config, size = chain.config.get_text_config(), dtype.itemsize
    boundary = chain.width * size
    wide = chain.width * max(4, size)
    heads = num_heads(config)
    queries = attention_width(config) * size
    keys = key_width(config) * size
    experts = getattr(config, "num_experts_per_tok", None) or 1
    width = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
    inner = (width or 4 * config.hidden_size) * experts * size
    norms, attention = 2 * (wide + 2 * boundary), 2 * queries + 2 * keys
    matrix = config.hidden_size * max(config.hidden_size, inner // size) * size
    logits, head = chunk_tokens * config.vocab_size, config.hidden_size * config.vocab_size * size
    layer = {
        "forward full": (0, 3 * inner + boundary),
        "backward full": (matrix, norms + attention + 6 * inner),
        "forward none": (0, 0),
        "backward none": (matrix, 3 * inner),
        "backward elementwise": (matrix, 4 * inner + boundary),
        "forward selective": (0, 3 * inner + boundary),
        "backward selective": (matrix, norms + attention + 6 * inner),
    }
    summed = 2 * keys // size * max(4, size)
    states = chain.state_bytes / LEAST_CHUNK  # states of one layer, at each chunk border
    in_chunks: dict[str, tuple[float, float, float]] = {"kept": (0, 0, max(queries + 4 * heads, states))}
    for how in ("full", "selective"):
        in_chunks[f"forward {how}"] = 0, 3 * inner + boundary, 2 * keys
        in_chunks[f"backward {how}"] = matrix, norms + attention + 6 * inner, 2 * keys + summed + states - boundary
    return BlockMemory(
        boundary,
        {
            "graph": boundary + norms + attention + 3 * inner,
            "kept": boundary + queries + 4 * heads,
            "products": (chain.operations is not EAGER) * (2 * boundary + attention + 2 * inner),
            "ctx": 2 * queries // max(1, heads) + 32,
            "lin": 4 * boundary + attention + queries + 5 * inner,
        },
        {
            "layer": layer,
            "head": {"backward full": (max(logits * (12 + size), logits * (4 + size) + head), 0)},
            "embedding": {"backward full": (head, 0)},
        },
        **dict(zip(("keys", "key_gradients"), key_bytes(config, dtype), strict=True)),
        in_chunks=in_chunks,
        unpacking=max((unit.packing.passing_bytes for unit in chain.units if unit.packing), default=0),
    )
