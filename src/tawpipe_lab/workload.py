"""The workloads of the lab, as settings.

* timed: real transfers of real bytes, computation as sleeps of given seconds. Scheduling and network are what is
  measured then, and many ranks run on few cores.
* lengths: the same for documents of uneven lengths, whose seconds and bytes follow from their tokens.
* serving: tokens of groups of users that pass through stages, as seconds and bytes.
* real: a small model with its optimizer. It shows that all strategies train the same thing: their losses agree.
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
    """Refuse settings that are no whole numbers of at least so much.

    Raises:
        UserError: one is not.
    """
    for name, number in least.items():
        value = getattr(settings, name)
        if not isinstance(value, int) or value < number:
            raise UserError(name, value, f"a whole number of at least {number}")


def check_positive(settings: object, *names: str) -> None:
    """Refuse settings that are no numbers above 0.

    Raises:
        UserError: one is not.
    """
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, int | float) or not value > 0:
            raise UserError(name, value, "a number above 0")


class Uncut:
    """A workload whose layers cannot be cut."""

    kind: ClassVar[str]

    def split(self, parts: int) -> Self:
        """The same workload.

        Raises:
            UserError: there should be more than one part.
        """
        if parts != 1:
            raise UserError("parts_per_layer", parts, f"1, because layers of the kind {self.kind} cannot be cut")
        return self


class TimedPart(NamedTuple):
    """A part of a timed model: its weights and, for a micro-batch, its seconds."""

    elements: int
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    frozen: int = 0
    """Elements besides that travel and are not trained."""
    linear_bytes: int = 0
    """Kept for a micro-batch between the two parts of its backward pass."""
    graph_bytes: int = 0
    """Kept for a micro-batch from its forward to its backward pass, if nothing is computed again."""

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
    forward, backward_input, backward_weight = (seconds.get(name, 0.0) for name in SECONDS_OF_LAYERS)
    return TimedPart(size // 4, forward, backward_input, backward_weight, *kept)


@dataclass(frozen=True)
class TimedWorkload:
    """A model as sizes and seconds.

    Args:
        layers: decoder layers.
        layer_bytes: weights of a layer, fp32.
        forward_s: of a layer and micro-batch.
        backward_input_s: the gradient of the input, with the recomputation of the forward pass before it.
        backward_weight_s: the gradient of the weights; zero-bubble schedules run it apart.
        micro_batches: of one step, over all devices.
        activation_bytes: of the boundary between two layers, for one micro-batch.
        optimizer: run AdamW on the home stripes, instead of leaving the update out.
        embedding_bytes, head_bytes: weights of the model's ends, fp32; 0 leaves them out.
        head_s: of loss and gradients of a micro-batch; of the embedding's lookup see ``kinds``.
        tied: the head uses the weights of the embedding, which it has none of its own besides.
        keys_bytes: keys and values of a layer for one micro-batch, which processes that compute one together exchange:
            in this project's rows those of a node, where a micro-batch is one document.
        frozen_bytes: of a layer besides, as it travels: quantised, of a model under adapters. No gradient of it exists.
        linear_bytes: of a layer, what its linear layers keep for a micro-batch where the gradients of weights come
            later than that of the input.
        graph_bytes: of a layer, what it keeps for a micro-batch under ``recompute: none``; 0 for ``activation_bytes``.
        kinds: letter -> settings of a layer of this kind that are not those above: its seconds, ``layer_bytes``,
            ``frozen_bytes``, ``linear_bytes``, ``graph_bytes``; and the seconds of an ``embedding``, which otherwise
            takes no time, and of a ``head``, which otherwise takes a third of ``head_s`` for each of its passes.
        pattern: the letters of all layers in their order, where not all are alike; one that is no kind stands for the
            settings above.
        host_s: in which a boundary activation passes between a device and its host's memory, one at a time.
        homes_bytes_per_s: of the link between a device and homes in its host's memory, each way; 0 for one without a
            limit.
        room: boundary activations that a device has memory for, in pipelines that are made for that; None for any
            number.
        inside_sleeps: what passes inside a node takes its time by sleeping, in rows of this project; it is the loopback
            of the machine otherwise.

    Raises:
        UserError: ends that contradict each other, or a pattern that does not fit.
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
        """The same work with every layer cut into ``parts`` equal layers.

        Raises:
            UserError: the weights of a layer cannot be cut so.
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
        """The same bytes with computing, and a link to the host, that is so many times as fast."""
        faster = replace(self, homes_bytes_per_s=self.homes_bytes_per_s * times)
        return faster._with_seconds(lambda seconds: seconds / times)

    def with_each_sleep(self, more: float) -> TimedWorkload:
        """The same where everything that takes time takes so many seconds more."""
        return self._with_seconds(lambda seconds: seconds + more if seconds else 0.0)

    def _with_seconds(self, change: Callable[[float], float]) -> TimedWorkload:
        kinds = {
            kind: {name: change(size) if name in SECONDS_OF_LAYERS else size for name, size in values.items()}
            for kind, values in self.kinds.items()
        }
        seconds = {name: change(getattr(self, name)) for name in (*SECONDS_OF_LAYERS, "head_s", "host_s")}
        return replace(self, kinds=kinds, **seconds)

    def work(self, micro_batch: int) -> float:
        """The seconds of a micro-batch as a multiple of those above."""
        return 1.0

    def tokens(self, micro_batch: int) -> float:
        """The bytes of a micro-batch as a multiple of those above."""
        return 1.0

    def keys_s(self, micro_batch: int) -> float:
        """Seconds of a layer's forward pass as far as its keys and values, which documents in sets need besides."""
        return 0.0

    @property
    def compute_s(self) -> float:
        """Seconds of all layers and micro-batches together; divided by the devices it bounds a step from below."""
        return self.micro_batches * sum(part.seconds for part in self.parts)

    @cached_property
    def layer_parts(self) -> tuple[TimedPart, ...]:
        """Every layer."""
        usual = {name: getattr(self, name) for name in (*SECONDS_OF_LAYERS, *BYTES_OF_LAYERS)}

        def part(letter: str) -> TimedPart:
            values = {**usual, **self.kinds.get(letter, {})}
            size, frozen, linear, graph = (int(values[name]) for name in BYTES_OF_LAYERS)
            return _part(size, values, frozen // 4, linear, graph or self.activation_bytes)

        kinds = {letter: part(letter) for letter in {*self.pattern, ""}}
        return tuple(kinds[letter] for letter in self.pattern or [""] * self.layers)

    @cached_property
    def block_parts(self) -> tuple[TimedPart, ...]:
        """Embedding, every layer and head, whether there is anything to them or not."""
        third = dict.fromkeys(SECONDS_OF_LAYERS, self.head_s / 3)
        embedding = _part(self.embedding_bytes, self.kinds.get("embedding", {}))
        return embedding, *self.layer_parts, _part(self.head_bytes, {**third, **self.kinds.get("head", {})})

    @property
    def parts(self) -> tuple[TimedPart, ...]:
        """Embedding, layers and head, as far as there are any."""
        return tuple(self.block_parts[block] for block in self.blocks_with_parts)

    @property
    def blocks_with_parts(self) -> tuple[int, ...]:
        """The blocks of ``parts``: of the ends those that have weights or take time."""
        ends = (0, self.layers + 1)
        return tuple(
            block for block, part in enumerate(self.block_parts) if block not in ends or part.elements or part.seconds
        )


PASSES = 4
"""Forward, forward again, and both gradients, which take as long each."""


@dataclass(frozen=True)
class LengthsWorkload(Uncut):
    """A model as sizes and seconds, and a step of documents whose lengths are random (lognormal) numbers.

    Backward passes take twice the seconds of the forward pass, and once more what they recompute.

    Args:
        layers: decoder layers.
        layer_bytes: weights of a layer, fp32.
        token_s: of a layer's forward pass for a token, without its attention.
        even_at: tokens of a document of which attention takes as long as the rest.
        mu, sigma: of the logarithm of a document's tokens.
        max_document: tokens of a document at most; longer ones are cut. As many are in a row of one length.
        min_document: tokens of a document at least.
        tokens: of a step.
        bin_tokens: of the documents that a device computes as one micro-batch, at most.
        token_bytes: of the boundary between two layers, for a token.
        keys_bytes: of keys and values of a layer, for a token; processes that compute a document together exchange
            them.
        graph_bytes: of what a layer keeps for a token if nothing is recomputed.
        seed: of the lengths.
        optimizer: run AdamW on the home stripes, instead of leaving the update out.
        inside_sleeps: as of a ``TimedWorkload``.

    Raises:
        UserError: a setting that cannot work.
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
        """The same bytes with computing that is so many times as fast."""
        return replace(self, token_s=self.token_s / times)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of the documents of a step; the last one is cut where the step is full."""
        draw, left, lengths = random.Random(self.seed), self.tokens, list[int]()
        while left:
            wanted = max(self.min_document, int(draw.lognormvariate(self.mu, self.sigma)))
            lengths.append(min(left, wanted, self.max_document))
            left -= lengths[-1]
        return tuple(lengths)

    @property
    def work(self) -> LayerTime:
        """Seconds of a document's forward pass through all layers."""
        return LayerTime((LayerKind(self.layers, self.token_s, self.token_s / self.even_at),))

    def floor_s(self, topology: Topology, speeds: Sequence[float] = ()) -> float:
        """Seconds of all passes that no dealing of the documents undercuts: the mean over all devices, or the longest
        document over those of a node.

        Args:
            speeds: of all devices, where they differ; the fastest has 1.
        """
        times = [self.work.of(length) for length in self.lengths]
        return PASSES * max(sum(times) / (sum(speeds) or topology.world_size), max(times) / topology.local_size)


@dataclass(frozen=True)
class ServingWorkload(Uncut):
    """A model that is served, as sizes and seconds.

    Args:
        layers: decoder layers.
        forward_s: of a layer on a pass.
        slots: of a group, each of which has a token in every pass.
        token_bytes: of a token between two stages.
        laps: of a step in which nothing but such tokens pass.
        chunk, chunks: tokens of a part of a prompt, and parts of the prompts that follow these laps.
        chunk_s: that a layer takes longer with such a part.
        embedding_s: of the embedding on a pass. So the first stage is what passes wait for: if all were alike, it would
            be whichever is slower by a hair, and a step would end long before all wait there.

    Raises:
        UserError: a setting that cannot work.
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
        """The same bytes with computing that is so many times as fast."""
        less = {name: getattr(self, name) / times for name in ("forward_s", "chunk_s", "embedding_s")}
        return replace(self, **less)


@dataclass(frozen=True)
class RealWorkload(Uncut):
    """A Llama with random weights, trained in fp32 with AdamW on random tokens. A micro-batch is one sequence.

    Args:
        layers: decoder layers; embedding and head have weights as well, and are not tied.
        heads: of the attention, for queries, keys and values alike.
        vocabulary: tokens that there are.
        micro_batches: of one step, over all devices.
        clip_norm: largest global gradient norm.
        seed: of initial weights and of tokens.

    Raises:
        UserError: a setting that cannot work.
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
        """Tokens of one step that a prediction is made for: all but the first of every sequence."""
        return self.micro_batches * (self.sequence_length - 1)

    @property
    def activation_bytes(self) -> int:
        """Bytes of the boundary between two layers, for one micro-batch."""
        return 4 * self.sequence_length * self.hidden_size


Known = TimedWorkload | RealWorkload
"""Workloads of which is known which micro-batches there are."""
Workload = Known | LengthsWorkload | ServingWorkload
KINDS: dict[str, type[Workload]] = {
    cls.kind: cls for cls in (TimedWorkload, LengthsWorkload, ServingWorkload, RealWorkload)
}


def with_found(knobs: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """The knobs of a row, and those that a search found. Given ones count, but for stages that say over what they are
    laid and no more.
    """
    given = {name: value for name, value in knobs.items() if name != "stages" or name not in found or ":" in value}
    return {**found, **given}


def spell_out(workload: Workload) -> dict[str, Any]:
    """Every setting, the kind among them; plain values."""
    return {"kind": workload.kind, **asdict(workload)}


def from_spelled_out(values: Mapping[str, Any]) -> Workload:
    """The workload that was spelled out."""
    return KINDS[values["kind"]](**{name: value for name, value in values.items() if name != "kind"})
