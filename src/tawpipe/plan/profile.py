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
from tawpipe.model.chain import Chain
from tawpipe.model.flops import attention_width
from tawpipe.plan.bench import Bench
from tawpipe.plan.memory import estimate_memory, measure_memory
from tawpipe.schedule.footprint import BlockMemory
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
        memory: what a micro-batch needs in them.
        source: in words, for the reader.
    """

    blocks: tuple[BlockCost, ...]
    update_s: float
    memory: BlockMemory
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
    sequence_chunk: int = 0,
    packed: bool = False,
    timed: bool = True,
    tell: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Run one layer of every kind, the embedding and the head on a few micro-batches, the largest of ``tokens``.

    Args:
        chain: of a model on the meta device; it is prepared here and is of no other use afterwards.
        packed: rows hold several documents.
        timed: False for memory alone, which takes less time; all seconds are 0.
        tell: is given what is measured, before it is and while it takes time.
    """
    bench = Bench(chain, device, dtype, chunk_tokens, sequence_chunk)
    memory = measure_memory(bench, tokens=tokens, packed=packed)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    source = f"measured on {where}, {tokens} tokens"
    if not timed:
        return Profile((BlockCost(),) * len(chain.blocks), 0.0, memory, source)
    clock, kinds = _Clock(bench, tell), bench.kinds()
    tell(f"measuring {len(kinds)} kinds of blocks on {where}, {tokens:,} tokens")
    half = max(1, tokens // 2)
    shapes = [(tokens,), (half,), (max(1, tokens // 4),), (max(1, tokens // 8),) * 8]
    sizes = [size_of(shape) for shape in shapes]
    costs: dict[int, BlockCost] = {}
    for blocks in kinds.values():
        timed_shapes = [clock.seconds(blocks[0], shape) for shape in shapes]
        forward, backward = (fit(sizes, [one[i] for one in timed_shapes]) for i in (0, 1))
        costs |= dict.fromkeys(blocks, BlockCost(forward, backward, Seconds(per_pair=forward.per_pair)))
    in_order = tuple(costs[block] for block in range(len(chain.blocks)))
    return Profile(in_order, clock.update_seconds(), memory, source)


def estimate(
    chain: Chain, *, dtype: torch.dtype, flops: float, chunk_tokens: int = 1024, sequence_chunk: int = 0
) -> Profile:
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
    return Profile(
        tuple(blocks),
        UPDATE_BYTES / ESTIMATED_BYTES_PER_S,
        estimate_memory(chain, dtype=dtype, chunk_tokens=chunk_tokens, sequence_chunk=sequence_chunk),
        f"estimated: {EFFICIENCY:.0%} of {flops / 1e12:.3g} TFLOP/s, layers of up to {largest / 1e6:.3g} M parameters",
    )


class _Clock:
    """Times blocks on a bench."""

    def __init__(self, bench: Bench, tell: Callable[[str], None]) -> None:
        self.bench, self.device = bench, bench.device
        self._tell, self._doing = tell, ""
        self._began = self._told = time.perf_counter()

    def seconds(self, block: int, lengths: Sequence[int]) -> tuple[float, float]:
        """Seconds of a forward pass, and of a backward pass with the recomputation; for the head of the loss and its
        gradient in both.
        """
        chain = self.bench.chain
        with self.bench.case(block, lengths) as case:
            spec, batch = case.spec, case.batch.to(self.device)
            self._doing = f"block {block} ({spec.kind}), {sum(lengths):,} tokens"

            def forward(leaf: torch.Tensor) -> torch.Tensor:
                return chain.layer(block, leaf, case.calls) if spec.kind == "layer" else chain.embed(batch)[0]

            def head() -> object:
                return self.bench.head(case)

            def backward() -> None:
                torch.autograd.backward(forward(case.hidden.detach().requires_grad_()), case.hidden)

            is_head = spec.kind == "head"
            trained = any(chain.units[unit].trainable for unit in spec.units)
            forward_s = self._time(head if is_head else lambda: forward(case.hidden), grad=False)
            backward_s = self._time(head if is_head else backward, grad=True) if is_head or trained else 0.0
        return forward_s, backward_s

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
