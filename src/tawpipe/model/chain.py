"""Runs a causal LM block by block, so that each block needs only its own weights, and only during its visit.

This module knows nothing of processes, transfers or schedules. All calls of one chain happen on one thread."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tawpipe.errors import UserError
from tawpipe.model.adapters.folded import fold_adapters
from tawpipe.model.attention import attention
from tawpipe.model.attention.attention import PackedMask
from tawpipe.model.attention.indexers import spare_indexers
from tawpipe.model.batch import MicroBatch
from tawpipe.model.binding import UnitBinding, refuse_emptied, refuse_use
from tawpipe.model.bits.forms import AnyForm, BlockForm, FlatForm, PlainForm
from tawpipe.model.bits.quantized import AUTO, NONE, PUBLISHED, check_form, matrices_of
from tawpipe.model.buffers import materialize_buffers
from tawpipe.model.discovery.discovery import Discovery, discover, embedding_width
from tawpipe.model.discovery.first_call import ValuesBefore, first_call
from tawpipe.model.experts.adapted import take_adapters
from tawpipe.model.experts.balance import ExpertBalance, RoutedTokens, balance_of
from tawpipe.model.fused.operations import EAGER, Operations
from tawpipe.model.fused.places import Place, change_places, plain_again
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
from tawpipe.model.units import Unit, base_name, build_blocks, build_units
from tawpipe.schedule.spec import BlockSpec, ModelSpec

logger = logging.getLogger(__name__)
PUBLISHED_FORMS = "_tawpipe_published_forms"
"""Attribute of a model whose folder has codes of 4 or 8 bits: parameter name without ``peft`` -> its form."""
LayerCalls = Sequence[LayerCall] | Mapping[int, LayerCall]
PROBED_LENGTHS = 5, 7
"""Lengths, in tokens, of two probe rows. Comparing the layers' calls for both shows which arguments have a token
dimension."""


def inner_model(model: nn.Module) -> Any:
    """Return the transformers model inside a ``peft`` model, or ``model`` itself if it is not a ``peft`` model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]


def _row_of(length: int, device: torch.device) -> MicroBatch:
    """Return a micro-batch of one row with ``length`` tokens, all of them token 0, on ``device``."""
    ids = torch.zeros(1, length, dtype=torch.long, device="cpu")
    return MicroBatch.from_rows(ids, ids).to(device)


