"""Values that computing actions keep for later actions, by kind: the state of a rank between two actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge

from tawpipe.model.batch import MicroBatch
from tawpipe.model.experts.balance import RoutedTokens
from tawpipe.model.stubs import LayerCall
from tawpipe.runtime.compute.attention_results import AttentionResults
from tawpipe.runtime.compute.chunks import KeptAttention
from tawpipe.runtime.compute.cp_groups import CpTokens
from tawpipe.runtime.compute.recompute import Saved
from tawpipe.runtime.compute.rows import Rows
from tawpipe.runtime.compute.split import DeferredProducts
from tawpipe.runtime.compute.step_input import DocumentSlice, StepInput
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import KEPT, Buffer, Kind

SAVED = (Kind.GRAPH, Kind.PRODUCTS, Kind.ATTENTION)
"""Kinds of values that a layer on whole rows keeps for its backward pass instead of its input."""
ROWS = (Kind.INPUT, Kind.OFFLOADED, Kind.RELOADED)
"""Kinds of a block's input."""
RETURNED = (Kind.RELOADED_GRAPH, Kind.RELOADED_PRODUCTS, Kind.RELOADED_ATTENTION)
"""Kinds of values in ``SAVED`` that were copied back from CPU memory."""
READ = frozenset((*SAVED, *RETURNED, *ROWS))
"""Kinds of values from which the backward pass of a layer on whole rows starts."""


@dataclass(frozen=True)
class LayerGraph:
    """A layer's input and the autograd graph of its output, kept for the backward pass.

    ``graph`` is the end of the graph, or the attention results with which the layer is recomputed."""

    leaf: Tensor
    graph: GradientEdge | AttentionResults
    deferred: DeferredProducts | None
    """Products whose weight gradients are computed later; None if the backward pass has one part, or recomputes."""
    saved: Saved = field(default_factory=list)
    """Other tensors that only this graph keeps alive. They are held until the backward pass begins."""

    def forget(self) -> None:
        """Drop the saved tensors, so that autograd frees each as soon as it has used it."""
        self.saved.clear()
        if isinstance(self.graph, AttentionResults):
            self.graph.forget()


@dataclass(frozen=True)
class WaitingGraph:
    """A ``LayerGraph`` whose tensors are in CPU memory.

    Args:
        graph: The graph.
        memory: Bytes of all its storages, one after the other.
        storages: For each storage its begin and end in ``memory``, and the tensors in it, each with its size, its
            stride and its offset in the storage.
    """

    graph: LayerGraph
    memory: Tensor
    storages: tuple[tuple[int, int, tuple[tuple[Tensor, tuple[int, ...], tuple[int, ...], int], ...]], ...]


class LayerRunner(Protocol):
    """Interface of the module that computes layers of a micro-batch: ``layer``, ``cut_layer`` or ``sliced``."""

    def forward(
        self, blocks: Any, action: Action, held: DeviceBatch, step_input: StepInput, before: Any, /
    ) -> None: ...

    def backward(
        self, blocks: Any, action: Action, held: DeviceBatch, step_input: StepInput, /, *, wanted: bool
    ) -> Any: ...


@dataclass
class DeviceBatch:
    """A micro-batch on the device, with the calls of its layers and the code that computes them.

    Attributes:
        batch: The whole micro-batch.
        local: The tokens that this rank computes.
        dealt: Tokens of each rank of the context-parallel group; None if this rank computes all.
        calls: Arguments of the layers, apart from their input.
        runner: Module that computes the layers.
    """

    batch: MicroBatch
    local: MicroBatch
    dealt: CpTokens | None
    calls: tuple[LayerCall, ...]
    runner: LayerRunner
    embedded: GradientEdge | None
    """Start of the backward graph of the embedding's output, if that backward pass needs no weights; else None.

    It does not keep the output itself alive.
    """
    part: DocumentSlice | None = None
    """The document slice that this micro-batch is, or None. Its ``calls`` are those for the whole document."""
    piece: RoutedTokens | None = None
    """The tokens of ``local`` for the loss that balances experts; None without it."""


class Activations:
    """Boundary activations and all other values that live from one action to another, by the schedule's buffer names.

    Args:
        table: Makes one of the tables.
    """

    def __init__(self, table: Callable[[], dict[Buffer, Any]] = dict) -> None:
        self.batches: dict[Buffer, DeviceBatch] = table()
        self.inputs: dict[Buffer, Tensor | Rows | LayerGraph] = table()
        """Inputs of blocks, on the device or in CPU memory or a file."""
        self.kept: dict[Buffer, LayerGraph | WaitingGraph | KeptAttention] = table()
        """Values that layers keep in addition to their input: a graph on whole rows, attention outputs in chunks."""
        self.gradients: dict[Buffer, Tensor] = table()
        """Gradients of the inputs of blocks."""
        self.keys: dict[Buffer, Any] = table()
        """Keys and values of a context-parallel group's ranks, or one ``HandedOn`` per document for all its slices."""
        self.key_gradients: dict[Buffer, Any] = table()
        """Gradients of all ranks' keys and values, with a buffer for this rank's sums, or a ``HandedOn``."""
        self.deferred: dict[Buffer, DeferredProducts] = table()
        self.losses: dict[Buffer, Tensor] = table()
        self.tables: dict[Kind, dict[Buffer, Any]] = {
            Kind.CONTEXT: self.batches,
            **dict.fromkeys(ROWS, self.inputs),
            **dict.fromkeys((*SAVED, *KEPT, *RETURNED, Kind.OFFLOADED_GRAPH, Kind.OFFLOADED_PRODUCTS), self.kept),
            Kind.INPUT_GRADIENT: self.gradients,
            Kind.KEYS: self.keys,
            Kind.KEY_GRADIENTS: self.key_gradients,
            Kind.LINEAR: self.deferred,
            Kind.LOSS: self.losses,
        }

    def free(self, action: Action) -> None:
        """Remove the values of the buffers that ``action`` frees, because no later action reads them."""
        for buffer in action.frees:
            if buffer.kind is not Kind.TURN:
                del self.tables[buffer.kind][buffer]
