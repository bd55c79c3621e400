"""What a run starts from: its model and its documents, and whether they suit each other and the settings."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path

from tawpipe.checkpoint.format import Manifest
from tawpipe.checkpoint.resume import RunState, refuse_other_trained
from tawpipe.console import Console
from tawpipe.data.lengths import Dealing
from tawpipe.data.prepare import prepare_data
from tawpipe.data.prepared import PreparedData
from tawpipe.data.rows import take
from tawpipe.data.tokenizer import check_vocabulary
from tawpipe.environment import started_by_local_launcher
from tawpipe.errors import UserError
from tawpipe.model.adapters import adapter_facts
from tawpipe.model.build import BuiltModel, build_model, config_of, resolve_model
from tawpipe.model.chain import Chain
from tawpipe.model.flops import work_of
from tawpipe.model.merged import refuse_unmergeable
from tawpipe.model.pretrained import has_weights
from tawpipe.model.quantized import NONE
from tawpipe.model.rope import refuse_other_rope, rope_of
from tawpipe.runtime.world import World
from tawpipe.train.checks import check_longest_fits
from tawpipe.train.config import TrainConfig, in_bins
from tawpipe.train.evaluation import check_best
from tawpipe.train.retrieval import RetrievalCheck, retrieval_check

ROWS_LOOKED_AT = 15


def start_of(config: TrainConfig) -> str:
    """What the run starts from: one of ``recipe.RECIPES``."""
    if config.lora.active:
        return "adapter"
    folder = resolve_model(config.model)
    return "weights" if folder is not None and has_weights(folder) else "random"


def build(config: TrainConfig, *, longest: int | None, vocab_size: int | None = None) -> BuiltModel:
    """The model as the settings ask for it.

    Args:
        longest: tokens of the longest document; 1 where it is not known yet.
    """
    return build_model(
        config.model,
        vocab_size=vocab_size,
        max_positions=config.document_tokens,
        longest=longest,
        rope=config.rope,
        lora=config.lora,
        frozen=config.freeze,
        trust_remote_code=config.trust_remote_code,
    )


def check_start(config: TrainConfig, built: BuiltModel, data: PreparedData) -> RetrievalCheck | None:
    """Check that model and documents suit each other and can give what the settings ask for.

    Returns:
        the retrieval check of evaluations, if there is one.

    Raises:
        UserError: the first that cannot be.
    """
    if config.export.enabled and config.export.merge:
        refuse_unmergeable(built.model)
    retrieval = retrieval_check(config, data, built.model.config)
    check_best(config, validation=data.validation is not None)
    if not config.steps and data.validation is None and retrieval is None:
        raise UserError("--steps", 0, "at least 1 without validation data: there is nothing to evaluate on")
    check_vocabulary(data.tokenizer, built.model.config.get_text_config().vocab_size)
    return retrieval


def with_packing(config: TrainConfig, data: PreparedData, world: World) -> TrainConfig:
    """The settings with the packing that was chosen for the documents.

    Raises:
        UserError: the longest document has no room in a bin.
    """
    if data.report.packing != "balanced":
        return replace(config, packing=data.report.packing)
    config = in_bins(config, world.size)
    check_longest_fits(config, data.longest, data.report.longest[1])
    return config


def refuse_other_form(config: TrainConfig, manifest: Manifest, place: str) -> None:
    """Raise UserError if a checkpoint's frozen weights are in another form than the settings say."""
    if (form := manifest.get("quantize", NONE)) != config.quantize:
        raise UserError("--quantize", config.quantize, f"{form}, as in the checkpoint {place}")


def refuse_other_run(config: TrainConfig, state: RunState, chain: Chain, place: str) -> None:
    """Raise UserError if a checkpoint is of a run that cannot be gone on with by these settings."""
    if state.seed != config.seed:
        raise UserError("--seed", config.seed, f"{state.seed}, as in the checkpoint {place}")
    refuse_other_rope(state.rope, rope_of(chain.config), f"the checkpoint {place}")
    refuse_other_trained(state, adapter_facts(chain.given), config.freeze, f"the checkpoint {place}")


def documents_of(config: TrainConfig, world: World, console: Console) -> PreparedData:
    world.require_same(repr(config), "settings", "the same on every machine")
    folder = resolve_model(config.model)
    if config.rope.changes:  # refused before documents are tokenised, whose lengths are not known yet
        config_of(config.model, folder, None, config.document_tokens, 1, config.rope, config.trust_remote_code)
    if config.lora.active and (folder is None or not has_weights(folder)):
        raise UserError("--model", config.model, "a model with weights: an adapter on random ones is of no use later")
    if config.lora.active or config.freeze:  # refused before documents are tokenised, too
        build(config, longest=1)
    data = prepare_data(
        config,
        sequence_length=config.sequence_length,
        seed=config.seed,
        max_document=config.max_document,
        dealing=_dealing(config, world, folder),
        model=None if folder is None else str(folder),
        leader=world.nodes.local_of(world.rank) == 0 and (world.rank == 0 or not started_by_local_launcher()),
        barrier=world.wait_patiently,
    )
    world.require_same(data.fingerprint, "--data", "the same files and tokenizer on every machine")
    for line in data.report.lines():
        console.line(line)
    return data


def _dealing(config: TrainConfig, world: World, folder: Path | None) -> Dealing:
    """The steps of the run, should its documents be dealt."""

    @cache
    def chain_of_model() -> Chain:
        return Chain(build(config, longest=1).model)

    against = ""
    if config.micro_batch > 1:
        against = "--micro-batch is above 1, and documents that are dealt come in rows of their own"
    elif config.compile:
        against = "--compile would compile rows of every length"
    elif config.plan not in ("none", "auto"):
        against = "--plan names a plan, which is for rows of one length"
    bins = in_bins(config, world.size)
    assert bins.bin_tokens is not None
    return Dealing(
        config.step_tokens,
        world.size,
        bins.bin_tokens,
        lambda: work_of(chain_of_model()),
        ranks=config.schedule.sequence_ranks or 1,
        pretrained=folder is not None and has_weights(folder),
        asked=config.asks_for_balance,
        alone="" if config.packing == "none" else chain_of_model().alone,
        rows=config.global_batch,
        micro_batch=config.micro_batch,
        against="" if config.asks_for_balance else against,
    )


def typical_lengths(data: PreparedData, config: TrainConfig) -> list[int]:
    """Lengths of the documents in one of the first rows, whose attention is neither the least nor the most work."""
    sequence_length = config.sequence_length
    if config.packing == "balanced":
        lengths = iter(data.train.step(0, max(config.step_tokens, sequence_length)).lengths)
        rows = [take(chain([first], lengths), sequence_length) for first in lengths][:ROWS_LOOKED_AT]
    else:
        rows = [list(data.train.sample(number).lengths) for number in range(ROWS_LOOKED_AT)]
    rows = [[*row, sequence_length - sum(row)] if sum(row) < sequence_length else row for row in rows]
    return sorted(rows, key=lambda row: sum(length * length for length in row))[len(rows) // 2]
