"""Seconds and bytes of the blocks of a model: measured on a device, or estimated from its peak.

Seconds are fitted to ``fixed + per_token * tokens + per_pair * pairs``, where pairs is the sum over a micro-batch's
documents of the squared length: attention grows with it, everything else with the tokens. Of layers with a window pairs
are those within it. Layers that take documents in turn are called for every length, and take the fixed part each time.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from tawpipe.console import duration, progress
from tawpipe.dealing.balance import LayerKind, LayerTime
from tawpipe.model.chain import Chain
from tawpipe.model.flops import attention_width, key_width, met_elements, windows
from tawpipe.plan.cost import coding
from tawpipe.plan.cost.bench import Bench
from tawpipe.plan.cost.memory import estimate_memory, measure_chunks, measure_memory
from tawpipe.plan.cost.updates import Updates, estimated, measured
from tawpipe.runtime.compute.rows import OnDevice
from tawpipe.runtime.homes.optimizer import OptimizerFactory, adamw
from tawpipe.runtime.memory import give_back
from tawpipe.schedule.sizes.footprint import BlockMemory
from tawpipe.simulate import BlockCost, CodingTimes, MicroBatchSize, Seconds, size_of

EFFICIENCY = 0.5
"""Share of a device's peak that is reached where nothing was measured: what good trainers report for large layers."""
UNPACK_BYTES = 16
"""Bytes that dequantising moves for an element: its code is looked up, multiplied and written."""
ESTIMATED_BYTES_PER_S = 1e12
"""Rate of a device's memory where nothing was measured."""
USUAL = adamw()
"""The optimizer whose updates are timed where nobody has said which it is."""
REPEATS = 3
HEAT_S, ENOUGH_S = 2.0, 0.5
"""Seconds for which a GPU computes before anything is timed, as it runs slower when it is warm; and for how long the
runs of one shape take together. They are issued one after the other, as in a step: the host is ahead of them."""
MOST_RUNS = 1000
LONG_S = 4.0
"""Seconds that the longest row in chunks may take that is run."""
QUIET_S = 2.0
"""Seconds in which nothing is said of what goes on."""


@dataclass(frozen=True)
class Profile:
    """Costs of one model on one kind of device.

    Args:
        blocks: costs of every block.
        update_s: of the optimizer, for one element, on the mean.
        update_of: the same for every unit; empty where they are alike.
        memory: what a micro-batch needs in them.
        source: in words, for the reader.
        in_chunks: costs of every block where rows run in chunks, the fixed part of each of them; empty where that was
            not looked at.
        cuts: rows can be cut into shares for several ranks; False where that was not looked at.
        why_whole: the reason why they cannot be cut, into chunks or shares, if they cannot.
        why_not_shares: the reason why they can be cut into chunks only, if that is so.
        mixers: share of the time of layers with mixers that these take; 0 without any, or where nothing was timed.
        coding: of what travels coded without loss; 0 where that was not looked at.
    """

    blocks: tuple[BlockCost, ...]
    update_s: float
    memory: BlockMemory
    source: str
    in_chunks: tuple[BlockCost, ...] = ()
    cuts: bool = False
    why_whole: str = ""
    why_not_shares: str = ""
    mixers: float = 0.0
    update_of: tuple[float, ...] = ()
    coding: CodingTimes = field(default_factory=CodingTimes)

    @property
    def shares(self) -> bool:
        """True unless something is known against rows that several ranks compute together."""
        return not (self.why_whole or self.why_not_shares)

    @property
    def windows(self) -> tuple[int, ...]:
        """Windows of layers, ascending."""
        return tuple(sorted({block.window for block in self.blocks if block.window}))

    @property
    def work(self) -> LayerTime:
        """Seconds of a document in a step, by which documents are dealt; without the fixed part of micro-batches."""
        kinds: Counter[tuple[float, float, int | None, float]] = Counter()
        for number, block in enumerate(self.blocks):
            passes = [block.forward, block.backward][number == len(self.blocks) - 1 :]  # the head's are one
            calls = sum(cost.fixed for cost in passes if cost.in_turn)
            per_token, per_pair = sum(cost.per_token for cost in passes), sum(cost.per_pair for cost in passes)
            kinds[per_token, per_pair, block.window, calls] += 1
        return LayerTime(tuple(LayerKind(layers, *kind) for kind, layers in kinds.items() if any(kind[:2])))

    def cut(self, chunk: int) -> Profile:
        """The same for micro-batches whose layers compute so many tokens at a time."""

        def whole(each: Seconds) -> Seconds:
            return Seconds(0.0, each.per_token + each.fixed / chunk, each.per_pair)

        first, *layers, last = self.in_chunks
        layers = [replace(layer, forward=whole(layer.forward), backward=whole(layer.backward)) for layer in layers]
        return replace(self, blocks=(first, *layers, last), memory=self.memory.cut(chunk), in_chunks=())


