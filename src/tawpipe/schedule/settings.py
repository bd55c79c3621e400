"""Settings of a schedule: one name for each choice, in one place.

The command line, the YAML files, the library, the plan, the lab and saved runs all use this class. The string under a
field is its help text. ``StepSpec`` (step.py) works out what a choice means for one model on one cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tawpipe.errors import UserError
from tawpipe.options import bounded, describe
from tawpipe.schedule.buffers import Kind
from tawpipe.schedule.spec import ModelSpec

Compression = Literal["none", "exact", "int8", "fp8"]
AUTO_RECOMPUTE = "auto"
ELEMENTWISE = "elementwise"
RECOMPUTE: dict[str, Kind | None] = {"full": None, "selective": Kind.ATTENTION}
RECOMPUTE |= {ELEMENTWISE: Kind.PRODUCTS, "none": Kind.GRAPH}
"""Value of ``recompute`` -> kind of activation that is kept instead of recomputed, in addition to the block's input."""


@dataclass(frozen=True)
class ScheduleSettings:
    """Settings of how weights and activations travel."""

    strategy: str = "tawpipe-spread"
    """Strategy: where weights are stored, and how weights, gradients and activations travel."""
    homes: str = ""
    """Home of every unit (embedding, layers, head) under tawpipe-striped and tawpipe-whole: the number of the node or
    process that stores it, as in 0,1,2,0. If empty, units are assigned in turn. tawpipe plan finds homes that suit
    uneven layers or links."""
    groups: str = ""
    """Sizes of the three groups of tawpipe-groups, in processes, as in 4/8/16, or in nodes, as in 1n/1n/2n. Weights are
    kept for the step over the first group. Gradients are reduced over the second. The optimizer state is sharded over
    the third. If empty, the sizes are one node, one node and all processes."""
    stages: str = ""
    """Stages of a pipeline, for 1f1b, interleaved-1f1b, zero-bubble, generated and solved. The value says what a
    position of the pipeline is. world: every process is a position. nodes: every node is a position, and as many
    pipelines run side by side as a node has processes. locals: every node has a pipeline of its processes. If empty:
    world. The layout may follow after a colon: the first block of every stage (0 is the embedding), then the position
    of every stage, as in world:0,5,9,12@0,1,1,0. Without it, stages are even; generated uses the best stages that it
    finds."""
    block_times: str = ""
    """Times of all blocks, for which zero-bubble, generated and solved make stages and orders. From the embedding to
    the head: forward, backward for inputs, backward for weights, as in 0/0/0,32x10/20/10,5/15/0. A plan sets this. If
    empty, times are estimated from the sizes of the blocks."""
    pipeline_order: str = ""
    """Order of the work of every position of a pipeline, for the number of micro-batches that it contains. A plan sets
    this under solved. If empty, the strategy makes the order."""
    device_speeds: str = ""
    """Relative speed of every process, as in 8x1,8x0.5. Documents, micro-batches and even stages are assigned in
    proportion. A plan sets this if the topology file has device_of. If empty, all processes are equally fast."""
    micro_batches_per_visit: int = bounded(2, minimum=1)
    """Micro-batches that a process computes in one visit, while it holds a unit's weights. More micro-batches need
    fewer transfers and more memory for activations."""
    look_ahead: int = bounded(2, minimum=0)
    """Prefetch depth: weights are loaded this number of visits before they are needed. Each visit costs a buffer of the
    size of the largest unit."""
    gradient_buffers: int = bounded(2, minimum=1)
    """Number of gradient buffers, each of the size of a unit. One gradient is computed while the others are reduced."""
    step_cache: int | Literal["all"] | None = bounded(None, minimum=0)
    """Number of additional units whose weights a process keeps until the end of the step, once they have crossed the
    slow link; all for every unit. Units that the prefetch depth needs are not counted. It is for several nodes. Each
    unit saves transfers and costs its share of the unit's size. By default all under tawpipe-step, 0 under the others.
    """
    gradients_scope: Literal["visit", "step"] | None = None
    """How often gradients leave a node. visit: after every visit. step: once per step, which costs memory and saves
    traffic. By default step under tawpipe-step, tawpipe-groups and hsdp, visit under the others."""
    host_homes: Literal["none", "state", "all"] | None = None
    """Parts of the homes that are stored in CPU memory. none: nothing. state: master weights, gradients and optimizer
    state (16 of 18 bytes per parameter), which pass through the device in portions. all: also the weights that travel
    and frozen weights; only if the strategy moves weights. Results are equal bit by bit. By default a plan takes the
    first of these that fits; without a plan none."""
    recompute: str = "auto"
    """Part of a layer that its backward pass recomputes to save memory. full: everything. selective: everything but
    attention, whose outputs are kept, and for rows in chunks the states of mixers. elementwise: norms and gates, which
    takes little time and about half the memory of none. none: nothing, which needs the most memory and a quarter less
    computation. A list sets it per layer, from the last layer backwards:
    none:4,selective:8,full. By default (auto) a plan chooses. Without a plan a run takes none if that fits into 85 % of
    the free memory, else full. A resumed run keeps its value. In the library auto means full."""
    keep_mib: int | None = bounded(None, minimum=0)
    """Device memory, in MiB, in which layers keep activations that they would otherwise recompute. In every step, and
    for every micro-batch, as many layers keep activations as fit. So a small packed micro-batch keeps more layers than
    a full one. Document slices keep nothing, and neither do packed micro-batches of a context-parallel group. By
    default a run with uneven documents (packing balanced) uses the memory that is left, unless --plan is none;
    otherwise 0."""
    offloaded_layers: int = bounded(0, minimum=0)
    """Number of layers, counted from the first, whose kept activations are offloaded to CPU memory until their backward
    pass. These are the layers' inputs, or what recompute lets them keep. With sequence_chunk they are moved chunk by
    chunk."""
    offload_dir: str = ""
    """Directory on a local disk (NVMe) of every machine for offloaded activations, instead of CPU memory. It needs
    sequence_chunk. The files have no names and disappear with the process."""
    weights_compression: Compression = "none"
    """Format of weights that travel between nodes. none: the type of --dtype. exact: only the changed bits since the
    step before, usually 2 to 8 bits per weight; results stay the same. It is for bfloat16 under tawpipe-step. int8 and
    fp8: 8 bits with one scale for 256 weights, which changes results. Between CPUs a plan takes exact if that makes a
    step 5 % shorter. See docs/numbers.md."""
    gradients_compression: Compression = "none"
    """Format of gradients that travel between nodes. none: the type of reduce_dtype. exact: coded without loss, 13 to
    26 of 32 bits for sums of few gradients; results stay the same. It is for CPUs, under tawpipe-spread and
    tawpipe-step. int8 and fp8: 8 bits with one scale for 256 gradients, which changes results."""
    early_updates: bool = False
    """Update a unit as soon as its gradient is complete, without waiting for the norm of all gradients. Gradients are
    then not clipped. If numbers are not finite, the run ends, but they have already reached the weights."""
    reuse: bool = True
    """Use a unit again that is still in a buffer from an earlier visit. If off, every visit receives the unit anew, as
    in the paper; for comparisons."""
    reduce_dtype: Literal["float32", "same"] = "float32"
    """Type in which gradients are added and sent. float32: float32 (float64 under --dtype float64). same: the type of
    --dtype; with bfloat16 this halves the bytes and rounds every sum to 8 bits, see docs/numbers.md."""
    loss_chunk_tokens: int = bounded(0, minimum=0)
    """Number of tokens whose logits are in memory at one time. Logits of a whole long sequence are never in memory. 0
    takes 1024 to 8192 tokens: as many as need 4 GiB on a GPU or 1 GiB on a CPU."""

    sequence_chunk: int | None = bounded(None, minimum=0)
    """Tokens of a row that a layer computes at one time. All chunks of a row are computed in one visit, so rows may be
    much longer: a layer's intermediate results exist for one chunk only, and keys and values for one layer only. 0
    computes whole rows. By default a plan chooses, and takes whole rows if they fit; without a plan 0."""
    sequence_ranks: int | None = bounded(None, minimum=1)
    """Number of processes of a node that compute a row together (context parallelism). Each computes a share of the
    tokens of every document, and keys and values are gathered in every layer. It is for rows that need too much memory
    or time on one device. It must divide the number of processes of every node. By default a plan chooses, and takes 1
    if that fits, is as fast, and gives every process a row; without a plan 1."""