class Chain(UnitBinding):
    """A Hugging Face causal LM as a chain of blocks: embedding, layers and head.

    Args:
        model: a decoder-only ``AutoModelForCausalLM``, usually on the meta device, or a ``peft`` model around one. Its
            attention implementation is replaced by ours, as is the code of LoRA adapters, and ``output_router_logits``
            in its config by False. Nothing else of it changes before ``prepare``.
        loss: function used instead of the cross-entropy over the vocabulary; see ``Loss``.

    Raises:
        UserError: the model cannot be run this way. The message says why.
    """

    def __init__(self, model: nn.Module, *, loss: Loss | None = None) -> None:
        self._views: list[nn.Module] = []
        self.outer_model = model
        """The model passed by the caller: the ``peft`` model, if it is one."""
        refuse_emptied(model)
        refuse_adapters(model)
        self.model = inner_model(model)
        refuse_unsupported(self.model)
        take_adapters(self.model)
        text = self.model.config.get_text_config()
        self.asked_for_balance = bool(getattr(text, "output_router_logits", False))
        """True if the config asked for router logits, and so for a loss that balances experts."""
        if self.asked_for_balance:
            text.output_router_logits = False
        self.balance: ExpertBalance | None = None
        """The loss that balances experts; None for none. ``balance_experts`` sets it."""
        self.operations = EAGER
        """Functions that compute norms, rotary embeddings and gates of layers. ``compute_by`` sets it."""
        attention.register()
        self.own_attention: str = self.model.config._attn_implementation
        """Name of the attention implementation that the model used before."""
        self.in_turn = why_apart(self.model)
        """Reason why the documents of a row are computed one by one, or ``""`` if a row is computed as a whole."""

        self.config = self.model.config
        self.loss = loss
        """Loss function passed by the caller, or None for the cross-entropy."""
        self._loss = loss or token_loss_sum

        # Layers are recomputed anyway. Checkpointing inside a layer would draw other random numbers in its
        # recomputation.
        for module in self.model.modules():
            if getattr(module, "gradient_checkpointing", False):
                module.gradient_checkpointing = False
        training_modes = {module: module.training for module in self.model.modules()}
        self._in_evaluation = [m for m, training in training_modes.items() if self.model.training and not training]
        """Modules that the caller has put into evaluation mode permanently, such as frozen statistics."""

        # Results of following one forward pass.
        self.set_training(True)
        try:
            discovery = self._discover()
        finally:
            for module, training in training_modes.items():
                module.training = training
        fold_adapters(self.model)
        self.layers, self.path, self.positions = discovery.layers, discovery.path, discovery.positions
        self.mixing = discovery.mixing
        """Modules that mix tokens in each layer, if some layers carry a state along a row; otherwise empty."""
        for layer, mixing in zip(self.layers, self.mixing, strict=False):
            for mixer in mixing.mixers:
                make_mixer(layer.get_submodule(mixer))
        self._checked_mixers: set[object] = set()
        if self.in_turn:
            spare_indexers(self.model)
        self.width = discovery.width
        """Elements of one token's hidden states."""
        self.why_not_staged = discovery.calls_need_weights
        """Reason why layers cannot be called on a device without the embedding's weights (see ``calls``), or ``""``."""
        self._writes_input: dict[tuple[int, bool], bool] = {}
        """(block, training mode) -> True if the layer changes its hidden states in place. Filled when a layer first
        runs."""

        count = len(self.layers)
        names = ("embedding", *(f"layer.{index}" for index in range(count)), "head")
        super().__init__(build_units(self.model, discovery.uses, names))
        self.blocks: tuple[BlockSpec, ...] = build_blocks(
            self.units, len(names), embedding_backward_reads_weights=discovery.embedding_backward_reads_weights
        )
        self._block_names = names
        self.along_tokens: tuple[tuple[int | None, ...], ...] = ()
        """For every layer, the token dimension of each leaf of its arguments (None for a leaf without one).
        ``find_tokens`` fills it; before, it is empty."""

        # Views of the model for its code before and after the layers.
        self._tape, self._feed = Tape(discovery.returns), Feed(discovery.returns)
        recorders = [Recorder(layer, index, count, self._tape) for index, layer in enumerate(self.layers)]
        feeders = [Feeder(layer, self._feed) for layer in self.layers]
        self._embedding_side, embedding_views = view_with_layers(self.model, self.path, recorders)
        self._head_side, head_views = view_with_layers(self.model, self.path, feeders)
        remember_angles(head_views)
        self._views = [*embedding_views, *head_views]

    def _discover(self) -> Discovery:
        """Return the result of ``discover``, and set ``in_turn`` and the attention implementation.

        Three options are tried in order: documents that share a row, with our attention; one document per row, with our
        attention, if the model mixes documents; one document per row, with the model's own attention, if its masks
        differ otherwise."""
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
        """Set the attention implementation of the model, and of configs copied into its modules, if it can be set."""
        if self.model._can_set_attn_implementation():
            self.model.set_attn_implementation(implementation)
            for module in self.model.modules():  # a copied layer has its own copy of the config
                if isinstance(getattr(module, "config", None), type(self.model.config)):
                    module.config._attn_implementation = implementation

    @property
    def config_as_read(self) -> Any:
        """Copy of the model's config, with ``output_router_logits`` as before."""
        config = deepcopy(self.model.config)
        if self.asked_for_balance:
            config.get_text_config().output_router_logits = True
        return config

    def balance_experts(self, value: object) -> str:
        """Choose the loss that balances experts, and return a sentence about it, or ``""``; see ``balance_of``.

        ``balance.install`` begins it."""
        if self.balance is not None:
            self.balance.remove()
        self.balance, words = balance_of(self.model, self.layers, value, asked=self.asked_for_balance)
        return words

    def compute_by(self, operations: Operations) -> Counter[Place]:
        """Compute norms, rotary embeddings and gates of layers by ``operations``; return the number of each form."""
        plain_again(self.model)
        places = Counter[Place]() if operations is EAGER else change_places(self.layers, operations)
        self.operations = operations if places else EAGER
        return places

    def quantise(self, form: str, dtype: torch.dtype) -> None:
        """Store and send frozen matrices of layers in 4 or 8 bits; arguments as in ``quantised``.

        Call it before reading ``spec``."""
        self.units = self.quantised(form, dtype)

    def quantised(self, form: str, dtype: torch.dtype) -> tuple[Unit, ...]:
        """Return all units, those with frozen matrices of layers stored and sent in 4 or 8 bits.

        Args:
            form: ``nf4`` or ``int8``; ``published`` for the codes and scales of the model's folder; ``none`` for
                plain numbers; ``auto`` for ``published`` if the folder has such matrices, otherwise ``none``.
            dtype: compute dtype, as passed to ``prepare``.

        Raises:
            UserError: ``form`` is unknown, or no matrix of a layer is frozen, or the folder has no published codes.
        """
        form = self.form_of(form)
        if form == NONE:
            return self.units
        forms, layers = self._forms(form), range(1, len(self.blocks) - 1)
        coded = {name for name, each in forms.items() if not isinstance(each, PlainForm)}

        def has_some(unit: Unit) -> bool:
            """Return True if the unit is frozen, belongs to layers only, and has a matrix that can be quantised."""
            of_frozen_layers = not unit.trainable and all(block in layers for block in unit.blocks)
            return of_frozen_layers and any(slot.name in coded for slot in unit.slots)

        if not any(map(has_some, self.units)):
            expected = "none, where no matrix of a layer is frozen: train an adapter (LoRA), or freeze layers"
            if form == PUBLISHED and not coded:
                expected = "none, nf4 or int8: the model's folder has no codes of 4 or 8 bits that can be kept"
            raise UserError("quantize", form, expected)
        return tuple(unit.packed(forms, form, dtype) if has_some(unit) else unit for unit in self.units)

    def form_of(self, form: str) -> str:
        """Return the form that a setting stands for: ``auto`` means ``published`` or ``none``.

        Raises:
            UserError: ``form`` is unknown.
        """
        check_form(form)
        if form != AUTO:
            return form
        coded = {name for name, each in self._forms(PUBLISHED).items() if isinstance(each, BlockForm)}
        frozen = {slot.name for unit in self.units if not unit.trainable for slot in unit.slots}
        return PUBLISHED if frozen & coded else NONE

    def _forms(self, form: str) -> Mapping[str, AnyForm]:
        """Return name -> form, for the matrices that can be quantised."""
        matrices = matrices_of(self.model)
        if form != PUBLISHED:
            return dict.fromkeys(matrices, FlatForm(form))
        published: Mapping[str, AnyForm] = getattr(self.model, PUBLISHED_FORMS, {})
        return {name: published[base_name(name)] for name in matrices if base_name(name) in published}

    def prepare(self, device: torch.device | str, dtype: torch.dtype) -> None:
        """Replace every parameter of the model by a placeholder without values, and move every buffer to ``device``.

        Buffers on the meta device, such as rotary frequencies, are computed. In fp64 the experts switch to eager code,
        because grouped matrix products have no fp64.

        Args:
            device: device on which blocks compute.
            dtype: dtype in which blocks compute.
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
        """Return a context in which the chain may be quantised, prepared and run for measurements.

        At its end all changes are undone: parameters and buffers are on the meta device again."""
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
        """Make methods of the caller's model that need weights raise an error which says where the weights are."""
        refuse_use(self.outer_model, *modules_above(self.model, self.path))

    @property
    def why_not_chunks(self) -> str:
        """Reason why rows cannot be computed in chunks, or ``""`` if they can."""
        return self.in_turn or next((mixing.why_not_chunks for mixing in self.mixing if mixing.why_not_chunks), "")

    @property
    def why_not_cp_groups(self) -> str:
        """Reason why a context-parallel group cannot compute one row together, or ``""`` if it can."""
        instead = "" if self.why_not_chunks else "; chunks instead (schedule.sequence_chunk) let long rows fit"
        return self.in_turn or (f"its layers carry a state along a row{instead}" if self.mixing else "")

    @property
    def state_bytes(self) -> int:
        """Bytes of the largest state that one layer's mixers pass from one chunk of a row to the next, or 0."""
        return max((mixing.state_bytes for mixing in self.mixing), default=0)

    @property
    def own_code(self) -> bool:
        """True if the model's own attention code is used.

        Eager code of older models holds S x S scores."""
        return self.config.get_text_config()._attn_implementation != attention.NAME

    def compile_layers(self) -> None:
        """Mark the layers for ``torch.compile``, which compiles each when it first runs.

        Layers of one kind share the compiled code. Attention is not compiled: its kernel depends on the documents of a
        micro-batch."""
        for layer in self.layers:
            layer.compile()

    @property
    def name(self) -> str:
        """Class name of the model."""
        return type(self.model).__name__

    def block_name(self, block: int) -> str:
        """Return the name of ``block`` for messages, for example ``layer 3``."""
        return self._block_names[block].replace(".", " ")

    @property
    def spec(self) -> ModelSpec:
        """Sizes of the model, as builders of schedules see them."""
        share = share_of_experts(self.config.get_text_config())
        active = [round(unit.active_elements(share)) for unit in self.units]
        units = (
            replace(unit.spec, active=some * (some < unit.numel)) for unit, some in zip(self.units, active, strict=True)
        )
        return ModelSpec(self.blocks, tuple(units), self.balance is not None)

    def set_training(self, mode: bool) -> None:
        """Switch the model between training mode (with dropout) and evaluation mode.

        Modules that the caller has put into evaluation mode stay there."""
        self.model.train(mode)
        for module in self._views:
            module.training = mode
        for module in self._in_evaluation:
            module.training = False

    def embed(self, batch: MicroBatch) -> tuple[Tensor, tuple[LayerCall, ...]]:
        """Run block 0: return the hidden states [b, S, H] and the calls of all layers for this micro-batch.

        A call holds all other arguments of a layer, such as position embeddings and masks. Under ``torch.enable_grad``
        the hidden states carry the graph of the embedding block."""
        return embed_in_turn(batch, self._embed) if self.in_turn else self._embed(batch)

    def _embed(self, batch: MicroBatch) -> tuple[Tensor, tuple[LayerCall, ...]]:
        """Run the model's code before its layers on whole rows; return hidden states and the layers' calls."""
        ids = batch.input_ids.clone()  # a copy, because the model may change it and the recomputation reads it again
        documents = batch.documents(ids.device)
        # A mask without padding keeps the model from searching for packed documents, which would wait for the device.
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
        """Return the layers' calls for ``batch`` on a device without the embedding's weights.

        The hidden states come from another device. The layers' other arguments must not depend on the embedding's
        weights (``why_not_staged`` is empty). Parameters of the embedding block are NaN placeholders, and hidden states
        computed from them are discarded."""
        return self.embed(batch)[1]

    def _call(self, view: nn.Module, arguments: dict[str, Any]) -> Any:
        """Call a view of the model with ``arguments``, without a key-value cache."""
        return view(**taken_by(view, {**arguments, "use_cache": False}, alone=bool(self.in_turn)))

    def _position_ids(self, batch: MicroBatch) -> Tensor:
        """Return the position ids [b, S] for the model: given ones, or positions counted in every document."""
        first, positions = self.positions.first, batch.position_ids.clone()
        if batch.positions_given or not first:
            return positions
        # RoBERTa and similar models count only tokens that are not padding. Padding has the position first - 1.
        counted = batch.input_ids.ne(first - 1).long()
        total = counted.cumsum(1)
        before = (total - counted).masked_fill(positions != 0, 0).cummax(1).values
        return (total - before) * counted + first - 1

    def find_tokens(self) -> None:
        """Set ``along_tokens`` by recording the layers' calls for two row lengths.

        The embedding's weights must be bound.

        Raises:
            UserError: rows cannot be cut, or an argument depends on the row length other than by one token dimension.
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
        """Return the token dimension of one argument of a layer, or None if it has none.

        Args:
            index: number of the layer, for messages.
            short, long: the argument as recorded for the shorter and for the longer row.

        Raises:
            UserError: the argument depends on the row length in another way.
        """
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

    def layer(self, block: int, hidden: Tensor, calls: LayerCalls, piece: RoutedTokens | None = None) -> Tensor:
        """Run one of blocks 1 to N: the model's own layer, on hidden states [b, S, H].

        Args:
            block: index of the block; block 1 is layer 0.
            hidden: input of the layer. It is never changed in place.
            calls: the layers' calls from ``embed``, by layer number.
            piece: the tokens, for the loss that balances experts; None to leave it out.

        Returns:
            The layer's output [b, S, H].

        Raises:
            UserError: the layer changes tensors that it must not change.
        """
        call = calls[block - 1]
        run = partial(self._layer, block, hidden, call)
        return run() if self.balance is None else self.balance.around(run, call, piece)

    def _layer(self, block: int, hidden: Tensor, call: LayerCall) -> Tensor:
        """Run the model's own layer of a block, which must not change its input in place."""
        layer = self.layers[block - 1]
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
        """Return logits [b, c, V] of hidden states [b, c, H], by the model's own code after its last layer.

        This code includes the final norm, the head, scales and caps."""
        rows, length = hidden.shape[:2]
        if self.in_turn and length > (most := self.positions.limit or length):  # limit of its own positions
            return torch.cat([self.logits(part) for part in hidden.split(most, dim=1)], dim=1)
        nothing = torch.zeros(rows, length, dtype=torch.long, device=hidden.device)
        documents = Documents.of((length,) * rows, (rows, length), torch.device("cpu"))
        # The code before the layers runs as well. Feeders discard its result. It is NaN, so that a use would show in
        # the loss.
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
        """Check that the logits of every position depend on that position alone, because the head runs in chunks.

        Runs the head up to four times on a few random hidden states. Positions are not compared if the logits are not
        finite, or differ between two equal runs.

        Args:
            like: hidden states whose device, dtype and width are used. The head's weights must be bound.

        Raises:
            UserError: the logits of one position change with the hidden states of another, or the head changes weights.
        """
        held = ValuesBefore(self.model)
        drawn = torch.Generator().manual_seed(0)
        hidden = torch.randn(3, 3, *like.shape[2:], generator=drawn, device="cpu").to(like)
        whole, part = self.logits(hidden.clone()), self.logits(hidden[:, :2].clone())
        held.check(self.name)
        if not whole.isfinite().all() or not torch.equal(whole, self.logits(hidden.clone())):
            return  # NaN weights, which the loss will show, or a head that draws random numbers
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
        """Run block N + 1 for some positions and return the sum of their losses, a tensor of one number.

        Args:
            hidden: hidden states [b, c, H].
            labels: labels [b, c], already shifted.
        """
        return self.heads(hidden, [labels])[0]

    def heads(self, hidden: Tensor, choices: Sequence[Tensor]) -> list[Tensor]:
        """Run the head once and return the loss sum for every tensor of labels [b, c] in ``choices``."""
        logits = self.logits(hidden)
        return [sum_of_loss(self._loss, logits, labels) for labels in choices]

    def load_buffers(self, values: dict[str, Tensor]) -> None:
        """Set persistent buffers to values that were loaded with the weights.

        Call it after ``prepare``. A buffer with 32 bits in the file gets 32 bits here, whatever the dtype of the
        model's config: transformers creates empty buffers in that dtype.

        Args:
            values: name of a buffer -> its value.

        Raises:
            UserError: the model lacks a buffer of this name and shape.
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
