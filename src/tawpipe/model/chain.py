"""A causal LM run block by block, so that each block needs only its own weights, and only for its visit.

It knows nothing of processes, transfers or schedules. All calls of one chain happen on one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tawpipe.errors import UserError
from tawpipe.model.attention import attention
from tawpipe.model.attention.attention import PackedMask
from tawpipe.model.attention.indexers import spare_indexers
from tawpipe.model.batch import MicroBatch
from tawpipe.model.binding import UnitBinding, refuse_emptied, refuse_use
from tawpipe.model.bits.quantized import NONE, check_form, matrices_of
from tawpipe.model.buffers import materialize_buffers
from tawpipe.model.discovery.discovery import Discovery, discover, embedding_width
from tawpipe.model.discovery.first_call import ValuesBefore, first_call
from tawpipe.model.kernels import Documents
from tawpipe.model.loss import Loss, check_loss, sum_of_loss, token_loss_sum
from tawpipe.model.mixers.in_turn import embed_in_turn
from tawpipe.model.mixers.mixers import RowCall, make_mixer
from tawpipe.model.refuse import ApartError, refuse_adapters, refuse_unsupported, unsupported, why_apart
from tawpipe.model.shapes import share_of_experts
from tawpipe.model.stubs import (
    Feed,
    Feeder,
    LayerCall,
    LayersReached,
    Recorder,
    Tape,
    modules_above,
    remember_angles,
    taken_by,
    view_with_layers,
)
from tawpipe.model.units import Unit, build_blocks, build_units
from tawpipe.schedule.spec import BlockSpec, ModelSpec

logger = logging.getLogger(__name__)
PROBED_LENGTHS = 5, 7
"""Of the rows for which the calls of layers are recorded, to see which arguments run along the tokens."""


def inner_model(given: nn.Module) -> Any:
    """The transformers model in a ``peft`` model, or the model itself."""
    return given.get_base_model() if hasattr(given, "get_base_model") else given  # type: ignore[operator]


def _row_of(length: int, device: torch.device) -> MicroBatch:
    """A row of the first token."""
    ids = torch.zeros(1, length, dtype=torch.long, device="cpu")
    return MicroBatch.from_rows(ids, ids).to(device)


class Chain(UnitBinding):
    """A Hugging Face causal LM as embedding, layers and head.

    Args:
        model: a decoder-only ``AutoModelForCausalLM``, usually on the meta device, or a ``peft`` model around one. Its
            attention implementation is set to ours; nothing else of it changes before ``prepare``.
        loss: instead of the cross-entropy over the vocabulary; see ``Loss``.

    Raises:
        UserError: for a model that cannot be run this way; it says why.
    """

    def __init__(self, model: nn.Module, *, loss: Loss | None = None) -> None:
        self._views: list[nn.Module] = []
        self.given = model
        """The model that was given: the ``peft`` model, if it is one."""
        refuse_emptied(model)
        refuse_adapters(model)
        self.model = inner_model(model)
        refuse_unsupported(self.model)
        attention.register()
        self.own_attention: str = self.model.config._attn_implementation
        """The attention implementation that the model used before."""
        self.in_turn = why_apart(self.model)
        """The reason why documents are computed one after the other; empty where a row is computed as a whole."""

        # What it computes, and how it was given.
        self.config = self.model.config
        self.loss = loss
        """What was given instead of the cross-entropy; None without."""
        self._loss = loss or token_loss_sum

        # Layers are computed again anyway; what a layer would compute again by itself would draw other random numbers.
        for module in self.model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False
        given = {module: module.training for module in self.model.modules()}
        self._in_evaluation = [m for m, training in given.items() if self.model.training and not training]
        """Modules that the caller has put into evaluation mode for good, such as frozen statistics."""

        # What is found by following it once.
        self.set_training(True)
        try:
            discovery = self._discover()
        finally:
            for module, training in given.items():
                module.training = training
        self.layers, self.path, self.positions = discovery.layers, discovery.path, discovery.positions
        self.mixing = discovery.mixing
        """For every layer what mixes tokens in it, if some carry a state along a row; else empty."""
        for layer, mixing in zip(self.layers, self.mixing, strict=False):
            for mixer in mixing.mixers:
                make_mixer(layer.get_submodule(mixer))
        self._checked_mixers: set[object] = set()
        if self.in_turn:
            spare_indexers(self.model)
        self.width = discovery.width
        """Elements of the hidden states of a token."""
        self.why_not_staged = discovery.calls_need_weights
        """The reason why layers cannot be called where the embedding's weights are not (``calls``); mostly empty."""
        self._writes_input: dict[tuple[int, bool], bool] = {}
        """(block, training) -> True if the layer changes its hidden states in place; known once it has run."""

        # Its units and blocks.
        count = len(self.layers)
        names = ("embedding", *(f"layer.{index}" for index in range(count)), "head")
        super().__init__(build_units(self.model, discovery.uses, names))
        self.blocks: tuple[BlockSpec, ...] = build_blocks(
            self.units, len(names), embedding_backward_reads_weights=discovery.embedding_backward_reads_weights
        )
        self._block_names = names
        self.along_tokens: tuple[tuple[int | None, ...], ...] = ()
        """For every layer, of each leaf of its arguments the dimension of a row's tokens, or None where it has none;
        empty until ``find_tokens`` has looked.
        """

        # The model on either side of its layers.
        self._tape, self._feed = Tape(discovery.returns), Feed(discovery.returns)
        recorders = [Recorder(layer, index, count, self._tape) for index, layer in enumerate(self.layers)]
        feeders = [Feeder(layer, self._feed) for layer in self.layers]
        self._embedding_side, embedding_views = view_with_layers(self.model, self.path, recorders)
        self._head_side, head_views = view_with_layers(self.model, self.path, feeders)
        remember_angles(head_views)
        self._views = [*embedding_views, *head_views]

    def _discover(self) -> Discovery:
        """Follow the model with documents that share a row; if it mixes them, with documents alone in theirs, by our
        attention; and if there is anything else about its masks, by its own.
        """
        ways = [(False, attention.NAME), (True, attention.NAME), (True, "own")]
        if not self.model._can_set_attn_implementation():
            ways = ways[2:]
        states = bool(self.in_turn)
        for alone, implementation in ways:
            of_model = self.own_attention if self.own_attention in ("sdpa", "eager") else "eager"
            self._set_attention(of_model if implementation == "own" else implementation)
            try:
                discovery = discover(self.model, alone=alone, states=states)
            except ApartError as error:
                known = self.in_turn and not (states and not alone)
                self.in_turn = self.in_turn if known else error.expected
            else:
                self.in_turn = self.in_turn if alone else ""
                return discovery
        raise AssertionError("a model's own attention needs no mask of ours")

    def _set_attention(self, implementation: str) -> None:
        if self.model._can_set_attn_implementation():
            self.model.set_attn_implementation(implementation)
            for module in self.model.modules():  # a layer that was copied has a copy of the config, too
                if isinstance(getattr(module, "config", None), type(self.model.config)):
                    module.config._attn_implementation = implementation

    def quantise(self, form: str, dtype: torch.dtype) -> None:
        """Let frozen matrices of layers live and travel in 4 or 8 bits; before ``spec`` is asked for.

        Args:
            form: ``nf4``, ``int8``, or ``none`` for nothing of the kind.
            dtype: that ``prepare`` will be given.

        Raises:
            UserError: no such form, or nothing that could have it.
        """
        check_form(form)
        if form == NONE:
            return
        matrices, layers = matrices_of(self.model), range(1, len(self.blocks) - 1)

        def has_some(unit: Unit) -> bool:
            of_frozen_layers = not unit.trainable and all(block in layers for block in unit.blocks)
            return of_frozen_layers and any(slot.name in matrices for slot in unit.slots)

        if not any(map(has_some, self.units)):
            expected = "none, where no matrix of a layer is frozen: train an adapter (LoRA), or freeze layers"
            raise UserError("quantize", form, expected)
        self.units = tuple(unit.packed(matrices, form, dtype) if has_some(unit) else unit for unit in self.units)

    def prepare(self, device: torch.device | str, dtype: torch.dtype) -> None:
        """Take the values out of the model: every parameter becomes a placeholder, every buffer moves to ``device``.

        Buffers that are still on meta (rotary frequencies) are computed.
        """
        device = torch.device(device)
        if self._loss is not token_loss_sum:
            check_loss(self._loss, self.config.get_text_config().vocab_size, device)
        if dtype == torch.float64 and self.model._can_set_experts_implementation():
            logger.info("%s: grouped matrix products have no fp64, so the experts run one by one", self.name)
            self.model.set_experts_implementation("eager")
        materialize_buffers(self.model, device)
        self.empty(self.model, device, dtype)

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """A context in which the chain may be quantised, prepared and run, to be measured. Afterwards it is as it was:
        its parameters and buffers on the meta device, and nothing known of what ran.
        """
        sides = self.model, self._embedding_side, self._head_side
        modules = {id(module): module for side in sides for module in side.modules()}
        attributes = [vars(owner) for owner in (self, *modules.values())]
        inside = [value for mapping in attributes for value in mapping.values() if isinstance(value, dict)]
        before = [(mapping, dict(mapping)) for mapping in (*attributes, *inside)]
        try:
            yield
        finally:
            for mapping, content in before:
                mapping.clear()
                mapping.update(content)

    def hand_over(self) -> None:
        """Let the model that was given say from now on where its weights are, instead of working without them."""
        refuse_use(self.given, *modules_above(self.model, self.path))

    @property
    def why_not_chunks(self) -> str:
        """The reason why rows cannot be computed in chunks; empty if they can."""
        return self.in_turn or next((mixing.why_not_chunks for mixing in self.mixing if mixing.why_not_chunks), "")

    @property
    def why_not_sets(self) -> str:
        """The reason why ranks cannot compute a row together; empty if they can."""
        instead = "" if self.why_not_chunks else "; chunks instead (schedule.sequence_chunk) let long rows fit"
        return self.in_turn or (f"its layers carry a state along a row{instead}" if self.mixing else "")

    @property
    def state_bytes(self) -> int:
        """The most that mixers of a layer hand on for a row, from one chunk to the next; 0 without any."""
        return max((mixing.state_bytes for mixing in self.mixing), default=0)

    @property
    def own_code(self) -> bool:
        """True if attention is the model's own: eager code of older models holds scores of S x S then."""
        return self.config.get_text_config()._attn_implementation != attention.NAME

    def compile_layers(self) -> None:
        """Compile the layers with ``torch.compile`` when they first run; those of one kind share the code.

        Attention stays outside: which kernel it takes depends on the documents of a micro-batch.
        """
        for layer in self.layers:
            layer.compile()

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(self.model).__name__

    def block_name(self, block: int) -> str:
        """A block in words, for messages."""
        return self._block_names[block].replace(".", " ")

    @property
    def spec(self) -> ModelSpec:
        """The sizes of the model: all that builders of schedules see of it."""
        share = share_of_experts(self.config.get_text_config())
        met = [round(unit.met(share)) for unit in self.units]
        units = (replace(unit.spec, met=some * (some < unit.numel)) for unit, some in zip(self.units, met, strict=True))
        return ModelSpec(self.blocks, tuple(units))

    def set_training(self, mode: bool) -> None:
        """Switch dropout and the like on or off."""
        self.model.train(mode)
        for module in self._views:
            module.training = mode
        for module in self._in_evaluation:
            module.training = False

    def embed(self, batch: MicroBatch) -> tuple[Tensor, tuple[LayerCall, ...]]:
        """Block 0: hidden states [b, S, H], and the layers' calls with all that they need besides for this micro-batch:
        position embeddings and masks.

        Under ``torch.enable_grad`` the hidden states carry the graph of the embedding side.
        """
        return embed_in_turn(batch, self._embed) if self.in_turn else self._embed(batch)

    def _embed(self, batch: MicroBatch) -> tuple[Tensor, tuple[LayerCall, ...]]:
        ids = batch.input_ids.clone()  # the model may change it; the recomputation needs it again
        documents = batch.documents(ids.device)
        # Saying that nothing is padded keeps the model from looking for packed documents itself, which would wait for
        # the device.
        unpadded = torch.ones_like(ids)
        self._tape.rewind()
        try:
            with attention.packing(documents):
                arguments = {"input_ids": ids, "attention_mask": unpadded, "position_ids": self._position_ids(batch)}
                self._call(self._embedding_side, arguments)
            raise AssertionError("the model went past its layers")
        except LayersReached:
            hidden = self._tape.hidden
            assert hidden is not None
            calls = tuple(self._tape.calls)
            if self.mixing:
                calls = tuple(RowCall(call.args, call.kwargs, documents, self._checked_mixers) for call in calls)
            return hidden, calls
        finally:
            self._tape.rewind()

    @torch.no_grad()
    def calls(self, batch: MicroBatch) -> tuple[LayerCall, ...]:
        """The layers' calls that ``embed`` gives, where the embedding's weights are not: no value of them is in what
        layers are given besides the hidden states, which come from elsewhere (``why_not_staged`` is empty).

        The parameters of the embedding side are placeholders; what is computed of them goes, and would be NaN.
        """
        return self.embed(batch)[1]

    def _call(self, view: nn.Module, arguments: dict[str, Any]) -> Any:
        return view(**taken_by(view, {**arguments, "use_cache": False}, alone=bool(self.in_turn)))

    def _position_ids(self, batch: MicroBatch) -> Tensor:
        """The positions as the model would count them in every document by itself, unless the caller has given them."""
        first, positions = self.positions.first, batch.position_ids.clone()
        if batch.positions_given or not first:
            return positions
        # RoBERTa and its kin count the tokens that are no padding, which has the position first - 1.
        counted = batch.input_ids.ne(first - 1).long()
        total = counted.cumsum(1)
        before = (total - counted).masked_fill(positions != 0, 0).cummax(1).values
        return (total - before) * counted + first - 1

    def find_tokens(self) -> None:
        """Find ``along_tokens``, by recording the layers' calls for two lengths; the embedding's weights are bound.

        Raises:
            UserError: an argument that has the tokens of a row in two dimensions, or depends on their number otherwise.
        """
        if self.why_not_chunks:
            raise unsupported(self.name, f"rows cannot be cut, because {self.why_not_chunks}")
        along_tokens = []
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            short, long = (self.embed(_row_of(length, self.device))[1] for length in PROBED_LENGTHS)
        for index, calls in enumerate(zip(short, long, strict=True)):
            leaves = [tree_leaves((call.args, call.kwargs)) for call in calls]
            along_tokens.append(tuple(self._tokens_of(index, *pair) for pair in zip(*leaves, strict=True)))
        self.along_tokens = tuple(along_tokens)

    def _tokens_of(self, index: int, short: Any, long: Any) -> int | None:
        """The dimension of the tokens of an argument of a layer, which was recorded for two lengths."""
        where = f"an argument of layer {index} of {self.name}"
        if isinstance(short, Tensor) and isinstance(long, Tensor) and short.ndim == long.ndim:
            changed = [dim for dim in range(short.ndim) if short.shape[dim] != long.shape[dim]]
            if not changed:
                return None
            if len(changed) == 1 and (short.shape[changed[0]], long.shape[changed[0]]) == PROBED_LENGTHS:
                return changed[0]
        elif isinstance(short, PackedMask) or (type(short) is type(long) and short == long):
            return None
        raise unsupported(
            where, "it depends on the length of the row other than token by token, so that rows cannot be cut in chunks"
        )

    def layer(self, block: int, hidden: Tensor, calls: Sequence[LayerCall] | Mapping[int, LayerCall]) -> Tensor:
        """Blocks 1 to N: the model's own layer, called as its model calls it. [b, S, H] -> [b, S, H]."""
        call, layer = calls[block - 1], self.layers[block - 1]
        state = block, self.model.training
        if state not in self._writes_input:
            output, self._writes_input[state] = first_call(layer, call, hidden, f"layer {block - 1} of {self.name}")
            return output
        if self._writes_input[state]:
            return call(layer, hidden.clone())
        version = hidden._version
        output = call(layer, hidden)
        if hidden._version != version:
            raise unsupported(
                f"{self.block_name(block)} of {self.name}",
                "it changes the hidden states that it is given in place, but did not do so when it was called first",
            )
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """[b, c, H] -> [b, c, V] by the model's own forward from its last layer on: final norm, head, scales, caps."""
        rows, length = hidden.shape[:2]
        if self.in_turn and length > (most := self.positions.limit or length):  # positions that the model counts itself
            return torch.cat([self.logits(part) for part in hidden.split(most, dim=1)], dim=1)
        nothing = torch.zeros(rows, length, dtype=torch.long, device=hidden.device)
        documents = Documents.of((length,) * rows, (rows, length), torch.device("cpu"))
        # The embedding side runs as well; what it gives is thrown away by the feeders, and would show in the loss.
        unused = hidden.new_full((rows, length, embedding_width(self.model)), float("nan"), requires_grad=False)
        self._feed.hidden = hidden
        try:
            with attention.packing(documents):
                arguments = {"inputs_embeds": unused, "attention_mask": nothing + 1, "position_ids": nothing}
                output = self._call(self._head_side, arguments)
        finally:
            self._feed.hidden = None
        return output[0] if isinstance(output, tuple) else output.logits

    @torch.no_grad()
    def check_head(self, like: Tensor) -> None:
        """Check that every position's logits depend on that position alone, because the head runs in chunks.

        Args:
            like: hidden states; their device, dtype and width count. The head's weights must be bound.

        Raises:
            UserError: the logits of one position change with the hidden states of another.
        """
        held = ValuesBefore(self.model)
        drawn = torch.Generator().manual_seed(0)
        hidden = torch.randn(3, 3, *like.shape[2:], generator=drawn, device="cpu").to(like)
        whole, part = self.logits(hidden.clone()), self.logits(hidden[:, :2].clone())
        held.check(self.name)
        if not whole.isfinite().all() or not torch.equal(whole, self.logits(hidden.clone())):
            return  # weights that are no numbers: the loss will tell; or a head that draws, whose results differ
        hidden[range(3), range(3)] = float("nan")
        spoiled = self.logits(hidden).isnan().any(dim=-1)
        alone = torch.equal(spoiled, torch.eye(3, dtype=torch.bool, device=spoiled.device))
        tolerance = 16 * torch.finfo(whole.dtype).eps
        if not alone or not torch.allclose(
            whole[:, :2], part, rtol=tolerance, atol=tolerance * float(whole.abs().max())
        ):
            raise unsupported(
                self.name,
                "after its last layer the model mixes the tokens of a row (or counts them), but logits are computed "
                "for a few positions at a time; such heads are not supported",
            )

    def head(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Block N + 1 for some positions: hidden states [b, c, H] and shifted labels [b, c] -> the sum of the loss."""
        return self.heads(hidden, [labels])[0]

    def heads(self, hidden: Tensor, choices: Sequence[Tensor]) -> list[Tensor]:
        """``head`` for several choices of labels from the same logits."""
        logits = self.logits(hidden)
        return [sum_of_loss(self._loss, logits, labels) for labels in choices]

    def load_buffers(self, values: dict[str, Tensor]) -> None:
        """Set persistent buffers, by name, to values that came with the weights. After ``prepare``.

        A buffer that has 32 bits on disk has 32 bits here, whatever the dtype of the model's config: transformers makes
        empty buffers in that dtype.
        """
        buffers = dict(self.model.named_buffers())
        for name, value in values.items():
            if name not in buffers or buffers[name].shape != value.shape:
                raise unsupported(name, f"{self.name} has no such buffer of shape {tuple(value.shape)}")
            buffer, (path, _, leaf) = buffers[name], name.rpartition(".")
            if value.is_floating_point() and value.dtype.itemsize > buffer.dtype.itemsize:
                self.model.get_submodule(path)._buffers[leaf] = value.to(buffer.device)
            else:
                buffer.copy_(value)