DEFAULT = ScheduleSettings()
UNPLANNED = ("early_updates", "reuse", "reduce_dtype", "loss_chunk_tokens", "offload_dir", "keep_mib")
"""Settings that a plan does not change: they change results, or are for comparisons."""
PLANNED = tuple(setting.name for setting in fields(ScheduleSettings) if setting.name not in UNPLANNED)
"""Settings that a plan chooses."""
KEPT_BY_PLANS = ("sequence_chunk", "sequence_ranks", "host_homes", "device_speeds")
"""Settings of ``PLANNED`` that a plan does not change if the user has set them; it still chooses the others."""


def chosen_by_hand(settings: ScheduleSettings) -> list[str]:
    """Return the names of settings that a plan could choose but that differ from their defaults.

    Settings in ``KEPT_BY_PLANS`` are left out."""
    names = [
        setting for setting in fields(ScheduleSettings) if setting.name in PLANNED and setting.name not in KEPT_BY_PLANS
    ]
    return [setting.name for setting in names if getattr(settings, setting.name) != setting.default]


def settings_from(values: Mapping[str, Any], *, where: str, **fixed: Any) -> ScheduleSettings:
    """Return settings from plain data, such as the section ``schedule`` of a saved plan.

    Args:
        values: names and values of settings.
        where: origin of ``values``, for messages.
        fixed: settings that override ``values``.

    Raises:
        UserError: a name is unknown, or a value has another type than the default.
    """
    known = {setting.name: setting.default for setting in fields(ScheduleSettings)}
    for name, value in values.items():
        if name not in known:
            raise UserError(where, name, f"one of {', '.join(known)}")
        if known[name] is not None and type(value) is not type(known[name]):  # step_of checks other values
            raise UserError(f"{where}: {name}", value, describe(type(known[name])))
    return ScheduleSettings(**{**values, **fixed})


