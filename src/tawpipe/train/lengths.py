"""Tokens of a row and of a step under ``--sequence-length auto``: from the model, the documents and the memory.

A model with weights gets rows as long as its longest document. Its steps keep the number of tokens that they would have
in rows of 512. The chosen lengths are part of the run's state, so that a resumed run uses them again, whatever memory
is free then.
"""

from __future__ import annotations

import time
from dataclasses import replace
from math import ceil
from typing import Any

from tawpipe.checkpoint.resume import RunState
from tawpipe.dealing.lengths import STEP, USUAL_LENGTH, USUAL_STEP, LengthLimits
from tawpipe.errors import UserError
from tawpipe.model.files.build import longest_allowed
from tawpipe.options import Open
from tawpipe.plan.answer.longest import SHORTEST, longest_that
from tawpipe.plan.cost.feasible import holds, some_fit
from tawpipe.plan.cost.measure import Asked
from tawpipe.plan.machine.probe import machine_unprobed
from tawpipe.runtime.dtype import DTYPES, chosen_dtype
from tawpipe.runtime.world import World
from tawpipe.schedule.settings import chosen_by_hand
from tawpipe.schedule.strategies.table import find
from tawpipe.train.planned import Planning
from tawpipe.train.run_model import RunModel
from tawpipe.train.settings.config import TrainConfig
from tawpipe.train.settings.decided import BatchShape
from tawpipe.train.settings.optimizers import factory_of

LENGTHS = ("sequence_length", "global_batch", "tokens_per_step")
"""Settings that a run may choose from the lengths of its documents."""
SECONDS = 8.0
"""Seconds of computing after which the search for a length ends, and only the check before the first step counts."""
POSITIONS, MEMORY = "the model's positions", "the memory"


def settled_lengths(config: TrainConfig) -> dict[str, Any]:
    """Return the values of the settings in ``LENGTHS``, by name, to be saved in checkpoints."""
    return {name: getattr(config, name) for name in LENGTHS}


def lengths_before_data(config: TrainConfig, earlier: RunState | None, *, pretrained: bool) -> TrainConfig:
    """Settle lengths that do not depend on the documents: lengths for random weights and of a resumed run.

    Args:
        earlier: state that the run resumes from; None for a new run. A state without lengths was saved by a version
            that had rows of 512 tokens.
        pretrained: True if the model has weights.
    """
    had = earlier.settled if earlier is not None else {}
    changes: dict[str, Any] = {}
    if isinstance(config.sequence_length, Open) and (earlier is not None or not pretrained):
        changes["sequence_length"] = had.get("sequence_length", int(config.sequence_length))
    if isinstance(config.global_batch, Open) and "global_batch" in had:
        changes["global_batch"] = had["global_batch"]
        changes["tokens_per_step"] = config.tokens_per_step or had["tokens_per_step"]
    config = replace(config, **changes)
    follows = isinstance(config.sequence_length, Open)
    return config if follows else replace(config, global_batch=int(config.global_batch))


def with_length(config: TrainConfig, length: int, packing: str, world_size: int) -> TrainConfig:
    """Settle open lengths: rows of ``length`` tokens, and steps that have at least one row for every process.

    Returns ``config`` unchanged if ``sequence_length`` is not open. Processes that compute a row together count as one.

    Args:
        length: tokens of a row.
        packing: how documents are packed into rows; ``balanced`` also sets ``tokens_per_step``.
        world_size: number of processes.
    """
    if not isinstance(config.sequence_length, Open):
        return config
    config = replace(config, sequence_length=length)
    if not isinstance(config.global_batch, Open):
        return config
    tokens = max(USUAL_STEP, length * ceil(world_size / (config.schedule.sequence_ranks or 1)))
    config = replace(config, global_batch=max(ceil(tokens / length), config.micro_batch))
    if packing == "balanced" and config.tokens_per_step is None:
        config = replace(config, tokens_per_step=tokens)
    return config


def limits_of(config: TrainConfig, model: RunModel) -> LengthLimits:
    """Return the limits on the length of a document that are known before any document is read."""
    limits = [(longest_allowed(model.followed(None)[1].config), POSITIONS)]
    if config.tokens_per_step is not None:
        limits.append((config.tokens_per_step, STEP))
    if config.bin_tokens and not find(config.schedule.strategy).cuts_documents:
        limits.append((config.bin_tokens * (config.schedule.sequence_ranks or 1), "the size of a packed micro-batch"))
    most, why = min(limits)
    return LengthLimits(most, why, config.tokens_per_step or USUAL_STEP)


def length_in_memory(config: TrainConfig, model: RunModel, world: World, length: int, packing: str) -> int:
    """Return ``length``, or the largest length below it that fits into memory; call on all ranks.

    Memory is measured and time is not, as in the check before the first step. The measured rows have one document each
    and may fill the share of memory that a plan may fill, so that this limit is lower than the limit of the check. If
    no length fits, ``length`` is returned, and the check lists settings that would fit. A length of at most
    ``USUAL_LENGTH`` is returned without a measurement.

    Args:
        length: tokens of a row.
        packing: how documents are packed into rows.
    """
    if length <= min(USUAL_LENGTH, longest_allowed(model.followed(None)[1].config)):
        return length

    end = time.thread_time() + SECONDS

    def is_late() -> bool:
        """Return True after ``SECONDS`` of computing."""
        return time.thread_time() > end

    def shape(tokens: int) -> BatchShape:
        """Return the batch sizes for rows of ``tokens`` tokens."""
        return BatchShape.of(with_length(config, tokens, packing, world.size), packing, world.size)

    batch = shape(length)
    asked = Asked(
        batch.row_tokens,
        batch.rows,
        batch.micro_batch,
        dtype=DTYPES[chosen_dtype(config.dtype, world, "")[0]],
        settings=config.schedule,
        quantize=config.quantize,
        compiled=config.compile,
        optimizer=factory_of(config),
    )
    planning = Planning(world, model.followed(None)[1], asked, by_one=batch.dealt)
    request, _ = planning.ask(machine_unprobed(world), timed=False)

    def fits(tokens: int) -> bool:
        """Return True if rows of ``tokens`` tokens fit into memory, by the measured sizes of blocks.

        Also True if the blocks could not be measured, if time is up under ``plan=auto``, or if a setting is refused
        later."""
        if request is None:
            return True
        of_length = request.with_length(shape(tokens).row_tokens)
        if config.plan == "auto" and not chosen_by_hand(config.schedule):
            return some_fit(of_length, is_late) or is_late()
        try:
            return holds(of_length, of_length.step(config.schedule))
        except UserError:  # this error is raised again when the pipeline is made
            return True

    longest = length if fits(length) or not fits(SHORTEST) else longest_that(fits, SHORTEST, length)
    return int(min(world.gather_numbers(float(longest))))