def fit(sizes: Sequence[MicroBatchSize], seconds: Sequence[float], chunks: Sequence[int] = ()) -> Seconds:
    """The non-negative coefficients with the least relative error.

    Args:
        chunks: of every size, in each of which the fixed part is taken; 1 by default.
    """
    counts = chunks or [1] * len(sizes)
    terms = np.array([[count, size.tokens, size.pairs] for count, size in zip(counts, sizes, strict=True)])
    target = np.array(seconds)
    if not target.any():  # a backward pass that there is none of
        return Seconds()
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
    packed: bool = False,
    timed: bool = True,
    optimizer: OptimizerFactory = USUAL,
    row: int = 0,
    chunks: Callable[[Profile], Sequence[int] | None] = lambda _: None,
    layer_tokens: float = math.inf,
    now: Callable[[], float] = time.perf_counter,
) -> Profile:
    """Run one layer of every kind, the embedding and the head on a few micro-batches, the largest of ``tokens``. What
    that takes of a GPU is given back: training computes on another stream, which could not use it.

    Args:
        chain: of a model on the meta device; it is prepared here and is of no other use afterwards.
        packed: rows hold several documents.
        timed: False for memory alone, which takes less time; all seconds are 0.
        optimizer: whose updates are timed.
        row: tokens of the rows that are asked about.
        chunks: is given the profile of whole rows, and says in chunks of which sizes rows should be looked at,
            ascending; none where only shares of rows are asked about, None where rows stay whole.
        layer_tokens: tokens times layers that a device computes in the run, whose time bounds that of measuring.
        now: seconds; those of the process alone where others use its processors.
    """
    try:
        bench = Bench(chain, device, dtype, chunk_tokens)
        memory = measure_memory(bench, tokens=tokens, packed=packed)
        clock = Clock(bench, now, layer_tokens)
        whole = _whole(clock, memory, tokens, optimizer, timed=timed)
        return _with_chunks(whole, clock, chunks, tokens if timed else 0, row)
    finally:
        give_back(device)