def check_values(settings: ScheduleSettings) -> None:
    """Check that every value is at least the field's minimum or one of its choices. Raises at the first that is not.

    Args:
        settings: settings in which no choice is left open, see ``Strategy.settle``.

    Raises:
        UserError: a value is not allowed, or ``offload_dir`` is set without ``sequence_chunk``.
    """
    if settings.offload_dir and not settings.sequence_chunk:
        why = "whole rows wait in the host's memory"
        expected = f"nothing without sequence_chunk: {why}"
        raise UserError("schedule.offload_dir", settings.offload_dir, expected, need=why)
    hints = get_type_hints(ScheduleSettings)
    for setting in fields(settings):
        value, choices = getattr(settings, setting.name), _choices(hints[setting.name])
        if value in choices:
            continue
        least, numbers = setting.metadata.get("minimum"), isinstance(value, int) and not isinstance(value, bool)
        if least is not None and not (numbers and value >= least):
            expected = " or ".join((f"at least {least}", *choices))
            raise UserError(f"schedule.{setting.name}", value, expected)
        if least is None and choices:
            raise UserError(f"schedule.{setting.name}", value, f"one of {', '.join(choices)}")


def _choices(hint: Any) -> tuple[str, ...]:
    """Return the words that a type hint allows: the values of its ``Literal`` parts; empty if it has none."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(word for part in get_args(hint) for word in _choices(part))


def recompute_of_blocks(setting: str, model: ModelSpec) -> tuple[str, ...]:
    """Return what the backward pass of every block recomputes, from ``ScheduleSettings.recompute``.

    >>> from tawpipe.schedule.spec import BlockSpec
    >>> ends = BlockSpec((), "embedding"), BlockSpec((), "head")
    >>> model = ModelSpec((ends[0], *[BlockSpec((), "layer")] * 4, ends[1]), ())
    >>> recompute_of_blocks("none:1,selective:2,full", model)
    ('full', 'full', 'selective', 'selective', 'none', 'full')

    Args:
        setting: ``full``, ``selective``, ``elementwise`` or ``none`` for all layers. Or a list of them, separated by
            commas, each with a number of layers, from the last layer backwards; the last one without a number is for
            the rest. ``auto`` means ``full``.
        model: sizes of the model.

    Raises:
        UserError: ``setting`` is anything else.
    """
    wanted: list[str] = []
    layers = model.num_layers
    parts = ("full" if setting == AUTO_RECOMPUTE else setting).split(",")
    for i, part in enumerate(parts):
        how, colon, number = part.strip().partition(":")
        last = i == len(parts) - 1
        if how not in RECOMPUTE or (colon and not number.isdecimal()) or not (colon or last):
            choices = ", ".join(RECOMPUTE)
            raise UserError("schedule.recompute", setting, f"{choices}, or for example none:4,selective:8,full")
        wanted += [how] * (int(number) if colon else layers)
    wanted = [*wanted, *["full"] * layers][:layers]
    return ("full", *reversed(wanted), "full")


def parse_homes(text: str) -> tuple[int, ...]:
    """Return ``ScheduleSettings.homes`` as numbers; empty for an empty text.

    >>> parse_homes("0,1, 0")
    (0, 1, 0)

    Raises:
        UserError: ``text`` has anything but numbers and commas.
    """
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isdecimal() and word.isascii() and len(word) < 10 for word in words):
        raise UserError("schedule.homes", text, "numbers of nodes or of processes, as in 0,1,2,0")
    return tuple(map(int, words))


def spell_homes(homes: Sequence[int]) -> str:
    """Return the text from which ``parse_homes`` reads ``homes``."""
    return ",".join(map(str, homes))
