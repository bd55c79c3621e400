"""Start of a run: its documents, and checks that they suit the model, the settings and the checkpoint."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from itertools import chain
from pathlib import Path

from tawpipe.checkpoint.format import Manifest
from tawpipe.checkpoint.frozen import naming_frozen
from tawpipe.checkpoint.names import state_to_resume
from tawpipe.checkpoint.resume import ResumePoint, RunState, refuse_other_trained
from tawpipe.console import Console
from tawpipe.data.chats.chat import today
from tawpipe.data.prepare import prepare_data
from tawpipe.data.prepared import PreparedData, changed_parts
from tawpipe.data.rows import take
from tawpipe.data.tokenizer import check_vocabulary, has_tokenizer
from tawpipe.dealing.lengths import Dealing, LengthLimits, in_like_lengths
from tawpipe.environment import started_by_local_launcher
from tawpipe.errors import UserError
from tawpipe.model.bits.quantized import AUTO, NONE
from tawpipe.model.chain import Chain
from tawpipe.model.facts import Fact
from tawpipe.model.files.adapters import adapter_facts
from tawpipe.model.files.build import BuiltModel, resolve_model
from tawpipe.model.files.merged import refuse_unmergeable
from tawpipe.model.files.pretrained import folder_facts, has_weights
from tawpipe.model.flops import work_of
from tawpipe.model.rope import refuse_other_rope, rope_of
from tawpipe.options import Open
from tawpipe.plan.cost.typical import LOOKED_AT, typical_documents
from tawpipe.runtime.alike import SAME_FILES, read_alike, same_folder
from tawpipe.runtime.world import World
from tawpipe.train.judging.evaluation import check_best
from tawpipe.train.judging.retrieval import RetrievalCheck, retrieval_check
from tawpipe.train.lengths import MEMORY, length_in_memory, lengths_before_data, limits_of, with_length
from tawpipe.train.run_model import RunModel
from tawpipe.train.settings.checks import check_lengths
from tawpipe.train.settings.config import OF_A_MACHINE, TrainConfig, train_options
from tawpipe.train.settings.decided import BatchShape

Documents = tuple[TrainConfig, PreparedData]
ROWS_LOOKED_AT = 15
LAST_OF_BEFORE = "commit 1eeab342"
"""Last version that made documents of chats without a date in the state."""


def start_of(config: TrainConfig) -> str:
    """Return the key in ``recipe.RECIPES`` of what the run starts from: ``random``, ``weights`` or ``adapter``."""
    if config.lora.active:
        return "adapter"
    folder = resolve_model(config.model)
    return "weights" if folder is not None and has_weights(folder) else "random"


def check_start(config: TrainConfig, built: BuiltModel, data: PreparedData, *, ranks: int) -> RetrievalCheck | None:
    """Check that model and documents suit each other and can serve the settings.

    Args:
        built: model of the run.
        data: documents of the run.
        ranks: number of processes that compute a row together.

    Returns:
        the retrieval check of evaluations; None without one.

    Raises:
        UserError: for the first requirement that is not met.
    """
    if config.export.enabled and config.export.merge:
        refuse_unmergeable(built.model)
    retrieval = retrieval_check(config, data, built.model.config, ranks=ranks)
    check_best(config, validation=data.validation is not None)
    if not config.steps and data.validation is None and retrieval is None:
        raise UserError("--steps", 0, "at least 1: without validation data there is nothing to evaluate on")
    check_vocabulary(data.tokenizer, built.model.config.get_text_config().vocab_size)
    return retrieval


def refuse_other_form(config: TrainConfig, manifest: Manifest, place: str) -> None:
    """Raise UserError if a checkpoint's frozen weights are quantised differently than the settings say.

    Args:
        place: folder of the checkpoint, for the message.
    """
    if config.quantize not in (AUTO, form := manifest.get("quantize", NONE)):
        raise UserError("--quantize", config.quantize, f"{form}, as in the checkpoint {place}")


def refuse_other_run(config: TrainConfig, state: RunState, chain: Chain, place: str) -> None:
    """Raise UserError if these settings cannot resume the run of a checkpoint.

    Seed, rotary positions and the trained parameters must be equal.

    Args:
        place: folder of the checkpoint, for the message.
    """
    if state.seed != config.seed:
        raise UserError("--seed", config.seed, f"{state.seed}, as in the checkpoint {place}")
    refuse_other_rope(state.rope, rope_of(chain.config), f"the checkpoint {place}")
    refuse_other_trained(state, adapter_facts(chain.outer_model), config.freeze, f"the checkpoint {place}")


def require_alike(config: TrainConfig, world: World) -> None:
    """Check that all ranks have equal settings and read equal files of the model and the adapter; call on all ranks.

    Settings in ``OF_A_MACHINE`` may differ.

    Raises:
        UserError: ranks differ, or a rank cannot read its files. The message names the first difference and the ranks.
    """
    leaves = train_options().leaves.items()
    texts = {leaf.option: leaf.text(reduce(getattr, path, config)) for path, leaf in leaves if path not in OF_A_MACHINE}
    facts = {option: Fact("", text) for option, text in texts.items()}
    read_alike(world, "settings", "different ones", "the same on every rank", lambda: None, lambda _: facts)
    with naming_frozen(state_to_resume(config.output_path, config.resume)):
        same_folder(world, config.model, code=config.trust_remote_code)
    if adapter := config.lora.adapter:
        read_alike(world, "lora.adapter", adapter, SAME_FILES, lambda: Path(adapter).expanduser(), folder_facts)


def other_commit_words(state: RunState | None, built: BuiltModel) -> str:
    """Return a line if the model's commit on the Hub differs from the commit of the resumed run, else ``""``."""
    before = state.settled.get("commit") if state is not None else ""
    if not before or before == built.commit:
        return ""
    here = f"is at commit {built.commit}" if built.commit else "is no commit of the Hub"
    return f"{built.spec} {here}; the run started from commit {before} (--model NAME@{before})"


