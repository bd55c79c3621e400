"""What the actions that compute leave for later ones, by its kind: the state of a rank between two actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge

from tawpipe.model.batch import MicroBatch
from tawpipe.model.stubs import LayerCall
from tawpipe.runtime.compute.chunks import KeptAttention
from tawpipe.runtime.compute.recompute import Saved
from tawpipe.runtime.compute.rows import Rows
from tawpipe.runtime.compute.sets import SetTokens
from tawpipe.runtime.compute.split import DeferredProducts
from tawpipe.runtime.compute.step_input import DocumentSlice, StepInput
from tawpipe.schedule.actions import Action
from tawpipe.schedule.buffers import KEPT, Buffer, Kind

SAVED = (Kind.GRAPH, Kind.ATTENTION)
"""Kinds of what a layer on whole rows keeps for its backward pass instead of its input."""
ROWS = (Kind.INPUT, Kind.OFFLOADED, Kind.RELOADED)
"""Kinds of a block's input."""
RETURNED = (Kind.RELOADED_GRAPH, Kind.RELOADED_ATTENTION)
"""The same, come back from the host's memory."""
READ = frozenset((*SAVED, *RETURNED, *ROWS))
"""Kinds of what the backward pass of a layer on whole rows starts from."""


@dataclass(frozen=True)
class LayerGraph:
    """A layer's input with the graph of its output: what a layer keeps, also in the place of the input."""

    leaf: Tensor
    edge: GradientEdge
    deferred: DeferredProducts | None
    """Where its backward pass may be in two parts."""
    saved: Saved = field(default_factory=list)
    """What it holds besides and nobody else does, until the backward pass begins; each goes then as soon as it can."""

    def forget(self) -> None:
        """Leave what is saved to the graph alone."""
        self.saved.clear()


@dataclass(frozen=True)
class WaitingGraph:
    """A ``LayerGraph`` whose tensors wait in the host's memory.

    Args:
        memory: what waits, byte by byte, one storage after the other.
        storages: of every storage where it begins and ends there, and the tensors in it: each with its size, its stride
            and its place in the storage.
    """

    graph: LayerGraph
    memory: Tensor
    storages: tuple[tuple[int, int, tuple[tuple[Tensor, tuple[int, ...], tuple[int, ...], int], ...]], ...]


class LayerRunner(Protocol):
    """The code that computes layers of a micro-batch: ``layer``, ``cut_layer`` or ``sliced``."""

    def forward(self, blocks: Any, action: Action, held: DeviceBatch, given: StepInput, before: Any, /) -> None: ...

    def backward(self, blocks: Any, action: Action, held: DeviceBatch, given: StepInput, /, *, wanted: bool) -> Any: ...


@dataclass
class DeviceBatch:
    """A micro-batch on the device: its tensors, those of the tokens that this rank computes, the calls of its layers
    and what computes these.
    """

    batch: MicroBatch
    local: MicroBatch
    dealt: SetTokens | None
    calls: tuple[LayerCall, ...]
    runner: LayerRunner
    embedded: GradientEdge | None
    """The beginning of the graph of the embedding's output, if its backward pass needs no weights; the output itself is
    not kept alive by it.
    """
    part: DocumentSlice | None = None
    """Where it is a slice of a document; the calls are those for all of it."""


class Activations:
    """Boundary activations and all else that lives from one action to another, under the names of the schedule.

    Args:
        table: makes one of the tables.
    """

    def __init__(self, table: Callable[[], dict[Buffer, Any]] = dict) -> None:
        self.batches: dict[Buffer, DeviceBatch] = table()
        self.inputs: dict[Buffer, Tensor | Rows | LayerGraph] = table()
        """Of blocks, on the device or where they wait."""
        self.kept: dict[Buffer, LayerGraph | WaitingGraph | KeptAttention] = table()
        """Of layers that keep more than their input: on whole rows a graph, in chunks what attention gave."""
        self.gradients: dict[Buffer, Tensor] = table()
        """Of inputs of blocks."""
        self.keys: dict[Buffer, Any] = table()
        """Keys and values of all ranks of a set, tensors; or what slices of a document hand on, the same for all."""
        self.key_gradients: dict[Buffer, Any] = table()
        """Of all ranks' keys and values, each with room for the sum of them that is this rank's; of slices as above."""
        self.deferred: dict[Buffer, DeferredProducts] = table()
        self.losses: dict[Buffer, Tensor] = table()
        self.tables: dict[Kind, dict[Buffer, Any]] = {
            Kind.CONTEXT: self.batches,
            **dict.fromkeys(ROWS, self.inputs),
            **dict.fromkeys((*SAVED, *KEPT, *RETURNED, Kind.OFFLOADED_GRAPH), self.kept),
            Kind.INPUT_GRADIENT: self.gradients,
            Kind.KEYS: self.keys,
            Kind.KEY_GRADIENTS: self.key_gradients,
            Kind.LINEAR: self.deferred,
            Kind.LOSS: self.losses,
        }

    def free(self, action: Action) -> None:
        """Drop what an action is the last to need."""
        for buffer in action.frees:
            if buffer.kind is not Kind.TURN:
                del self.tables[buffer.kind][buffer]
