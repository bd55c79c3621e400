"""A question and a choice as plain data, so that a plan can be played again without its model. Imports schedule, plan.

A saved plan has two parts: what a reader wants to know and ``tawpipe train --plan`` follows, and under ``clock`` what
the clock was given. Layers that are alike are written once, with their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from tawpipe.errors import UserError
from tawpipe.plan.machine import machine_from, spell_machine
from tawpipe.plan.profile import Profile
from tawpipe.plan.request import Question
from tawpipe.schedule.blocks import recompute_of_blocks
from tawpipe.schedule.footprint import Widths
from tawpipe.schedule.placement import parse_homes, spell_homes
from tawpipe.schedule.spec import BlockSpec, Knobs, ModelSpec, UnitSpec
from tawpipe.simulate import BlockCost, MicroBatchSize, Seconds

MOST_ALIKE = 100_000
"""Blocks or units in a row, beyond which a plan is damaged."""
PLACEMENTS = {"flat": "flat", "hsdp": "hybrid", "weipipe": "ring"}
"""Of the settings ``schedule.builder`` that fix the placement."""
SETTINGS = (
    "micro_batches_per_visit",
    "look_ahead",
    "gradient_buffers",
    "weights_scope",
    "gradients_scope",
    "kept_units",
    "offloaded_layers",
    "weights_wire",
    "gradients_wire",
)
"""Knobs that are settings of ``tawpipe train`` under the same name."""
NUMBERS = ("global_batch", "micro_batch", "sequence_length", "memory_bytes", "flops", "peak_flops", "clip")
"""Of a question, plain ones."""


def record_of(question: Question) -> dict[str, Any]:
    """What ``question_from`` makes the question of again."""
    profile, model = question.profile, question.model
    return {
        "machine": spell_machine(question.machine),
        "blocks": _packed(
            [block.kind, block.backward_reads_weights, block.needs_backward, _cost(cost)]
            for block, cost in zip(model.blocks, profile.blocks, strict=True)
        ),
        "block_units": [list(block.units) for block in model.blocks],
        "units": _packed([unit.numel, unit.trainable] for unit in model.units),
        "profile": {
            "update_s": profile.update_s,
            "kept": dict(profile.kept),
            "boundary": profile.boundary,
            "working": profile.working,
            "fixed_working": profile.fixed_working,
            "source": profile.source,
        },
        "size": asdict(question.size),
        "widths": asdict(question.widths),
        **{name: getattr(question, name) for name in NUMBERS},
    }


def question_from(content: Mapping[str, Any], *, where: str) -> Question:
    """The question of a saved plan.

    Raises:
        UserError: it is damaged.
    """
    try:
        blocks = list(_unpacked(content["blocks"]))
        of_blocks = content["block_units"]
        units = [
            UnitSpec(numel, trainable, tuple(b for b, own in enumerate(of_blocks) if u in own))
            for u, (numel, trainable) in enumerate(_unpacked(content["units"]))
        ]
        specs = tuple(
            BlockSpec(tuple(own), kind, reads, needs)
            for own, (kind, reads, needs, _) in zip(of_blocks, blocks, strict=True)
        )
        costs = tuple(BlockCost(*(Seconds(*part) for part in one[3])) for one in blocks)
        return Question(
            model=ModelSpec(specs, tuple(units)),
            profile=Profile(costs, **content["profile"]),
            machine=machine_from(content["machine"], where=where),
            size=MicroBatchSize(**content["size"]),
            widths=Widths(**content["widths"]),
            **{name: content[name] for name in NUMBERS},
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise UserError("PLAN", where, f"a plan that `tawpipe plan --save` or a run wrote ({error!r})") from error


def knobs_from(schedule: Mapping[str, Any], question: Question) -> Knobs:
    """The knobs that the section ``schedule`` of a plan or of settings stands for."""
    return question.knobs(
        placement=PLACEMENTS.get(schedule.get("builder", "tawpipe")) or schedule.get("placement", "spread"),
        recompute=recompute_of_blocks(schedule.get("recompute", "full"), question.model),
        homes=parse_homes(schedule.get("homes", "")),
        **{name: schedule[name] for name in SETTINGS if name in schedule},
    )


def settings_of(knobs: Knobs) -> dict[str, Any]:
    """The section ``schedule`` of a training run."""
    builders = {placement: builder for builder, placement in PLACEMENTS.items()}
    found: dict[str, Any] = {"builder": builders.get(knobs.placement, "tawpipe")}
    if knobs.placement not in builders:
        found |= {"placement": knobs.placement, "homes": spell_homes(knobs.homes)}
    found |= {name: getattr(knobs, name) for name in SETTINGS}
    found["recompute"] = spell_recompute(knobs.recompute) if knobs.recompute else "full"
    return found


def spell_recompute(recompute: Sequence[str]) -> str:
    """The setting that ``recompute_of_blocks`` reads.

    >>> spell_recompute(("full", "full", "selective", "none", "none", "full"))
    'none:2,selective:1,full'
    """
    layers = list(reversed(recompute[1:-1]))
    words: list[str] = []
    while layers:
        count = next((i for i, how in enumerate(layers) if how != layers[0]), len(layers))
        words.append(f"{layers[0]}:{count}" if count < len(layers) else layers[0])
        del layers[:count]
    return ",".join(words)


def _cost(cost: BlockCost) -> list[list[float]]:
    return [[part.fixed, part.per_token, part.per_pair] for part in (cost.forward, cost.backward, cost.attention)]


def _packed(rows: Iterable[Any]) -> list[list[Any]]:
    """Neighbours that are alike, once, after their number.

    >>> _packed("aab")
    [[2, 'a'], [1, 'b']]
    """
    return [[len(list(same)), row] for row, same in groupby(rows)]


def _unpacked(rows: Iterable[list[Any]]) -> Iterable[Any]:
    for count, row in rows:
        if count > MOST_ALIKE:
            raise ValueError(f"{count} that are alike")
        for _ in range(count):
            yield row