def refuse_other_documents(begins: ResumePoint, data: PreparedData, *, partly: bool) -> None:
    """Refuse to resume a run on chats if an earlier version made or held out other documents.

    Args:
        begins: the start of the run, with the state that it resumes from.
        partly: True if only some documents were read, as in a dry run. The documents are then not compared.

    Raises:
        UserError: the documents differ. The message names the version that can finish the run.
    """
    state = begins.state
    if state is None or "date" in state.settled or not data.report.read.masked or partly:
        return
    if changed := changed_parts(state.fingerprint, data.fingerprint):
        version = state.versions.get("tawpipe", "0.1.0")
        raise UserError(
            "--resume",
            begins.place,
            (
                f"a run of this version. tawpipe {version} ({LAST_OF_BEFORE} or before) started it and made other "
                f"documents of its chats ({', '.join(changed)} changed). That version can finish it; --resume none "
                "starts again"
            ),
        )


def documents_of(
    config: TrainConfig,
    model: RunModel,
    world: World,
    console: Console,
    earlier: RunState | None = None,
    *,
    looks: bool = False,
) -> Documents:
    """Read the documents of a run, print a report, and settle the lengths of rows and steps.

    Call on all ranks.

    Args:
        earlier: state that the run resumes from; None for a new run.
        looks: True if only the first documents are read, which stand for all.

    Returns:
        the settings with their lengths settled, and the documents.

    Raises:
        UserError: see ``prepare_data`` and ``check_lengths``; or documents differ between ranks.
    """
    if model.pretrained and config.tokenizer is None and not has_tokenizer(str(model.folder)):
        expected = f"the tokenizer that {config.model} was trained with: its folder has weights but no tokenizer"
        raise UserError("--tokenizer", None, expected)
    config = lengths_before_data(config, earlier, pretrained=model.pretrained)
    check_lengths(config)  # before documents are read, which may take long
    date = (earlier.settled.get("date") if earlier is not None else "") or world.broadcast_text(today())

    def dealing(length: int) -> Dealing:
        """Return the sizes of the run's steps for rows of ``length`` tokens, by which a packing is chosen."""
        return _dealing(config, with_length(config, length, "balanced", world.size), model, world.size)

    def prepared(length: int | LengthLimits) -> PreparedData:
        """Read and pack the documents, for rows of ``length`` tokens or within limits."""
        return prepare_data(
            config,
            sequence_length=length,
            seed=config.seed,
            max_document=config.max_document,
            dealing=dealing(length) if isinstance(length, int) else None,
            model=None if model.folder is None else str(model.folder),
            date=date,
            leader=world.nodes.local_of(world.rank) == 0 and (world.rank == 0 or not started_by_local_launcher()),
            barrier=world.wait_patiently,
        )

    limits = None
    if not isinstance(config.sequence_length, Open):
        data = prepared(config.sequence_length)
    elif config.max_document is not None:
        data = prepared(config.max_document)
    else:
        limits = replace(limits_of(config, model), dealing=dealing, looks=looks)
        data = prepared(limits)
    parts = sorted((part.split(":", 1) for part in data.fingerprint.split()), reverse=True)  # tokenizer first
    files = {"tokenizer": config.tokenizer or str(model.folder or "")}
    facts = {f"the data's {part}": Fact(files.get(part, ""), "", digest) for part, digest in parts}
    read_alike(world, "--data", " ".join(config.data), SAME_FILES, lambda: data, lambda _: facts)
    if limits is not None:
        length = data.report.sequence_length
        most = length_in_memory(config, model, world, length, data.report.packing)
        data = prepared(replace(limits, most=most, why=MEMORY)) if most < length else data
    for line in [*data.report.lines(), *data.report.example_lines(None if config.dry_run else SHOWN)]:
        console.line(line)
    for warning in data.report.warnings:
        console.warning(warning)
    config = with_length(config, data.report.sequence_length, data.report.packing, world.size)
    check_lengths(config)
    return config, data


