"""What a user may choose about a schedule: one name for each choice, in one place.

The command line, the YAML, the library, the plan, the lab and saved runs all use this class; the string under a field
is its help. What a choice means for one model on one cluster is worked out in ``StepSpec`` (step.py), once.
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
RECOMPUTE: dict[str, Kind | None] = {"full": None, "selective": Kind.ATTENTION, "none": Kind.GRAPH}
"""How much a backward pass computes again, and the kind of activation that is kept instead."""


@dataclass(frozen=True)
class ScheduleSettings:
    """How weights travel."""

    strategy: str = "tawpipe-spread"
    """The way that weights and gradients take."""
    homes: str = ""
    """Under tawpipe-striped and tawpipe-whole, of every unit (embedding, layers, head) the node or the process that
    keeps it, as in 0,1,2,0; in turn if empty. tawpipe plan finds what suits uneven layers or links."""
    groups: str = ""
    """Under tawpipe-groups, the processes of its three groups, as in 4/8/16, or their nodes, as in 1n/1n/2n: weights
    are kept over the first for the step, gradients reduced over the second, and the optimizer's state cut over the
    third. A node, a node and all if empty."""
    stages: str = ""
    """Under 1f1b, interleaved-1f1b, zero-bubble, generated and solved, what the positions of a pipeline are: world (all
    processes; so if empty), nodes (every node is one, and as many pipelines run side by side as a node has processes)
    or locals (a pipeline inside every node). After a colon the first block of every stage (0 is the embedding) and the
    stages' positions, as in world:0,5,9,12@0,1,1,0; even stages if empty, under generated the best that it finds."""
    block_times: str = ""
    """Under zero-bubble, generated and solved, the times of blocks for which stages and orders are made: forward,
    backward for inputs, backward for weights, from the embedding to the head, as in 0/0/0,32x10/20/10,5/15/0. A plan
    fills it in; what the sizes of the blocks say if empty."""
    pipeline_order: str = ""
    """Under pipelines, what every position does, in order, for as many micro-batches as are in it. A plan fills it in
    under solved; made anew if empty."""
    device_speeds: str = ""
    """How fast every process computes beside the others, as in 8x1,8x0.5: documents, micro-batches and even stages are
    dealt by it. A plan fills it in where a topology says device_of; all alike if empty."""
    micro_batches_per_visit: int = bounded(2, minimum=1)
    """Micro-batches that a process computes while a unit's weights are there. More of them mean less traffic and more
    memory for activations."""
    look_ahead: int = bounded(2, minimum=0)
    """How many visits ahead weights are fetched; every one costs a buffer of the largest unit's size."""
    gradient_buffers: int = bounded(2, minimum=1)
    """Buffers of a unit's size for gradients: one is computed while the others are reduced."""
    step_cache: int | Literal["all"] | None = bounded(None, minimum=0)
    """On several nodes, of how many more units than look-ahead needs a process keeps what has crossed the slow link
    until the step's end: a number, or all. Each saves transfers and costs its share of a unit's size. By default what
    the strategy is made for: all under tawpipe-step, 0 under the others."""
    gradients_scope: Literal["visit", "step"] | None = None
    """How often gradients leave a node: after every visit, or once per step, which costs memory and saves traffic. By
    default what the strategy is made for: step under tawpipe-step and hsdp, visit under the others."""
    host_homes: Literal["none", "state", "all"] | None = None
    """What of the homes lives in the host's memory: none; state, which is master weights, gradients and the optimizer's
    state (16 of 18 bytes a parameter) and passes through the device slice by slice; or, where weights travel, all,
    which is the copy that travels and what is frozen too. The numbers stay the same, bit by bit. By default a plan
    chooses, which takes the first that fits; without a plan none."""
    recompute: str = "auto"
    """What backward passes compute again, to keep less: full (everything), selective (all but attention, whose results
    are kept, and between chunks the states of mixers) or none (nothing; the most memory, a quarter less to compute).
    For some layers, from the last one backwards: none:4,selective:8,full. By default a plan chooses; without a plan a
    run takes none where that fits into 85 % of the free memory, else full. A resumed run keeps what it took. In the
    library auto is full."""
    keep_mib: int | None = bounded(None, minimum=0)
    """Memory of a device, in MiB, for what backward passes would compute again: of every micro-batch as many layers
    keep it as that holds, chosen anew in every step, so that a bin of few tokens keeps more of them than a full one; a
    slice of a document keeps nothing, nor does a bin that several processes share. By default a run with uneven
    documents (packing balanced) takes what is left, unless --plan is none; otherwise 0."""
    offloaded_layers: int = bounded(0, minimum=0)
    """What so many first layers keep for their backward pass waits in the host's memory: their inputs, or what
    recompute lets them keep; under sequence_chunk it comes and goes by chunk."""
    offload_dir: str = ""
    """Under sequence_chunk, a folder on every machine's own disk (NVMe) in whose files they wait instead. The files
    have no names: they go with the process."""
    weights_compression: Compression = "none"
    """In what weights travel between nodes: as --dtype says (none); how their bits have changed since the step before
    (exact: 2 to 8 bits a weight as a rule, the numbers stay the same; bfloat16 under tawpipe-step); or in 8 bits with a
    scale for every 256 of them, which changes the numbers. Between CPUs a plan takes exact where a step is 5 % shorter
    with it. See docs/numbers.md."""
    gradients_compression: Compression = "none"
    """In what gradients travel between nodes: as reduce_dtype says (none); coded without loss, which changes no number
    either (exact: 13 to 26 of 32 bits for sums of few; between CPUs, under tawpipe-spread and tawpipe-step); or in 8
    bits likewise."""
    early_updates: bool = False
    """Update a unit as soon as its gradient is complete, without waiting for the norm of all of them. There is no
    clipping then, and numbers that are not finite have reached the weights when the run ends because of them."""
    reuse: bool = True
    """Use a unit again that a buffer still holds from an earlier visit. Off, every visit brings it anew, as in the
    paper; for comparisons."""
    reduce_dtype: Literal["float32", "same"] = "float32"
    """Type in which gradients are added up and sent: float32 (float64 under --dtype float64), or as --dtype (same),
    which under bfloat16 halves their bytes and rounds every sum to 8 bits; see docs/numbers.md."""
    loss_chunk_tokens: int = bounded(0, minimum=0)
    """Tokens whose logits exist at one time; those of a long sequence never do. 0 for 1024 to 8192, as many as take 4
    GiB on a GPU or 1 GiB on a CPU."""

    sequence_chunk: int | None = bounded(None, minimum=0)
    """Run a layer on so many tokens of a row at a time, all of them in one visit, so that rows may be much longer: what
    a layer needs besides its input then exists for one chunk, and keys and values for one layer. 0 runs it on whole
    rows. By default a plan chooses, which takes whole rows where they fit; without a plan 0."""
    sequence_ranks: int | None = bounded(None, minimum=1)
    """So many processes of a node compute the rows of a micro-batch together, each a share of the tokens of every
    document; they gather keys and values layer by layer. For rows that one device cannot hold, or computes for too
    long. It must divide the processes of every node. By default a plan chooses, which leaves every row to one process
    where that fits, is as fast and leaves none without rows; without a plan 1."""


