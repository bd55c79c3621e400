"""The library's front door: a model, its schedule and its homes as one object.

Usage:

    pipeline = tawpipe.Pipeline(model)  # on every process that torchrun started, or on one
    for batch in batches:  # the global batch, the same on all processes
        print(pipeline.step(batch).loss)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tawpipe.checkpoint.load import Source
from tawpipe.checkpoint.save import Saved, Saving
from tawpipe.checkpoint.store import Store
from tawpipe.dealing.balance import Bin, Bins
from tawpipe.doors import Door
from tawpipe.errors import RunError, UserError
from tawpipe.model.attention.indexers import freeze_indexers, frozen_words
from tawpipe.model.batch import MicroBatch
from tawpipe.model.binding import refuse_emptied
from tawpipe.model.buffers import wide_parameters, wide_words
from tawpipe.model.chain import Chain, inner_model
from tawpipe.model.files.carried import NOTHING_CARRIED, Carried
from tawpipe.model.files.export import carry, export_hugging_face
from tawpipe.model.flops import work_of
from tawpipe.model.loss import Loss
from tawpipe.model.refuse import settle_mtp
from tawpipe.model.weights import WeightSource
from tawpipe.pipeline.batch import Deal, LocalBatch, Share
from tawpipe.pipeline.check import check_on_rank_0, is_tested, slices_of_documents
from tawpipe.pipeline.schedules import Schedules
from tawpipe.pipeline.setup import (
    CheckSettings,
    TrainingSettings,
    Wiring,
    filled_homes,
    refuse_cut_rows,
    refuse_old_arguments,
    refuse_settings,
    refuse_strategy,
    refuse_values,
    values_alike,
)
from tawpipe.pipeline.state import State
from tawpipe.pipeline.steps import Continuation, Steps
from tawpipe.runtime.compute.measures import AnswersByRow, Measure
from tawpipe.runtime.dtype import AUTO, DTYPES, chosen_dtype
from tawpipe.runtime.frame import UpdateRule
from tawpipe.runtime.homes.groups import PipelineOptimizer
from tawpipe.runtime.homes.optimizer import OptimizerFactory, adamw
from tawpipe.runtime.homes.step_result import StepResult
from tawpipe.runtime.leaving import leave_at_exit
from tawpipe.runtime.watch.recording import Recording
from tawpipe.runtime.watch.stalls import Others
from tawpipe.runtime.watch.watchdog import write_record
from tawpipe.runtime.world import World, connect
from tawpipe.schedule.pipelines.work import Order
from tawpipe.schedule.settings import DEFAULT, ScheduleSettings
from tawpipe.schedule.sharing import share_in_sets
from tawpipe.schedule.sizes.footprint import Costs
from tawpipe.schedule.step import Schedule, Strategy
from tawpipe.schedule.strategies.table import strategy_of

logger = logging.getLogger(__name__)

TEXTS = Door[Callable[..., Any]]("tawpipe.serving.generate")
"""Makes of a pipeline what continues prompts from its weights (``PipelineTexts``)."""


class Pipeline:
    """Trains a Hugging Face causal LM with its weights spread over all processes.

    Args:
        model: a decoder-only ``AutoModelForCausalLM`` (a ``peft`` model around one is fine), with values or on the meta
            device; or the ``Chain`` that was made of one, with its loss. Its parameters are emptied: the values live
            here from now on, and the model refuses to be used.
        weights: makes what gives the initial values, for example ``lambda chain: SafetensorsSource(chain, folder)``; by
            default the model's own values, or for a model on meta a fresh initialisation.
        optimizer: makes an optimizer for a list of parameters, ``lambda parameters: SGD(parameters, lr=1)``. They are
            one-dimensional pieces of the model's parameters; ``tawpipe.piece_of(parameter)`` has name and shape of the
            whole one. ``adamw`` by default. For one that looks at whole matrices (Muon, Adafactor)
            ``tawpipe.whole_matrices(factory)``, under ``tawpipe-whole``.
        loss: instead of cross-entropy: ``(logits [b, c, V], shifted labels [b, c]) -> summed loss`` for some positions.
        micro_batch: rows computed at once.
        schedule: how weights travel: settings; the name of a strategy; a strategy of your own; or a ready ``Schedule``,
            for batches of as many micro-batches as it has.
        dtype: in which weights travel and blocks compute; ``auto`` is bf16 where every device computes in it (GPUs
            from compute capability 8 on), else fp32. Masters, gradients at home and optimizer state are fp32 (fp64 for
            fp64).
        world: the processes; found from torchrun's variables by default.
        training: how the model is trained: clipping, random numbers, documents of uneven lengths, form of the layers.
        checks: how the model is checked and steps are watched.
        old: arguments of earlier versions, refused with the new place.

    Raises:
        UserError: a model, an optimizer or a setting that cannot work.
    """

    def __init__(
        self,
        model: nn.Module | Chain,
        *,
        weights: Callable[[Chain], WeightSource] | None = None,
        optimizer: OptimizerFactory | None = None,
        loss: Loss | None = None,
        micro_batch: int = 1,
        schedule: ScheduleSettings | Strategy | Schedule | str = DEFAULT,
        dtype: torch.dtype | str = AUTO,
        world: World | None = None,
        training: TrainingSettings | None = None,
        checks: CheckSettings | None = None,
        **old: object,
    ) -> None:
        # What the user said, and the processes.
        refuse_old_arguments(old)
        training, checks = training or TrainingSettings(), checks or CheckSettings()
        refuse_values(micro_batch, dtype, training, checks)
        self.world = world = world or connect(timeout=checks.timeout)
        self.micro_batch, self.training = micro_batch, training
        self.seed, self.injector = training.seed, checks.injector
        self.dtype = dtype if isinstance(dtype, torch.dtype) else DTYPES[chosen_dtype(dtype, world)[0]]
        self.settings = settings = strategy_of(schedule)[1]
        self.sequence_ranks = settings.sequence_ranks or 1
        refuse_settings(
            settings,
            clip_norm=training.clip_norm,
            compile_layers=training.compile_layers,
            quantize=training.quantize,
            dtype=self.dtype,
            on_gpus=world.device.type == "cuda",
        )
        _ = share_in_sets(0, world.topology, settings)

        # The model as a chain of blocks, and its first values.
        if not isinstance(model, Chain) and (words := frozen_words(freeze_indexers(inner_model(model)))):
            logger.warning("frozen: %s", words)
        self.chain = chain = model if isinstance(model, Chain) else Chain(model, loss=loss)
        if chain is not model and (words := wide_words(wide_parameters(chain.model), self.dtype)):
            logger.warning("%s", words)
        if chain is model:
            refuse_emptied(chain.given)
            if loss is not None:
                raise UserError("loss", loss, "unset beside a Chain, which was made with its own")
            loss = chain.loss
        settle_mtp(chain.model, without=training.without_mtp)
        refuse_cut_rows(chain, settings)
        self.work = training.work or work_of(chain)
        source = values_alike(chain, weights, training.seed, world)

        # A check of the model, unless the tests know its family.
        self.checked = ""
        """The outcome of the model's check, in a sentence; empty where it was left out."""
        self._cuts: float | None = None
        """How documents may be cut, see ``Strategy.dealing``."""
        if training.bin_tokens and strategy_of(schedule)[0].cuts_documents and not training.compile_layers:
            self._cuts, self.checked = slices_of_documents(
                Pipeline, chain, source, world, loss=loss, check=checks.check
            )
        in_chunks = bool(settings.sequence_chunk) or self.sequence_ranks > 1
        untested = checks.check == "auto" and (in_chunks or not is_tested(chain.given, loss))
        if (checks.check == "always" or untested) and not self.checked:
            self.checked = check_on_rank_0(Pipeline, chain, source, world, loss=loss, in_chunks=in_chunks)
        chain.quantise(training.quantize, self.dtype)
        self.spec = chain.spec

        # Its schedules, which refuse before anything is allocated; its homes, and what runs steps on them.
        optimizer = optimizer or adamw()
        self._schedules = schedules = Schedules(schedule, chain.spec, world)
        smallest = schedules.smallest
        refuse_strategy(chain, smallest, optimizer=optimizer, compile_layers=training.compile_layers)
        world_of_saves = world.with_group("saves", timedelta(days=7))  # while there are no lanes that an error leaves
        self.storage = filled_homes(chain, source, schedules, world, self.dtype, optimizer)
        del source  # before anything else is allocated
        wiring = Wiring(chain, self.storage, schedules, world, optimizer, training, checks)
        self._places = wiring.compute.places
        self.optimizers, self.transport, self.executor = wiring.optimizers, wiring.transport, wiring.executor
        self.reduce_dtype = self.executor.reduce_dtype

        # Its rows, its steps and its state.
        self._deal = Deal(
            micro_batch,
            world.rank,
            world.size,
            chain.positions,
            chain.config.get_text_config().vocab_size,
            own_loss=loss is not None,
            ranks=self.sequence_ranks,
            in_turn=chain.in_turn,
            share=schedules.shares,
            dealt_to=smallest.strategy.dealt_to(world.topology)[world.rank],
            pinned=world.device.type == "cuda",
        )
        self.speeds = smallest.speeds
        """Relative speed of every process, by which work is dealt; empty where they are equal."""
        self._steps = Steps(wiring, self._deal)
        if world.size > 1:
            self.executor.watchdog.hear(Others(world_of_saves.store, world.rank, world.size))
        self.limit = self._steps.limit
        """Limit of a step's time; until ``set_timeout`` it ends communication alone."""
        self._state = State(wiring, self._steps, world_of_saves)
        self.step_number = 0
        """Training steps up to now, those before a loaded checkpoint included."""
        self._texts: Any = None
        self._closed = leave_at_exit(self, self.executor, self._steps, self._state.savings, world)
        chain.hand_over()

    def __repr__(self) -> str:
        """The model, the strategy, the processes, and how far training has come."""
        count, trained = self.spec.identity["parameters"], self.spec.identity["trained"]
        some = f", of them {trained:,} trained" if trained < count else ""
        rows = f"micro-batches of {self.micro_batch} row{'s' * (self.micro_batch > 1)}"
        return (
            f"Pipeline({self.chain.name}: {count:,} parameters{some}\n"
            f"  {self._schedules.smallest.strategy.name}, {rows}, {str(self.dtype).removeprefix('torch.')}\n"
            f"  {self.world.nodes} on {self.world.device.type}\n"
            f"  {self.step_number:,} step{'s' * (self.step_number != 1)} done)"
        )

    @property
    def optimizer(self) -> PipelineOptimizer:
        """The optimizer's parameter groups, for ``torch.optim.lr_scheduler``: ``scheduler.step()`` after ``step``."""
        return self.optimizers.groups

    @property
    def without_labels(self) -> int:
        """Steps of this pipeline whose labels were all -100 and which were left out, of those whose numbers were looked
        at.
        """
        return self._steps.without_labels

    @property
    def ranks_of_a_row(self) -> int:
        """How many processes compute a row: a set, or the positions of a pipeline."""
        size, step = self.world.size, self._schedules.smallest
        alike = replace(step.settings, device_speeds="")
        return size // len(set(step.strategy.share(size, step.topology, alike)))

    @property
    def share_of_a_row(self) -> float:
        """The share of a row's work that is this process's, relative to the others': its stages' in a pipeline."""
        step = self._schedules.smallest
        return step.strategy.share_of_a_row(step, self.world.rank)

    # what a step does

    def schedule(self, rows: int, *, training: bool = True) -> Schedule:
        """The schedule for a global batch of ``rows`` rows, proved once and kept."""
        if rows < 1:
            raise UserError("batch", f"{rows} rows", "at least one row")
        return self._steps.schedule(self._deal.count(rows), training=training)

    def reorder(self, rows: int, order: Order) -> None:
        """Train on batches of ``rows`` rows in another order of the same pipeline from the next step on; between the
        same two steps on all ranks. Weights stay where they are, and the numbers what they are.

        Raises:
            UserError: weights travel under the strategy.
            ScheduleError: the order is none of this pipeline.
        """
        self._schedules.reorder(self._deal.count(rows), order)

    def shares(self, rows: int) -> tuple[Share, ...]:
        """This rank's micro-batches of a global batch of ``rows`` rows, and the rows that each of them holds.

        A micro-batch holds the same rows for every number of processes; only who computes it changes.
        """
        return self._deal.shares(rows)

    def part_of(self, rows: int, sequence_length: int, row: Callable[[int], MicroBatch]) -> LocalBatch:
        """This rank's part of a global batch of ``rows`` rows, each of which ``row`` makes by its number. Shorter rows
        of a micro-batch are padded.

        Args:
            sequence_length: the most tokens that a row has.
        """
        return self._deal.local_of_rows(rows, sequence_length, row)

    def deal(self, lengths: Sequence[int]) -> Bins:
        """Deal documents of so many tokens to all processes, so that they compute for equally long.

        Raises:
            UserError: a document is longer than a bin can be, or no ``bin_tokens`` were given.
        """
        return self.dealing(lengths)

    @property
    def dealing(self) -> Callable[[Sequence[int]], Bins]:
        """What ``deal`` calls, as a value that may go to another process.

        Raises:
            UserError: no ``bin_tokens`` were given.
        """
        bin_tokens, step = self.training.bin_tokens, self._schedules.smallest
        if bin_tokens < 1:
            raise UserError("bin_tokens", bin_tokens, "the most tokens that a process computes at once")
        return step.strategy.dealing(step, cap=bin_tokens, work=self.work, cuts=self._cuts)

    def own_bins(self, bins: Bins) -> Sequence[Bin]:
        """The bins that this process computes, in a pipeline with others."""
        return bins.of(self._deal.dealt_to)

    def part_of_documents(
        self,
        lengths: Sequence[int],
        document: Callable[[int], MicroBatch],
        bins: Bins | None = None,
        *,
        training: bool = True,
    ) -> LocalBatch:
        """This rank's part of a step on documents of uneven lengths. Where a step of this shape is the first, its
        schedule is made and proved: a thread that is ahead of the steps can call it.

        Args:
            lengths: of all documents of the step, alike on all processes.
            document: makes one by its number, as a micro-batch of one row.
            bins: what ``deal`` made of the lengths, if it was asked before.
            training: False for an evaluation.

        Raises:
            UserError: see ``deal``; or a document has another length than was said.
        """
        bins = bins or self.deal(lengths)
        _ = self._schedules.of(bins.form, training=training)
        return self._deal.local_of_bins(bins, document, bin_tokens=self.training.bin_tokens)

    @torch.inference_mode(False)  # what a step makes is used by later ones
    def step(
        self, batch: Mapping[str, Tensor] | LocalBatch, *, rate: float = 1.0, recording: Recording | None = None
    ) -> StepResult:
        """Forward, backward and update on one global batch. Returns while the step still runs. One without a label to
        learn updates nothing (``without_labels``).

        Args:
            batch: the global batch, alike on all processes: ``input_ids`` and ``labels`` [rows, S] in the Hugging Face
                convention, optionally ``position_ids`` (restarting at each packed document) or ``attention_mask``; or
                only this rank's part of it.
            rate: multiplies the learning rates of ``optimizer``'s groups, for this step alone.
            recording: takes down when the step's actions run; complete after ``drain``.

        Raises:
            RunError: an earlier step had a loss or gradient norm that was not finite. Neither it nor any step after it
                has changed the weights (unless updates are early); ``load`` goes on from a good state.
        """
        self._steps.make_room()
        local = self._deal.local(batch)
        self._state.require_whole()
        rule = UpdateRule(self.training.clip_norm, rate, memory=0.0 if self.training.skip_limit else 1.0)
        result = self._steps.play(local, self.step_number, rule, seed=self.seed, recording=recording)
        self.optimizer.step()  # schedulers want to have seen it
        self.step_number += 1
        self._state.stepped()
        return result

    @torch.inference_mode(False)
    def evaluate(self, batch: Mapping[str, Tensor] | LocalBatch, *, measure: Measure | None = None) -> StepResult:
        """The loss on a global batch without an update. Waits for what is under way first.

        Args:
            measure: looks at the head of this rank's micro-batches, and says what their loss is.
        """
        if isinstance(measure, AnswersByRow) and self.micro_batch > 1 and self.sequence_ranks > 1:
            expected = "1 with schedule.sequence_ranks, where answers are told apart by row"
            raise UserError("micro_batch", self.micro_batch, expected)
        self.drain()
        local = self._deal.local(batch)
        self._state.require_whole()
        result = self._steps.play(local, self.step_number, UpdateRule(rate=0.0), seed=None, measure=measure)
        self.executor.drain()
        result.require_alike()
        return result

    @torch.inference_mode(False)
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        stops: Sequence[int] = (),
    ) -> list[Continuation]:
        """Continue every prompt by up to ``max_tokens`` tokens; call on all ranks, with the same arguments. All get the
        new ids and their logprobs. Waits for what is under way first; nothing of training changes.

        Weights go to stages once, one stage on each process, whose memory must have room for its share of them and for
        the keys and values of the texts. A model that this cannot be done with takes an evaluation for every token.

        Args:
            prompts: token ids, at least one each.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k, top_p: draw among the likeliest only, as ``transformers`` does it; 0 and 1 for all.
            seed: of the first prompt's draws; the next ones have the seeds that follow. A text is the same whatever
                else is generated with it, but for rounding.
            stops: tokens that end a text, which has the token then.

        Raises:
            UserError: a prompt or a number that cannot be.
        """
        self.drain()
        self._state.require_whole()
        if self._texts is None:
            self._texts = TEXTS()(self)
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        return self._texts.generate(prompts, max_tokens, stops, **sampling)

    def drain(self) -> None:
        """Wait for everything under way: the state in which weights may be read, saved or replaced.

        Raises:
            RunError: a step had a loss or gradient norm that was not finite.
        """
        self._steps.drain()

    def close(self) -> None:
        """Drain, end the lanes and leave the process groups. The pipeline cannot be used afterwards.

        A script that ends without it, however, is waited for in the same way (runtime/leaving.py).
        """
        try:
            self.drain()
        finally:
            self._state.join_saves()
            self.executor.close()
            self._places.close()
        self._closed()
        if self._texts is not None:
            self._texts.close()
        self.transport.close()
        self._state.leave()

    def set_timeout(self, limit: timedelta) -> None:
        """Limit the time of a step from now on; beyond it every rank says what it waits for, and its process ends, but
        not in a debugger or a notebook.

        Args:
            limit: the least; a multiple of what steps are known to take if that is more (``self.limit``).
        """
        self._steps.watch(limit)

    def record_hangs(self, folder: Path) -> None:
        """Name the folder for what NCCL was given, which a rank that hangs writes under the step's name; on GPUs."""
        if self.world.device.type == "cuda":
            named = lambda step: folder / step.replace(" ", "-")  # noqa: E731
            self.executor.watchdog.last_words = lambda step: write_record(named(step), self.world.rank)

    # state

    def save(
        self, where: str | Path | Store, *, run: Mapping[str, Any] | None = None, copy_frozen: bool = False
    ) -> Saved:
        """Write weights, optimizer state and step number; call on all ranks.

        Frozen weights that a ``SafetensorsSource`` read from a folder are not written, but their digests. ``load``
        needs a pipeline whose ``weights`` read the same ones.

        Args:
            where: a folder, which all ranks must see, and which is replaced when the new one is complete; or a store,
                in which the folder is named after the step.
            run: JSON values of the caller, which ``load`` returns.
            copy_frozen: write frozen weights of a folder, too.

        Raises:
            RunError: it could not be written; what was there before is untouched.
        """
        saved = self.start_saving(where, run=run, copy_frozen=copy_frozen).wait()
        if saved.problem:
            raise RunError(f"{saved.folder} could not be written: {saved.problem}")
        return saved

    def start_saving(
        self,
        where: str | Path | Store,
        *,
        run: Mapping[str, Any] | None = None,
        limit_s: float | None = None,
        copy_frozen: bool = False,
    ) -> Saving:
        """Copy what ``save`` writes, and write it while training goes on; a save that is still being written is waited
        for.

        Returns when the copy is there: weights may change then. What came of it, ``Saving.wait`` says.

        Args:
            limit_s: seconds for the save before, and for homes in the host's memory, which are written before anything
                goes on.

        Raises:
            RunError: one of them has taken longer.
        """
        return self._state.start_saving(
            where, self.step_number, run or {}, self.injector, limit_s, copy_frozen=copy_frozen
        )

    def load(self, where: str | Path | Source) -> dict[str, Any]:
        """Go on from what ``save`` has written, on any number of processes and with any strategy; returns its ``run``.

        Args:
            where: the folder, or the source that ``checkpoint.resume`` has chosen.

        Raises:
            UserError: no complete state, or one of another model, other frozen weights or another optimizer; nothing
                here has changed.
            RunError: reading broke off in the middle. What is here is half of a state: steps, evaluations, saves and
                exports raise until a load succeeds.
        """
        manifest = self._state.load(where)
        self.step_number = manifest["step"]
        return manifest["run"]

    def export(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype | None = None,
        format: str = "hf",
        merge: bool = False,
        max_shard_bytes: int = 4 * 2**30,
        tokenizer: Any = None,
        base: str | Path | None = None,
        carried: Carried | None = None,
    ) -> Path:
        """Write a folder for ``AutoModelForCausalLM.from_pretrained``, or for a ``peft`` model its adapter, which
        ``merge`` puts into the weights of the whole model instead; call on all ranks.

        See ``export_hugging_face`` for the other arguments. Config keys, tokenizer files and dtypes are those of the
        folder that the model came from: ``base``, or the one that ``from_pretrained`` left in the model's config.

        Raises:
            UserError: a format that this model cannot have, or a file of its folder that cannot be read.
            RunError: the folder could not be written, or is not what it was to be; on all ranks.
        """
        self._state.require_whole()
        self.drain()
        form: dict[str, Any] = {"dtype": dtype, "format": format, "merge": merge, "tokenizer": tokenizer}
        if carried is None:
            carried = NOTHING_CARRIED

            def make() -> str:
                nonlocal carried
                carried = carry(self.chain, None if base is None else Path(base).expanduser(), **form)
                return ""

            _ = self.world.text_of_rank_0(make)
        problem = ""
        try:
            export_hugging_face(
                self.chain,
                folder,
                self.parameter,
                **form,
                max_shard_bytes=max_shard_bytes,
                is_writer=self.world.rank == 0,
                carried=carried,
            )
        except RunError as error:
            problem = str(error)
        if problem := self.world.broadcast_text(problem):
            raise RunError(problem)
        return Path(folder)

    def costs(self, rows: int, sequence_length: int) -> Costs:
        """Bytes over the links and memory of one step, from its schedule."""
        return self._steps.costs(self.schedule(rows), min(self.micro_batch, rows) * sequence_length)

    def costs_of_bins(self, bins: Bins) -> Costs:
        """Bytes over the links and memory of one step on documents of uneven lengths, if bins are full."""
        return self._steps.costs(self._steps.schedule(bins.form), self.training.bin_tokens * bins.ranks)

    def check_copies(self) -> None:
        """Compare what should be alike on several processes: the copies of every home, what travels of it with its
        master, and what nodes keep of weights from step to step. Waits for what is under way; call on all ranks.

        Raises:
            RunError: something is not alike; on all ranks.
        """
        self.drain()
        self._state.parameters.check_copies(self.executor.refresh.checksums())

    # weights

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of all parameters, in the order of their units."""
        return self._state.parameters.names

    def parameter(self, name: str) -> Tensor | None:
        """One whole parameter in the master dtype on rank 0, None elsewhere; call on all ranks. Drains first."""
        return self._state.parameter(name)

    def gradient(self, name: str) -> Tensor | None:
        """The clipped gradient that the last update used, like ``parameter``; the parameter must be trainable.

        Raises:
            UserError: it is not, or nothing keeps its gradient: homes of one process in its host, early updates.
        """
        return self._state.parameter(name, gradient=True)