SHOWN = 160
"""Characters of each part of the first document that a run prints; ``--dry-run`` prints the whole document."""


def _dealing(config: TrainConfig, settled: TrainConfig, model: RunModel, world_size: int) -> Dealing:
    """Return the sizes of the run's steps under ``balanced``, and reasons for or against this packing.

    Args:
        config: settings as the user gave them, which show if ``balanced`` is asked for.
        settled: settings with the lengths of rows and steps settled.
        model: model of the run, for the computing time of documents.
    """
    against = ""
    if config.micro_batch > 1:
        against = "--micro-batch is above 1, but balanced documents come in rows of their own"
    elif config.compile:
        against = "--compile would compile rows of every length"
    elif config.plan not in ("none", "auto"):
        against = "--plan names a plan for rows of one length"
    balanced = BatchShape.of(settled, "balanced", world_size)
    return Dealing(
        balanced.step_tokens,
        world_size,
        balanced.bin_tokens,
        lambda vocabulary: work_of(model.followed(vocabulary)[1]),
        ranks=balanced.ranks,
        pretrained=model.pretrained,
        asked=config.asks_for_balance,
        rows=settled.global_batch,
        micro_batch=config.micro_batch,
        against="" if config.asks_for_balance else against,
    )


def typical_lengths(data: PreparedData, batch: BatchShape) -> list[int]:
    """Return the lengths of the documents in a typical row, with padding as one more document.

    The typical row is the one with the median work for attention among the first rows. Under ``balanced``, a document
    longer than a row counts with the length of a row. Under packing ``none`` the longest document is returned.
    """
    row = batch.row_tokens
    if batch.packing == "none":
        return [row if data.report.streamed else data.longest]
    if batch.dealt:
        lengths = iter([min(length, row) for length in data.train.step(0, max(batch.step_tokens, row)).lengths])
        rows = [take(chain([first], lengths), row) for first in lengths][:ROWS_LOOKED_AT]
    else:
        rows = [list(data.train.sample(number).lengths) for number in range(ROWS_LOOKED_AT)]
    rows = [[*documents, row - sum(documents)] if sum(documents) < row else documents for documents in rows]
    return sorted(rows, key=lambda documents: sum(length * length for length in documents))[len(rows) // 2]


def first_micro_batches(data: PreparedData, batch: BatchShape, ranks: int) -> list[list[int]]:
    """Return the document lengths of the longest micro-batch of every round in the first steps, under packing ``none``.

    The other ranks wait for these micro-batches. Padding is included as further documents. Under other packings the
    list is empty.

    Args:
        ranks: number of micro-batches that are computed in one round.
    """
    if batch.packing != "none":
        return []
    groups, rows, size = list[list[int]](), batch.rows, batch.micro_batch
    for first in range(0, max(rows, ROWS_LOOKED_AT), rows):
        lengths = [data.train.length(first + row) for row in range(rows)]
        order = in_like_lengths(lengths, size)
        parts = [[lengths[row] for row in order[at : at + size]] for at in range(0, rows, size)]
        groups += [max(parts[at : at + ranks], key=max) for at in range(0, len(parts), ranks)]
    return [[*group, *(max(group) - length for length in group if length < max(group))] for group in groups]


def documents_of_a_step(data: PreparedData, batch: BatchShape, chain: Chain) -> tuple[int, ...]:
    """Return the document lengths of a typical step among the first ones; empty unless ``balanced``."""
    steps = documents_of_steps(data, batch, LOOKED_AT)
    return typical_documents(steps, data.longest, work_of(chain)) if steps else ()


def documents_of_steps(data: PreparedData, batch: BatchShape, count: int, samples: int = 0) -> list[tuple[int, ...]]:
    """Return the document lengths of ``count`` steps, or of one step of a stream; empty unless ``balanced``.

    Args:
        samples: number of samples consumed before these steps.
    """
    steps = list[tuple[int, ...]]()
    if not batch.dealt:
        return steps
    for _ in range(min(count, 1) if data.report.streamed else count):
        steps.append(tuple(data.train.step(samples, batch.step_tokens).lengths))
        samples += len(steps[-1])
    return steps
