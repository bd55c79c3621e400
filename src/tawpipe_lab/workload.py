"""Workloads of the lab, as settings.

* timed: real transfers of real bytes, and computing replaced by sleeps of given seconds. So scheduling and network are
  measured, and many ranks run on few cores.
* lengths: like timed, for documents of uneven lengths; seconds and bytes follow from their tokens.
* serving: tokens of groups of users that pass through pipeline stages, as seconds and bytes.
* real: a small model with its optimizer. It shows that all strategies train equally: their losses agree.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self

from tawpipe.dealing.balance import LayerKind, LayerTime
from tawpipe.errors import UserError
from tawpipe.topology import Topology


def check_whole(settings: object, **least: int) -> None:
    """Raise UserError if a setting is no whole number, or is below its minimum.

    Args:
        settings: object whose attributes are checked.
        least: name of an attribute -> its minimum.

    Raises:
        UserError: with the name of the first such attribute.
    """
    for name, number in least.items():
        value = getattr(settings, name)
        if not isinstance(value, int) or value < number:
            raise UserError(name, value, f"a whole number of at least {number}")


def check_positive(settings: object, *names: str) -> None:
    """Raise UserError if one of the attributes ``names`` of ``settings`` is not a number above 0."""
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, int | float) or not value > 0:
            raise UserError(name, value, "a number above 0")


class Uncut:
    """Workload whose layers cannot be cut into parts."""

    kind: ClassVar[str]

    def split(self, parts: int) -> Self:
        """Return this workload unchanged.

        Raises:
            UserError: ``parts`` is not 1.
        """
        if parts != 1:
            raise UserError("parts_per_layer", parts, f"1, because layers of the kind {self.kind} cannot be cut")
        return self


class TimedPart(NamedTuple):
    """Embedding, layer or head of a timed model: number of weights, and seconds per micro-batch."""

    elements: int
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    frozen: int = 0
    """Number of weights that travel and are not trained, in addition to ``elements``."""
    linear_bytes: int = 0
    """Bytes kept per micro-batch between the two parts of its backward pass."""
    graph_bytes: int = 0
    """Bytes kept per micro-batch from its forward to its backward pass if nothing is recomputed."""

    @property
    def backward_s(self) -> float:
        return self.backward_input_s + self.backward_weight_s

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


SECONDS_OF_LAYERS = ("forward_s", "backward_input_s", "backward_weight_s")
BYTES_OF_LAYERS = ("layer_bytes", "frozen_bytes", "linear_bytes", "graph_bytes")
ENDS = ("embedding", "head")


def _part(size: int, seconds: Mapping[str, float], *kept: int) -> TimedPart:
    """Build a part from the bytes of its fp32 weights and its seconds by name; seconds that are not given are 0."""
    forward, backward_input, backward_weight = (seconds.get(name, 0.0) for name in SECONDS_OF_LAYERS)
    return TimedPart(size // 4, forward, backward_input, backward_weight, *kept)


@dataclass(frozen=True)
class TimedWorkload:
    """Model and step as sizes and seconds.

    Args:
        layers: number of decoder layers.
        layer_bytes: bytes of a layer's weights in fp32.
        forward_s: seconds of a layer's forward pass for one micro-batch.
        backward_input_s: seconds for the gradient of a layer's input, including the recomputation of its forward pass.
        backward_weight_s: seconds for the gradient of a layer's weights, which zero-bubble schedules run separately.
        micro_batches: number of micro-batches of a step, over all devices.
        activation_bytes: bytes of the boundary between two layers for one micro-batch.
        optimizer: if True, run AdamW on the weights at their homes; if False, leave the update out.
        embedding_bytes: bytes of the embedding's weights in fp32; 0 for no such weights.
        head_bytes: bytes of the head's weights in fp32; 0 for no such weights.
        head_s: seconds for loss and gradients of one micro-batch. Seconds of the embedding are set in ``kinds``.
        tied: if True, the head uses the weights of the embedding and has none of its own.
        keys_bytes: bytes of a layer's keys and values for one micro-batch. Processes that compute a micro-batch
            together exchange them; in this project's rows these are the processes of a node, and a micro-batch is one
            document.
        frozen_bytes: bytes of a layer's frozen weights as they travel, in addition to ``layer_bytes``: the quantised
            weights of a model under adapters. They have no gradients.
        linear_bytes: bytes that a layer's linear modules keep for one micro-batch if the gradients of weights are
            computed later than the gradient of the input.
        graph_bytes: bytes that a layer keeps for one micro-batch under ``recompute: none``; 0 for ``activation_bytes``.
        kinds: letter of a kind of layer -> settings that differ from those above: its seconds, ``layer_bytes``,
            ``frozen_bytes``, ``linear_bytes`` and ``graph_bytes``. The keys ``embedding`` and ``head`` set seconds of
            the ends. By default the embedding takes no time, and each of the head's three passes takes a third of
            ``head_s``.
        pattern: letters of all layers in order; empty if all are equal. A letter that is not in ``kinds`` stands for
            the settings above.
        host_s: seconds in which one boundary activation passes between a device and its host's memory; one passes at a
            time.
        homes_bytes_per_s: rate of the link between a device and homes in its host's memory, in each direction; 0 for no
            limit.
        room: number of boundary activations for which a device has memory, for pipelines that are made for a limit;
            None for no limit.
        inside_sleeps: if True, transfers inside a node sleep for their time, in this project's rows. If False, they use
            the loopback of the machine.

    Raises:
        UserError: the settings of the ends contradict each other, or pattern and kinds do not fit.
    """

    layers: int
    layer_bytes: int
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    micro_batches: int
    activation_bytes: int
    optimizer: bool = True
    embedding_bytes: int = 0
    head_bytes: int = 0
    head_s: float = 0.0
    tied: bool = False
    keys_bytes: int = 0
    frozen_bytes: int = 0
    linear_bytes: int = 0
    graph_bytes: float = 0
    kinds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    pattern: str = ""
    host_s: float = 0.0
    homes_bytes_per_s: float = 0.0
    room: float | None = None
    inside_sleeps: bool = False

    kind: ClassVar[str] = "timed"

    def __post_init__(self) -> None:
        if self.tied and (self.head_bytes or not self.embedding_bytes):
            raise UserError("tied", True, "an embedding with bytes and a head without")
        if self.pattern and len(self.pattern) != self.layers:
            raise UserError("pattern", self.pattern, f"a letter for each of the {self.layers} layers")
        for kind, values in self.kinds.items():
            if kind not in (*self.pattern, *ENDS):
                raise UserError("kinds", kind, f"{', '.join(ENDS)} and letters that are in the pattern")
            known = SECONDS_OF_LAYERS if kind in ENDS else (*SECONDS_OF_LAYERS, *BYTES_OF_LAYERS)
            if unknown := set(values) - set(known):
                raise UserError(f"kinds.{kind}", min(unknown), f"some of {', '.join(known)}")

    def split(self, parts: int) -> TimedWorkload:
        """Return an equal workload with every layer cut into ``parts`` equal layers.

        Raises:
            UserError: the number of a layer's weights is not a multiple of ``parts``.
        """
        for elements in {layer.elements for layer in self.layer_parts}:
            if parts < 1 or elements % parts:
                raise UserError("parts_per_layer", parts, f"a divisor of the {elements} weights of a layer")
        sizes = {name: getattr(self, name) // parts for name in ("keys_bytes", *BYTES_OF_LAYERS)}
        shares = {name: getattr(self, name) / parts for name in SECONDS_OF_LAYERS}
        kinds = {
            kind: {name: size // parts if name in BYTES_OF_LAYERS else size / parts for name, size in values.items()}
            for kind, values in self.kinds.items()
            if kind not in ENDS
        }
        pattern = "".join(letter * parts for letter in self.pattern)
        layers = {"layers": self.layers * parts, "pattern": pattern, "kinds": {**self.kinds, **kinds}}
        return replace(self, **layers, **sizes, **shares)

    def faster(self, times: float) -> TimedWorkload:
        """Return a copy that computes ``times`` times as fast, with links to the host faster by this factor, too.

        Bytes stay as they are."""
        faster = replace(self, homes_bytes_per_s=self.homes_bytes_per_s * times)
        return faster._with_seconds(lambda seconds: seconds / times)

    def with_each_sleep(self, more: float) -> TimedWorkload:
        """Return a copy with ``more`` seconds added to every duration that is not 0."""
        return self._with_seconds(lambda seconds: seconds + more if seconds else 0.0)

    def _with_seconds(self, change: Callable[[float], float]) -> TimedWorkload:
        """Return a copy with ``change`` applied to every duration, those in ``kinds`` included."""
        kinds = {
            kind: {name: change(size) if name in SECONDS_OF_LAYERS else size for name, size in values.items()}
            for kind, values in self.kinds.items()
        }
        seconds = {name: change(getattr(self, name)) for name in (*SECONDS_OF_LAYERS, "head_s", "host_s")}
        return replace(self, kinds=kinds, **seconds)

    def work(self, micro_batch: int) -> float:
        """Return the seconds of a micro-batch as a multiple of the workload's seconds per micro-batch."""
        return 1.0

    def tokens(self, micro_batch: int) -> float:
        """Return the bytes of a micro-batch as a multiple of the workload's bytes per micro-batch."""
        return 1.0

    def keys_s(self, micro_batch: int) -> float:
        """Return the seconds for which a layer computes only the keys and values of a micro-batch.

        Ranks that share a document spend these seconds in addition to the layer's passes. They are 0 here.
        """
        return 0.0

    @property
    def compute_s(self) -> float:
        """Seconds of all layers and micro-batches together.

        Divided by the number of devices, they bound a step from below.
        """
        return self.micro_batches * sum(part.seconds for part in self.parts)

    @cached_property
    def layer_parts(self) -> tuple[TimedPart, ...]:
        """Sizes and seconds of every layer."""
        usual = {name: getattr(self, name) for name in (*SECONDS_OF_LAYERS, *BYTES_OF_LAYERS)}

        def part(letter: str) -> TimedPart:
            """Return sizes and seconds of a layer of the kind ``letter``."""
            values = {**usual, **self.kinds.get(letter, {})}
            size, frozen, linear, graph = (int(values[name]) for name in BYTES_OF_LAYERS)
            return _part(size, values, frozen // 4, linear, graph or self.activation_bytes)

        kinds = {letter: part(letter) for letter in {*self.pattern, ""}}
        return tuple(kinds[letter] for letter in self.pattern or [""] * self.layers)

    @cached_property
    def block_parts(self) -> tuple[TimedPart, ...]:
        """Sizes and seconds of embedding, every layer, and head; ends without weights and time are included."""
        third = dict.fromkeys(SECONDS_OF_LAYERS, self.head_s / 3)
        embedding = _part(self.embedding_bytes, self.kinds.get("embedding", {}))
        return embedding, *self.layer_parts, _part(self.head_bytes, {**third, **self.kinds.get("head", {})})

    @property
    def parts(self) -> tuple[TimedPart, ...]:
        """Sizes and seconds of embedding, layers and head, without ends that have neither weights nor time."""
        return tuple(self.block_parts[block] for block in self.blocks_with_parts)

    @property
    def blocks_with_parts(self) -> tuple[int, ...]:
        """Block numbers of ``parts``: all layers, and the ends that have weights or take time."""
        ends = (0, self.layers + 1)
        return tuple(
            block for block, part in enumerate(self.block_parts) if block not in ends or part.elements or part.seconds
        )


PASSES = 4
"""Passes of a layer that take equal seconds: forward, recomputed forward, gradient of the input, gradient of the
weights."""


@dataclass(frozen=True)
class LengthsWorkload(Uncut):
    """Model as sizes and seconds, and a step of documents whose lengths are random numbers (lognormal).

    Each of the two parts of a backward pass takes the seconds of the forward pass, and so does recomputation.

    Args:
        layers: number of decoder layers.
        layer_bytes: bytes of a layer's weights in fp32.
        token_s: seconds of a layer's forward pass per token, without attention.
        mu: mean of the logarithm of a document's length in tokens.
        sigma: standard deviation of the logarithm of a document's length in tokens.
        max_document: largest length of a document in tokens; longer ones are cut. Also the length of a row of equal
            lengths.
        tokens: number of tokens of a step.
        bin_tokens: largest number of tokens in one packed micro-batch.
        even_at: length of a document, in tokens, at which attention takes as long as all other work.
        min_document: smallest length of a document in tokens.
        token_bytes: bytes of the boundary between two layers, per token.
        keys_bytes: bytes of a layer's keys and values, per token. Processes that compute a document together exchange
            them.
        graph_bytes: bytes that a layer keeps per token if nothing is recomputed.
        seed: seed of the lengths.
        optimizer: if True, run AdamW on the weights at their homes; if False, leave the update out.
        inside_sleeps: see ``TimedWorkload``.

    Raises:
        UserError: a setting is out of range.
    """

    layers: int
    layer_bytes: int
    token_s: float
    mu: float
    sigma: float
    max_document: int
    tokens: int
    bin_tokens: int
    even_at: int = 53_248
    min_document: int = 32
    token_bytes: float = 8
    keys_bytes: float = 4
    graph_bytes: float = 168
    seed: int = 0
    optimizer: bool = True
    inside_sleeps: bool = False

    kind: ClassVar[str] = "lengths"

    def __post_init__(self) -> None:
        check_whole(self, layers=1, layer_bytes=4, even_at=1, min_document=1)
        check_positive(self, *("token_s", "sigma", "token_bytes", "keys_bytes", "graph_bytes"))
        check_whole(self, max_document=self.min_document, tokens=self.min_document, bin_tokens=self.max_document)

    def faster(self, times: float) -> LengthsWorkload:
        """Return a copy with equal bytes that computes ``times`` times as fast."""
        return replace(self, token_s=self.token_s / times)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Lengths in tokens of all documents of a step. The last document is cut where the step is full."""
        draw, left, lengths = random.Random(self.seed), self.tokens, list[int]()
        while left:
            wanted = max(self.min_document, int(draw.lognormvariate(self.mu, self.sigma)))
            lengths.append(min(left, wanted, self.max_document))
            left -= lengths[-1]
        return tuple(lengths)

    @property
    def work(self) -> LayerTime:
        """Function of a document's length that gives the seconds of its forward pass through all layers."""
        return LayerTime((LayerKind(self.layers, self.token_s, self.token_s / self.even_at),))

    def floor_s(self, topology: Topology, speeds: Sequence[float] = ()) -> float:
        """Return a lower bound of the computing seconds of a step, which no assignment of the documents can undercut.

        It is the larger of two: the mean over all devices, and the longest document divided by the devices of a node.

        Args:
            topology: ranks and nodes.
            speeds: speeds of all devices, the fastest being 1; empty if all are equal.
        """
        times = [self.work.of(length) for length in self.lengths]
        return PASSES * max(sum(times) / (sum(speeds) or topology.world_size), max(times) / topology.local_size)


@dataclass(frozen=True)
class ServingWorkload(Uncut):
    """Served model as sizes and seconds.

    A step is ``laps`` decode steps, then prompts in chunks; see `tawpipe_lab.serving`.

    Args:
        layers: number of decoder layers.
        forward_s: seconds of a layer in one pass.
        slots: KV-cache slots of a group; each has one token in every pass.
        token_bytes: bytes of one token between two stages.
        laps: number of decode steps in which only single tokens pass.
        chunk: number of tokens of one chunk of a prompt.
        chunks: number of chunks of each prompt; the prompts follow these decode steps.
        chunk_s: seconds that a layer takes longer in a pass with a chunk.
        embedding_s: seconds of the embedding in one pass. They make the first stage the slowest, so that passes wait
            there. If all stages were equal, chance would decide where passes wait, and the step could end long before
            they all wait at the first stage.

    Raises:
        UserError: a setting is out of range.
    """

    layers: int
    forward_s: float
    slots: int
    token_bytes: int
    laps: int
    chunk: int
    chunks: int
    chunk_s: float
    embedding_s: float

    kind: ClassVar[str] = "serving"

    def __post_init__(self) -> None:
        check_whole(self, laps=3, **dict.fromkeys(("layers", "slots", "token_bytes", "chunk", "chunks"), 1))
        check_positive(self, "forward_s", "chunk_s", "embedding_s")

    def faster(self, times: int) -> ServingWorkload:
        """Return a copy with equal bytes that computes ``times`` times as fast."""
        less = {name: getattr(self, name) / times for name in ("forward_s", "chunk_s", "embedding_s")}
        return replace(self, **less)


@dataclass(frozen=True)
class RealWorkload(Uncut):
    """Llama with random weights, trained in fp32 with AdamW on random tokens; a micro-batch is one sequence.

    Args:
        layers: number of decoder layers. Embedding and head have weights, too, and are not tied.
        heads: number of attention heads, equal for queries, keys and values.
        vocabulary: number of different tokens.
        micro_batches: number of micro-batches of a step, over all devices.
        clip_norm: largest global gradient norm.
        seed: seed of initial weights and of tokens.

    Raises:
        UserError: a setting is out of range.
    """

    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    vocabulary: int
    sequence_length: int
    micro_batches: int
    learning_rate: float = 1e-3
    clip_norm: float = 1.0
    seed: int = 0

    kind: ClassVar[str] = "real"

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden_size", "intermediate_size", "heads", "vocabulary", "micro_batches")
        check_whole(self, **dict.fromkeys(sizes, 1), sequence_length=2, seed=0)
        check_positive(self, *("learning_rate", "clip_norm"))
        if self.hidden_size % (2 * self.heads):
            raise UserError("hidden_size", self.hidden_size, f"a multiple of twice the heads, which are {self.heads}")

    @property
    def tokens(self) -> int:
        """Number of tokens of a step that are predicted: all but the first of every sequence."""
        return self.micro_batches * (self.sequence_length - 1)

    @property
    def activation_bytes(self) -> int:
        """Bytes of the boundary between two layers for one micro-batch."""
        return 4 * self.sequence_length * self.hidden_size


Known = TimedWorkload | RealWorkload
"""Workloads whose micro-batches are known before documents are assigned."""
Workload = Known | LengthsWorkload | ServingWorkload
KINDS: dict[str, type[Workload]] = {
    cls.kind: cls for cls in (TimedWorkload, LengthsWorkload, ServingWorkload, RealWorkload)
}


def merge_knobs(knobs: Mapping[str, Any], searched: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs of a row together with those that a search found.

    A given knob wins, except ``stages`` that names only an axis, which a search completes.

    Args:
        knobs: given knobs.
        searched: knobs from a search.
    """
    user_knobs = {
        name: value for name, value in knobs.items() if name != "stages" or name not in searched or ":" in value
    }
    return {**searched, **user_knobs}


def spell_out(workload: Workload) -> dict[str, Any]:
    """Return all settings of a workload, and its kind, as plain data."""
    return {"kind": workload.kind, **asdict(workload)}


def from_spelled_out(values: Mapping[str, Any]) -> Workload:
    """Build the workload whose settings ``spell_out`` returned."""
    return KINDS[values["kind"]](**{name: value for name, value in values.items() if name != "kind"})
