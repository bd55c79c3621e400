"""Seconds and bytes of the blocks of a model: measured on a device, or estimated from its peak rate.

Seconds are fitted to ``fixed + per_token * tokens + per_pair * pairs``. Here ``pairs`` is the sum over a micro-batch's
documents of the squared length. Attention grows with it, everything else grows with the tokens. In layers with a window
only pairs within the window count. Layers that process documents in turn are called once for each distinct length, and
take the fixed time for each call."""

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
from tawpipe.model.flops import active_elements, attention_width, key_width, windows
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
"""Assumed share of a device's peak rate where nothing was measured: what good trainers report for large layers."""
FLASH_FACTOR = 1.65
"""Assumed time of flash attention 2 on Hopper and Blackwell, relative to cuDNN's attention, forward and backward. A
step of TRL on a row of 1,048,576 tokens took 606 s with the one and 373 s with the other, about 15 s of them for
everything else, by its documentation."""
UNPACK_BYTES = 16
"""Bytes that dequantising moves per element: its code is looked up, multiplied and written."""
ESTIMATED_BYTES_PER_S = 1e12
"""Rate of a device's memory that is assumed where nothing was measured."""
USUAL = adamw()
"""Optimizer whose updates are timed by default."""
REPEATS = 3
HEAT_S, ENOUGH_S = 2.0, 0.5
"""``HEAT_S``: seconds for which a GPU computes before the first measurement, because it is slower when warm.
``ENOUGH_S``: seconds that all runs of one shape take together. They are issued without waiting, as in a step, so that
the host stays ahead of the GPU."""
MOST_RUNS = 1000
LONG_S = 4.0
"""Longest time, in seconds, of a row in chunks that is run."""
QUIET_S = 2.0
"""Seconds between progress lines."""


