"""A rank's computing: blocks forward and backward on micro-batches.

All calls happen on the COMPUTE lane. Boundary activations live here under the names that the schedule gives them and
are dropped when an action frees them; weights and gradients are handed in as buffers.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from tawpipe.errors import RunError, UserError
from tawpipe.model.batch import MicroBatch, tokens_of
from tawpipe.model.chain import Chain
from tawpipe.model.chunked import KeyStore
from tawpipe.model.stubs import LayerCall
from tawpipe.runtime.chunks import KeptAttention, LayerInChunks, spans_of
from tawpipe.runtime.head import loss_in_chunks
from tawpipe.runtime.measures import Measure
from tawpipe.runtime.randomness import BlockRandomness, seed_of
from tawpipe.runtime.recompute import keep_attention, keep_graph
from tawpipe.runtime.rows import OnDevice, Places, Room, Rows
from tawpipe.runtime.sets import Dealt, LayerInSet
from tawpipe.runtime.split import DeferredProducts
from tawpipe.runtime.transport import Transport
from tawpipe.schedule.actions import Action, Lane, Op
from tawpipe.schedule.buffers import (
    KEPT,
    OUTSIDE,
    Buffer,
    Kind,
    block_input,
    context,
    input_gradient,
    key_gradients,
    keys,
    linear,
    loss,
)
from tawpipe.schedule.footprint import TRAVELLING
from tawpipe.schedule.spec import ModelSpec

T = TypeVar("T")
SAVED = (Kind.GRAPH, Kind.ATTENTION)
"""Kinds of what a layer on whole rows keeps for its backward pass instead of its input."""
ROWS = (Kind.INPUT, Kind.OFFLOADED, Kind.RELOADED)
"""Kinds of a block's input."""


