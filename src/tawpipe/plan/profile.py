"""Seconds and bytes of the blocks of a model: measured on a device, or estimated from its peak.

Seconds are fitted to ``fixed + per_token * tokens + per_pair * pairs``, where pairs is the sum over a micro-batch's
documents of the squared length: attention grows with it, everything else with the tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tawpipe.console import duration
from tawpipe.model.batch import MicroBatch
from tawpipe.model.chain import Chain
from tawpipe.model.flops import attention_width
from tawpipe.model.loss import logits_bytes
from tawpipe.runtime.compute import loss_in_chunks
from tawpipe.runtime.recompute import kept_per_token
from tawpipe.simulate import BlockCost, MicroBatchSize, Seconds

EFFICIENCY = 0.5
"""Share of a device's peak that is reached where nothing was measured: what good trainers report for large layers."""
UPDATE_BYTES = 28
"""Bytes that AdamW moves for an fp32 element: gradient, weight and two states read, three and a copy written."""
ESTIMATED_BYTES_PER_S = 1e12
"""Rate of a device's memory where nothing was measured."""
REPEATS = 3
QUIET_S = 2.0
"""Seconds in which nothing is said of what goes on."""


@dataclass(frozen=True)
class Profile:
    """Costs of one model on one kind of device.

    Args:
        blocks: costs of every block.
        update_s: of the optimizer, for one element.
        kept: bytes for every token that a layer keeps, by kind of activation (``Schedule.peak_activations``).
        boundary: bytes of a boundary activation for every token.
        working: bytes for every token that computing a block takes besides, at most.
        fixed_working: bytes that it takes whatever the tokens (logits of a chunk).
        source: in words, for the reader.
    """

    blocks: tuple[BlockCost, ...]
    update_s: float
    kept: dict[str, int]
    boundary: int
    working: int
    fixed_working: int
    source: str


def size_of(lengths: Sequence[int]) -> MicroBatchSize:
    """The size of a micro-batch with documents of these lengths.

    >>> size_of([3, 4])
    MicroBatchSize(tokens=7, pairs=25)
    """
    return MicroBatchSize(sum(lengths), sum(length * length for length in lengths))


def fit(sizes: Sequence[MicroBatchSize], seconds: Sequence[float]) -> Seconds:
    """The non-negative coefficients with the least relative error."""
    terms = np.array([[1.0, size.tokens, size.pairs] for size in sizes])
    target = np.array(seconds)
    scaled, ones = terms / target[:, None], np.ones(len(target))
    chosen = [0, 1, 2]
    while chosen:
        coefficients, *_ = np.linalg.lstsq(scaled[:, chosen], ones, rcond=None)
        if (coefficients >= 0).all():
            values = dict(zip(chosen, map(float, coefficients), strict=True))
            return Seconds(values.get(0, 0.0), values.get(1, 0.0), values.get(2, 0.0))
        chosen = [term for term, value in zip(chosen, coefficients, strict=True) if value >= 0]
    return Seconds(statistics.mean(seconds))