DEFAULT = ScheduleSettings()
UNPLANNED = ("early_updates", "reuse", "reduce_dtype", "loss_chunk_tokens", "offload_dir", "keep_mib")
"""Settings that a plan takes as given: they change the numbers, or are for comparisons."""
PLANNED = tuple(setting.name for setting in fields(ScheduleSettings) if setting.name not in UNPLANNED)
"""Settings that a plan chooses."""
KEPT_BY_PLANS = ("sequence_chunk", "sequence_ranks", "host_homes", "device_speeds")
"""Of those, the ones that a plan takes as given where the user has chosen, and chooses the others."""


def chosen_by_hand(settings: ScheduleSettings) -> list[str]:
    """Names of settings that a plan would choose and that somebody has set."""
    names = [
        setting for setting in fields(ScheduleSettings) if setting.name in PLANNED and setting.name not in KEPT_BY_PLANS
    ]
    return [setting.name for setting in names if getattr(settings, setting.name) != setting.default]


def settings_from(values: Mapping[str, Any], *, where: str, **fixed: Any) -> ScheduleSettings:
    """Settings from plain data, such as the section ``schedule`` of a saved plan.

    Args:
        where: what is said to hold them, in messages.
        fixed: values that beat those.

    Raises:
        UserError: a name that is unknown, or a value of another type.
    """
    known = {setting.name: setting.default for setting in fields(ScheduleSettings)}
    for name, value in values.items():
        if name not in known:
            raise UserError(where, name, f"one of {', '.join(known)}")
        if known[name] is not None and type(value) is not type(known[name]):  # of the others step_of looks at the value
            raise UserError(f"{where}: {name}", value, describe(type(known[name])))
    return ScheduleSettings(**{**values, **fixed})


def check_values(settings: ScheduleSettings) -> None:
    """Look for values that no strategy could work with: below the field's minimum, or not among its choices.

    Args:
        settings: with nothing left open, see ``Strategy.settle``.

    Raises:
        UserError: the first of them.
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
    """The words that a type allows."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(word for part in get_args(hint) for word in _choices(part))


def recompute_of_blocks(setting: str, model: ModelSpec) -> tuple[str, ...]:
    """What the backward pass of every block computes again, from ``ScheduleSettings.recompute``.

    >>> from tawpipe.schedule.spec import BlockSpec
    >>> ends = BlockSpec((), "embedding"), BlockSpec((), "head")
    >>> model = ModelSpec((ends[0], *[BlockSpec((), "layer")] * 4, ends[1]), ())
    >>> recompute_of_blocks("none:1,selective:2,full", model)
    ('full', 'full', 'selective', 'selective', 'none', 'full')

    Args:
        setting: ``full``, ``selective`` or ``none`` for all layers; or a list separated by commas, each with a number
            of layers, from the last one backwards, and the rest without a number; ``auto``, where nobody settles it,
            is ``full``.

    Raises:
        UserError: anything else.
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
    """``ScheduleSettings.homes`` as numbers.

    >>> parse_homes("0,1, 0")
    (0, 1, 0)

    Raises:
        UserError: something else than numbers and commas.
    """
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if not all(word.isdecimal() and word.isascii() and len(word) < 10 for word in words):
        raise UserError("schedule.homes", text, "numbers of nodes or of processes, as in 0,1,2,0")
    return tuple(map(int, words))


def spell_homes(homes: Sequence[int]) -> str:
    """The text that ``parse_homes`` reads."""
    return ",".join(map(str, homes))