def _whole(clock: Clock, memory: BlockMemory, tokens: int, optimizer: OptimizerFactory, *, timed: bool) -> Profile:
    """The profile of whole rows."""
    bench, chain, device = clock.bench, clock.bench.chain, clock.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    source = f"measured on {where}, {tokens} tokens"
    kinds = bench.kinds()
    if not timed:
        return Profile((BlockCost(),) * len(chain.blocks), 0.0, memory, source, why_not_shares=chain.why_not_sets)
    progress.info(f"measuring {len(kinds)} kinds of blocks on {where}, {tokens:,} tokens")
    half, quarter = max(1, tokens // 2), max(1, tokens // 4)
    of_layers = [(tokens,), (half,), (quarter,), _eight(max(1, tokens // 8), uneven=bool(chain.in_turn))]
    costs: dict[int, BlockCost] = {}
    for blocks in kinds.values():
        window, is_layer = bench.window(blocks[0]), chain.blocks[blocks[0]].kind == "layer"
        shapes = of_layers if is_layer else [(tokens,), (quarter,)]
        sizes = [size_of(shape, bench.windows).seen(window) for shape in shapes]
        if not is_layer:  # where nothing grows with the pairs of tokens
            sizes = [replace(size, pairs=0.0) for size in sizes]
        timed_shapes = [clock.seconds(blocks[0], shape) for shape in shapes]
        in_turn = is_layer and bool(chain.in_turn)
        calls = [size.lengths if in_turn else 1 for size in sizes]
        forward, backward = (
            replace(fit(sizes, [pair[i] for pair in timed_shapes], calls), in_turn=in_turn) for i in (0, 1)
        )
        unpack_s = clock.unpack_seconds(blocks[0])
        cost = BlockCost(forward, backward, Seconds(per_pair=forward.per_pair), window, unpack_s)
        costs |= dict.fromkeys(blocks, cost)
    in_order = tuple(costs[block] for block in range(len(chain.blocks)))
    update_s, update_of = clock.updates(optimizer)
    source += f", at {mhz:,} MHz" if (mhz := clock_mhz(device)) else ""
    return Profile(
        in_order,
        update_s,
        memory,
        source,
        update_of=update_of,
        why_not_shares=chain.why_not_sets,
        mixers=max(clock.mixers, default=0.0),
        coding=clock.coding(),
    )


def _eight(length: int, *, uneven: bool) -> tuple[int, ...]:
    """The lengths of eight documents, all different if that is wanted and they are long enough."""
    return tuple(length + (place - 4) * (length > 4) * uneven for place in range(8))


def _with_chunks(
    whole: Profile, clock: Clock, chunks: Callable[[Profile], Sequence[int] | None], tokens: int, row: int
) -> Profile:
    """The profile with whether rows can be cut and what chunks cost, as far as ``measure`` is asked for that.

    Args:
        tokens: as of ``measure``; 0 for memory alone.
    """
    bench, sizes = clock.bench, chunks(whole)
    if sizes is None:
        return whole
    if why := bench.why_whole():
        return replace(whole, why_whole=why)
    whole = replace(whole, cuts=not whole.why_not_shares)
    if not sizes:
        return whole
    blocks = clock.in_chunks(whole, tokens, row, sizes[0]) if tokens else whole.blocks
    memory = replace(whole.memory, in_chunks=measure_chunks(bench, sizes[0]))
    return replace(whole, memory=memory, in_chunks=blocks)


def estimate(
    chain: Chain, *, dtype: torch.dtype, flops: float, chunk_tokens: int = 1024, optimizer: OptimizerFactory = USUAL
) -> Profile:
    """A profile from the device's peak: ``EFFICIENCY`` of it is reached by matrix products and by attention.

    A token is multiplied with every weight of a layer that it meets, of a mixture those of the experts that it is sent
    to, 2 operations each; attention takes 4 for every pair of a query's element and a key before it, half of all pairs.
    Backward takes twice as much, and recomputation once more. In chunks queries, keys and values are projected twice.
    """
    config = chain.config.get_text_config()
    width = attention_width(config)
    rate = flops * EFFICIENCY
    projected = config.hidden_size * (width + 2 * key_width(config))
    blocks, in_chunks = list[BlockCost](), list[BlockCost]()
    seen = windows(config)
    for number, block in enumerate(chain.blocks):
        met, trained = (met_elements(chain, number, trained=only) for only in (False, True))
        per_token = 0.0 if block.kind == "embedding" else 2 * met / rate
        per_pair = 2 * width / rate if block.kind == "layer" else 0.0
        forward = Seconds(0.0, per_token, per_pair)
        passes = 2 + trained / max(1, met)  # frozen weights have no gradients; the head's has its forward pass in it
        backward = Seconds(0.0, passes * per_token, 3 * per_pair)
        window = seen[number - 1] if block.kind == "layer" else None
        packed = sum(chain.units[unit].numel for unit in block.units if chain.units[unit].packing)
        unpack_s = packed * UNPACK_BYTES / ESTIMATED_BYTES_PER_S
        blocks.append(BlockCost(forward, backward, Seconds(per_pair=per_pair), window, unpack_s))
        again = replace(backward, per_token=backward.per_token + 2 * projected / rate)
        in_chunks.append(replace(blocks[-1], backward=again) if block.kind == "layer" else blocks[-1])
    update_s, update_of = estimated(optimizer, chain.units, rate, ESTIMATED_BYTES_PER_S)
    largest = max(sum(chain.units[u].numel for u in block.units) for block in chain.blocks if block.kind == "layer")
    return Profile(
        tuple(blocks),
        update_s,
        estimate_memory(chain, dtype=dtype, chunk_tokens=chunk_tokens),
        f"estimated: {EFFICIENCY:.0%} of {flops / 1e12:.3g} TFLOP/s, layers of up to {largest / 1e6:.3g} M parameters",
        tuple(in_chunks),
        update_of=update_of,
        why_not_shares=chain.why_not_sets,
        coding=coding.estimated(ESTIMATED_BYTES_PER_S),
    )


def _seconds_of(cost: BlockCost, length: int) -> float:
    """Of a block forward and backward, on a row of one document."""
    size = size_of([length], [cost.window] if cost.window else []).seen(cost.window)
    return cost.forward.of(size) + cost.backward.of(size)


def clock_mhz(device: torch.device) -> int:
    """The clock of a GPU's multiprocessors at present; 0 where nothing (``pynvml``) says it."""
    if device.type != "cuda":
        return 0
    try:
        return torch.cuda.clock_rate(device)
    except (ImportError, RuntimeError, AttributeError):
        return 0


def heat(run: Callable[[], object], now: Callable[[], float] = time.perf_counter) -> None:
    """Compute for a while, before anything is timed on a GPU.

    Args:
        run: returns when the device has done it.
        now: seconds.
    """
    begin = now()
    while now() - begin < HEAT_S:
        run()


MEASURING_SHARE = 0.05
"""Share of the time of a run after which measuring for its plan repeats nothing more than once."""


class Clock:
    """Times blocks on a bench.

    Args:
        layer_tokens: of the run, see ``measure``. Once a layer was timed, the time of the run is known about, and what
            is timed after ``MEASURING_SHARE`` of it has passed runs twice instead of ``REPEATS`` + 1 times.
    """

    def __init__(
        self,
        bench: Bench,
        now: Callable[[], float] = time.perf_counter,
        layer_tokens: float = math.inf,
    ) -> None:
        self._layer_tokens, self._run_s = layer_tokens, math.inf
        self.bench, self.device, self._now = bench, bench.device, now
        self._doing, self._is_hot = "", False
        self._began = self._told = time.perf_counter()
        self.mixers: list[float] = []
        """Shares of the time of layers that their mixers take, forward."""

    def seconds(self, block: int, lengths: Sequence[int], *, backward: bool = True) -> tuple[float, float]:
        """Seconds of a forward pass, and of a backward pass with the recomputation, if that is wanted; for the head of
        the loss and its gradient in both.
        """
        chain = self.bench.chain
        with self.bench.case(block, lengths) as case:
            spec, batch = case.spec, case.batch.to(self.device)
            self._doing = f"block {block} ({spec.kind}), {sum(lengths):,} tokens"

            def forward(leaf: torch.Tensor) -> torch.Tensor:
                return chain.layer(block, leaf, case.calls) if spec.kind == "layer" else chain.embed(batch)[0]

            def head() -> object:
                return self.bench.head(case)

            def propagate() -> None:
                torch.autograd.backward(forward(case.hidden.detach().requires_grad_()), case.hidden)

            is_head = spec.kind == "head"
            forward_s = self._time(head if is_head else lambda: forward(case.hidden), grad=False)
            if mixing := chain.mixing[block - 1 : block] if spec.kind == "layer" else ():
                self._time_mixers(chain.layers[block - 1], mixing[0].mixers, lambda: forward(case.hidden))
            trained = backward and (is_head or spec.needs_backward)
            backward_s = self._time(head if is_head else propagate, grad=True) if trained else 0.0
        if spec.kind == "layer":
            self._run_s = self._layer_tokens * (forward_s + backward_s) / sum(lengths)
        return forward_s, backward_s

    def in_chunks(self, whole: Profile, tokens: int, row: int, least: int) -> tuple[BlockCost, ...]:
        """Costs of all blocks where rows run in chunks. Besides short rows in chunks of two sizes, one row is run that
        is as long as takes ``LONG_S``, because attention grows with its square.

        Args:
            tokens: of the longest short row.
            row: of the rows that are asked about.
            least: the smallest chunk that is asked about.
        """
        costs = list(whole.blocks)
        for (kind, *_), blocks in self.bench.kinds().items():
            if kind != "layer":
                continue
            before, long = whole.blocks[blocks[0]], tokens
            while 2 * long <= row and _seconds_of(before, 2 * long) < LONG_S:
                long *= 2
            half, small = max(1, tokens // 2), max(1, min(least, tokens // 4) // 2)
            shapes = [(tokens, 2 * small), (tokens, small), (half, small)]
            shapes += [(long, min(least, long // 4))] if long > tokens else []
            passes = [self._seconds_in_chunks(blocks[0], *shape, once=shape[0] > tokens) for shape in shapes]
            sizes = [size_of([length], self.bench.windows).seen(before.window) for length, _ in shapes]
            counts = [-(-length // size) for length, size in shapes]
            forward, backward = (fit(sizes, [pair[i] for pair in passes], counts) for i in (0, 1))
            for block in blocks:
                attention = Seconds(per_pair=forward.per_pair)
                costs[block] = replace(before, forward=forward, backward=backward, attention=attention)
        return tuple(costs)

    def _seconds_in_chunks(self, block: int, tokens: int, size: int, *, once: bool) -> tuple[float, float]:
        """``seconds`` of a layer on one row in chunks."""
        bench = self.bench
        with bench.case(block, (tokens,), in_chunks=True) as case:
            layer, hidden = bench.layer_in_chunks(block, case, size), OnDevice(case.hidden)
            gradient, output = torch.empty_like(case.hidden), OnDevice(torch.empty_like(case.hidden))
            wanted = block > bench.chain.spec.first_backward
            self._doing = f"block {block} in chunks, {tokens:,} tokens"

            def backward() -> None:
                layer.backward(hidden, gradient.copy_(case.hidden), wanted=wanted)

            forward_s = self._time(lambda: layer.forward(hidden, output), grad=False, once=once)
            trained = bench.chain.blocks[block].needs_backward
            return forward_s, self._time(backward, grad=False, once=once) if trained else 0.0

    def _time(self, run: Callable[[], object], *, grad: bool, once: bool = False) -> float:
        """The median of a few runs after one that does not count; or of one run. On a GPU the mean of many."""
        taken = []
        with torch.set_grad_enabled(grad):
            if self.device.type == "cuda" and not once:
                self._heat(run)
                times = min(MOST_RUNS, max(REPEATS, math.ceil(ENOUGH_S / max(self._together(run, 1), 1e-6))))
                return self._together(run, times)
            for _ in range(1 if once else REPEATS + 1):
                self._wait()
                begin = self._now()
                run()
                self._wait()
                taken.append(self._now() - begin)
                self._say(taken)
                if len(taken) > 1 and time.perf_counter() - self._began > MEASURING_SHARE * self._run_s:
                    break
        return statistics.median(taken[1:] or taken)

    def _time_mixers(self, layer: nn.Module, names: Sequence[str], run: Callable[[], object]) -> None:
        """Note the share of the mixers in one run of their layer."""
        times: list[float] = []

        def note(*_: object) -> None:
            self._wait()
            times.append(self._now())

        mixers = [layer.get_submodule(name) for name in names]
        hooks = [mixer.register_forward_pre_hook(note) for mixer in mixers]
        hooks += [mixer.register_forward_hook(note) for mixer in mixers]
        with torch.no_grad():
            note()
            run()
            note()
        for hook in hooks:
            hook.remove()
        first, *inside, last = times
        if inside and last > first:
            self.mixers.append(
                sum(end - begin for begin, end in zip(inside[::2], inside[1::2], strict=True)) / (last - first)
            )

    def _heat(self, run: Callable[[], object]) -> None:
        """Compute for a while, if this is the first to be timed."""
        if not self._is_hot:
            heat(lambda: self._together(run, 1), self._now)
        self._is_hot = True
        self._together(run, 1)  # what is new to the device comes now

    def _together(self, run: Callable[[], object], times: int) -> float:
        """Seconds of each of some runs that are issued one after the other."""
        self._wait()
        begin = self._now()
        for _ in range(times):
            run()
        self._wait()
        return (self._now() - begin) / times

    def _say(self, taken: Sequence[float]) -> None:
        now = time.perf_counter()
        if now - self._told > QUIET_S:
            self._told = now
            run = f"run {len(taken)} of {REPEATS + 1} took {taken[-1]:.1f} s"
            progress.info(f"measuring for {duration(now - self._began)}: {self._doing}, {run}")

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def unpack_seconds(self, block: int) -> float:
        """Seconds in which the packed units of a block are dequantised; 0 without any."""
        if not self.bench.is_packed(block):
            return 0.0
        self._doing = f"dequantising block {block}"
        return self._time(self.bench.unpack(block), grad=False)

    def updates(self, factory: OptimizerFactory) -> Updates:
        """Seconds of the optimizer for one element, and for one of every unit."""
        self._doing = "the optimizer"
        return measured(factory, self.bench.chain.units, self.device, lambda run: self._time(run, grad=False))

    def coding(self) -> CodingTimes:
        """Seconds of coding without loss, for one element."""
        self._doing = "coding"
        return coding.measured(self.device, lambda run: self._time(run, grad=False))