@dataclass
class StepInput:
    """The micro-batches of one step, and the numbers that go with them.

    Args:
        micro_batches: this rank's, by their global index, on the CPU.
        scale: every token's loss is multiplied by it in the backward pass; a power of two, so that no dtype rounds it.
        seed, step: what random numbers derive from; ``seed`` None for an evaluation.
        digest: a small number that is the same on all ranks if they were given the same.
        measure: looks at an evaluation's head.
        place: of this rank among those that compute these micro-batches together.
        shared: micro-batches below this number are computed together, the others alone; None for all together.
        counted: those whose tokens this rank counts, where several ranks compute one in turn; None for all.
        kept: by micro-batch, blocks that keep all that their backward pass would compute again.
    """

    micro_batches: Mapping[int, MicroBatch]
    scale: float
    seed: int | None
    step: int
    digest: int = 0
    measure: Measure | None = None
    place: int = 0
    shared: int | None = None
    counted: Collection[int] | None = None
    kept: Mapping[int, Collection[int]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Labels that count, of micro-batches that no other rank counts."""
        return sum(batch.tokens for m, batch in self.micro_batches.items() if self._counts(m))

    @property
    def learns(self) -> bool:
        """True if this rank's micro-batches have a label that counts, whoever counts it."""
        return any(batch.tokens for batch in self.micro_batches.values())

    def _counts(self, m: int) -> bool:
        return m in self.counted if self.counted is not None else not (self.place and self.is_shared(m))

    def is_shared(self, m: int) -> bool:
        """True if a micro-batch is computed by a set of ranks, where there are any."""
        return self.shared is None or m < self.shared


@dataclass(frozen=True)
class _Graph:
    """A layer's input with the graph of its output: what a layer keeps, also in the place of the input."""

    leaf: Tensor
    edge: GradientEdge
    deferred: DeferredProducts | None
    """Where its backward pass may be in two parts."""


@dataclass
class _OnDevice:
    """A micro-batch on the device: its tensors, those of the tokens that this rank computes, and the calls of its
    layers.
    """

    batch: MicroBatch
    own: MicroBatch
    dealt: Dealt | None
    calls: tuple[LayerCall, ...]
    embedded: GradientEdge | None
    """The beginning of the graph of the embedding's output, if its backward pass needs no weights; the output itself is
    not kept alive by it.
    """


class Compute:
    """Runs FORWARD and BACKWARD actions.

    Args:
        chunk_tokens: tokens of a micro-batch for which logits exist at one time.
        sequence_chunk: tokens of a row that a layer computes at one time; 0 for all.
        sequence_ranks: that compute a row together.
        compiled: layers are compiled.
        split_backward: the backward passes of layers may be in two parts (BACKWARD_INPUT); not of compiled ones, and
            not in chunks.
        offload_dir: folder of files for what waits outside of the device chunk by chunk; the host's memory if empty.
    """

    def __init__(
        self,
        chain: Chain,
        spec: ModelSpec,
        *,
        chunk_tokens: int,
        sequence_chunk: int = 0,
        sequence_ranks: int = 1,
        compiled: bool = False,
        split_backward: bool = False,
        offload_dir: str = "",
    ) -> None:
        self.chain, self.spec, self.chunk_tokens = chain, spec, chunk_tokens
        self.sequence_chunk, self.sequence_ranks = sequence_chunk, sequence_ranks
        self.split_backward = split_backward
        self._random = BlockRandomness(chain.device, compiled=compiled)
        self._repeated: set[tuple[int, bool]] = set()
        """Blocks that have been seen to give the same twice."""
        self._held: dict[Buffer, Any] = {}
        self._bound: dict[int, Tensor] = {}
        """Unit -> what its parameters are views of."""
        self._places: dict[tuple[Buffer, torch.dtype], Room] = {}
        """Places in which inputs wait in the host's memory, and into which they come back; for the whole run."""
        self.places = Places(chain.device, offload_dir)
        self._under_way: defaultdict[Lane, deque[torch.Event]] = defaultdict(deque)
        """The ends of the latest transfers of activations, on CUDA."""
        self.stream: Any = None
        """The one that computes, on CUDA: that of the executor's lane, known before anything is received."""

    def forward(self, action: Action, buffers: Mapping[Buffer, Tensor], given: StepInput) -> None:
        """FORWARD: no graph, unless the action writes one, and except the embedding's where its backward pass can use
        it without weights.
        """
        block, m = self.spec.blocks[action.block], action.micro_batch
        self._bind(action, buffers)
        before = self._sums_when_new(action) if block.kind != "head" else None
        if block.kind == "embedding":
            keep = block.needs_backward and not block.backward_reads_weights and given.seed is not None
            whole, dealt = self._dealt(given, m)
            batch = whole.to(self.chain.device)  # in the lane's stream
            if (self.sequence_chunk or dealt) and not self.chain.along_tokens:
                self.chain.find_tokens()
            with torch.set_grad_enabled(keep), saved_tensors_hooks(self._check_saved, lambda tensor: tensor):
                hidden, calls = self._drawing(action, given, lambda: self.chain.embed(batch))
            self._check_new(action, given, before, hidden, lambda: self.chain.embed(batch)[0])
            own = batch.tokens_at(dealt.own) if dealt else batch
            with torch.set_grad_enabled(keep):
                hidden = tokens_of(hidden, dealt.own) if dealt else hidden
            edge = get_gradient_edge(hidden) if keep else None
            if context(m) in action.writes:
                self._held[context(m)] = _OnDevice(batch, own, dealt, calls, edge)
            self._keep_rows(next(one for one in action.writes if one.kind in ROWS), hidden.detach())
        else:
            held = self._held[context(m)]
            if block.kind == "layer" and (self.sequence_chunk or held.dealt):
                self._layer_forward_in_chunks(action, held, given, before)
            elif block.kind == "layer":
                hidden = self._input(action)
                output = self._layer_forward(action, hidden, held.calls, given)
                again = partial(self.chain.layer, action.block, hidden, held.calls)
                self._check_new(action, given, before, output, again)
                self._held[block_input(m, action.block + 1)] = output
            else:
                hidden = self._input(action)
                self._check_head(action, given, hidden)
                whole, dealt = self._dealt(given, m)
                on_host = whole.tokens_at(dealt.own) if dealt else whole
                head = given.measure.head(self.chain, on_host, m) if given.measure else None
                with torch.no_grad(), self._random.seeded(self._seed(action, given)):
                    self._held[loss(m)] = loss_in_chunks(
                        self.chain, hidden, held.own, None, given.scale, self.chunk_tokens, head
                    )
        self._release(action)

    def _layer_forward(self, action: Action, hidden: Tensor, calls: tuple[LayerCall, ...], given: StepInput) -> Tensor:
        """A layer's output; what the action writes besides is what its backward pass starts from."""
        b = action.block
        layer = partial(self.chain.layer, action.block, calls=calls)
        kept = next((buffer for buffer in action.writes if buffer.kind in SAVED), None)
        if kept is None and not self._keeps(action, given):
            with torch.no_grad():
                return self._drawing(action, given, lambda: layer(hidden))
        leaf = hidden.detach().requires_grad_(b > self.spec.first_backward)
        deferred = self._deferred(b) if self.split_backward else None
        layer = deferred.around(layer) if deferred else layer
        if kept is None or kept.kind is Kind.GRAPH:
            units = self.spec.blocks[b].units
            output = self._drawing(action, given, lambda: keep_graph(layer, leaf, units, self._bound))
            if kept is None:  # the input stays for the backward pass anyway; now with what it gave
                self._held[block_input(action.micro_batch, b)] = _Graph(leaf, get_gradient_edge(output), deferred)
                return output.detach()
        else:
            again = partial(self._random.again, self._state(action), self._seed(action, given))
            output = self._drawing(action, given, lambda: keep_attention(layer, leaf, again=again))
        # Not the output: its memory belongs to the next block's input, and goes with that.
        self._held[kept] = _Graph(leaf, get_gradient_edge(output), deferred)
        return output.detach()

    def _keeps(self, action: Action, given: StepInput) -> bool:
        """True if a layer that would compute all again keeps it for this micro-batch."""
        stays = block_input(action.micro_batch, action.block) not in action.frees and given.seed is not None
        return stays and action.block in given.kept.get(action.micro_batch, ())

    def _layer_forward_in_chunks(
        self, action: Action, held: _OnDevice, given: StepInput, before: list[Tensor] | None
    ) -> None:
        """Like ``_layer_forward`` and ``_check_new``, where neither input nor output need be on the device."""
        source, layer = self._rows_of(self._input(action)), self._in_chunks(action, held, given)
        if isinstance(layer, LayerInSet):
            layer.gather(self._held[keys(action.micro_batch, action.block)])
        target = next(one for one in action.writes if one.kind in ROWS)
        kept = None
        if buffer := next((one for one in action.writes if one.kind in KEPT), None):
            self._held[buffer] = kept = KeptAttention(partial(self._make_rows, buffer), source.shape[1])
        made = self._make_rows(target, "", source.shape, source.dtype)
        self._held[target] = made.tensor if isinstance(made, OnDevice) else made
        layer.forward(source, made, kept)
        if before is not None:
            again = layer.outputs(source)
            spans = spans_of(source.shape[1], layer.size)
            for first, (_, second) in zip(made.read(spans), again, strict=True):
                self._compare(action, first, second)
            self._expect_unchanged(action, before)

    def _keep_rows(self, target: Buffer, hidden: Tensor) -> None:
        """Hold an activation where its buffer says."""
        if target.kind is not Kind.OFFLOADED:
            self._held[target] = hidden
            return
        self._held[target] = rows = self.places.of(target, hidden.shape, hidden.dtype)
        for span in spans_of(hidden.shape[1], self.sequence_chunk):
            rows.write(span, hidden[:, span])
        rows.settle()

    def _make_rows(self, target: Buffer, part: str, shape: Sequence[int], dtype: torch.dtype) -> Rows:
        if target.kind in OUTSIDE:
            return self.places.of(target, shape, dtype, part)
        return OnDevice(torch.empty(tuple(shape), dtype=dtype, device=self.chain.device))

    def _rows_of(self, held: Tensor | Rows) -> Rows:
        return OnDevice(held) if isinstance(held, Tensor) else held

    def _input(self, action: Action) -> Any:
        """The input of a block: a tensor, or rows that are elsewhere."""
        return self._held[next(one for one in action.reads if one.kind in ROWS)]

    def _in_chunks(self, action: Action, held: _OnDevice, given: StepInput) -> LayerInChunks:
        state, seed, dealt = self._state(action), self._seed(action, given), held.dealt
        ranks, place = (dealt.ranks, dealt.place) if dealt else (1, 0)

        def draw(number: int, run: Callable[[], Tensor]) -> Tensor:
            return self._random.run(state, seed_of(seed, number * ranks + place + 1), run)

        if dealt is None:
            return LayerInChunks(self.chain, action.block, held.calls, self.sequence_chunk, draw)
        size, store = self.sequence_chunk or dealt.most, KeyStore(1, sum(dealt.lengths))
        return LayerInSet(self.chain, action.block, held.calls, size, draw, dealt, store)

    def _in_set(self, action: Action, given: StepInput) -> LayerInSet:
        layer = self._in_chunks(action, self._held[context(action.micro_batch)], given)
        assert isinstance(layer, LayerInSet)
        return layer

    def _dealt(self, given: StepInput, m: int) -> tuple[MicroBatch, Dealt | None]:
        """A micro-batch, and which of its tokens this rank computes, where it is not alone."""
        batch = given.micro_batches[m]
        if self.sequence_ranks == 1 or not given.is_shared(m):
            return batch, None
        row = batch.in_one_row()
        return row, Dealt(row.lengths, self.sequence_ranks, given.place)

    def _shape(self, given: StepInput, m: int) -> tuple[int, ...]:
        """Rows and tokens of a micro-batch that this rank computes."""
        batch, dealt = self._dealt(given, m)
        return (1, sum(end - begin for begin, end in dealt.own)) if dealt else tuple(batch.input_ids.shape)

    def prepare(self, action: Action, given: StepInput) -> None:
        """PREPARE: what layers are called with besides their input."""
        batch = given.micro_batches[action.micro_batch].to(self.chain.device)
        # The embedding side runs for it, and draws what it draws where the embedding is.
        calls = self._drawing(replace(action, block=0), given, lambda: self.chain.calls(batch))
        self._held[context(action.micro_batch)] = _OnDevice(batch, batch, None, calls, None)

    def travel(self, action: Action, transport: Transport, given: StepInput) -> None:
        """An EXCHANGE of activations, in the lane of a direction between two ranks."""
        on_cuda, tensors = self.chain.device.type == "cuda", dict[Buffer, Tensor]()
        under_way = self._under_way[action.lane]
        if len(under_way) == TRAVELLING:
            under_way.popleft().synchronize()
        for one in action.transfers:
            (m, block), width = one.buffer.at, self.chain.width
            shape, dtype = (*self._shape(given, m), width), self.chain.dtype
            if one.send:
                held = self._held[one.buffer]
                if tuple(held.shape) != shape or held.dtype != dtype:
                    name = f"{self.chain.block_name(block - 1)} of {self.chain.name}"
                    expected = (
                        f"hidden states {shape} in {dtype} where a stage ends; or a strategy whose weights travel"
                    )
                    raise UserError(name, f"{tuple(held.shape)} in {held.dtype}", expected)
                tensors[one.buffer] = held.contiguous()
            else:
                tensors[one.buffer] = torch.empty(shape, dtype=dtype, device=self.chain.device)
        transport.exchange(action, tensors)
        for one in action.transfers:
            if not one.send:
                self._held[one.buffer] = tensors[one.buffer]
            held = self._held.pop(one.buffer) if one.send else tensors[one.buffer]
            if on_cuda:  # or its memory would be given away before the other lane has read it
                held.record_stream(torch.cuda.current_stream() if one.send else self.stream)
        if on_cuda:
            under_way.append(torch.cuda.current_stream().record_event())

    def keys(self, action: Action, buffers: Mapping[Buffer, Tensor], given: StepInput) -> None:
        """KEYS: this rank's keys and values of a layer."""
        self._bind(action, buffers)
        self._held[action.writes[0]] = self._in_set(action, given).keys(self._rows_of(self._input(action)))
        self._release(action)

    def keys_together(self, action: Action, transport: Transport) -> None:
        """A COLLECTIVE of keys and values, or of their gradients. What of these is not this rank's goes with the sums,
        on the lane that made it and has waited for this one: dropped here it would be of no use to anybody until then,
        for as many layers as the host is ahead.
        """
        (buffer,) = action.reads
        if buffer.kind is Kind.KEYS:
            place = self._held[context(action.micro_batch)].dealt.place
            transport.together(action, [(one[place].view(-1), one.view(-1)) for one in self._held[buffer]])
            return
        transport.together(action, [(one.view(-1), own.view(-1)) for one, own in self._held[buffer]])

    def keys_backward(self, action: Action, buffers: Mapping[Buffer, Tensor], given: StepInput) -> None:
        """KEYS_BACKWARD: propagate the gradients of this rank's keys and values to the weights and to the input's."""
        m, b = action.micro_batch, action.block
        self._bind(action, buffers)
        units = self.spec.trainable_units(b)
        for unit, buffer in zip(units, action.gradients, strict=True):
            self.chain.collect(unit, buffers[buffer], accumulate=True, in_chunks=True)
        gradient = self._held[input_gradient(m, b)] if input_gradient(m, b) in action.writes else None
        source, sums = self._rows_of(self._input(action)), [own for _, own in self._held[key_gradients(m, b)]]
        self._in_set(action, given).keys_backward(source, sums, gradient)
        for unit in units:
            self.chain.finish_collect(unit)
        self._release(action)

    def backward(self, action: Action, buffers: Mapping[Buffer, Tensor], given: StepInput) -> None:
        """BACKWARD: propagate through the graph that was kept, or through one computed again; gradients of weights into
        their buffers. BACKWARD_INPUT, of a layer on whole rows: but for those of its products, and what these are
        computed from is held.
        """
        block, m, b = self.spec.blocks[action.block], action.micro_batch, action.block
        self._bind(action, buffers)
        units = self.spec.trainable_units(b)
        held: _OnDevice = self._held[context(m)]
        cut = block.kind == "layer" and (self.sequence_chunk > 0 or held.dealt is not None)
        in_chunks = cut or (block.kind == "head" and held.own.input_ids.numel() > self.chunk_tokens)
        for unit, buffer in zip(units, action.gradients, strict=True):
            self.chain.collect(unit, buffers[buffer], accumulate=buffer in action.reads, in_chunks=in_chunks)
        wanted = input_gradient(m, b) in action.writes
        gradient = None
        if block.kind == "head":
            hidden = self._input(action)
            gradient = torch.empty_like(hidden) if wanted else None
            self._check_head(action, given, hidden)
            with torch.enable_grad(), self._random.seeded(self._seed(action, given)):
                self._held[loss(m)] = loss_in_chunks(
                    self.chain, hidden, held.own, gradient, given.scale, self.chunk_tokens
                )
        elif cut:
            gradient = self._held[input_gradient(m, b + 1)]  # replaced in place, chunk by chunk
            kept = next((self._held[one] for one in action.reads if one.kind in KEPT), None)
            source, layer = self._rows_of(self._input(action)), self._in_chunks(action, held, given)
            if isinstance(layer, LayerInSet):
                layer.gather(self._held[keys(m, b)])
            layer.backward(source, gradient, wanted=wanted, kept=kept)
            if isinstance(layer, LayerInSet):
                sums = layer.key_gradients()
                self._held[key_gradients(m, b)] = [(one, torch.empty_like(one[0])) for one in sums]
        else:
            arriving = self._held[input_gradient(m, b + 1)]
            with torch.enable_grad():
                hidden, deferred = None, None
                kept = next((self._held[one] for one in action.reads if one.kind in (*SAVED, *ROWS)), None)
                if isinstance(kept, _Graph):
                    hidden, graph, deferred = kept.leaf, kept.edge, kept.deferred
                elif block.kind == "layer":
                    hidden = self._input(action).detach().requires_grad_(wanted)
                    layer = partial(self.chain.layer, b, calls=held.calls)
                    if action.op is Op.BACKWARD_INPUT:
                        deferred = self._deferred(b)
                        layer = deferred.around(layer)
                    graph = get_gradient_edge(self._drawing(action, given, partial(layer, hidden)))
                elif held.embedded is not None:
                    graph, held.embedded = held.embedded, None
                else:
                    output = self._drawing(action, given, lambda: self.chain.embed(held.batch))[0]
                    graph = get_gradient_edge(tokens_of(output, held.dealt.own) if held.dealt else output)
                torch.autograd.backward(graph, arriving)
            if action.op is Op.BACKWARD_INPUT:
                self._held[linear(m, b)] = deferred
            elif deferred is not None:
                deferred.run(self.chain.gradient_of)
            if hidden is not None:
                gradient = hidden.grad
        if wanted:
            self._held[input_gradient(m, b)] = gradient
        for unit in units:
            self.chain.finish_collect(unit)
        self._release(action)

    def backward_weight(self, action: Action, buffers: Mapping[Buffer, Tensor]) -> None:
        """BACKWARD_WEIGHT: the gradients of a layer's weights that BACKWARD_INPUT has left out. It reads no weights."""
        units = self.spec.trainable_units(action.block)
        for unit, buffer in zip(units, action.gradients, strict=True):
            self.chain.collect(unit, buffers[buffer], accumulate=buffer in action.reads)
        self._held[linear(action.micro_batch, action.block)].run(self.chain.gradient_of)
        for unit in units:
            self.chain.finish_collect(unit)
        self._free(action)

    def _deferred(self, block: int) -> DeferredProducts:
        return DeferredProducts(self.chain.parameters_of(self.spec.blocks[block].units))

    def _sums_when_new(self, action: Action) -> list[Tensor] | None:
        """Sums over the bits of a block's weights, if it runs for the first time."""
        if self._state(action) in self._repeated:
            return None
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        flats = [self._bound[unit] for unit in self.spec.blocks[action.block].units]
        return [flat.view(integers[flat.itemsize]).sum() for flat in flats]

    def _check_head(self, action: Action, given: StepInput, hidden: Tensor) -> None:
        """``Chain.check_head`` when the head is new, with random numbers that nothing else draws."""
        state = self._state(action)
        if state not in self._repeated:
            self._repeated.add(state)
            with self._random.seeded(seed_of(self._seed(action, given), 1)):
                self.chain.check_head(hidden)

    @torch.no_grad()
    def _check_new(
        self,
        action: Action,
        given: StepInput,
        before: list[Tensor] | None,
        first: Tensor,
        forward: Callable[[], Tensor],
    ) -> None:
        """Run a block once more when it is new: what it gives may depend on nothing but what it is given.

        Args:
            before: the block's ``_sums_when_new``.
            first: what it has given.
        """
        if before is not None:
            self._compare(action, first, self._drawing(action, given, forward))
            self._expect_unchanged(action, before)

    def _expect_unchanged(self, action: Action, before: list[Tensor]) -> None:
        if any(old != new for old, new in zip(before, self._sums_when_new(action) or (), strict=True)):
            expected = "its forward pass changes weights in place, which only the optimizer may do"
            raise UserError("model", self._name(action), expected)
        self._repeated.add(self._state(action))

    def _compare(self, action: Action, first: Tensor, second: Tensor) -> None:
        # Some kernels of GPUs add in any order.
        limit = torch.finfo(first.dtype).eps if first.is_cuda else 0.0
        reach = limit * float(first.abs().nan_to_num().max())
        if not torch.allclose(first, second, rtol=limit, atol=reach, equal_nan=True):
            raise UserError(
                "model",
                self._name(action),
                "run twice on the same input it gives two results, so its gradients would belong to neither: it keeps "
                "state from call to call, or draws random numbers elsewhere than from torch's default generators",
            )

    def _name(self, action: Action) -> str:
        return f"{self.chain.block_name(action.block)} of {self.chain.name}"

    def offload(self, action: Action) -> None:
        """OFFLOAD: copy an activation into pinned memory of the host. A later action on COMPUTE, which waits for this
        one, drops the device's copy: its memory goes back to the stream that made it.
        """
        self._copy(action, to_host=True)

    def reload(self, action: Action) -> None:
        """RELOAD: bring it back."""
        self._copy(action, to_host=False)

    def _copy(self, action: Action, *, to_host: bool) -> None:
        source, target = self._held[action.reads[0]], action.writes[0]
        if target.kind is Kind.INPUT:  # back to where any input is
            place = torch.empty(source.shape, dtype=source.dtype, device=self.chain.device)
        else:
            place = self._place(target, source.shape, source.dtype, to_host=to_host)
        self._held[target] = place.copy_(source, non_blocking=True)
        if self.chain.device.type == "cuda" and action.frees:
            (source if to_host else place).record_stream(torch.cuda.current_stream() if to_host else self.stream)
        self._free(action)

    def _place(self, target: Buffer, shape: torch.Size, dtype: torch.dtype, *, to_host: bool) -> Tensor:
        return self._room(target, dtype, to_host=to_host).of(shape)

    def _room(self, target: Buffer, dtype: torch.dtype, *, to_host: bool) -> Room:
        key = target, dtype
        if key not in self._places:
            pinned = to_host and self.chain.device.type == "cuda"
            self._places[key] = Room(dtype, "cpu" if to_host else self.chain.device, pinned=pinned)
        return self._places[key]

    def make_places(self, program: Iterable[Action], given: StepInput, dtype: torch.dtype, tokens: int = 0) -> None:
        """Allocate the places of inputs that wait in the host's memory, before a step: to pin memory halts the thread
        that issues all lanes, until what it has issued is over. A model whose hidden states are not [rows, S, hidden
        size] in ``dtype`` gets its places when they are first needed.

        Args:
            tokens: of a micro-batch at most, where steps are not alike; 0 where they are.
        """
        width = self.chain.config.get_text_config().hidden_size
        shapes = {m: (1, tokens, width) if tokens else (*self._shape(given, m), width) for m in given.micro_batches}
        for action in program:
            if action.op in (Op.OFFLOAD, Op.RELOAD):
                room = self._room(action.writes[0], dtype, to_host=action.op is Op.OFFLOAD)
                room.reserve(shapes[action.micro_batch])
            for buffer in action.writes:
                if buffer.kind is Kind.OFFLOADED and action.op is Op.FORWARD:
                    shape = shapes[action.micro_batch]
                    self.places.reserve(buffer, shape, dtype, spans_of(shape[1], self.sequence_chunk))

    def losses(self, action: Action) -> list[Tensor]:
        """The losses that NORM reads, on another lane than that which made them; they are dropped here."""
        losses = [self._held.pop(buffer) for buffer in action.frees if buffer.kind is Kind.LOSS]
        if self.chain.device.type == "cuda":
            for one in losses:  # or its memory would be given away before that lane has read it
                one.record_stream(torch.cuda.current_stream())
        return losses

    def _bind(self, action: Action, buffers: Mapping[Buffer, Tensor]) -> None:
        if action.weights:
            for unit, buffer in zip(self.spec.blocks[action.block].units, action.weights, strict=True):
                self._bound[unit] = self.chain.bind(unit, buffers[buffer])

    def _release(self, action: Action) -> None:
        """End a computation: whatever reads a weight outside of its visit finds NaN, and what is not needed goes."""
        if action.weights:
            for unit in self.spec.blocks[action.block].units:
                self.chain.release(unit)
        self._free(action)

    def _check_saved(self, saved: Tensor) -> Tensor:
        """Refuse a graph of the embedding side that holds weights: its backward pass comes when these have gone."""
        place = saved.untyped_storage().data_ptr()
        if any(place == flat.untyped_storage().data_ptr() for flat in self._bound.values()):
            raise RunError("the embedding side keeps weights for its backward pass, which discovery has not seen")
        return saved

    def _free(self, action: Action) -> None:
        for buffer in action.frees:
            if buffer.kind is not Kind.TURN:
                del self._held[buffer]

    def _drawing(self, action: Action, given: StepInput, forward: Callable[[], T]) -> T:
        """``forward()`` with the random numbers of this block and micro-batch."""
        return self._random.run(self._state(action), self._seed(action, given), forward)

    def _state(self, action: Action) -> tuple[int, bool]:
        return action.block, self.chain.model.training

    def _seed(self, action: Action, given: StepInput) -> int:
        """Random numbers of a block are the same wherever and whenever it computes this micro-batch."""
        return seed_of(given.seed or 0, given.step, action.micro_batch, action.block)