def measure(
    chain: Chain,
    *,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    chunk_tokens: int = 1024,
    tell: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Run one layer of every kind, the embedding and the head on a few micro-batches, the largest of ``tokens``.

    Args:
        chain: of a model on the meta device; it is prepared here and is of no other use afterwards.
        tell: is given what is measured, before it is and while it takes time.
    """
    chain.prepare(device, dtype)
    bench = _Bench(chain, device, dtype, chunk_tokens, tell)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    blocks = range(len(chain.blocks))
    tell(f"measuring {len(set(map(bench.kind, blocks)))} kinds of blocks on {where}, {tokens:,} tokens")
    half = max(1, tokens // 2)
    shapes = [(tokens,), (half,), (max(1, tokens // 4),), (max(1, tokens // 8),) * 8]
    sizes = [size_of(shape) for shape in shapes]
    kinds: dict[tuple, int] = {}
    costs: dict[int, BlockCost] = {}
    for block in blocks:
        kind = bench.kind(block)
        if kind not in kinds:
            kinds[kind] = block
            timed = [bench.seconds(block, shape) for shape in shapes]
            forward, backward = (fit(sizes, [one[i] for one in timed]) for i in (0, 1))
            costs[block] = BlockCost(forward, backward, Seconds(per_pair=forward.per_pair))
        costs[block] = costs[kinds[kind]]
    kept = kept_per_token(chain)
    return Profile(
        tuple(costs[block] for block in blocks),
        bench.update_seconds(),
        kept,
        _hidden(chain) * dtype.itemsize,
        kept["graph"],
        chunk_tokens * logits_bytes(chain.config.get_text_config().vocab_size, dtype),
        f"measured on {where}, {tokens} tokens",
    )


def estimate(chain: Chain, *, dtype: torch.dtype, flops: float, chunk_tokens: int = 1024) -> Profile:
    """A profile from the device's peak: ``EFFICIENCY`` of it is reached by matrix products and by attention.

    A token is multiplied with every weight of a layer, 2 operations each; attention takes 4 for every pair of a query's
    element and a key before it, half of all pairs. Backward takes twice as much, and recomputation once more.
    """
    config = chain.config.get_text_config()
    width = attention_width(config)
    rate = flops * EFFICIENCY
    blocks = []
    for block in chain.blocks:
        numel = sum(chain.units[unit].numel for unit in block.units)
        per_token = 0.0 if block.kind == "embedding" else 2 * numel / rate
        per_pair = 2 * width / rate if block.kind == "layer" else 0.0
        forward = Seconds(0.0, per_token, per_pair)
        backward = Seconds(0.0, 3 * per_token, 3 * per_pair)  # the head's has its forward pass in it
        blocks.append(BlockCost(forward, backward, Seconds(per_pair=per_pair)))
    largest = max(sum(chain.units[u].numel for u in block.units) for block in chain.blocks if block.kind == "layer")
    graph = int(_hidden(chain) * 34 * dtype.itemsize / 2)
    return Profile(
        tuple(blocks),
        UPDATE_BYTES / ESTIMATED_BYTES_PER_S,
        {"graph": graph, "kept": 3 * _hidden(chain) * dtype.itemsize},
        _hidden(chain) * dtype.itemsize,
        graph,
        chunk_tokens * logits_bytes(config.vocab_size, dtype),
        f"estimated: {EFFICIENCY:.0%} of {flops / 1e12:.3g} TFLOP/s, layers of up to {largest / 1e6:.3g} M parameters",
    )


def _hidden(chain: Chain) -> int:
    return chain.config.get_text_config().hidden_size


class _Bench:
    """Runs single blocks with random weights."""

    def __init__(
        self,
        chain: Chain,
        device: torch.device,
        dtype: torch.dtype,
        chunk_tokens: int,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.chain, self.device, self.dtype, self.chunk = chain, device, dtype, chunk_tokens
        self._tell, self._doing = tell, ""
        self._began = self._told = time.perf_counter()

    def kind(self, block: int) -> tuple:
        """Blocks of one kind cost the same."""
        spec = self.chain.blocks[block]
        shapes = tuple(slot.shape for unit in spec.units for slot in self.chain.units[unit].slots)
        types = getattr(self.chain.config.get_text_config(), "layer_types", None)
        return spec.kind, shapes, types[block - 1] if types and spec.kind == "layer" else None, spec.needs_backward

    def seconds(self, block: int, lengths: Sequence[int]) -> tuple[float, float]:
        """Seconds of a forward pass, and of a backward pass with the recomputation; for the head of the loss and its
        gradient in both.
        """
        spec, chain = self.chain.blocks[block], self.chain
        self._doing = f"block {block} ({spec.kind}), {sum(lengths):,} tokens"
        trainable = [unit for unit in spec.units if chain.units[unit].trainable]
        flats = {u: torch.randn(chain.units[u].numel, dtype=self.dtype, device=self.device) * 0.02 for u in spec.units}
        sums = {u: torch.zeros(chain.units[u].numel, dtype=torch.float32, device=self.device) for u in trainable}
        for unit, flat in flats.items():
            chain.bind(unit, flat)
        batch = self._batch(lengths)
        hidden = torch.randn(1, sum(lengths), _hidden(chain), dtype=self.dtype, device=self.device)
        context = self._context(batch) if spec.kind == "layer" else ()

        def forward(leaf: torch.Tensor) -> torch.Tensor:
            return chain.layer(block, leaf, context) if spec.kind == "layer" else chain.embed(batch)[0]

        def head() -> torch.Tensor:
            gradient = torch.empty_like(hidden) if torch.is_grad_enabled() else None
            return loss_in_chunks(chain, hidden, batch, gradient, 1.0, self.chunk)

        def backward() -> None:
            torch.autograd.backward(forward(hidden.detach().requires_grad_()), hidden)

        is_head = spec.kind == "head"
        forward_s = self._time(head if is_head else lambda: forward(hidden), grad=False)
        backward_s = self._backward(head if is_head else backward, trainable, sums) if is_head or trainable else 0.0
        for unit in flats:
            chain.release(unit)
        return forward_s, backward_s

    def _batch(self, lengths: Sequence[int]) -> MicroBatch:
        vocabulary = self.chain.config.get_text_config().vocab_size
        ids = torch.randint(0, vocabulary, (1, sum(lengths)))
        positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
        return MicroBatch.from_rows(ids, ids, positions).to(self.device)

    def _context(self, batch: MicroBatch):
        """The arguments that layers are called with; the embedding's weights play no part in it."""
        units = self.chain.blocks[0].units
        for unit in units:
            self.chain.bind(unit, torch.zeros(self.chain.units[unit].numel, dtype=self.dtype, device=self.device))
        with torch.no_grad():
            context = self.chain.embed(batch)[1]
        for unit in units:
            self.chain.release(unit)
        return context

    def _backward(self, run: Callable[[], object], trainable: Sequence[int], sums: dict[int, torch.Tensor]) -> float:
        def once() -> None:
            for unit in trainable:
                self.chain.collect(unit, sums[unit], accumulate=True)
            run()
            for unit in trainable:
                self.chain.finish_collect(unit)

        return self._time(once, grad=True)

    def _time(self, run: Callable[[], object], *, grad: bool) -> float:
        """The median of a few runs after one that does not count."""
        taken = []
        with torch.set_grad_enabled(grad):
            for _ in range(REPEATS + 1):
                self._wait()
                begin = time.perf_counter()
                run()
                self._wait()
                taken.append(time.perf_counter() - begin)
                self._say(taken)
        return statistics.median(taken[1:])

    def _say(self, taken: Sequence[float]) -> None:
        now = time.perf_counter()
        if now - self._told > QUIET_S:
            self._told = now
            run = f"run {len(taken)} of {REPEATS + 1} took {taken[-1]:.1f} s"
            self._tell(f"measuring for {duration(now - self._began)}: {self._doing}, {run}")

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def update_seconds(self, elements: int = 4_000_000) -> float:
        """Seconds of AdamW for one element."""
        value = torch.nn.Parameter(torch.zeros(elements, device=self.device))
        value.grad = torch.ones_like(value)
        self._doing = "the optimizer"
        optimizer = torch.optim.AdamW([value], fused=True)
        return self._time(lambda: optimizer.step(), grad=False) / elements
