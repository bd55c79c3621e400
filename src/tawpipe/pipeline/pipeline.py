"""Public library interface: ``Pipeline`` joins a model, its schedule and its homes in one object.

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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tawpipe.checkpoint.load import Source
from tawpipe.checkpoint.save import Saved, Saving
from tawpipe.checkpoint.store import Store
from tawpipe.dealing.balance import Pack, Packs
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
from tawpipe.pipeline.kernels import choose_kernels
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
from tawpipe.schedule.sharing import share_in_cp_groups
from tawpipe.schedule.sizes.footprint import Costs
from tawpipe.schedule.step import Schedule, Strategy
from tawpipe.schedule.strategies.table import strategy_of

logger = logging.getLogger(__name__)

TEXTS = Door[Callable[..., Any]]("tawpipe.serving.generate")
"""Entry point that builds the text generator of a pipeline (``PipelineTexts``)."""


class Pipeline:
    """Trainer of a Hugging Face causal LM whose weights are spread over all processes.

    Args:
        model: a decoder-only ``AutoModelForCausalLM`` (a ``peft`` model around one is fine), with values or on the meta
            device; or a ``Chain`` made of one, with its loss. Its parameters are emptied: the pipeline holds the values
            from now on, and the model itself can no longer be used.
        weights: returns the source of initial values, for example ``lambda chain: SafetensorsSource(chain, folder)``.
            By default the model's own values, or a fresh initialisation for a model on the meta device.
        optimizer: makes an optimizer for a list of parameters, for example ``lambda parameters: SGD(parameters,
            lr=1)``. The parameters are one-dimensional pieces of the model's parameters;
            ``tawpipe.piece_of(parameter)`` has name and shape of the whole one. Default: ``adamw``. An optimizer that
            needs whole matrices (Muon, Adafactor) needs ``tawpipe.whole_matrices(factory)`` and the strategy
            ``tawpipe-whole``.
        loss: replaces cross-entropy: ``(logits (b, c, V), shifted labels (b, c)) -> summed loss`` over some positions.
        micro_batch: rows computed at one time.
        schedule: how weights travel: settings, the name of a strategy, a strategy of your own, or a ready ``Schedule``,
            which fits only batches with its number of micro-batches.
        dtype: dtype in which weights travel and blocks compute. ``auto`` is bf16 if every device computes in bf16 (GPUs
            from compute capability 8 on), else fp32. Master weights, gradients at home and optimizer state are fp32
            (fp64 for fp64).
        world: the processes; by default found from the variables of torchrun.
        training: how the model is trained: clipping, random numbers, documents of uneven lengths, form of the layers.
        checks: how the model is checked and steps are watched.
        old: arguments of earlier versions; each raises an error that names its new place.

    Raises:
        UserError: the model, the optimizer or a setting cannot work.
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
        # Check the arguments and find the processes.
        refuse_old_arguments(old)
        training, checks = training or TrainingSettings(), checks or CheckSettings()
        refuse_values(micro_batch, dtype, training, checks)
        self.world = world = world or connect(timeout=checks.timeout)
        self.micro_batch, self.training = micro_batch, training
        self.seed, self.injector = training.seed, checks.injector
        self.dtype = dtype if isinstance(dtype, torch.dtype) else DTYPES[chosen_dtype(dtype, world)[0]]
        self.settings = settings = strategy_of(schedule)[1]
        self.sequence_ranks = settings.sequence_ranks or 1
        refuse = partial(
            refuse_settings,
            settings,
            clip_norm=training.clip_norm,
            compile_layers=training.compile_layers,
            dtype=self.dtype,
            on_gpus=world.device.type == "cuda",
        )
        refuse(quantize=training.quantize)
        _ = share_in_cp_groups(0, world.topology, settings)

        # Turn the model into a chain of blocks with initial values.
        if not isinstance(model, Chain) and (words := frozen_words(freeze_indexers(inner_model(model)))):
            logger.warning("frozen: %s", words)
        self.chain = chain = model if isinstance(model, Chain) else Chain(model, loss=loss)
        if chain is not model and (words := wide_words(wide_parameters(chain.model), self.dtype)):
            logger.warning("%s", words)
        if chain is model:
            refuse_emptied(chain.outer_model)
            if loss is not None:
                raise UserError("loss", loss, "unset beside a Chain, which was made with its own")
            loss = chain.loss
        settle_mtp(chain.model, without=training.without_mtp)
        words = "" if training.balance is None and chain.balance else chain.balance_experts(training.balance)
        if chain is not model and chain.asked_for_balance:
            logger.warning("%s", words)
        refuse_cut_rows(chain, settings)
        self.kernels = choose_kernels(chain, training.kernels, world, self.dtype, settings.recompute)
        """Line about the kernels for norms, rotary embeddings and gates, or ``""``; see ``choose_kernels``."""
        self.work = training.work or work_of(chain)
        source = values_alike(chain, weights, training.seed, world)

        # Check the model unless the tests cover its family.
        self.checked = ""
        """Result of the model's check as a sentence; ``""`` if the check was skipped."""
        self._cuts: float | None = None
        """Limit above which documents are cut into slices, None if they stay whole; see ``Strategy.dealing``."""
        if training.bin_tokens and strategy_of(schedule)[0].cuts_documents and not training.compile_layers:
            self._cuts, self.checked = slices_of_documents(
                Pipeline, chain, source, world, loss=loss, check=checks.check
            )
        in_chunks = bool(settings.sequence_chunk) or self.sequence_ranks > 1
        untested = checks.check == "auto" and (in_chunks or not is_tested(chain.outer_model, loss))
        if (checks.check == "always" or untested) and not self.checked:
            self.checked = check_on_rank_0(Pipeline, chain, source, world, loss=loss, in_chunks=in_chunks)
        if chain.balance is not None:
            chain.balance.install()
        refuse(quantize=chain.form_of(training.quantize))
        chain.quantise(training.quantize, self.dtype)
        self.spec = chain.spec

        # Build schedules first, because they refuse before memory is allocated; then homes and the objects that run
        # steps.
        optimizer = optimizer or adamw()
        self._schedules = schedules = Schedules(schedule, chain.spec, world)
        smallest = schedules.smallest
        refuse_strategy(chain, smallest, optimizer=optimizer, compile_layers=training.compile_layers)
        world_of_saves = world.with_group("saves", timedelta(days=7))  # before lanes exist
        self.storage = filled_homes(chain, source, schedules, world, self.dtype, optimizer)
        del source  # frees the initial values before more memory is allocated
        wiring = Wiring(chain, self.storage, schedules, world, optimizer, training, checks)
        self._places = wiring.compute.places
        self.optimizers, self.transport, self.executor = wiring.optimizers, wiring.transport, wiring.executor
        self.reduce_dtype = self.executor.reduce_dtype

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
        """Relative speed of every process, by which work is assigned; empty if all are equal."""
        self._steps = Steps(wiring, self._deal)
        if world.size > 1:
            self.executor.watchdog.hear(Others(world_of_saves.store, world.rank, world.size))
        self.limit = self._steps.limit
        """Time limit of a step. Until ``set_timeout`` is called it aborts communication only."""
        self._state = State(wiring, self._steps, world_of_saves)
        self.step_number = 0
        """Number of training steps issued so far, including steps before a loaded checkpoint."""
        self._texts: Any = None
        self._closed = leave_at_exit(self, self.executor, self._steps, self._state.savings, world)
        chain.hand_over()

    def __repr__(self) -> str:
        """Return the model, the strategy, the processes and the number of steps."""
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
        """Parameter groups of the optimizer, as ``torch.optim.lr_scheduler`` expects them.

        Call ``scheduler.step()`` after ``step``.
        """
        return self.optimizers.groups

    @property
    def without_labels(self) -> int:
        """Number of finished steps whose labels were all -100 and whose update was therefore skipped.

        Counts only steps whose results were already checked.
        """
        return self._steps.without_labels

    @property
    def ranks_of_a_row(self) -> int:
        """Number of processes that compute one row together: a context-parallel group, or positions of a pipeline."""
        size, step = self.world.size, self._schedules.smallest
        alike = replace(step.settings, device_speeds="")
        return size // len(set(step.strategy.share(size, step.topology, alike)))

    @property
    def share_of_a_row(self) -> float:
        """Relative time that this process computes on one of its rows; in a pipeline the time of its stages."""
        step = self._schedules.smallest
        return step.strategy.share_of_a_row(step, self.world.rank)

    # what a step does

    def schedule(self, rows: int, *, training: bool = True) -> Schedule:
        """Return the schedule for a global batch of ``rows`` rows, and allocate its buffers.

        The schedule is built and proved at the first call and then kept.

        Args:
            rows: rows of the global batch.
            training: False for a schedule of forward passes only.

        Raises:
            UserError: ``rows`` is below 1.
        """
        if rows < 1:
            raise UserError("batch", f"{rows} rows", "at least one row")
        return self._steps.schedule(self._deal.count(rows), training=training)

    def reorder(self, rows: int, order: Order) -> None:
        """Use another order of the same pipeline for training on batches of ``rows`` rows, from the next step on.

        Call between the same two steps on all ranks. Weights are not moved, and results do not change.

        Raises:
            UserError: the strategy moves weights instead of activations, so it has no order.
            ScheduleError: ``order`` does not belong to this pipeline.
        """
        self._schedules.reorder(self._deal.count(rows), order)

    def shares(self, rows: int) -> tuple[Share, ...]:
        """Return this rank's micro-batches of a global batch of ``rows`` rows, each with the indices of its rows.

        A micro-batch holds equal rows whatever the number of processes; only the rank that computes it changes.
        """
        return self._deal.shares(rows)

    def part_of(self, rows: int, sequence_length: int, row: Callable[[int], MicroBatch]) -> LocalBatch:
        """Build this rank's part of a global batch of ``rows`` rows. Pads shorter rows of a micro-batch.

        Args:
            rows: rows of the global batch.
            sequence_length: the most tokens that a row has.
            row: returns the row with an index, as a micro-batch of one row; called only for rows of this rank.
        """
        return self._deal.local_of_rows(rows, sequence_length, row)

    def deal(self, lengths: Sequence[int]) -> Packs:
        """Assign documents with ``lengths`` tokens each to all processes, so that all compute for equally long.

        Raises:
            UserError: a document is longer than a process can compute, or ``bin_tokens`` is not set.
        """
        return self.dealing(lengths)

    @property
    def dealing(self) -> Callable[[Sequence[int]], Packs]:
        """Function that ``deal`` calls; it can be pickled for another process.

        Raises:
            UserError: ``bin_tokens`` is not set.
        """
        pack_tokens, step = self.training.bin_tokens, self._schedules.smallest
        if pack_tokens < 1:
            raise UserError("bin_tokens", pack_tokens, "the most tokens that a process computes at once")
        return step.strategy.dealing(step, cap=pack_tokens, work=self.work, cuts=self._cuts)

    def own_packs(self, packs: Packs) -> Sequence[Pack]:
        """Return the packed micro-batches of this process; all processes of one pipeline have equal ones."""
        return packs.of(self._deal.dealt_to)

    def part_of_documents(
        self,
        lengths: Sequence[int],
        document: Callable[[int], MicroBatch],
        packs: Packs | None = None,
        *,
        training: bool = True,
    ) -> LocalBatch:
        """Build this rank's part of a step on documents of uneven lengths.

        Builds and proves the schedule at the first step of a form. Other threads may call it to prepare later steps.

        Args:
            lengths: tokens of every document of the step; equal on all processes.
            document: returns a document by its index, as a micro-batch of one row.
            packs: result of ``deal(lengths)``, if it is known already.
            training: False for an evaluation.

        Raises:
            UserError: ``deal`` refuses the lengths, or a document has another length than ``lengths`` says.
        """
        packs = packs or self.deal(lengths)
        _ = self._schedules.of(packs.form, training=training)
        return self._deal.local_of_packs(packs, document, pack_tokens=self.training.bin_tokens)

    @torch.inference_mode(False)  # tensors made in a step are used by later ones
    def step(
        self, batch: Mapping[str, Tensor] | LocalBatch, *, rate: float = 1.0, recording: Recording | None = None
    ) -> StepResult:
        """Issue forward, backward and update on one global batch; returns while the step still runs.

        First waits until at most one earlier step is unfinished. A batch without any label updates nothing and is
        counted in ``without_labels``.

        Args:
            batch: the global batch, equal on all processes: ``input_ids`` and ``labels`` (rows, S) in the Hugging Face
                convention, optionally ``position_ids`` (restarting at each packed document) or ``attention_mask``; or
                only this rank's part of it as a ``LocalBatch``.
            rate: multiplies the learning rates of all groups of ``optimizer``, in this step only.
            recording: records when the actions of the step run; complete after ``drain``.

        Returns:
            A handle of loss, gradient norm and token count; reading one waits for the step.

        Raises:
            RunError: loss or gradient norm of an earlier step was not finite. This step and all steps after the failed
                one have not changed the weights (unless updates are early). ``load`` a good state to continue.
            UserError: ``batch`` is not valid.
        """
        self._steps.judge_recent()
        local = self._deal.local(batch)
        self._state.require_whole()
        rule = UpdateRule(self.training.clip_norm, rate, memory=0.0 if self.training.skip_limit else 1.0)
        result = self._steps.play(local, self.step_number, rule, seed=self.seed, recording=recording)
        self.optimizer.step()  # learning-rate schedulers expect this call
        self.step_number += 1
        self._state.stepped()
        return result

    @torch.inference_mode(False)
    def evaluate(self, batch: Mapping[str, Tensor] | LocalBatch, *, measure: Measure | None = None) -> StepResult:
        """Compute the loss on a global batch without an update. Waits for all issued steps and for its own result.

        Args:
            batch: the global batch, or this rank's part of it; see ``step``.
            measure: computes results and the loss from the model's head for this rank's micro-batches.
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
        """Continue every prompt by up to ``max_tokens`` tokens; call on all ranks with equal arguments.

        All ranks return the new ids and their logprobs. Waits for all issued steps first. The training state does not
        change.

        Weights are sent once to pipeline stages, one stage on each process. The memory of each process must hold its
        share of the weights and of the keys and values of the texts. Models that cannot run so are evaluated once for
        every token.

        Args:
            prompts: token ids of each prompt, at least one each.
            max_tokens: most new tokens for each prompt.
            temperature: divides the logits; 0 takes the most likely token.
            top_k: sample among the ``top_k`` most likely tokens, as ``transformers`` does; 0 for all.
            top_p: sample among the most likely tokens with this total probability, as ``transformers`` does; 1 for all.
            seed: seed of the first prompt; each next prompt uses the next number. A text does not depend on the other
                prompts, except for rounding.
            stops: token ids that end a text; the text includes the one that ended it.

        Raises:
            UserError: a prompt or a number is not valid.
        """
        self.drain()
        self._state.require_whole()
        if self._texts is None:
            self._texts = TEXTS()(self)
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        return self._texts.generate(prompts, max_tokens, stops, **sampling)

    def drain(self) -> None:
        """Wait for all issued steps and check their results. Weights may be read, saved or replaced afterwards.

        Raises:
            RunError: the loss or gradient norm of a step was not finite.
        """
        self._steps.drain()

    def close(self) -> None:
        """Wait for all steps and saves, end the lanes and leave the process groups.

        The pipeline cannot be used afterwards. A script that ends without this call is waited for in the same way
        (runtime/leaving.py).
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
        """Limit the time of a step from now on and end the process if a step exceeds it.

        Every rank first reports what it waits for. Processes in a debugger or a notebook do not end.

        Args:
            limit: smallest time limit; a multiple of the usual time of steps replaces it if that is longer
                (``self.limit``).
        """
        self._steps.watch(limit)

    def record_hangs(self, folder: Path) -> None:
        """Set the folder for NCCL flight records, which a rank writes when a step hangs; no effect on CPUs.

        Each record is in a subfolder of ``folder`` named after the step.
        """
        if self.world.device.type == "cuda":
            named = lambda step: folder / step.replace(" ", "-")  # noqa: E731
            self.executor.watchdog.last_words = lambda step: write_record(named(step), self.world.rank)

    # state

    def save(
        self, where: str | Path | Store, *, run: Mapping[str, Any] | None = None, copy_frozen: bool = False
    ) -> Saved:
        """Write weights, optimizer state and step number, and wait until they are complete; call on all ranks.

        Frozen weights that a ``SafetensorsSource`` read from a folder are not written; only their digests are. ``load``
        then needs a pipeline whose ``weights`` read equal values.

        Args:
            where: a folder that all ranks see, replaced when the new state is complete; or a store, in which the folder
                is named after the step.
            run: JSON values of the caller, which ``load`` returns.
            copy_frozen: also write frozen weights that came from a folder.

        Raises:
            RunError: the state could not be written. An earlier state in the folder is untouched.
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
        """Copy the state and write it in the background while training continues; call on all ranks.

        First waits for all steps and for a save that is still running. Weights may change after the return.
        ``Saving.wait`` reports the outcome. Homes in host memory are not copied: they are written before this method
        returns.

        Args:
            where: a folder that all ranks see, or a store; see ``save``.
            run: JSON values of the caller, which ``load`` returns.
            limit_s: limit in seconds for the earlier save, and for writing homes in host memory; None for no limit.
            copy_frozen: also write frozen weights that came from a folder.

        Raises:
            RunError: one of them took longer than ``limit_s``.
        """
        return self._state.start_saving(
            where, self.step_number, run or {}, self.injector, limit_s, copy_frozen=copy_frozen
        )

    def load(self, where: str | Path | Source) -> dict[str, Any]:
        """Load a state that ``save`` wrote and return its ``run``; call on all ranks.

        Waits for all issued steps first. ``step_number`` becomes the step of the state. The number of processes and the
        strategy may differ from the run that saved it.

        Args:
            where: the folder, or the source that ``checkpoint.resume`` has chosen.

        Raises:
            UserError: there is no complete state, or it belongs to another model, other frozen weights or another
                optimizer; nothing has changed.
            RunError: reading failed midway. The pipeline holds a partial state: steps, evaluations, saves and exports
                raise until a load succeeds.
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
        """Write a model folder for ``AutoModelForCausalLM.from_pretrained``; call on all ranks.

        For a ``peft`` model writes the adapter, or with ``merge`` the whole model with the adapter merged in. Waits for
        all issued steps. Config keys, tokenizer files and dtypes are taken from the folder of the original model:
        ``base``, or the one that ``from_pretrained`` recorded in the model's config.

        Args:
            folder: folder to write.
            dtype, format, merge, max_shard_bytes, tokenizer: see ``export_hugging_face``.
            base: folder of the original model.
            carried: files of the original model, if they have been read already.

        Returns:
            ``folder`` as a ``Path``.

        Raises:
            UserError: the format is not possible for this model, or a file of its original folder cannot be read.
            RunError: the folder could not be written or is not valid; on all ranks.
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
        """Return predicted memory and network bytes of one step on ``rows`` rows of ``sequence_length`` tokens."""
        return self._steps.costs(self.schedule(rows), min(self.micro_batch, rows) * sequence_length)

    def costs_of_packs(self, packs: Packs) -> Costs:
        """Return predicted memory and network bytes of one step on ``packs`` with full packed micro-batches."""
        return self._steps.costs(self._steps.schedule(packs.form), self.training.bin_tokens * packs.ranks)

    def check_copies(self) -> None:
        """Check that copies of weights on several processes are equal; call on all ranks.

        Compares the copies of every home, the weights that a home sends with its masters, and the weights that nodes
        keep from step to step. Waits for all issued steps first.

        Raises:
            RunError: two copies differ; on all ranks.
        """
        self.drain()
        self._state.parameters.check_copies(self.executor.refresh.checksums())

    # weights

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of all parameters, in the order of their units."""
        return self._state.parameters.names

    def parameter(self, name: str) -> Tensor | None:
        """Return one whole parameter in the master dtype on rank 0 and None on other ranks; call on all ranks.

        Waits for all issued steps first.
        """
        return self._state.parameter(name)

    def gradient(self, name: str) -> Tensor | None:
        """Return the clipped gradient of the last update on rank 0 and None on other ranks; call on all ranks.

        Waits for all issued steps first.

        Args:
            name: name of a trained parameter.

        Raises:
            UserError: the parameter is frozen, or its gradient is not kept (one process with homes in host memory, or
                early updates).
        """
        return self._state.parameter(name, gradient=True)