@dataclass(frozen=True)
class Profile:
    """Costs of one model on one kind of device.

    Args:
        blocks: costs of every block.
        update_s: mean seconds of the optimizer for one element.
        update_of: seconds for one element of every unit; empty if all are equal.
        memory: memory of a micro-batch in the blocks.
        source: description of how the profile was made, for the reader.
        in_chunks: costs of every block where rows run in chunks, with the fixed part taken per chunk; empty if not
            examined.
        cuts: True if rows can be split between several ranks; False if that was not examined.
        why_whole: reason why rows cannot be cut, into chunks or between ranks; ``""`` if they can.
        why_not_shares: reason why rows can be cut into chunks but not split between ranks; ``""`` if they can.
        mixers: share of the time of layers with mixers that the mixers take; 0 without mixers or measurement.
        coding: seconds of lossless coding; 0 if not examined.
        flash_factor: time of attention in rows that are cut, whose kernel is flash attention, relative to whole rows.
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
    flash_factor: float = 1.0

    @property
    def shares(self) -> bool:
        """True if rows may be split between ranks; also if that was not examined."""
        return not (self.why_whole or self.why_not_shares)

    @property
    def windows(self) -> tuple[int, ...]:
        """Attention windows of the layers, ascending."""
        return tuple(sorted({block.window for block in self.blocks if block.window}))

    @property
    def work(self) -> LayerTime:
        """Seconds of a document in all layers, by which documents are assigned to devices.

        Forward and backward passes are included. Contains no fixed time per micro-batch."""
        kinds: Counter[tuple[float, float, int | None, float]] = Counter()
        for number, block in enumerate(self.blocks):
            passes = [block.forward, block.backward][number == len(self.blocks) - 1 :]  # the head's are one
            calls = sum(cost.fixed for cost in passes if cost.in_turn)
            per_token, per_pair = sum(cost.per_token for cost in passes), sum(cost.per_pair for cost in passes)
            kinds[per_token, per_pair, block.window, calls] += 1
        return LayerTime(tuple(LayerKind(layers, *kind) for kind, layers in kinds.items() if any(kind[:2])))

    def cut(self, chunk: int) -> Profile:
        """Return the profile for rows whose layers compute ``chunk`` tokens at a time. Nothing is measured.

        The costs in ``in_chunks`` replace those of whole rows; their fixed part per chunk becomes a time per token."""

        def whole(each: Seconds) -> Seconds:
            return Seconds(0.0, each.per_token + each.fixed / chunk, each.per_pair)

        first, *layers, last = self.in_chunks
        layers = [replace(layer, forward=whole(layer.forward), backward=whole(layer.backward)) for layer in layers]
        blocks = first, *layers, last
        return replace(self, blocks=blocks, memory=self.memory.cut(chunk), in_chunks=(), flash_factor=1.0)

    def with_flash(self, factor: float, *, estimated: bool) -> Profile:
        """Return the profile with its ``flash_factor``: the one that was measured in chunks, else ``factor``.

        Args:
            factor: assumed ``flash_factor``.
            estimated: True to multiply the attention of ``in_chunks`` by it, where nothing was measured.
        """
        cut = tuple(cost.with_attention(factor) for cost in self.in_chunks) if estimated else self.in_chunks
        pairs = ((part.forward.per_pair, cost.forward.per_pair) for part, cost in zip(cut, self.blocks, strict=False))
        ratio = next((part / whole for part, whole in pairs if part and whole), factor)
        words = f"; in rows that are cut, flash attention 2 takes {factor:g} times as long" * (estimated and factor > 1)
        return replace(self, in_chunks=cut, flash_factor=ratio, source=self.source + words)

    def split(self) -> Profile:
        """Return the profile for rows that several ranks compute, whose attention takes ``flash_factor`` as long."""
        blocks = tuple(cost.with_attention(self.flash_factor) for cost in self.blocks)
        return replace(self, blocks=blocks, flash_factor=1.0)


def fit(sizes: Sequence[MicroBatchSize], seconds: Sequence[float], chunks: Sequence[int] = ()) -> Seconds:
    """Fit seconds to non-negative coefficients of fixed, per-token and per-pair time; return these.

    The relative error is the least. All are 0 if the seconds are.

    Args:
        sizes: size of every measured micro-batch.
        seconds: measured seconds of each.
        chunks: number of times that each takes the fixed part; 1 by default.
    """
    counts = chunks or [1] * len(sizes)
    terms = np.array([[count, size.tokens, size.pairs] for count, size in zip(counts, sizes, strict=True)])
    target = np.array(seconds)
    if not target.any():  # this block has no backward pass
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
    """Run the embedding, the head and one layer of every kind on a few micro-batches, and return their costs.

    The GPU memory that this takes is released afterwards, because training computes on another stream, which could not
    use it.

    Args:
        chain: chain of a model on the meta device. It is prepared here, and cannot be used for anything else
            afterwards.
        dtype: dtype in which blocks compute.
        device: device on which they run.
        tokens: tokens of the largest micro-batch.
        chunk_tokens: tokens whose logits exist at one time.
        packed: True if rows contain several documents.
        timed: False to measure memory only, which is quicker; then all seconds are 0.
        optimizer: optimizer whose updates are timed.
        row: tokens of the rows for which the plan is made.
        chunks: function that gets the profile of whole rows. It returns the chunk sizes to examine, ascending; an empty
            sequence if only splitting rows between ranks is of interest; None if rows stay whole.
        layer_tokens: tokens times layers that a device computes in the run. This limits the time for measuring.
        now: clock in seconds; CPU time of the process if other processes share its cores.
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
    """Time one block of every kind, the optimizer and lossless coding, and return the profile of whole rows.

    Args:
        clock: timer of the blocks.
        memory: measured memory, for the profile.
        tokens: tokens of the largest micro-batch.
        optimizer: optimizer whose updates are timed.
        timed: False to run nothing; then all seconds are 0.
    """
    bench, chain, device = clock.bench, clock.bench.chain, clock.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
    source = f"measured on {where}, {tokens} tokens"
    kinds = bench.kinds()
    if not timed:
        return Profile((BlockCost(),) * len(chain.blocks), 0.0, memory, source, why_not_shares=chain.why_not_cp_groups)
    progress.info(f"measuring {len(kinds)} kinds of blocks on {where}, {tokens:,} tokens")
    half, quarter = max(1, tokens // 2), max(1, tokens // 4)
    of_layers = [(tokens,), (half,), (quarter,), _eight(max(1, tokens // 8), uneven=bool(chain.in_turn))]
    costs: dict[int, BlockCost] = {}
    for blocks in kinds.values():
        window, is_layer = bench.window(blocks[0]), chain.blocks[blocks[0]].kind == "layer"
        shapes = of_layers if is_layer else [(tokens,), (quarter,)]
        sizes = [size_of(shape, bench.windows).seen(window) for shape in shapes]
        if not is_layer:  # nothing here grows with the pairs
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
        why_not_shares=chain.why_not_cp_groups,
        mixers=max(clock.mixers, default=0.0),
        coding=clock.coding(),
    )


def _eight(length: int, *, uneven: bool) -> tuple[int, ...]:
    """Return the lengths of eight documents of about ``length`` tokens.

    If ``uneven`` is True and ``length`` is above 4, all lengths differ."""
    return tuple(length + (place - 4) * (length > 4) * uneven for place in range(8))


def _with_chunks(
    whole: Profile, clock: Clock, chunks: Callable[[Profile], Sequence[int] | None], tokens: int, row: int
) -> Profile:
    """Measure rows that run in chunks, as far as ``chunks`` asks for, and return the profile with the results.

    Rows are also tested for whether they can be cut. Returns ``whole`` itself if ``chunks`` returns None.

    Args:
        whole: profile of whole rows.
        clock: timer of the blocks.
        chunks: as in ``measure``.
        tokens: as in ``measure``; 0 to measure memory only.
        row: tokens of the rows for which the plan is made.
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
    """Estimate a profile from a device's peak rate, of which matrix products and attention reach ``EFFICIENCY``.

    A token is multiplied with every weight that it meets, at 2 operations each; in a mixture of experts these are the
    weights of the experts to which it is sent. Attention takes 4 operations for every pair of a query's element and an
    earlier key, which is half of all pairs. The backward pass takes twice as much, and recomputation adds a forward
    pass. With chunks, queries, keys and values are projected twice.

    Args:
        flops: peak operations per second of the device.
        chunk_tokens: tokens whose logits exist at one time.
    """
    config = chain.config.get_text_config()
    width = attention_width(config)
    rate = flops * EFFICIENCY
    projected = config.hidden_size * (width + 2 * key_width(config))
    blocks, in_chunks = list[BlockCost](), list[BlockCost]()
    seen = windows(config)
    for number, block in enumerate(chain.blocks):
        elements, trained = (active_elements(chain, number, trained=only) for only in (False, True))
        per_token = 0.0 if block.kind == "embedding" else 2 * elements / rate
        per_pair = 2 * width / rate if block.kind == "layer" else 0.0
        forward = Seconds(0.0, per_token, per_pair)
        passes = 2 + trained / max(
            1, elements
        )  # frozen weights have no gradients; the head's passes include its forward
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
        why_not_shares=chain.why_not_cp_groups,
        coding=coding.estimated(ESTIMATED_BYTES_PER_S),
    )


def _seconds_of(cost: BlockCost, length: int) -> float:
    """Return the seconds of a block's forward and backward pass together, on one document of ``length`` tokens."""
    size = size_of([length], [cost.window] if cost.window else []).seen(cost.window)
    return cost.forward.of(size) + cost.backward.of(size)


def clock_mhz(device: torch.device) -> int:
    """Return the current clock of a GPU's multiprocessors in MHz; 0 if it cannot be read (without ``pynvml``)."""
    if device.type != "cuda":
        return 0
    try:
        return torch.cuda.clock_rate(device)
    except (ImportError, RuntimeError, AttributeError):
        return 0


def heat(run: Callable[[], object], now: Callable[[], float] = time.perf_counter) -> None:
    """Run ``run`` repeatedly for ``HEAT_S`` seconds, to warm a GPU up before measurements.

    Args:
        run: must return only when the device has finished.
        now: clock in seconds.
    """
    begin = now()
    while now() - begin < HEAT_S:
        run()


MEASURING_SHARE = 0.05
"""Share of the run's time. When measuring for its plan has taken longer, nothing is repeated more than once."""


class Clock:
    """Timer of blocks on a bench.

    Args:
        now: clock in seconds.
        layer_tokens: see ``measure``. After the first layer the time of the run is known approximately. Once
            ``MEASURING_SHARE`` of it has passed, a shape runs twice instead of ``REPEATS`` + 1 times.
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
        """Share of the forward time of each measured layer that its mixers take."""

    def seconds(self, block: int, lengths: Sequence[int], *, backward: bool = True) -> tuple[float, float]:
        """Time a block on documents of ``lengths``: return the seconds of a forward and of a backward pass.

        The backward pass includes full recomputation; its seconds are 0 without ``backward``, or if the block has none.
        For the head, the first number is the time of the loss, and the second the time of the loss with its gradient.
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
        """Time layers whose rows run in chunks, and return the costs of all blocks.

        Other blocks than layers keep the costs in ``whole``. Short rows run in chunks of two sizes. One longer row runs
        as well, because attention grows with its square; its time is about ``LONG_S``.

        Args:
            whole: profile of whole rows.
            tokens: tokens of the longest short row.
            row: tokens of the rows for which the plan is made.
            least: smallest chunk size that the plan considers.
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
        """Time a layer on one row that runs in chunks: return the seconds of forward and backward pass.

        They are for the whole row, summed over its chunks. The second number is 0 if the layer has no backward pass.

        Args:
            block: index of the layer's block.
            tokens: tokens of the row.
            size: tokens of a chunk.
            once: True to time a single run without warm-up, for long rows; False for the median of several runs.
        """
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
        """Run a function several times and return its median seconds; on a GPU the mean of many runs.

        Args:
            run: function to time. It runs once more before, for warm-up.
            grad: True to enable gradients.
            once: True to time a single run without warm-up.
        """
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
        """Run a layer once, and append to ``mixers`` the share of the time that its submodules ``names`` take."""
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
        """Warm the device up before the first measurement, then run ``run`` once."""
        if not self._is_hot:
            heat(lambda: self._together(run, 1), self._now)
        self._is_hot = True
        self._together(run, 1)  # absorbs costs of the first run, such as loading kernels

    def _together(self, run: Callable[[], object], times: int) -> float:
        """Run ``run`` ``times`` times without waiting in between, wait for the device, and return the mean seconds."""
        self._wait()
        begin = self._now()
        for _ in range(times):
            run()
        self._wait()
        return (self._now() - begin) / times

    def _say(self, taken: Sequence[float]) -> None:
        """Print a progress line with the last measured time, at most every ``QUIET_S`` seconds."""
        now = time.perf_counter()
        if now - self._told > QUIET_S:
            self._told = now
            run = f"run {len(taken)} of {REPEATS + 1} took {taken[-1]:.1f} s"
            progress.info(f"measuring for {duration(now - self._began)}: {self._doing}, {run}")

    def _wait(self) -> None:
        """Wait until the GPU has finished; return at once on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def unpack_seconds(self, block: int) -> float:
        """Time the dequantisation of a block's packed units, and return its seconds; 0 if it has none."""
        if not self.bench.is_packed(block):
            return 0.0
        self._doing = f"dequantising block {block}"
        return self._time(self.bench.unpack(block), grad=False)

    def updates(self, factory: OptimizerFactory) -> Updates:
        """Time the optimizer: return the seconds for one element, as mean and for every unit."""
        self._doing = "the optimizer"
        return measured(factory, self.bench.chain.units, self.device, lambda run: self._time(run, grad=False))

    def coding(self) -> CodingTimes:
        """Time lossless coding on this device, and return its seconds for one element."""
        self._doing = "coding"
        return coding.measured(self.device, lambda run: self._time(run, grad=False))
